"""Reductions over the head's output, row by row: functions of log-probabilities (r, V) that never materialise (R, V).

On a GPU in bf16 the common ones are fused kernels; elsewhere, and for any other function, the head runs chunk by chunk,
and a chunk is recomputed in the backward pass rather than kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from imdm.kernels import is_plain, kernels

Reduce = Callable[[Tensor, slice], Tensor]
AT_ONCE = 1 << 26  # elements of (rows, V) that a loss holds at a time
MORE = 16  # features that `Head.without` adds: one would do, but matmuls are faster in round sizes
LOW = -80.0  # a logit whose probability is negligible

Divergence = Literal["backward-kl", "forward-kl", "tv", "mse"]
Gradient = Literal["fkl", "kl", "ipf", "soft"]


class Head(NamedTuple):
    """Rows (R, D) and the output layer: linear, or a function of rows with `out_features`. The token `never` has
    probability 0. size: V, if the layer has another number of outputs: surplus ones are ignored, missing ones have
    probability 0. barred: tokens that have probability 0 in some rows (`without`); rows then have MORE features, of
    which the first marks them."""

    rows: Tensor
    layer: nn.Linear
    never: int
    size: int | None = None
    barred: tuple[int, ...] = ()

    def without(self, where: Tensor, tokens: tuple[int, ...]) -> Head:
        """This head, but these tokens have probability 0 in the rows `where` (R,). An extra feature marks the rows,
        and its large negative weight lowers the logits, so kernels need no special case."""
        more = nn.functional.pad(where[:, None].to(self.rows.dtype), (0, MORE - 1))
        return self._replace(rows=torch.cat((self.rows, more), 1), barred=tokens)

    @property
    def is_linear(self) -> bool:
        """Whether it is a plain linear layer, so that a fused kernel can replace it."""
        return is_plain(self.layer) and (self.size or 0) <= self.layer.out_features

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, weight (V, D) and bias (V,) of a linear head."""
        weight: Tensor = self.layer.weight
        bias: Tensor = weight.new_zeros(len(weight)) if self.layer.bias is None else self.layer.bias
        if self.size is not None and self.size < len(weight):
            weight, bias = weight[: self.size], bias[: self.size]
        if self.barred:
            every = torch.arange(len(weight), device=weight.device)
            low = torch.stack([every == token for token in self.barred]).any(0).to(weight.dtype) * LOW
            weight = torch.cat((weight, nn.functional.pad(low[:, None], (0, MORE - 1))), 1)
        return self.rows, weight, bias

    def log_probs(self, part: slice = slice(None)) -> Tensor:
        """Log-probabilities of some rows, (r, V), in float32."""
        logits = self._logits(self.rows[part]).float()
        never = torch.arange(logits.shape[-1], device=logits.device) == self.never
        return torch.log_softmax(logits.masked_fill(never, -torch.inf), dim=-1)

    def logits(self) -> Tensor:
        """Logits of all rows, in the dtype of the weights; tokens of probability 0 have the lowest finite value, so
        that sums over tokens stay finite."""
        logits = self._logits(self.rows)
        never = torch.arange(logits.shape[-1], device=logits.device) == self.never
        return logits.masked_fill(never, -torch.inf).clamp(min=torch.finfo(logits.dtype).min)

    def _logits(self, rows: Tensor) -> Tensor:
        if self.barred:
            logits = self._replace(barred=())._logits(rows[..., :-MORE])
            every = torch.arange(logits.shape[-1], device=logits.device)
            tokens = torch.stack([every == token for token in self.barred]).any(0)
            return logits.masked_fill((rows[..., -MORE] > 0)[..., None] & tokens, -torch.inf)
        more = 0 if self.size is None else self.size - self.layer.out_features
        if more < 0 and self.is_linear:  # surplus outputs need not be computed
            return nn.functional.linear(rows, *self.tensors[1:])
        logits = self.layer(rows)
        return nn.functional.pad(logits, (0, more), value=-torch.inf) if more > 0 else logits[..., : self.size]


