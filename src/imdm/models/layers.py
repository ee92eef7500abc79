"""The layers of the diffusion transformer. Shapes: B sequences, L positions, D width, H heads, C conditioning width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from imdm.diffusion.randomness import survivors
from imdm.diffusion.state import Rows
from imdm.kernels import kernels

Rope = tuple[Tensor, Tensor]
"""cos and sin of each position's rotation."""


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TokenEmbedding(nn.Embedding):
    """Kaiming-uniform rows, as the public models have."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)


class Norm(nn.Module):
    """LayerNorm in float32 with a weight, and a bias only where a folded adaLN needs one."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias).to(x.dtype)


class TimeCondition(nn.Module):
    """c(σ) at σ = 0: time is no input, so the time embedding is one learned vector (C,)."""

    FREQUENCIES = 256

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(self.FREQUENCIES, width)
        self.second = nn.Linear(width, width)

    def forward(self) -> Tensor:
        half = self.first.weight.new_ones(self.FREQUENCIES // 2)
        at_zero = torch.cat((half, torch.zeros_like(half)))  # cos(0·f), sin(0·f)
        return F.silu(self.second(F.silu(self.first(at_zero))))


class MixtureToken(nn.Module):
    """The token that carries the latent: λ (B,) in (0, 1) → (B, D), through sines and cosines and an MLP."""

    FREQUENCIES = 128
    FASTEST = 1000.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(self.FREQUENCIES, width)
        self.second = nn.Linear(width, width)

    def forward(self, latent: Tensor) -> Tensor:
        half = self.FREQUENCIES // 2
        frequency = self.FASTEST * 10_000.0 ** (-torch.arange(half, device=latent.device) / half)
        angle = latent.float()[:, None] * frequency  # (B, 64)
        waves = torch.cat((angle.cos(), angle.sin()), dim=-1).to(self.first.weight.dtype)
        return self.second(F.silu(self.first(waves)))


def rotary_frequencies(dim: int, device: torch.device | None = None) -> Tensor:
    """Frequencies of the rotary position embedding, in radians a position, base 10,000: (dim / 2,)."""
    return 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def rotary(length: int, dim: int, device: torch.device) -> Rope:
    """cos and sin of the rotary position embedding, base 10,000: (L, dim) each. Cached here and not in a buffer of the
    model, which would hold garbage after a load through the meta device."""
    frequency = rotary_frequencies(dim, device)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequency  # (L, dim/2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dim/2) of x (B, H, L, dim) by their position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    turned = x.float() * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)  # a no-op cast loses gradients in torch 2.11


class Heads(torch.autograd.Function):
    """The projection (B, L, 3D) as q and k, rotated, and v: (B, H, L, D/H) each. The backward pass rotates back and
    assembles the gradient at once; a compiler would make a slow sum of slices of it."""

    @staticmethod
    def forward(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (in_heads(part, heads) for part in qkv.chunk(3, dim=-1))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, cos, sin, _ = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        back = _turned_back_op if q.is_cuda else turned_back
        return back(q, k, v, *ctx.saved_tensors), None, None, None


def turned_back(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradients of rotated q, rotated k and v → gradient of the projection: (B, L, 3D)."""
    return torch.cat([from_heads(part) for part in (rotate(q, cos, -sin), rotate(k, cos, -sin), v)], dim=-1)


def _turned_back_fast(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    fast = kernels("rotation")
    return fast.turned_back(q, k, v, cos, sin) if fast else turned_back(q, k, v, cos, sin)


def _projection_like(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, H, L, d = q.shape
    return q.new_empty(B, L, 3 * H * d)


_turned_back_op: Callable[..., Tensor] = turned_back
if __name__ == "imdm.models.layers":  # a copy in an export has no kernels, and would take the operator's name away
    _turned_back_op = torch.library.custom_op("imdm::turned_back", _turned_back_fast, mutates_args=())
    _turned_back_op.register_fake(_projection_like)


def in_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, D) → (B, H, L, D/H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def from_heads(x: Tensor) -> Tensor:
    """(B, H, L, D/H) → (B, L, D)."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, causal: bool = False) -> Tensor:
    """Attention (B, H, L, dim), bidirectional unless causal. With a soft cap c the scores become c·tanh(score/c):
    FlexAttention on CUDA, a plain softmax elsewhere (FlexAttention has no backward on CPU)."""
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    if q.is_cuda and torch.compiler.is_compiling():  # the whole block is being compiled
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v, score_mod=soft_cap_score(softcap))
    if q.is_cuda:
        return _flex(softcap)(q, k, v)
    return capped_attention(q, k, v, softcap)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    return attention_weights(q, k, softcap).to(v.dtype) @ v


def attention_weights(q: Tensor, k: Tensor, softcap: float | None, seen: Tensor | None = None) -> Tensor:
    """Attention weights (B, H, L, L) in float32; 0 where `seen` is False."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, dim=-1)


@lru_cache
def _flex(softcap: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return partial(torch.compile(flex_attention), score_mod=soft_cap_score(softcap))


def soft_cap_score(softcap: float) -> Callable[..., Tensor]:
    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(value / softcap)

    return score


@dataclass(frozen=True)
class AttentionOptions:
    """Extra inputs and outputs of attention. seen (B, 1, 1, T) bool: the positions that may be attended to, None: all;
    weights: a list to which each layer appends its attention weights (B, H, T, T)."""

    seen: Tensor | None = None
    weights: list[Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, softcap: float | None, causal: bool) -> Tensor:
        """Attention under these options, where `attend` has none: (B, H, T, dim)."""
        seen = self.seen
        if causal:
            before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            seen = before if seen is None else (seen & before) | before.triu()  # leading padding attends to itself
        if softcap is None and self.weights is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        weights = attention_weights(q, k, softcap, seen)
        if self.weights is not None:
            self.weights.append(weights.to(v.dtype))
        return weights.to(v.dtype) @ v


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, softcap: float | None, causal: bool, out: type[nn.Linear]) -> None:
        super().__init__()
        self.heads, self.softcap, self.causal = heads, softcap, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = out(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        rows: Rows | None = None,
        queries: Tensor | None = None,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """x (B, L, D) → (B, L, D), or (R, D) of some rows only. With `queries` (B, Q), the positions of those rows,
        only these form queries. `options` needs all rows."""
        D = x.shape[-1]
        if options is not None:
            q, k, v = (in_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
            return self.out(
                from_heads(options.attend(rotate(q, *rope), rotate(k, *rope), v, self.softcap, self.causal))
            )
        if queries is None or rows is None or rows.slot is None:
            q, k, v = Heads.apply(self.qkv(x), *rope, self.heads)
            mixed = from_heads(attend(q, k, v, self.softcap, self.causal))
            return self.out(mixed if rows is None else rows.of(mixed))
        asking = x.gather(1, queries[..., None].expand(-1, -1, D))  # (B, Q, D)
        q = in_heads(F.linear(asking, self.qkv.weight[:D]), self.heads)
        k, v = (in_heads(part, self.heads) for part in F.linear(x, self.qkv.weight[D:]).chunk(2, dim=-1))
        there = tuple(turn[queries][:, None] for turn in rope)  # (B, 1, Q, D/H) each
        mixed = from_heads(attend(rotate(q, *there), rotate(k, *rope), v, self.softcap))  # (B, Q, D)
        return self.out(rows._replace(position=rows.slot).of(mixed))


class MLP(nn.Module):
    def __init__(self, width: int, out: type[nn.Linear]) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = out(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu_of(self.up, x))


def gelu_of(layer: nn.Linear, x: Tensor) -> Tensor:
    """GELU, by tanh, of a linear layer with bias: (…, D) → (…, 4D). In half precision on a GPU the matmul itself
    applies it (cuBLASLt's epilogue), which saves writing and reading the widest activations; it has no gradient."""
    half = x.is_cuda and x.dtype == layer.weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    if half and not torch.is_grad_enabled():
        wide = torch._addmm_activation(layer.bias, x.flatten(0, -2), layer.weight.t(), use_gelu=True)
        return wide.view(*x.shape[:-1], layer.out_features)
    return F.gelu(layer(x), approximate="tanh")


class Dropout(nn.Module):
    """Dropout keyed by sample: the mask is a function of the sequence's key, the position and the feature, whichever
    process and batch compute it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, keys: Tensor | None, rows: Rows | None = None) -> Tensor:
        """x (B, L, D), or (R, D) of some rows; keys (B,); no dropout without them."""
        if keys is None or not self.rate:
            return x
        feature = torch.arange(x.shape[-1], device=x.device)
        if rows is None:
            keys = keys[:, None, None]
            position = torch.arange(x.shape[1], device=x.device)[:, None]
        else:
            keys, position = keys[rows.sequence][:, None], rows.position[:, None]
        alive = survivors(keys, position * x.shape[-1] + feature, self.rate)
        return x * alive / (1 - self.rate)


class Block(nn.Module):
    """Pre-norm attention and MLP. With `condition` > 0 each is shifted, scaled and gated by adaLN-zero; with 0 those
    constants are folded into the norms and the output layers (`fold_conditioning`)."""

    def __init__(
        self, width: int, heads: int, softcap: float | None, causal: bool, dropout: float, condition: int
    ) -> None:
        super().__init__()
        out = nn.Linear if condition else ZeroLinear
        self.norm1 = Norm(width, bias=not condition)
        self.attention = Attention(width, heads, softcap, causal, out)
        self.norm2 = Norm(width, bias=not condition)
        self.mlp = MLP(width, out)
        self.modulation = ZeroLinear(condition, 6 * width) if condition else None
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        c: Tensor | None,
        rope: Rope,
        rows: Rows | None = None,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """x (B, L, D) → (B, L, D), or (R, D) of the given rows only. keys (2, B): for dropout, in training."""
        y = x if rows is None else rows.of(x)
        first, second = (None, None) if keys is None else keys
        if self.modulation is None:
            y = y + self.dropout(self.attention(self.norm1(x), rope, rows, queries, options), first, rows)
            return y + self.dropout(self.mlp(self.norm2(y)), second, rows)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)  # (D,) each
        attended = self.attention(self.norm1(x) * (1 + scale1) + shift1, rope, rows, queries, options)
        y = y + gate1 * self.dropout(attended, first, rows)
        return y + gate2 * self.dropout(self.mlp(self.norm2(y) * (1 + scale2) + shift2), second, rows)
