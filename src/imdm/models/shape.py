"""The settings of a masked diffusion language model, checked. It needs no `transformers`."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any, Self

from imdm.core.errors import UserError, check_number, check_whole, shown, unknown
from imdm.diffusion.ending import Ending
from imdm.diffusion.masks import parse_mask
from imdm.diffusion.process import NoisePolicy, check_policy
from imdm.diffusion.schedule import parse_schedule
from imdm.models.backbones import backbones, parse_backbone
from imdm.models.backbones.base import DEFAULT, is_default
from imdm.sampling.options import RevealOrder, check_order

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 128, "blocks": 4, "heads": 4, "condition": 32},
    "mini": {"width": 256, "blocks": 6, "heads": 4, "condition": 64},
    "small": {"width": 768, "blocks": 12, "heads": 12, "condition": 128},
    "large": {"width": 1536, "blocks": 24, "heads": 16, "condition": 128},
}
"""Sizes: `mini` stays under 10M parameters with a vocabulary of 4,096; `small` is GPT-2 Small's, `large` the 860M."""


LARGEST_VOCABULARY = 1 << 24
IN_TRANSFORMERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
"""Other names of width, blocks, heads and length."""


class Shape:
    """What a model is made of.

    vocab_size      V, the mask token included
    mask_token_id   the mask's id (the last id unless given: V − 1)
    length          the longest sequence
    mask            `single`, `finite-6144`, `infinite-uniform-768-1.0`, or their settings
    mixture         one extra token, appended to the sequence, shows the model a latent λ ~ U(0, 1) that all positions
                    share (Di4C's mixture model)
    schedule        `log-linear`, or its settings
    backbone        what turns embeddings into hidden states: `dit` unless given, or settings with `kind`
    width, dropout  of any backbone
    blocks, heads, softcap    of `dit`; `preset` fills width, blocks, heads and condition
    condition       of `dit`: width of adaLN's conditioning; 0: folded into the other weights (`fold_conditioning`)
    bos_token_id, eos_token_id, pad_token_id   where rows are whole texts (`Ending`): what follows the end token is
                    padding. None: rows are cut from a stream
    lengths         of whole texts: the share of texts of 0, 1, 2 … tokens, begin and end counted. Where it is known,
                    the end of a text is drawn first, then the text before it. None: the network draws the end
    noise, order    the noise policy and the order of revealing that the model writes with unless others are asked for;
                    None: `posterior` and `random`
    causal          each position attends to those before it only: an autoregressive language model, which can judge
                    samples of others (objective `autoregressive`)

    `MaskedDiffusionConfig` is the same as a configuration of `transformers`.
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    lengths: list[float] | None = None
    noise: NoisePolicy | None = None
    order: RevealOrder | None = None

    def __init__(
        self,
        vocab_size: int = 50_258,
        mask_token_id: int | None = None,
        length: int = 1024,
        width: int = 768,
        blocks: int = 12,
        heads: int = 12,
        condition: int = 128,
        dropout: float = 0.1,
        softcap: float | None = None,
        mask: Any = "single",
        mixture: bool = False,
        schedule: Any = "log-linear",
        causal: bool = False,
        backbone: Any = None,
        tie_word_embeddings: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        lengths: Sequence[float] | None = None,
        noise: NoisePolicy | None = None,
        order: RevealOrder | None = None,
        **kwargs: Any,
    ) -> None:
        width, blocks, heads, length = (
            kwargs.pop(name, own) for name, own in zip(IN_TRANSFORMERS, (width, blocks, heads, length), strict=True)
        )
        kwargs.pop("auto_map", None)  # set in folders for plain `transformers`, with files that are not saved here
        if kwargs and type(self) is Shape:
            raise unknown("model setting", next(iter(kwargs)), SETTINGS)
        _check_sizes(vocab_size, length, width, blocks, heads, condition)
        _check_switches(mixture=mixture, causal=causal, tie_word_embeddings=tie_word_embeddings)
        _check_rates(dropout, softcap)
        if causal and (softcap is not None or mixture or parse_mask(mask).noisy):
            raise UserError("model.causal = true: such a model has a single mask, no mixture and no softcap")
        mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id
        _check_tokens(vocab_size, mask_token_id, bos_token_id, eos_token_id, pad_token_id)
        self.vocab_size, self.length = vocab_size, length
        self.width, self.blocks, self.heads, self.condition = width, blocks, heads, condition
        self.dropout, self.softcap = float(dropout), softcap
        self.mask, self.mixture, self.schedule = mask, mixture, schedule
        self.mask_token_id, self.causal = mask_token_id, causal
        self.tie_word_embeddings = tie_word_embeddings
        self.backbone = backbone
        parsed = parse_backbone(self.backbone)
        backbones[parsed.kind].check(self, parsed)
        super().__init__(**kwargs)  # of `transformers`, where a subclass has its configuration as second base
        if eos_token_id is not None:  # not stored when unset, so that old configurations do not change
            self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        if lengths is not None:
            self.check_lengths(lengths)
            self.lengths = [float(share) for share in lengths]
        if noise is not None:
            check_policy(noise)
            self.noise = noise
        if order is not None:
            check_order(order)
            self.order = order

    def check_lengths(self, lengths: Any) -> None:
        """Refuse lengths that are no distribution over this model's lengths of texts."""
        if self.ending is None or self.causal:
            raise UserError("model.lengths: only for diffusion models of whole texts")
        if not isinstance(lengths, (list, tuple)) or not 2 < len(lengths) <= self.length + 1:
            raise UserError(f"model.lengths: give the share of texts of 0, 1, 2 … tokens, {self.length} at most")
        for share in lengths:
            check_number("model.lengths", share)
        if min(lengths) < 0 or max(lengths[2:]) <= 0 or max(lengths[:2]) > 0:
            raise UserError("model.lengths: shares are not negative, and a text has a begin and an end token at least")

    def __setattr__(self, name: str, value: Any) -> None:
        """Masks and schedules are stored as plain settings, however they are given."""
        parse = {"mask": parse_mask, "schedule": parse_schedule}.get(name)
        super().__setattr__(name, parse(value).model_dump() if parse else value)

    @property
    def backbone(self) -> dict[str, Any]:
        """The backbone's settings. Those of the default are not stored, so that configurations of earlier versions do
        not change."""
        return self.__dict__.get("backbone", {"kind": DEFAULT})

    @backbone.setter
    def backbone(self, value: Any) -> None:
        settings = parse_backbone(value)
        self.__dict__.pop("backbone", None)
        if not is_default(settings):
            self.__dict__["backbone"] = settings.model_dump()

    @property
    def ending(self) -> Ending | None:
        """How rows begin and end, where they are whole texts."""
        if self.bos_token_id is None or self.eos_token_id is None or self.pad_token_id is None:
            return None
        return Ending(self.bos_token_id, self.eos_token_id, self.pad_token_id)

    @property
    def law(self) -> list[Any]:
        """What a model's distribution depends on beside its weights, as plain data: masks, schedule, vocabulary,
        attention."""
        law: list[Any] = [parse_mask(self.mask).hashed(), parse_schedule(self.schedule).hashed()]
        law += [self.mask_token_id, self.vocab_size, self.heads, self.softcap]
        law += ["causal"] * self.causal
        law += [] if self.ending is None else ["whole texts", self.bos_token_id, self.eos_token_id, self.pad_token_id]
        law += [] if self.lengths is None else ["lengths", *self.lengths]
        backbone = parse_backbone(self.backbone)
        return law if is_default(backbone) else [*law, backbone.hashed()]

    def settings(self) -> dict[str, Any]:
        """All settings by name, as plain data."""
        return {name: getattr(self, name) for name in SETTINGS}

    def changed(self, **changes: Any) -> Self:
        """These settings but for some."""
        return type(self)(**(self.settings() | changes))

    @property
    def parameters(self) -> int:
        """About how many parameters a model of this size has."""
        D, mask = self.width, self.mask
        noise = mask.get("count", 0) * D + (4 * D * (mask["dim"] + D) if "dim" in mask else 0)
        backbone = parse_backbone(self.backbone)
        return 2 * self.vocab_size * D + backbones[backbone.kind].size(self, backbone) + noise

    @classmethod
    def preset(cls, name: str, **settings: Any) -> Self:
        """A named size with anything else set by keyword: `preset("small", vocab_size=30522, length=128)`."""
        if not isinstance(name, str) or name not in PRESETS:
            raise unknown("model preset", name, PRESETS)
        return cls(**(PRESETS[name] | settings))


