"""The interface of a backbone: embeddings → hidden states. All else, masks and noise, the head and the process, is the
wrapper's (`MaskedDiffusionLM`), so that another backbone is one file.

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

from imdm.config import Config
from imdm.errors import UserError, shown
from imdm.models.layers import Dropout
from imdm.registry import Registry
from imdm.state import Rows

if TYPE_CHECKING:
    from imdm.models.shape import Shape

backbones: Registry[type[Backbone]] = Registry("backbone")

DEFAULT = "dit"
WRAPPERS = ("embedding", "mask_embedding", "mixture", "output")
"""Layers of `MaskedDiffusionLM` that are not the backbone's, though it shares one table of layers with it."""


class BackboneSettings(Config):
    """What a backbone has to be told beside width, dropout and the like; one with settings of its own derives them from
    this and names them in `Backbone.Settings`."""

    kind: str


class Folded(NamedTuple):
    """Changes of the configuration, and all weights by name, of a model with the same function and less work."""

    changes: dict[str, Any]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Asked:
    """What `transformers` may ask beside the last hidden states. Sizes without the latent of a mixture.

    seen       (B, L) bool: False at padding, which no position reads; None: there is none
    positions  (B, L): where each token stands, counted from 0; None: one after another
    kinds      (B, L): `token_type_ids`, for backbones that have such
    states     whether all hidden states are wanted, attentions: whether the attention of each layer is
    """

    seen: Tensor | None = None
    positions: Tensor | None = None
    kinds: Tensor | None = None
    states: bool = False
    attentions: bool = False

    @property
    def nothing(self) -> bool:
        """Whether the last hidden states will do; kinds come from tokenizers, whoever has a use for them."""
        return self.seen is None and self.positions is None and not self.states and not self.attentions

    def places(self) -> Tensor | None:
        """Where tokens stand, padding left out of the count: (B, L); None: one after another."""
        if self.positions is not None or self.seen is None:
            return self.positions
        return (self.seen.long().cumsum(-1) - 1).clamp(min=0)

    def with_latent(self) -> Asked:
        """The same where one more token comes last, the latent's, which all positions read."""
        kinds = None if self.kinds is None else nn.functional.pad(self.kinds, (0, 1))
        if self.seen is None and self.positions is None:
            return replace(self, kinds=kinds)
        places = cast("Tensor", self.places())
        counted = places if self.seen is None else places.masked_fill(~self.seen, -1)
        seen = None if self.seen is None else nn.functional.pad(self.seen, (0, 1), value=True)
        return replace(self, seen=seen, positions=torch.cat((places, counted.amax(-1, True) + 1), -1), kinds=kinds)