class LogProbRows(NamedTuple):
    """Rows that already are log-probabilities (R, V), as an oracle's; there is no output layer."""

    rows: Tensor
    layer: None = None
    is_linear: bool = False

    def log_probs(self, part: slice = slice(None)) -> Tensor:
        return self.rows[part]

    def without(self, where: Tensor, tokens: tuple[int, ...]) -> LogProbRows:
        """These rows, but these tokens have probability 0 in the rows `where` (R,)."""
        rest = self.rows.index_fill(-1, torch.tensor(tokens, device=self.rows.device), -torch.inf).log_softmax(-1)
        return self._replace(rows=torch.where(where[:, None], rest, self.rows))


class Fused(ABC):
    """A reduction that has a kernel."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, part: slice) -> Tensor:
        """The reduction of a chunk of rows (r, V)."""

    @abstractmethod
    def fused(self, losses: Any, head: Head) -> Tensor | None:
        """The reduction of all rows by a fused kernel; None where there is none for this case."""


@dataclass(frozen=True)
class Chosen(Fused):
    """The log-probability of each row's target: targets (R,)."""

    targets: Tensor

    def __call__(self, log_probs: Tensor, part: slice) -> Tensor:
        return log_probs.gather(-1, self.targets[part, None])[:, 0]

    def fused(self, losses: Any, head: Head) -> Tensor:
        return losses.log_prob_of(*head.tensors, self.targets, head.never)