SETTINGS = tuple(name for name in signature(Shape.__init__).parameters if name not in ("self", "kwargs"))
"""The names of a model's settings."""


def _check_sizes(vocab_size: int, length: int, width: int, blocks: int, heads: int, condition: int) -> None:
    check_whole("model.vocab_size", vocab_size, 2, LARGEST_VOCABULARY)
    check_whole("model.length", length, 1, 1 << 20)
    check_whole("model.width", width, 1, 1 << 16)
    check_whole("model.blocks", blocks, 1, 1 << 12)
    check_whole("model.heads", heads, 1, 1 << 12)
    check_whole("model.condition", condition, 0, 1 << 16)


def _check_switches(**switches: bool) -> None:
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise UserError(f"model.{name} = {shown(switch)}: must be true or false")


def _check_rates(dropout: float, softcap: float | None) -> None:
    check_number("model.dropout", dropout)
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout = {dropout!r}: must be in [0, 1)")
    if softcap is not None:
        check_number("model.softcap", softcap)
        if softcap <= 0:
            raise UserError(f"model.softcap = {softcap!r}: must be positive, or null for none")


def _check_tokens(vocab_size: int, mask: int, begin: int | None, end: int | None, pad: int | None) -> None:
    """Ids inside the vocabulary; those of whole texts all given or none, and none of them the mask's."""
    check_whole("model.mask_token_id", mask, 0, vocab_size - 1)
    special = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    ids = {field: token for field, token in special.items() if token is not None}
    if len(ids) not in (0, len(special)):
        raise UserError(f"model: {', '.join(special)}: give all of them, for rows that are whole texts, or none")
    for field, token in ids.items():
        check_whole(f"model.{field}", token, 0, vocab_size - 1)
        if token == mask:
            raise UserError(f"model.{field} = {token}: that is the mask; a text ends with another token")
