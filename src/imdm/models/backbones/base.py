"""The interface of a backbone: embeddings → hidden states. Masks, noise, head and process belong to the wrapper
(`MaskedDiffusionLM`), so a new backbone is one file.

    @backbones.register("gru")
    class GRU(Backbone):
        def __init__(self, config, settings):
            super().__init__(config, settings)
            self.layers = nn.GRU(config.width, config.width // 2, 2, batch_first=True, bidirectional=True)

        def forward(self, x, keys=None):
            return self.layers(x)[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError, shown
from imdm.core.registry import Registry
from imdm.core.settings import Settings
from imdm.diffusion.state import Rows
from imdm.models.layers import Dropout

if TYPE_CHECKING:
    from imdm.models.shape import Shape

backbones: Registry[type[Backbone]] = Registry("backbone")

DEFAULT = "dit"
WRAPPERS = ("embedding", "mask_embedding", "mixture", "output")
"""Layers of `MaskedDiffusionLM` that are not the backbone's, though both share one table of submodules."""


class BackboneSettings(Settings):
    """Settings of a backbone beside width, dropout and the like. A backbone with its own derives them from this class
    and names it in `Backbone.Settings`."""

    kind: str


class Folded(NamedTuple):
    """Configuration changes and all weights by name of a model that computes the same function with fewer
    operations."""

    changes: dict[str, Any]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class BackboneRequest:
    """What a caller from `transformers` may request beside the last hidden states. Shapes do not count a mixture's
    latent.

    seen       (B, L) bool: False at padding, which is not attended to; None: no padding
    positions  (B, L): position of each token, counted from 0; None: consecutive
    kinds      (B, L): `token_type_ids`, for backbones that have such
    states     whether to return all hidden states; attentions: whether to return each layer's attention weights
    """

    seen: Tensor | None = None
    positions: Tensor | None = None
    kinds: Tensor | None = None
    states: bool = False
    attentions: bool = False

    @property
    def nothing(self) -> bool:
        """Whether only the last hidden states are requested. `kinds` does not count: tokenizers pass it to every
        model."""
        return self.seen is None and self.positions is None and not self.states and not self.attentions

    def places(self) -> Tensor | None:
        """Position of each token, not counting padding: (B, L); None: consecutive."""
        if self.positions is not None or self.seen is None:
            return self.positions
        return (self.seen.long().cumsum(-1) - 1).clamp(min=0)

    def with_latent(self) -> BackboneRequest:
        """This request with one more token at the end, the latent's, which all positions attend to."""
        kinds = None if self.kinds is None else nn.functional.pad(self.kinds, (0, 1))
        if self.seen is None and self.positions is None:
            return replace(self, kinds=kinds)
        places = cast("Tensor", self.places())
        counted = places if self.seen is None else places.masked_fill(~self.seen, -1)
        seen = None if self.seen is None else nn.functional.pad(self.seen, (0, 1), value=True)
        return replace(self, seen=seen, positions=torch.cat((places, counted.amax(-1, True) + 1), -1), kinds=kinds)


