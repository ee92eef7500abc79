"""LoRA: low-rank adapters of a large model. Each linear layer W of the backbone's blocks learns a low-rank change, W +
(alpha / rank)·B·A, and W itself is frozen (arXiv 2106.09685). Small parts are trained in full: norms, the mask's row of
the embedding, and our own layers, such as the embedding of the masks' noise.

The layers are `peft`'s. B starts at zero, so a run starts with the outputs of its start model, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from imdm.core.config import Config
from imdm.core.errors import UserError
from imdm.diffusion.randomness import Purpose, as_key, fold, seeded
from imdm.models import Network
from imdm.models.backbones import backbones
from imdm.models.pretrained import linear_layers

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

NAME = "default"  # peft's own


class Lora(Config):
    """rank     of each layer's change
    alpha    the change is scaled by alpha / rank; 2·rank unless given
    dropout of the adapters' inputs
    targets  names of the linear layers with adapters, such as `[q_proj, v_proj]`; all of the blocks unless given
    base     precision of the frozen weights in memory; bf16 needs `training.precision: bf16` and a GPU
    """

    rank: int = Field(ge=1)
    alpha: float | None = Field(None, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    base: Literal["float32", "bf16"] = "float32"


class MaskRow(nn.Module):
    """A frozen embedding, but for the mask's row, to which a learnt vector is added."""

    def __init__(self, base: Any, mask: int) -> None:
        super().__init__()
        self.base, self.mask = base, mask
        self.change = nn.Parameter(torch.zeros_like(base.weight[0], dtype=torch.float32))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.base(ids)
        scale = getattr(self.base, "embed_scale", 1.0)  # Gemma's embedding scales its rows
        return x + ((ids == self.mask)[..., None] * (self.change * scale)).to(x.dtype)

    @torch.no_grad()
    def merged(self) -> Any:
        self.base.weight[self.mask] += self.change.to(self.base.weight.dtype)
        return self.base


def add_adapters(model: Network, lora: Lora, seed: int) -> None:
    """Add adapters to the model, initialised from `seed`; from here on only these and small parts are trained."""
    peft = _peft()
    check_backbone(model.backbone.settings.kind)
    lm = model.backbone.get_network()
    names = targets_in(lm, lora.targets)
    lm.requires_grad_(False)
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    how = {"r": lora.rank, "lora_alpha": alpha, "lora_dropout": lora.dropout, "target_modules": names}
    turned = any(type(lm.get_submodule(name)).__name__ == "Conv1D" for name in names)  # GPT-2 has (in, out)
    with seeded(fold(as_key(seed), Purpose.INIT, 2)):
        peft.inject_adapter_in_model(peft.LoraConfig(**how, fan_in_fan_out=turned), lm)
    for module in lm.modules():
        if "norm" in type(module).__name__.lower() and not list(module.children()):  # not a module of norms
            module.requires_grad_(True)
    lm.set_input_embeddings(MaskRow(lm.get_input_embeddings(), model.config.mask_token_id).to(model.device))
    for weight in lm.parameters():
        weight.data = weight.data.to(
            torch.float32 if weight.requires_grad or lora.base == "float32" else torch.bfloat16
        )
    model.backbone.drops = lora.dropout > 0


def targets_in(lm: Any, endings: Sequence[str] | None) -> list[str]:
    """The full names of the linear layers in the blocks; with `endings`, of those whose names end with one of these."""
    linear = list(linear_layers(lm))
    if not linear:
        raise UserError(
            f"training.lora: the blocks of {lm.config.model_type!r} have no linear layer, and LoRA adapts no others; "
            "leave it out"
        )
    if endings is None:
        return linear
    for one in endings:
        if not any(f".{name}".endswith(f".{one}") for name in linear):
            layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise UserError(
                f"training.lora.targets: no linear layer of {lm.config.model_type!r} is called {one!r}; it has {layers}"
            )
    return [name for name in linear if any(f".{name}".endswith(f".{one}") for one in endings)]


@torch.no_grad()
def merged(model: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """A copy with its adapters merged into the weights: a plain model, on the CPU and in float32."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    moved = {id(weight): nn.Parameter(_cpu_float32(weight), weight.requires_grad) for weight in model.parameters()}
    plain = copy.deepcopy(model, moved)  # its weights are copied already
    lm = plain.backbone.get_network()
    nn.Module.to(plain, "cpu", torch.float32)
    for name, layer in list(lm.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, last = name.rpartition(".")
            setattr(lm.get_submodule(parent), last, layer.get_base_layer())
    lm.set_input_embeddings(lm.get_input_embeddings().merged())
    return plain.requires_grad_(True)


def _cpu_float32(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.float32, copy=True)


def has_adapters(model: nn.Module) -> bool:
    return isinstance(model, Network) and isinstance(model.get_input_embeddings(), MaskRow)


def check_lora(lora: Lora | None, precision: str) -> None:
    """Refuse settings that do not work together, before any work."""
    if lora is None:
        return
    _peft()
    if lora.base == "bf16" and precision != "bf16":
        raise UserError(
            f"training.lora.base = bf16: matmuls are then in bf16 too, but training.precision = {precision}; set both "
            "to bf16, or both to float32"
        )


def check_backbone(kind: str) -> None:
    """Refuse a model that is not one of `transformers`."""
    if not backbones[kind].owns_embedding:
        raise UserError(
            f"training.lora: backbone {kind!r} is small and trained in full; LoRA is for models of transformers "
            "(backbone 'hf')"
        )


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("training.lora needs the extra: pip install 'imdm[lora]'") from None
    return peft
