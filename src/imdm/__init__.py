"""imdm: infinite mask diffusion language models, and few-step generation from them.

>>> import imdm
>>> config = imdm.MaskedDiffusionConfig(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8)
>>> model = imdm.to_infinite(imdm.MaskedDiffusionLM(config), dim=8)
>>> model.generate(num=4, steps=1).tokens.shape
torch.Size([4, 2])
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

HOMES = {
    "Finite": "imdm.diffusion.masks",
    "Generation": "imdm.sampling",
    "Infinite": "imdm.diffusion.masks",
    "MaskedDiffusionConfig": "imdm.models.configuration",
    "MaskedDiffusionLM": "imdm.models.denoiser",
    "Noised": "imdm.diffusion.state",
    "Single": "imdm.diffusion.masks",
    "UserError": "imdm.core.errors",
    "Writer": "imdm.writer",
    "adopt": "imdm.adopting.adopt",
    "adopt_into": "imdm.adopting.adopt",
    "cost": "imdm.costing",
    "faster": "imdm.models.fast",
    "fold_conditioning": "imdm.models.variants",
    "load": "imdm.writer",
    "load_model": "imdm.models.loading",
    "load_recipe": "imdm.experiments",
    "register": "imdm.models.denoiser",
    "to_infinite": "imdm.models.variants",
    "with_mask": "imdm.models.variants",
}
"""The public names, and the modules they are imported from when first used: `imdm --help` does not wait for torch."""

__all__ = [*HOMES]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'imdm' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return [*HOMES, "__version__"]