class BackboneOutputs(NamedTuple):
    """hidden (B, T, D), for the head; states: after the embedding and after each layer; attentions: of each layer, (B,
    H, T, T); both only if requested."""

    hidden: Tensor
    states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class Backbone(nn.Module):
    """Layers between embeddings and hidden states, both (B, T, D) with D = `config.width`. T is the sequence's length,
    plus one for a model with `mixture`, whose latent comes last. The backbone encodes positions itself.

    The wrapper registers its layers under their own names: `blocks.0…`, not `backbone.blocks.0…`.
    """

    Settings: ClassVar[type[BackboneSettings]] = BackboneSettings
    resets: ClassVar[bool] = False  # whether a new model initialises its layers once more
    drops = False  # whether it has a dropout rate other than `config.dropout`
    opens = False  # whether it is a causal model made bidirectional
    owns_embedding: ClassVar[bool] = False  # whether it is a model with an embedding and a head of its own

    def __init__(self, config: Shape, settings: BackboneSettings) -> None:
        super().__init__()
        self.config, self.settings = config, settings

    @classmethod
    def check(cls, config: Shape, settings: BackboneSettings) -> None:
        """Refuse a configuration that it cannot be built from."""
        for setting, is_set in (("causal", config.causal), ("softcap", config.softcap is not None)):
            if is_set:
                raise UserError(f"model.{setting}: backbone {settings.kind!r} has no such setting; leave it out")

    @classmethod
    def size(cls, config: Shape, settings: BackboneSettings) -> int:
        """About how many parameters it has."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(config, settings).parameters())

    @property
    def about(self) -> str:
        """A short description of the backbone."""
        return f"backbone {self.settings.kind} of width {self.config.width}"

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Embeddings (B, T, D) → hidden states (B, T, D). keys (B,): random keys of dropout during training, one a
        sequence (`imdm.models.layers.Dropout`). torch's own dropout works too, but gives other masks with another
        number of processes."""
        raise NotImplementedError

    def at(self, x: Tensor, rows: Rows, keys: Tensor | None = None) -> Tensor:
        """Hidden states of some rows only, (R, D), where that costs less."""
        return rows.of(self(x, keys))

    def onward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Causal backbones only: hidden states (B, T, D) of positions that follow those already processed, and the
        cache to pass as `past` with the next call. Without a cache all positions are processed again."""
        x = x if past is None else torch.cat((past, x), 1)
        return self(x)[:, 0 if past is None else past.shape[1] :], x

    def fixed_cache(self, length: int) -> Any:
        """Causal backbones only: an empty cache for `onward` with room for `length` positions, whose tensors are never
        replaced, so that a CUDA graph can use them. `reset()` empties it. None: it has no such cache."""
        return None

    def outputs(self, x: Tensor, request: BackboneRequest) -> BackboneOutputs:
        """Hidden states and attentions as `transformers` requests them, of embeddings (B, T, D); refuses what it does
        not support."""
        if not request.nothing:
            raise UserError(
                f"backbone {self.settings.kind!r} has no padding, no position ids, no hidden states between its layers "
                "and no attentions; call it without them"
            )
        return BackboneOutputs(self(x))

    def set_dropout(self, rate: float) -> None:
        """Set the dropout rate; `config.dropout` already holds it."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.rate = rate
            elif isinstance(module, nn.Dropout):
                module.p = rate

    def checkpoint_blocks(self) -> None:
        """Turn on gradient checkpointing: only the input of each block is kept in training, the rest is recomputed in
        the backward pass. Same gradients, less memory, about a third more compute."""
        raise UserError(f"training.checkpoint_blocks: backbone {self.settings.kind!r} has no such option; leave it out")

    def open_attention(self, share: float, key: Tensor) -> None:
        """Open the attention of a causal model gradually, where `opens`: in training, each position attends to this
        share of the later positions, drawn from `key`; 1: all."""
        raise NotImplementedError

    def check_opening(self) -> None:
        """Refuse a model whose attention mask cannot be opened gradually, where `opens`."""

    def compile_trunk(self, *, training: bool) -> None:
        """Fuse small operations (`torch.compile`) from the next batch on, in training or in evaluation mode. Does
        nothing where the backbone does not support it."""

    @property
    def is_compiled(self) -> bool:
        return False

    def folded(self, weights: Mapping[str, Tensor]) -> Folded | None:
        """Settings and weights of the same function in fewer weights, given all of the model's; None: nothing to
        fold."""
        return None

    def matrices(self) -> dict[Tensor, int]:
        """Weight matrices of the blocks, which Muon optimises, and how many matrices are stacked in each. Embedding and
        head are not among them."""
        own = [part for name, part in self._modules.items() if name not in WRAPPERS and part is not None]
        linear = (module for part in own for module in part.modules() if isinstance(module, nn.Linear))
        return {module.weight: 1 for module in linear}

    @property
    def weights(self) -> int | None:
        """Weights that are applied to each position, if the forward pass can be captured as a CUDA graph (it never
        waits for the GPU); None: it cannot."""
        return None

    def get_network(self) -> Any:
        """The wrapped model of `transformers`, where `owns_embedding`."""
        raise NotImplementedError

    def set_network(self, network: Any) -> None:
        """Replace the wrapped model, where `owns_embedding`."""
        raise NotImplementedError

    @property
    def embedding(self) -> nn.Module:
        """The token embedding, where `owns_embedding`."""
        raise NotImplementedError

    @property
    def output(self) -> Any:
        """The map from rows of hidden states to logits, where `owns_embedding`: a linear layer, or a function of rows
        with `out_features`."""
        raise NotImplementedError

    def unrounded(self) -> AbstractContextManager[None]:
        """A context in which weights are moved or cast: buffers that must keep their dtype do so."""
        return nullcontext()

    def beside(self, length: int, device: torch.device) -> Any:
        """What a forward pass over `length` positions reads beside weights and embeddings; a captured CUDA graph keeps
        it alive."""
        return None


def parse_backbone(value: Any) -> BackboneSettings:
    """The settings of a backbone, given its name or its settings: `"dit"`, `{"kind": "gru", "layers": 2}`."""
    if isinstance(value, BackboneSettings):
        return value
    settings = {"kind": DEFAULT if value is None else value} if isinstance(value, str | None) else value
    if not isinstance(settings, dict) or "kind" not in settings:
        names = ", ".join(backbones)
        raise UserError(f"backbone: expected a name or settings with 'kind' ({names}), got {shown(value)}")
    return backbones[settings["kind"]].Settings.parse(settings, "backbone")


def is_default(settings: BackboneSettings) -> bool:
    """Whether this is the default backbone."""
    return settings.hashed() == {"kind": DEFAULT}


def size_filled(many: int) -> int:
    """The batch size that `many` sequences are padded to: a multiple of 4 up to 16, of 16 beyond."""
    each = 4 if many <= 16 else 16
    return -(-many // each) * each
