"""The denoiser x_θ: a trunk (tokens and noise → hidden) and a head (chosen rows → log-probabilities of data tokens).

Nothing that runs often builds (B, L, V): the sampler asks the head where a token is revealed, losses ask where a
position is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from imdm.errors import UserError, check_is, check_seed, check_whole, is_out_of_memory, shown
from imdm.kernels import is_plain
from imdm.masks import Infinite, Mask, parse_mask
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.layers import (
    Block,
    Dropout,
    MixtureToken,
    Norm,
    Rope,
    TimeCondition,
    TokenEmbedding,
    ZeroLinear,
    rotary,
)
from imdm.models.quantized import opened
from imdm.models.readout import Head, Reduce, reduced
from imdm.models.saving import check_saved, save_whole
from imdm.process import NoisePolicy, Process
from imdm.randomness import Purpose, as_key, fold, seeded
from imdm.room import check_room
from imdm.sampling import Generation, check_steps, sample
from imdm.schedule import parse_schedule
from imdm.state import Noised, Rows

AS_SAVED = {"dtype", "torch_dtype", "device_map", "low_cpu_mem_usage", "attn_implementation"}
"""What may be asked of `from_pretrained` without asking for another configuration than the one that was saved."""


class Denoiser(Protocol):
    """What the sampler, the objectives and the metrics ask of a model. Enumerated oracles satisfy it too."""

    process: Process

    @property
    def vocab_size(self) -> int:
        """V, the mask token included."""

    def trunk(self, state: Noised) -> Tensor:
        """Hidden states (B, L, ·)."""

    def head(self, rows: Tensor) -> Tensor:
        """Log-probabilities (R, V) for rows (R, ·) of the hidden states; −∞ at the mask."""


class MaskedDiffusionLM(PreTrainedModel):
    """A masked diffusion language model with any kind of mask.

    >>> config = MaskedDiffusionConfig(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8)
    >>> model = MaskedDiffusionLM(config)
    >>> model.generate(num=5, steps=1).tokens.shape
    torch.Size([5, 2])
    """

    config_class = MaskedDiffusionConfig
    config: MaskedDiffusionConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012  (transformers' own convention)

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__(config)
        self.mask: Mask = parse_mask(config.mask)
        self.process = Process(parse_schedule(config.schedule), self.mask, config.mask_token_id, config.mixture)
        D, C = config.width, config.condition
        self.embedding = TokenEmbedding(config.vocab_size, D)
        self.mask_embedding = self.mask.embedding(D)
        self.mixture = MixtureToken(D) if config.mixture else None
        self.time = TimeCondition(C) if C else None
        self.blocks = nn.ModuleList(
            Block(D, config.heads, config.softcap, config.causal, config.dropout, C) for _ in range(config.blocks)
        )
        self.norm = Norm(D, bias=not C)
        self.modulation = ZeroLinear(C, 2 * D) if C else None
        self.output = ZeroLinear(D, config.vocab_size)
        self._compiled: frozenset[bool] = frozenset()  # whether while it trains, whether while it does not
        self.replay: Any = None  # recorded evaluations (`faster`)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every layer knows its own start; `transformers` skips what was loaded."""
        if isinstance(module, nn.Linear | nn.Embedding | Norm):
            module.reset_parameters()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def set_dropout(self, rate: float) -> None:
        """Another dropout rate for further training."""
        self.config.dropout = rate
        for module in self.modules():
            if isinstance(module, Dropout):
                module.rate = rate

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> MaskedDiffusionLM:
        """As in `transformers`, from safetensors only, and refusing weights that do not fit: there, a missing layer
        would come back random. `mask=...` loads an MDM as an IMDM with identical log-probabilities."""
        where, folder = f"model {str(pretrained_model_name_or_path)!r}", Path(str(pretrained_model_name_or_path))
        new_mask = "mask" in kwargs
        as_saved = folder.is_dir() and not kwargs.keys() - AS_SAVED
        kwargs |= {"use_safetensors": True, "output_loading_info": True}
        try:
            source, kwargs = opened(cls.config_class, pretrained_model_name_or_path, kwargs)
            loaded: Any = super().from_pretrained(source, *args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"{where}: its weights do not have the shapes its config.json says") from error
        except (OSError, SafetensorError, TypeError, KeyError, AttributeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"{where} cannot be loaded: {reason}") from error
        model, info = loaded
        missing = {name for name in info["missing_keys"] if not (new_mask and name.startswith("mask_embedding."))}
        ignored = {name for name in info["unexpected_keys"] if not (new_mask and name.startswith("mask_embedding."))}
        if missing or ignored:
            problem = f"lacks {sorted(missing)[0]!r}" if missing else f"has the unknown {sorted(ignored)[0]!r}"
            raise UserError(f"{where} does not fit its config.json: it {problem}; it is damaged or not ours")
        if as_saved:
            check_saved(folder, model.config, where)
        for name, weight in model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise UserError(
                    f"{where}: {name!r} has weights that are no numbers; it is damaged, or its training failed"
                )
        return model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`, each file whole or not there, and the weights with a digest of themselves."""
        if kwargs.get("push_to_hub"):
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        save = super().save_pretrained
        save_whole(lambda place: save(place, *args, **kwargs), Path(save_directory), self.config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.output = new_embeddings  # type: ignore[assignment]

    def embed(self, state: Noised) -> Tensor:
        """Eq. 15: E(z) for data tokens, E(mask) + MLP(ε) for masked positions: (B, L, D). A single mask reads none."""
        x = self.embedding(state.tokens)
        if state.noise is None or not self.mask.noisy:
            return x
        return x + self.mask_embedding(state.noise).to(x.dtype) * state.masked[..., None]

    def trunk(self, state: Noised) -> Tensor:
        """Hidden states (B, L, D)."""
        hidden = self._replayed(state)
        return self._all(state) if hidden is None else hidden[: len(state.tokens)].clone()

    def _all(self, state: Noised) -> Tensor:
        return self._run(state)

    def _replayed(self, state: Noised) -> Tensor | None:
        """Hidden states from a recorded evaluation, the batch filled up; overwritten by the next."""
        if self.replay is None or self.training or not self.replay.wants(state):
            return None
        full = state.filled(_room(len(state.tokens)), self.config.mask_token_id)
        rope = self._rope(full.tokens.shape[1] + (self.mixture is not None), full.tokens.device)
        return self.replay(self._all, rope, full)

    def _rope(self, length: int, device: torch.device) -> Rope:
        return rotary(length, self.config.width // self.config.heads, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MaskedDiffusionLM:
        """Weights that move leave their recordings behind."""
        if getattr(self, "replay", None) is not None:
            self.replay.forget()
        return super()._apply(fn, recurse)

    def trunk_at(self, state: Noised, rows: Rows) -> Tensor:
        """Hidden states of some rows alone, (R, D): less work than all of them in the last block."""
        if (hidden := self._replayed(state)) is not None:
            return rows.of(hidden)
        queries, last = None, cast("Block", self.blocks[-1])
        few = is_plain(last.attention.qkv)  # else its parts cannot be taken
        if few and rows.slot is not None and rows.most is not None and 2 * _room(rows.most) <= state.tokens.shape[1]:
            queries = torch.zeros(len(state.tokens), _room(rows.most), dtype=torch.int64, device=state.tokens.device)
            queries[rows.sequence, rows.slot] = rows.position
        return self._run(state, rows._replace(most=None), queries)

    def _run(self, state: Noised, rows: Rows | None = None, queries: Tensor | None = None) -> Tensor:
        """Embeddings, blocks and last norm: hidden states (B, L, D), or (R, D) of the given rows: the last block then
        computes these alone.

        On a GPU each new shape has a price (cuDNN plans its attention for 50 ms), so while sequences come and go,
        batches are filled up to a few sizes.
        """
        x, (many, length) = self._embedded(state), state.tokens.shape
        if x.is_cuda and not self.training:
            more = _room(many) - many
            x = nn.functional.pad(x, (0, 0, 0, 0, 0, more))
            queries = None if queries is None else nn.functional.pad(queries, (0, 0, 0, more))
        rope = self._rope(x.shape[1], x.device)
        c = self.time() if self.time is not None else None
        through, out = _through, _out
        if self.training in self._compiled:
            through, out = _compiled()
            self._mark_changing(x, rows, queries)
        *first, last = cast("list[Block]", list(self.blocks))
        keys = self._dropout_keys(state)
        for number, block in enumerate(first):
            x = through(block, x, c, rope, keys[number])
        hidden = out(last, self.norm, self.modulation, x, c, rope, rows, queries, keys[-1])
        return hidden if rows is not None else hidden[:many, :length]

    def _dropout_keys(self, state: Noised) -> Sequence[Tensor | None]:
        """What each block's two dropouts draw from, (2, B); None where nothing is dropped."""
        if not self.training or not self.config.dropout:
            return [None] * len(self.blocks)
        B, device = len(state.tokens), state.tokens.device
        keys = torch.randint(1 << 62, (B,), device=device) if state.keys is None else state.keys
        layer = torch.arange(2 * len(self.blocks), device=device)[:, None]
        return fold(keys, Purpose.DROPOUT, layer).unflatten(0, (-1, 2)).unbind(0)

    def _mark_changing(self, x: Tensor, rows: Rows | None, queries: Tensor | None) -> None:
        """Sizes that change from call to call, so that they are compiled once for all: rows always do, sequences come
        and go while the model writes."""
        changing = [(part, 0) for part in (rows.tensors() if rows is not None else ())]
        if not self.training:
            changing += [(x, 0)] + ([(queries, 0), (queries, 1)] if queries is not None else [])
        for tensor, axis in changing:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)

    def _embedded(self, state: Noised) -> Tensor:
        """What the blocks read: the tokens and the masks' noise, and last the latent of a mixture."""
        if state.noise is None and self.mask.noisy:
            raise UserError(f"the state carries no noise, but the model's mask is {self.mask.name}; use model.noised()")
        x = self.embed(state)
        if self.mixture is not None:
            if state.latent is None:
                raise UserError("the state carries no latent, but the model is a mixture; use model.noised()")
            x = torch.cat((x, self.mixture(state.latent).to(x.dtype)[:, None]), dim=1)  # (B, L + 1, D)
        return x

    def compile_trunk(self, *, training: bool) -> None:
        """Fuse the blocks' small operations, from the next batch on, while the model trains or while it does not: the
        same law, other rounding, other draws of dropout. Needs what `torch.compile` needs; takes some
        seconds."""
        self._compiled |= {training}

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_trunk` was asked for, in either mode."""
        return bool(self._compiled)

    def head(self, rows: Tensor) -> Tensor:
        """SUBS: the mask is never predicted. Log-probabilities in float32."""
        return self.head_of(rows).log_probs()

    def head_of(self, rows: Tensor) -> Head:
        return Head(rows, self.output, self.config.mask_token_id)

    def forward(
        self, state: Noised | Tensor, rows: Rows | Tensor | None = None, reduce: Reduce | None = None, group: int = 1
    ) -> Tensor:
        """Log-probabilities of data tokens.

        rows, or (B, L) bool: only there, (R, V). With reduce, a function of the log-probabilities of some rows (r, V)
        and the slice of 0…R they are: what it makes of them, one after another, without ever holding (R, V); each
        `group` rows that follow one another come together.
        Without rows: all of (B, L, V), revealed tokens carried over.
        """
        if isinstance(state, Tensor):
            check_tokens(state, self.vocab_size, "tokens")
            state = self.noised(state)
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
        *,
        length: int | None = None,
        num: int = 1,
        steps: int = 8,
        seed: int = 0,
        noise: NoisePolicy = "posterior",
        temperature: float = 1.0,
        top_p: float = 1.0,
        trace: bool = False,
        batch_size: int | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Generation:
        """Write `num` sequences in at most `steps` network evaluations each.

        input_ids  a canvas (B, L) whose holes are `mask_token_id`; each row is completed `num` times, rows in order.
                   Without it: `num` sequences of `length` from nothing.
        noise      what a mask's noise does between steps: `posterior` (Eq. 13) or `keep`.
        """
        check_steps(steps)
        check_seed(seed)
        canvas = self._canvas(input_ids, length, num, steps, batch_size)
        keys = self.sample_keys(len(canvas), seed)
        training = self.training
        if training:
            self.eval()
        try:
            return sample(
                self,
                canvas,
                keys=keys,
                steps=steps,
                policy=noise,
                temperature=temperature,
                top_p=top_p,
                trace=trace,
                batch_size=batch_size,
                on_progress=on_progress,
            )
        finally:
            if training:
                self.train()

    def _check_room(self, what: str, many: int, tokens: int, steps: int, batch_size: int | None) -> None:
        """Refuse more texts of so many tokens than there is memory for; what the network itself takes counts only where
        all are evaluated at once."""
        each = self.dtype.itemsize * (3 * self.config.width + self.config.mask.get("dim", 0))
        at_once = each if batch_size is None else 0
        check_room(what, many, tokens * (40 + at_once) + 24 * (steps + 1), self.device)

    def _canvas(
        self, input_ids: Tensor | None, length: int | None, num: int, steps: int = 1, batch_size: int | None = None
    ) -> Tensor:
        check_whole("num", num)
        if length is not None:
            check_whole("length", length, 1, self.config.length)
        if input_ids is None:
            self._check_room("num", num, length or self.config.length, steps, batch_size)
            shape = num, self.config.length if length is None else length
            return torch.full(shape, self.config.mask_token_id, device=self.device)
        input_ids = as_ids(input_ids).to(self.device)
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            raise UserError(f"input_ids: expected a canvas (sequences, length), got shape {tuple(input_ids.shape)}")
        if length is not None and input_ids.shape[1] > length:
            raise UserError(f"input_ids: the prompt has {input_ids.shape[1]} tokens, more than length = {length}")
        if input_ids.shape[1] > self.config.length:
            raise UserError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, the model takes at most {self.config.length}"
            )
        check_tokens(input_ids, self.vocab_size, "input_ids")
        self._check_room("num", num, len(input_ids) * (length or input_ids.shape[1]), steps, batch_size)
        if length is not None:
            holes = self.config.mask_token_id
            input_ids = nn.functional.pad(input_ids, (0, length - input_ids.shape[1]), value=holes)
        return input_ids.repeat_interleave(num, dim=0)


def _room(many: int) -> int:
    """The size that so many are filled up to: a multiple of 4 up to 16, of 16 beyond."""
    each = 4 if many <= 16 else 16
    return -(-many // each) * each


def _through(block: Block, x: Tensor, c: Tensor | None, rope: Rope, keys: Tensor | None) -> Tensor:
    return block(x, c, rope, keys=keys)


def _out(
    block: Block,
    norm: Norm,
    modulation: nn.Linear | None,
    x: Tensor,
    c: Tensor | None,
    rope: Rope,
    rows: Rows | None,
    queries: Tensor | None,
    keys: Tensor | None,
) -> Tensor:
    """The last block and what follows it."""
    x = norm(block(x, c, rope, rows, queries, keys))
    if modulation is None:
        return x
    shift, scale = modulation(c).chunk(2, dim=-1)
    return x * (1 + scale) + shift


@lru_cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """One block and the last one: all blocks of all models share what was compiled for their shape."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(_through), torch.compile(_out)


