"""imdm: infinite mask diffusion language models, and few-step generation from them.

>>> import imdm
>>> config = imdm.MaskedDiffusionConfig(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8)
>>> model = imdm.to_infinite(imdm.MaskedDiffusionLM(config), dim=8)
>>> model.generate(num=4, steps=1).tokens.shape
torch.Size([4, 2])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from imdm.auto import watch
from imdm.later import later

if TYPE_CHECKING:
    from imdm.adopting import adopt, adopt_into
    from imdm.costing import cost
    from imdm.errors import UserError
    from imdm.experiments.loading import load_recipe
    from imdm.masks import Finite, Infinite, Single
    from imdm.models import (
        MaskedDiffusionConfig,
        MaskedDiffusionLM,
        faster,
        fold_conditioning,
        load_model,
        to_infinite,
        with_mask,
    )
    from imdm.sampling import Generation
    from imdm.state import Noised
    from imdm.writer import Writer, load

__version__ = "0.2.0"

__all__ = [
    "Finite",
    "Generation",
    "Infinite",
    "MaskedDiffusionConfig",
    "MaskedDiffusionLM",
    "Noised",
    "Single",
    "UserError",
    "Writer",
    "adopt",
    "adopt_into",
    "cost",
    "faster",
    "fold_conditioning",
    "load",
    "load_model",
    "load_recipe",
    "to_infinite",
    "with_mask",
]

__getattr__ = later(
    __name__,
    {
        "imdm.adopting": ("adopt", "adopt_into"),
        "imdm.costing": ("cost",),
        "imdm.errors": ("UserError",),
        "imdm.masks": ("Finite", "Infinite", "Single"),
        "imdm.models": (
            "MaskedDiffusionConfig",
            "MaskedDiffusionLM",
            "faster",
            "fold_conditioning",
            "load_model",
            "to_infinite",
            "with_mask",
        ),
        "imdm.experiments.loading": ("load_recipe",),
        "imdm.sampling": ("Generation",),
        "imdm.state": ("Noised",),
        "imdm.writer": ("Writer", "load"),
    },
)
"""`imdm --help` does not wait for torch."""

watch()


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
