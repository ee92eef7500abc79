"""The network x_θ: a trunk (tokens and noise → hidden) and a head (chosen rows → log-probabilities of data tokens).

(B, L, V) is never materialised in sampling or training: the sampler applies the head where a token is revealed, losses
where a position is masked. It needs torch alone; `MaskedDiffusionLM` is the same as a model of `transformers`, which
takes seconds to import.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError, check_is, check_seed, check_whole, shown
from imdm.core.memory import check_memory
from imdm.diffusion.masks import Mask, NoisePath, parse_mask
from imdm.diffusion.process import NoisePolicy, Process
from imdm.diffusion.randomness import Purpose, as_key, fold, seeded
from imdm.diffusion.schedule import parse_schedule
from imdm.diffusion.state import Noised, Rows
from imdm.models.backbones import Backbone, backbones, parse_backbone
from imdm.models.backbones.base import WRAPPERS, size_filled
from imdm.models.layers import MixtureToken, Norm, TokenEmbedding, ZeroLinear
from imdm.models.masked_lm import padding_to_holes
from imdm.models.readout import Head, Reduce, reduced
from imdm.models.shape import Shape
from imdm.sampling import Generation, Revealed, Sampling, sample
from imdm.sampling.options import RevealOrder


class Network(nn.Module):
    """A masked diffusion language model with any kind of mask and any backbone: tokens, noise and latent → embeddings →
    `backbone` → hidden states → head. `Denoiser` is its interface.

    >>> model = Network(Shape(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8))
    >>> model.generate(num=5, steps=1).tokens.shape
    torch.Size([5, 2])
    """

    config: Shape
    backbone: Backbone
    replay: Any = None  # captured CUDA graphs (`faster`)
    steps: Any = None  # the same of an autoregressive model's steps

    def __init__(self, config: Shape) -> None:
        super().__init__()
        self.config = config
        self._build(config)
        self.share_embedding()

    def _build(self, config: Shape) -> None:
        """All layers, in the order in which weights are initialised."""
        self.mask: Mask = parse_mask(config.mask)
        schedule = parse_schedule(config.schedule)
        lengths = None if config.lengths is None else tuple(config.lengths)
        self.process = Process(schedule, self.mask, config.mask_token_id, config.mixture, config.ending, lengths)
        D, settings = config.width, parse_backbone(config.backbone)
        kind = backbones[settings.kind]
        if not kind.owns_embedding:
            self.embedding = TokenEmbedding(config.vocab_size, D)
        self.mask_embedding = self.mask.embedding(D)
        self.mixture = MixtureToken(D) if config.mixture else None
        self._take_in(kind(config, settings))
        if not kind.owns_embedding:
            self.output = ZeroLinear(D, config.vocab_size)

    def share_embedding(self) -> None:
        """With a tied embedding, let the head read its weights. (`transformers` does it for `MaskedDiffusionLM`.)"""
        if self.config.tie_word_embeddings and not self.backbone.owns_embedding:
            self.output.weight = self.embedding.weight

    @classmethod
    def around(cls, config: Shape, network: nn.Module, seed: int = 0) -> Self:
        """A model around an existing network, so that a large one is not built twice. Its other layers are initialised
        from `seed`."""
        with torch.device("meta"):
            model = cls(config)
        with seeded(fold(as_key(seed), Purpose.INIT)):
            model.mask_embedding = model.mask.embedding(config.width)
            model.mixture = MixtureToken(config.width) if config.mixture else None
            for part in (model.mask_embedding, model.mixture):
                for module in () if part is None else part.modules():
                    if isinstance(module, nn.Linear | nn.Embedding | Norm):
                        module.reset_parameters()
        model.backbone.set_network(network)
        return model

    def like(self, seed: int, **changes: Any) -> Self:
        """A new model with some settings changed, on the same device and in the same dtype. Its weights are initialised
        from `seed`, except that a backbone which is a whole language model is copied."""
        config = self.config.changed(**changes)
        if self.backbone.owns_embedding:
            network = copy.deepcopy(self.backbone.get_network()).requires_grad_(True)
            fresh = type(self).around(config, network, seed)
        else:
            with seeded(fold(as_key(seed), Purpose.INIT)):
                fresh = type(self)(config)
        nn.Module.to(fresh, device=self.device, dtype=self.dtype)
        return fresh

    def set_lengths(self, lengths: Sequence[float]) -> None:
        """Let the end of a text be drawn before its tokens from now on: `lengths` as in the configuration."""
        self.config.check_lengths(lengths)
        self.config.lengths = list(lengths)
        self.process = replace(self.process, lengths=tuple(lengths))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.parameters() if weight.is_floating_point())

    def forward(
        self, state: Noised, rows: Rows | Tensor | None = None, reduce: Reduce | None = None, group: int = 1
    ) -> Any:
        return self.log_probs(state, rows, reduce, group)

    def check_finite(self, what: str) -> None:
        """Refuse weights that are NaN or infinite."""
        for name, weight in self.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise UserError(
                    f"{what}: {name!r} has weights that are NaN or infinite; it is damaged, or its training failed"
                )

    def _take_in(self, backbone: Backbone) -> None:
        """Register the backbone's layers under their own names, so that weights keep their names. Both share one table
        of submodules, and the backbone is no submodule itself: replacing a layer here replaces it there."""
        mine = set(WRAPPERS)
        names = [name for table in (backbone._modules, backbone._parameters, backbone._buffers) for name in table]
        for name in names:
            if name in mine or hasattr(self, name):
                raise ValueError(f"backbone {backbone.settings.kind!r}: a layer cannot be called {name!r} here")
        for table in ("_modules", "_parameters", "_buffers"):
            self.__dict__[table].update(backbone.__dict__[table])
            backbone.__dict__[table] = self.__dict__[table]
        self._non_persistent_buffers_set |= backbone._non_persistent_buffers_set
        self.__dict__["backbone"] = backbone

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.training = mode
        return self

    def __repr__(self) -> str:
        config, count = self.config, sum(parameter.numel() for parameter in self.parameters())
        sizes = f"{count / 1e6:.1f}M parameters, {self.backbone.about}, mask {self.mask.name}"
        return f"{type(self).__name__}({sizes}, {config.vocab_size:,} ids, up to {config.length} tokens)"

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.config.vocab_size = value

    @property
    def length(self) -> int:
        return self.config.length

    @property
    def causal(self) -> bool:
        return self.config.causal

    def policies(self, noise: str | None = None, order: str | None = None) -> dict[str, Any]:
        """`noise` and `order` of `Sampling`: the model's own, unless given."""
        return {"noise": noise or self.config.noise or "posterior", "order": order or self.config.order or "random"}

    def set_policies(self, noise: NoisePolicy | None = None, order: RevealOrder | None = None) -> None:
        """Set what `policies` returns from now on; None: the defaults. Masks without noise have no policy for it."""
        for name in ("noise", "order"):
            self.config.__dict__.pop(name, None)  # not stored when unset
        if noise is not None and self.mask.noisy:
            self.config.noise = noise
        if order is not None:
            self.config.order = order

    def set_dropout(self, rate: float) -> None:
        """Another dropout rate for further training."""
        self.config.dropout = rate
        self.backbone.set_dropout(rate)

    @property
    def _ends(self) -> Any:
        """The object with the embedding and the head: a whole backbone, or this model."""
        return self.backbone if self.backbone.owns_embedding else self

    def get_input_embeddings(self) -> nn.Module:
        return self._ends.embedding

    def embed(self, state: Noised) -> Tensor:
        """Eq. 15: E(z) for data tokens, E(mask) + MLP(ε) for masked positions: (B, L, D). A single mask has no ε."""
        x = self._ends.embedding(state.tokens)
        if state.noise is None or not self.mask.noisy:
            return x
        return x + self.mask_embedding(state.noise).to(x.dtype) * state.masked[..., None]

    def trunk(self, state: Noised) -> Tensor:
        """Hidden states (B, L, D)."""
        self._check_length(state)
        many = len(state.tokens)
        hidden = self._replayed(state, lambda all_of_them: all_of_them[:many].clone())
        return self._all(state) if hidden is None else hidden

    def trunk_at(self, state: Noised, rows: Rows) -> Tensor:
        """Hidden states of some rows only, (R, D)."""
        self._check_length(state)
        hidden = self._replayed(state, rows.of)
        return self.backbone.at(self._embedded(state), rows, state.keys) if hidden is None else hidden

    def _all(self, state: Noised) -> Tensor:
        return self.backbone(self._embedded(state), state.keys)[:, : state.tokens.shape[1]]

    def _replayed(self, state: Noised, read: Callable[[Tensor], Tensor]) -> Tensor | None:
        """read(hidden states) by a captured CUDA graph, the batch padded; None without one."""
        if self.replay is None or self.training or not self.replay.wants(state):
            return None
        full = state.filled(size_filled(len(state.tokens)), self.config.mask_token_id)
        beside = self.backbone.beside(full.tokens.shape[1] + (self.mixture is not None), full.tokens.device)
        return self.replay(self._all, beside, full, read)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.forget_captured()
        with self.backbone.unrounded():
            return super()._apply(fn, recurse)

    def forget_captured(self) -> None:
        """Drop captured CUDA graphs: they read the weights where these were."""
        for captured in (self.replay, self.steps):
            if captured is not None:
                captured.forget()

    def _check_length(self, state: Noised) -> None:
        if state.tokens.shape[1] > self.config.length:
            raise UserError(
                f"the state has rows of {state.tokens.shape[1]} tokens, the model takes at most {self.config.length}"
            )

    def _embedded(self, state: Noised) -> Tensor:
        """The backbone's input: embeddings of tokens and masks with noise, then a mixture's latent."""
        if state.noise is None and self.mask.noisy:
            raise UserError(f"the state carries no noise, but the model's mask is {self.mask.name}; use model.noised()")
        x = self.embed(state)
        if self.mixture is not None:
            if state.latent is None:
                raise UserError("the state carries no latent, but the model is a mixture; use model.noised()")
            x = torch.cat((x, self.mixture(state.latent).to(x.dtype)[:, None]), dim=1)  # (B, L + 1, D)
        return x

    def compile_trunk(self, *, training: bool) -> None:
        """Fuse the backbone's small operations (`torch.compile`) from the next batch on, in training or in evaluation
        mode: the same distribution, other rounding, other dropout masks. Takes some seconds. A backbone that does not
        support it stays as it is."""
        self.backbone.compile_trunk(training=training)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_trunk` was called, for either mode."""
        return self.backbone.is_compiled

    def head(self, rows: Tensor) -> Tensor:
        """Log-probabilities of rows, in float32. SUBS: the mask is never predicted."""
        return self.head_of(rows).log_probs()

    def head_of(self, rows: Tensor) -> Head:
        return Head(rows, self._ends.output, self.config.mask_token_id, self.vocab_size)

    def log_probs(
        self, state: Noised, rows: Rows | Tensor | None = None, reduce: Reduce | None = None, group: int = 1
    ) -> Tensor:
        """Log-probabilities of data tokens.

        rows, or (B, L) bool: only there, (R, V). With reduce, a function of the log-probabilities of a chunk of rows
        (r, V) and of its slice of 0…R: its results, concatenated; (R, V) is never materialised, and each `group`
        consecutive rows are in one chunk. Without rows: all of (B, L, V), revealed tokens carried over.
        """
        if rows is not None:
            rows = rows if isinstance(rows, Rows) else Rows.where(rows)
            head = self.head_of(self.trunk_at(state, rows))
            return head.log_probs() if reduce is None else reduced(head, reduce, group)
        hidden = self.trunk(state)
        carried = torch.full((*state.tokens.shape, self.vocab_size), -torch.inf, device=hidden.device)
        carried.scatter_(-1, state.tokens[..., None], 0.0)
        return torch.where(state.masked[..., None], self.head(hidden), carried)

    def noised(self, tokens: Tensor, seed: int = 0) -> Noised:
        """The state of `tokens` (B, L) at t = 1, masked where they hold the mask id, with noise drawn under `seed`."""
        start = torch.ones(len(tokens), device=tokens.device)
        return self.process.noised(tokens, start, self.sample_keys(len(tokens), seed).to(tokens.device))

    def sample_keys(self, num: int, seed: int) -> Tensor:
        """The keys of the first `num` sequences that `generate` writes under `seed`: (num,)."""
        return fold(as_key(seed, self.device), Purpose.SAMPLE, torch.arange(num, device=self.device))

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        length: int | None = None,
        num: int = 1,
        seed: int = 0,
        keys: Tensor | None = None,
        noise_keys: Tensor | NoisePath | None = None,
        trace: bool = False,
        batch_size: int | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_step: Callable[[Revealed], None] | None = None,
        **how: Any,
    ) -> Generation:
        """Write `num` sequences in at most `steps` network evaluations each (8 unless given).

        input_ids    a canvas (B, L) whose holes are `mask_token_id`; each row is completed `num` times, rows in order.
                     Without holes and `length` it is continued to the model's length. Without a canvas: `num` sequences
                     of `length` from nothing. A model of text expects its begin token first, which `Writer` adds.
        attention_mask   of a tokenizer: padding of prompts of unequal length is removed. Its token_type_ids are
                         accepted and not used
        seed, keys   sequence i depends on the i-th key of `seed`, or on keys[i] where keys (sequences,) are given
        noise_keys   other keys, or a path between two, for the masks' noise: the same token draws under other noise
        how          the options of `Sampling`: steps, noise and order (unless given, the model's `policies`),
                     temperature, top_p; a causal model samples one token an evaluation, whatever the steps
        on_progress, on_step    as in `sample`

        Safe to call from several threads, also while the model trains: dropout is off in this call only. But changing
        weights, or calling `train()`, during a call changes its samples.
        """
        own = self.policies(how.pop("noise", None), how.pop("order", None))
        options = Sampling.of(own | how)
        check_seed(seed)
        if input_ids is not None and attention_mask is not None:
            input_ids, padded = padding_to_holes(as_ids(input_ids), attention_mask, self.config.mask_token_id)
            length = self.config.length if length is None and padded else length
        canvas = self._canvas(input_ids, length, num, options.steps, batch_size)
        keys = self.sample_keys(len(canvas), seed) if keys is None else self.checked_keys(keys, len(canvas))
        return sample(
            self._still(),
            canvas,
            keys=keys,
            noise_keys=None if noise_keys is None else self.checked_noise_keys(noise_keys, len(canvas)),
            how=options,
            trace=trace,
            batch_size=batch_size,
            on_progress=on_progress,
            on_step=on_step,
        )

    def _still(self) -> Self:
        """This model in evaluation mode: in training, a second one that shares the weights, so that the mode is not
        changed for other threads."""
        if not self.training:
            return self
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        return copy.deepcopy(self, shared).eval()

    def checked_keys(self, keys: Tensor, many: int) -> Tensor:
        """Check that there are `many` keys, and move them to the model's device."""
        check_is("keys", keys, Tensor, "a tensor of whole numbers")
        if keys.shape != (many,) or keys.dtype != torch.int64:
            raise UserError(f"keys: expected {many} numbers of 64 bits, got {tuple(keys.shape)} of type {keys.dtype}")
        return keys.to(self.device)

    def checked_noise_keys(self, keys: Tensor | NoisePath, many: int) -> Tensor | NoisePath:
        """Check that there are `many` noise keys, or places between two, and move them to the model's device."""
        if not isinstance(keys, NoisePath):
            return self.checked_keys(keys, many)
        if keys.s.shape != (many,) or not bool(((keys.s >= 0) & (keys.s <= 1)).all()):
            raise UserError(f"noise_keys: expected {many} places s in [0, 1], got {shown(keys.s.tolist())}")
        one, other = (self.checked_keys(each, many) for each in (keys.first, keys.second))
        return NoisePath(one, other, keys.s.to(self.device, torch.float64))

    def _check_memory(self, what: str, many: int, tokens: int, steps: int, batch_size: int | None) -> None:
        """Refuse more sequences than fit into memory; activations of the network count only where all are evaluated in
        one batch."""
        each = self.dtype.itemsize * (3 * self.config.width + self.config.mask.get("dim", 0))
        at_once = each if batch_size is None else 0
        check_memory(what, many, tokens * (40 + at_once) + 24 * (steps + 1), self.device)

    def _canvas(
        self, input_ids: Tensor | None, length: int | None, num: int, steps: int = 1, batch_size: int | None = None
    ) -> Tensor:
        check_whole("num", num)
        if length is not None:
            check_whole("length", length, 1, self.config.length)
        if input_ids is None:
            self._check_memory("num", num, length or self.config.length, steps, batch_size)
            shape = num, self.config.length if length is None else length
            return torch.full(shape, self.config.mask_token_id, device=self.device)
        input_ids = as_ids(input_ids).to(self.device)
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            hint = "; one prompt is [ids]" if input_ids.ndim == 1 else ""
            dims = tuple(input_ids.shape)
            raise UserError(f"input_ids: expected a canvas (sequences, length), got shape {dims}{hint}")
        if length is not None and input_ids.shape[1] > length:
            raise UserError(f"input_ids: the prompt has {input_ids.shape[1]} tokens, more than length = {length}")
        if input_ids.shape[1] > self.config.length:
            raise UserError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, the model takes at most {self.config.length}"
            )
        check_tokens(input_ids, self.vocab_size, "input_ids")
        if length is None and not bool((input_ids == self.config.mask_token_id).any()):
            length = self.config.length
        self._check_memory("num", num, len(input_ids) * (length or input_ids.shape[1]), steps, batch_size)
        if length is not None:
            holes = self.config.mask_token_id
            input_ids = nn.functional.pad(input_ids, (0, length - input_ids.shape[1]), value=holes)
        return input_ids.repeat_interleave(num, dim=0)


def as_ids(values: Any) -> Tensor:
    """Token ids as a tensor of whole numbers, from nested lists too."""
    try:
        ids = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise UserError(f"input_ids = {shown(values)}: expected rows of token ids, all of one length") from None
    if ids.is_meta:
        raise UserError("input_ids: these are on the device 'meta', which holds no values")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"input_ids: token ids are whole numbers, these are of type {ids.dtype}")
    return ids.long()


def check_tokens(tokens: Tensor, vocab_size: int, where: str) -> None:
    """Refuse ids outside the vocabulary."""
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise UserError(f"{where}: token {int(bad)} is outside the vocabulary 0…{vocab_size - 1}")