def as_ids(values: Any) -> Tensor:
    """Token ids as a tensor of whole numbers, from nested lists too."""
    try:
        ids = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise UserError(f"input_ids = {shown(values)}: expected rows of token ids, all of one length") from None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"input_ids: token ids are whole numbers, these are of type {ids.dtype}")
    return ids.long()


def check_tokens(tokens: Tensor, vocab_size: int, where: str) -> None:
    """Every id names a token."""
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise UserError(f"{where}: token {int(bad)} is outside the vocabulary 0…{vocab_size - 1}")


def with_mask(model: MaskedDiffusionLM, mask: Any = None, seed: int = 0, *, mixture: bool = False) -> MaskedDiffusionLM:
    """A copy of `model` with another mask (None: the same), whose fresh layer follows from `seed`. A new mask adds zero
    until trained: an MDM's copy has identical log-probabilities. What the old mask had learned of its own noise is left
    behind. With `mixture`, the copy also reads a latent λ; its extra token changes what the model says at once."""
    check_is("model", model, MaskedDiffusionLM, "one of our models")
    check_seed(seed)
    mask = model.mask if mask is None else parse_mask(mask)
    weights = model.state_dict()
    if mask != model.mask:
        weights = {name: w for name, w in weights.items() if not name.startswith("mask_embedding.")}
    other = _like(model, seed, mask=mask.model_dump(), mixture=mixture or model.config.mixture)
    missing, unexpected = other.load_state_dict(weights, strict=False)
    if unexpected or any(not name.startswith(("mask_embedding.", "mixture.")) for name in missing):
        raise UserError(f"the model's weights do not fit its own config: {(missing + unexpected)[0]!r}")
    return other.train(model.training)