@dataclass(frozen=True)
class Compared(Fused):
    """A divergence between each row's distribution and its teacher's, which is held fixed."""

    kind: Divergence
    teacher: Head

    def __call__(self, log_probs: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            log_teacher = self.teacher.log_probs(part)
        return divergence(self.kind, log_probs, log_teacher)

    def fused(self, losses: Any, head: Head) -> Tensor | None:
        if self.kind not in ("backward-kl", "forward-kl") or not self.teacher.is_linear:
            return None
        return losses.kl(head.tensors, self.teacher.tensors, head.never, self.kind == "forward-kl")


class NeedsAllRows(ABC):
    """A reduction that needs all rows at once: it is given the head."""

    @abstractmethod
    def read(self, head: Head) -> Tensor:
        """The reduction of all rows."""

    def __call__(self, log_probs: Tensor, part: slice) -> Tensor:
        raise TypeError(f"{type(self).__name__} reads a head, not some rows of it")


def divergence(kind: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of two log-probabilities (R, V), row by row: (R,)."""
    p, q = student.exp(), teacher.exp()
    if kind == "tv":
        return 0.5 * (p - q).abs().sum(-1)
    if kind == "mse":
        return (p - q).square().sum(-1)
    log_ratio = torch.where(torch.isfinite(student) & torch.isfinite(teacher), student - teacher, 0.0)
    return (p * log_ratio).sum(-1) if kind == "backward-kl" else -(q * log_ratio).sum(-1)


def matched(
    gradient: Gradient, student: Tensor, teacher: Tensor, auxiliary: Tensor, clip: float | None = None
) -> Tensor:
    """The student's term of `match`, of three log-probabilities (R, V), row by row: (R,), chosen for its gradient with
    respect to the student's logits. Teacher p_T and auxiliary p_ψ are held fixed; c = log p_ψ − log p_T, within ±clip,
    and 0 where one of the three is −inf.

    | | value | gradient |
    |---|---|---|
    | `fkl` | Σ (p_ψ − p_T)·log p_θ | p_ψ − p_T (Di[M]O); clip is not used |
    | `kl` | Σ p_θ·c | p_θ·(c − E_θ c) |
    | `ipf` | KL(target ‖ p_θ), target = normalise(p_θ·e^−c), held fixed | p_θ − target |
    | `soft` | as `kl`: IDLM's ⟨p_θ, NELBO(teacher) − NELBO(auxiliary)⟩; its weight comes from outside | as `kl` |
    """
    teacher, auxiliary, now = teacher.detach(), auxiliary.detach(), student.detach()
    finite = torch.isfinite(now)
    if gradient == "fkl":
        return ((auxiliary.exp() - teacher.exp()) * torch.where(finite, student, 0.0)).sum(-1)
    c = torch.where(finite & torch.isfinite(teacher) & torch.isfinite(auxiliary), auxiliary - teacher, 0.0)
    if clip is not None:
        c = c.clamp(-clip, clip)
    if gradient == "ipf":
        target = torch.log_softmax(now - c, dim=-1)
        return (target.exp() * torch.where(finite, target - student, 0.0)).sum(-1)
    return (student.exp() * c).sum(-1)


def match_rows(
    gradient: Gradient,
    student: Head,
    teacher: Head | LogProbRows,
    auxiliary: Head,
    targets: Tensor,
    clip: float | None = None,
) -> Tensor:
    """Both terms of `match`, (R, 2), of heads over the same rows: `matched`, and the auxiliary's −log p_ψ(target).
    Gradients reach the student through the first and the auxiliary through the second; (R, V) is never materialised.
    """
    heads = (student, teacher, auxiliary)
    if all(head.is_linear and _in_bf16(head.rows) for head in heads):
        fast: Any = kernels("matching")
        if fast is not None:
            with torch.autocast("cuda", enabled=False):
                tensors = [head.tensors for head in heads if isinstance(head, Head)]
                return torch.stack(fast.matched(*tensors, targets, student.never, gradient, clip), 1)

    def chunk(ours: Tensor, others: Tensor, part: slice) -> Tensor:
        log_psi = auxiliary._replace(rows=others).log_probs()
        with torch.no_grad():
            log_teacher = teacher.log_probs(part)
        push = matched(gradient, student._replace(rows=ours).log_probs(), log_teacher, log_psi, clip)
        return torch.stack((push, -Chosen(targets)(log_psi, part)), 1)

    size = max(1, AT_ONCE // student.layer.out_features // 3)
    return _in_parts(chunk, (student.rows, auxiliary.rows), size)


def _in_parts(chunk: Callable[..., Tensor], rows: tuple[Tensor, ...], size: int) -> Tensor:
    """chunk(some of the rows …, which), `size` at a time; recomputed in the backward pass, not kept."""
    R = len(rows[0])
    if size >= R:
        return chunk(*rows, slice(0, R))
    parts = [slice(first, min(first + size, R)) for first in range(0, R, size)]
    # a chunk draws no random numbers, and CUDA-graph capture forbids reading the generator's state
    how: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(chunk, *(r[part] for r in rows), part, **how) for part in parts])


def reduced(head: Head, reduce: Reduce, group: int = 1) -> Tensor:
    """reduce(log-probabilities of some rows, which), chunk by chunk; each `group` consecutive rows are in one chunk."""
    if isinstance(reduce, NeedsAllRows):
        return reduce.read(head)
    if isinstance(reduce, Fused) and head.is_linear and _in_bf16(head.rows) and (losses := kernels("losses")):
        with torch.autocast("cuda", enabled=False):
            values = reduce.fused(losses, head)
        if values is not None:
            return values
    size = max(1, AT_ONCE // head.layer.out_features // group) * group

    def chunk(rows: Tensor, part: slice) -> Tensor:
        return reduce(head._replace(rows=rows).log_probs(), part)

    return _in_parts(chunk, (head.rows,), size)


def _in_bf16(rows: Tensor) -> bool:
    """Whether a matmul of these rows runs in bf16 on a GPU, given the current autocast."""
    if not rows.is_cuda:
        return False
    wide = torch.is_autocast_enabled("cuda")
    return (torch.get_autocast_dtype("cuda") if wide else rows.dtype) == torch.bfloat16
