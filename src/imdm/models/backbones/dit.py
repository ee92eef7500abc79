"""The diffusion transformer: blocks of attention and MLP with adaLN, whose conditioning is constant: time is no
input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from imdm.core.errors import UserError
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.state import Rows
from imdm.kernels import is_plain
from imdm.models.backbones.base import (
    Backbone,
    BackboneOutputs,
    BackboneRequest,
    BackboneSettings,
    Folded,
    backbones,
    size_filled,
)
from imdm.models.layers import AttentionOptions, Block, Norm, Rope, TimeCondition, ZeroLinear, rotary

if TYPE_CHECKING:
    from imdm.models.shape import Shape


@backbones.register("dit")
class DiT(Backbone):
    """`config.blocks` blocks of `config.heads` heads. With `condition` > 0 adaLN shifts, scales and gates by constants,
    as time is no input; with 0 these are folded into the other weights (`folded`)."""

    resets: ClassVar[bool] = True

    def __init__(self, config: Shape, settings: BackboneSettings) -> None:
        super().__init__(config, settings)
        D, C = config.width, config.condition
        self.time = TimeCondition(C) if C else None
        self.blocks = nn.ModuleList(
            Block(D, config.heads, config.softcap, config.causal, config.dropout, C) for _ in range(config.blocks)
        )
        self._compute_again(False)
        self.norm = Norm(D, bias=not C)
        self.modulation = ZeroLinear(C, 2 * D) if C else None
        self._compiled: frozenset[bool] = frozenset()  # the modes in which it is compiled: training or not

    @classmethod
    def check(cls, config: Shape, settings: BackboneSettings) -> None:
        if config.width % (2 * config.heads):
            raise UserError(f"model.width = {config.width}: must be a multiple of 2·heads = {2 * config.heads}")

    @classmethod
    def size(cls, config: Shape, settings: BackboneSettings) -> int:
        return config.blocks * 6 * config.width * (2 * config.width + config.condition)

    @property
    def about(self) -> str:
        return f"{self.config.blocks} blocks of width {self.config.width}, {self.config.heads} heads"

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        return self._run(x, keys)

    def at(self, x: Tensor, rows: Rows, keys: Tensor | None = None) -> Tensor:
        """The last block computes these rows only."""
        queries, last = None, cast("Block", self.blocks[-1])
        few = is_plain(last.attention.qkv)  # else q, k and v cannot be computed apart
        length = x.shape[1] - self.config.mixture
        if few and rows.slot is not None and rows.most is not None and 2 * size_filled(rows.most) <= length:
            queries = torch.zeros(len(x), size_filled(rows.most), dtype=torch.int64, device=x.device)
            queries[rows.sequence, rows.slot] = rows.position
        return self._run(x, keys, rows._replace(most=None), queries)

    def _run(self, x: Tensor, keys: Tensor | None, rows: Rows | None = None, queries: Tensor | None = None) -> Tensor:
        """Blocks and last norm: hidden states (B, T, D), or (R, D) of the given rows: the last block then computes only
        these.

        On a GPU each new shape costs time (cuDNN takes 50 ms to plan its attention). So in evaluation mode, where the
        number of sequences changes, batches are padded to a few sizes.
        """
        many = len(x)
        if x.is_cuda and not self.training:
            more = size_filled(many) - many
            x = nn.functional.pad(x, (0, 0, 0, 0, 0, more))
            queries = None if queries is None else nn.functional.pad(queries, (0, 0, 0, more))
        rope = self.beside(x.shape[1], x.device)
        c = self.time() if self.time is not None else None
        through, out = _through, _out
        if self.training in self._compiled:
            through, out = _compiled()
            self._mark_changing(x, rows, queries)
        through, out = self._again(through), self._again(out)
        *first, last = cast("list[Block]", list(self.blocks))
        dropped = self._dropout_keys(keys, many, x.device)
        for number, block in enumerate(first):
            x = through(block, x, c, rope, dropped[number])
        hidden = out(last, self.norm, self.modulation, x, c, rope, rows, queries, dropped[-1])
        return hidden if rows is not None else hidden[:many]

    def outputs(self, x: Tensor, request: BackboneRequest) -> BackboneOutputs:
        """Rotary embeddings depend on distances only, so padding before a text changes nothing. It would with a latent
        after the text, so positions then do not count padding. The last of the states is the input of the head, as in
        Llama."""
        if request.nothing:
            return BackboneOutputs(self(x))
        rope = self.beside(x.shape[1], x.device)
        if request.positions is not None:
            rope = self._rope_at(request.positions)
        options = AttentionOptions(
            None if request.seen is None else request.seen[:, None, None], [] if request.attentions else None
        )
        c = self.time() if self.time is not None else None
        dropped = self._dropout_keys(None, len(x), x.device)
        blocks = cast("list[Block]", list(self.blocks))
        through, out = self._again(_through), self._again(_out)
        states = [x]
        for block, keys in zip(blocks[:-1], dropped[:-1], strict=True):
            x = through(block, x, c, rope, keys, options)
            states.append(x)
        x = out(blocks[-1], self.norm, self.modulation, x, c, rope, None, None, dropped[-1], options)
        states.append(x)
        attentions = None if options.weights is None else tuple(options.weights)
        return BackboneOutputs(x, tuple(states) if request.states else None, attentions)

    def _rope_at(self, positions: Tensor) -> Rope:
        """The rotations of positions (B, T): (B, 1, T, dim) each."""
        longest = self.config.length + self.config.mixture
        table = self.beside(longest, positions.device)
        return cast("Rope", tuple(turn[positions][:, None] for turn in table))

    def _again(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The function, recomputed in the backward pass under gradient checkpointing. It draws no random numbers, and
        CUDA-graph capture forbids reading the generator's state."""
        if not (self.blocks.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return function
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)

    def _dropout_keys(self, keys: Tensor | None, many: int, device: torch.device) -> Sequence[Tensor | None]:
        """Keys of each block's two dropouts, (2, B); None without dropout."""
        if not self.training or not self.config.dropout:
            return [None] * len(self.blocks)
        keys = torch.randint(1 << 62, (many,), device=device) if keys is None else keys
        layer = torch.arange(2 * len(self.blocks), device=device)[:, None]
        return fold(keys, Purpose.DROPOUT, layer).unflatten(0, (-1, 2)).unbind(0)

    def _mark_changing(self, x: Tensor, rows: Rows | None, queries: Tensor | None) -> None:
        """Mark sizes that change between calls as dynamic, so that compilation happens once: the number of rows, and in
        sampling that of sequences."""
        changing = [(part, 0) for part in (rows.tensors() if rows is not None else ())]
        if not self.training:
            changing += [(x, 0)] + ([(queries, 0), (queries, 1)] if queries is not None else [])
        for tensor, axis in changing:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)

    def matrices(self) -> dict[Tensor, int]:
        """The blocks' matrices and how many lie in each: of attention (queries, keys and values in one weight) and MLP;
        not those of adaLN, which act as vectors where the conditioning is constant."""
        counts: dict[Tensor, int] = {}
        for block in cast("list[Block]", list(self.blocks)):
            counts |= {block.attention.qkv.weight: 3, block.attention.out.weight: 1}
            counts |= {block.mlp.up.weight: 1, block.mlp.down.weight: 1}
        return counts

    def beside(self, length: int, device: torch.device) -> Rope:
        return rotary(length, self.config.width // self.config.heads, device)

    def checkpoint_blocks(self) -> None:
        self._compute_again(True)

    def _compute_again(self, whether: bool) -> None:
        """Stored where `transformers` reads and sets it (`gradient_checkpointing_enable`)."""
        setattr(self.blocks, "gradient_checkpointing", whether)  # noqa: B010  (no layer, so mypy would refuse it)

    def compile_trunk(self, *, training: bool) -> None:
        self._compiled |= {training}

    @property
    def is_compiled(self) -> bool:
        return bool(self._compiled)

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.blocks.parameters())

    @torch.no_grad()
    def folded(self, weights: Mapping[str, Tensor]) -> Folded | None:
        """Fold adaLN away: shift, scale and gate, which are constants, move into the norms and the output layers."""
        if self.time is None or self.modulation is None:
            return None
        moved = {name: weight.clone() for name, weight in weights.items()}
        c = self.time()

        def move(norm: str, shift: Tensor, scale: Tensor) -> None:
            moved[f"{norm}.weight"] *= 1 + scale
            moved[f"{norm}.bias"] = shift.clone()

        for index, block in enumerate(self.blocks):
            shift1, scale1, gate1, shift2, scale2, gate2 = block.modulation(c).chunk(6)  # type: ignore[operator]
            prefix = f"blocks.{index}"
            move(f"{prefix}.norm1", shift1, scale1)
            move(f"{prefix}.norm2", shift2, scale2)
            moved[f"{prefix}.attention.out.weight"] *= gate1[:, None]
            moved[f"{prefix}.mlp.down.weight"] *= gate2[:, None]
            moved[f"{prefix}.mlp.down.bias"] *= gate2
        move("norm", *self.modulation(c).chunk(2))
        left = {n: w for n, w in moved.items() if "modulation." not in n and not n.startswith("time.")}
        return Folded({"condition": 0}, left)


def _through(
    block: Block, x: Tensor, c: Tensor | None, rope: Rope, keys: Tensor | None, options: AttentionOptions | None = None
) -> Tensor:
    return block(x, c, rope, keys=keys, options=options)


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
    options: AttentionOptions | None = None,
) -> Tensor:
    """The last block and what follows it."""
    x = norm(block(x, c, rope, rows, queries, keys, options))
    if modulation is None:
        return x
    shift, scale = modulation(c).chunk(2, dim=-1)
    return x * (1 + scale) + shift


@lru_cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A compiled block and a compiled last block, shared by all blocks of all models of the same shape."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(_through), torch.compile(_out)