def to_infinite(
    model: MaskedDiffusionLM, dim: int = 768, law: str = "uniform", scale: float = 1.0, seed: int = 0
) -> MaskedDiffusionLM:
    """Turn a trained MDM into an IMDM whose log-probabilities are identical until trained (Eq. 15)."""
    return with_mask(model, Infinite.parse({"law": law, "dim": dim, "scale": scale}, "mask"), seed)


@torch.no_grad()
def fold_conditioning(model: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """A copy without adaLN: as the model does not see time, shift, scale and gate are constants, and they move into
    the norms and the output layers. Same function, fewer parameters, less work."""
    check_is("model", model, MaskedDiffusionLM, "one of our models")
    if model.time is None or model.modulation is None:
        return with_mask(model, model.mask)
    folded = _like(model, 0, condition=0)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    c = model.time()

    def move(norm: str, shift: Tensor, scale: Tensor) -> None:
        weights[f"{norm}.weight"] *= 1 + scale
        weights[f"{norm}.bias"] = shift.clone()

    for index, block in enumerate(model.blocks):
        shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(c).chunk(6)  # type: ignore[operator]
        prefix = f"blocks.{index}"
        move(f"{prefix}.norm1", shift1, scale1)
        move(f"{prefix}.norm2", shift2, scale2)
        weights[f"{prefix}.attention.out.weight"] *= gate1[:, None]
        weights[f"{prefix}.mlp.down.weight"] *= gate2[:, None]
        weights[f"{prefix}.mlp.down.bias"] *= gate2
    move("norm", *model.modulation(c).chunk(2))
    folded.load_state_dict({n: w for n, w in weights.items() if "modulation." not in n and not n.startswith("time.")})
    return folded.train(model.training)


def _like(model: MaskedDiffusionLM, seed: int, **changes: Any) -> MaskedDiffusionLM:
    """A fresh model with another config, where and as the old one is."""
    with seeded(fold(as_key(seed), Purpose.INIT)):
        fresh = MaskedDiffusionLM(MaskedDiffusionConfig.from_dict(model.config.to_dict() | changes))
    nn.Module.to(fresh, device=model.device, dtype=model.dtype)
    return fresh