class Looked(NamedTuple):
    """hidden (B, T, D), for the head; states: after the embedding and after each layer, attentions: of each layer,
    (B, H, T, T), where asked for."""

    hidden: Tensor
    states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class Backbone(nn.Module):
    """Layers between embeddings and hidden states, both (B, T, D) with D = `config.width`. T is the sequence's length,
    and one more for a model with `mixture`, whose latent comes last. Position must be its own affair.

    The wrapper takes its layers in under their own names: `blocks.0…`, not `backbone.blocks.0…`.
    """

    Settings: ClassVar[type[BackboneSettings]] = BackboneSettings
    resets: ClassVar[bool] = False  # whether a new model resets its layers once more; else they stay as it made them
    drops = False  # whether it drops something at a rate that is not `config.dropout`
    opens = False  # whether it was causal, and its attention was opened
    whole: ClassVar[bool] = False  # whether it is a model with an embedding and a head of its own

    def __init__(self, config: Shape, settings: BackboneSettings) -> None:
        super().__init__()
        self.config, self.settings = config, settings

    @classmethod
    def check(cls, config: Shape, settings: BackboneSettings) -> None:
        """Refuse, in a sentence, a configuration that it cannot be built from."""
        for setting, asked in (("causal", config.causal), ("softcap", config.softcap is not None)):
            if asked:
                raise UserError(f"model.{setting}: backbone {settings.kind!r} has no such thing; leave it out")

    @classmethod
    def size(cls, config: Shape, settings: BackboneSettings) -> int:
        """About how many parameters it has."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in cls(config, settings).parameters())

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        return f"backbone {self.settings.kind} of width {self.config.width}"

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Embeddings (B, T, D) → hidden states (B, T, D). keys (B,): what dropout should draw from while it trains, so
        that it follows each sequence (`imdm.models.layers.Dropout`); torch's own dropout works, but is not repeated by
        another number of processes."""
        raise NotImplementedError

    def at(self, x: Tensor, rows: Rows, keys: Tensor | None = None) -> Tensor:
        """Hidden states of some rows alone, (R, D), where that is less work."""
        return rows.of(self(x, keys))

    def onward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Of a causal one: hidden states of positions (B, T, D) that follow those it has read, and what it is to be
        given back as `past` with the next. One that remembers nothing reads all of them again."""
        x = x if past is None else torch.cat((past, x), 1)
        return self(x)[:, 0 if past is None else past.shape[1] :], x

    def look(self, x: Tensor, asked: Asked) -> Looked:
        """Hidden states as `transformers` asks for them, of embeddings (B, T, D); what is not known here is refused."""
        if not asked.nothing:
            raise UserError(
                f"backbone {self.settings.kind!r} knows no padding, no positions, no hidden states between its layers "
                "and no attentions; ask without them"
            )
        return Looked(self(x))

    def set_dropout(self, rate: float) -> None:
        """Another rate; `config.dropout` has it already."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.rate = rate
            elif isinstance(module, nn.Dropout):
                module.p = rate

    def checkpoint_blocks(self) -> None:
        """From here on, while it trains, keep what enters each block alone and compute the rest again for its gradient:
        the same gradients, less memory, about a third more work."""
        raise UserError(f"training.checkpoint_blocks: backbone {self.settings.kind!r} does not know how; leave it out")

    def open_attention(self, share: float, key: Tensor) -> None:
        """Of one that `opens`: while it trains, each position sees so large a share of what follows it, drawn from
        `key`; 1: all."""
        raise NotImplementedError

    def check_opening(self) -> None:
        """Of one that `opens`: refuse, in a sentence, what cannot open gradually."""

    def compile_trunk(self, *, training: bool) -> None:
        """Fuse small operations from the next batch on, while it trains or while it does not; nothing, unless it knows
        how."""

    @property
    def is_compiled(self) -> bool:
        return False

    def folded(self, weights: Mapping[str, Tensor]) -> Folded | None:
        """The same function with fewer weights than these, which are the model's; None: there is nothing to fold."""
        return None

    def matrices(self) -> dict[Tensor, int]:
        """The weights that are matrices of its blocks, and how many matrices lie in each, one above the other: what
        Muon is for. Not those that give or take tokens."""
        own = [part for name, part in self._modules.items() if name not in WRAPPERS and part is not None]
        linear = (module for part in own for module in part.modules() if isinstance(module, nn.Linear))
        return {module.weight: 1 for module in linear}

    @property
    def weights(self) -> int | None:
        """How many weights each position passes through, if evaluations may be recorded as CUDA graphs (nothing in them
        waits for the GPU); None: they may not."""
        return None

    def get_network(self) -> Any:
        """Of one that is whole: the model of `transformers` that it is."""
        raise NotImplementedError

    def set_network(self, network: Any) -> None:
        """Of one that is whole: be this one from now on."""
        raise NotImplementedError

    @property
    def embedding(self) -> nn.Module:
        """Of one that is whole: the layer that embeds tokens."""
        raise NotImplementedError

    @property
    def output(self) -> Any:
        """Of one that is whole: what makes logits of rows of hidden states, a linear layer or a function of rows with
        `out_features`."""
        raise NotImplementedError

    def unrounded(self) -> AbstractContextManager[None]:
        """While weights are moved or change their type: what of it is to keep the type it has."""
        return nullcontext()

    def beside(self, length: int, device: torch.device) -> Any:
        """What an evaluation of so many positions reads beside weights and embeddings: a recording holds on to it."""
        return None


def parse_backbone(value: Any) -> BackboneSettings:
    """The settings of a backbone from its name or from themselves: `"dit"`, `{"kind": "gru", "layers": 2}`."""
    if isinstance(value, BackboneSettings):
        return value
    settings = {"kind": DEFAULT if value is None else value} if isinstance(value, str | None) else value
    if not isinstance(settings, dict) or "kind" not in settings:
        known = ", ".join(backbones)
        raise UserError(f"backbone: expected a name or settings with 'kind' ({known}), got {shown(value)}")
    return backbones[settings["kind"]].Settings.parse(settings, "backbone")


def is_default(settings: BackboneSettings) -> bool:
    """Whether it is the backbone of a model that names none."""
    return settings.hashed() == {"kind": DEFAULT}


def size_filled(many: int) -> int:
    """The size that so many are filled up to: a multiple of 4 up to 16, of 16 beyond."""
    each = 4 if many <= 16 else 16
    return -(-many // each) * each
