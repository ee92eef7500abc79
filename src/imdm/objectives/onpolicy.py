"""The parts of on-policy distillation: the plan of a step, the student's samples, the auxiliary network, and the state
kept beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, fold, uniform
from imdm.diffusion.state import Noised, Rows, filled_places, size_of_rows
from imdm.models import Network, Shape
from imdm.models.readout import Chosen, Gradient, Head, NeedsAllRows, match_rows, reduced
from imdm.models.sharding import duplicate, shared_like, weights_of
from imdm.objectives.base import Step
from imdm.objectives.rounds import fixed
from imdm.objectives.texts import Frontier
from imdm.sampling import draw_tokens

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

PRIOR, OWN, DATA = range(3)


class Push(Protocol):
    """The student's gradient: see `readout.matched`."""

    @property
    def gradient(self) -> Gradient: ...

    @property
    def clip(self) -> float | None: ...


@dataclass(frozen=True)
class Planned:
    """The parts of a step that do not depend on the networks.

    keys, origin, t   (b,): of each sequence; origin: PRIOR, OWN or DATA
    masked, again     (b, L): in z_t, and in z̃
    noise, latent     the student's input
    weight            (b,): of each row, None where all have 1
    rows              the masked positions of z_t
    left, left_rows   which of them are masked in z̃: (R̃,)
    recalled, kept    (b,): index of the own text that a sequence may start from, and of the one that it stores
    ended             whether the end of a whole text is never masked: the student has `lengths`
    """

    keys: Tensor
    origin: Tensor
    t: Tensor
    masked: Tensor
    again: Tensor
    noise: Tensor | None
    latent: Tensor | None
    weight: Tensor | None
    rows: Rows
    left: Tensor
    left_rows: Rows
    recalled: Any = None
    kept: Any = None
    ended: bool = False

    @property
    def generated(self) -> Tensor:
        """Who generated the tokens of z̃, (b, L): 0 given or masked; 1 the student in this step; 2 the student
        earlier."""
        before = (self.origin == OWN)[:, None] & ~self.masked
        return (self.masked & ~self.again) + 2 * before

    def state(self, text: Tensor, process: Process) -> Noised:
        """z_t of a text (b, L)."""
        tokens, masked = self._with_masks(text, self.masked, process)
        return Noised(tokens, masked, self.noise, self.t, self.latent, self.keys)

    def written(self, student: MaskedDiffusionLM, hidden: Tensor, text: Tensor) -> StudentTexts:
        """x̃: a token for every masked position, from the student's hidden states (R, D)."""
        process, rows = student.process, self.rows
        with torch.no_grad():
            u = uniform(self.keys[rows.sequence], Purpose.TOKEN, rows.position)
            state = self.state(text, process)
            ends = process.ends(state, rows, self.keys, 0)
            draws = draw_tokens(student, hidden.detach(), u, ends=ends).tokens
            tokens = state.tokens.index_put((rows.sequence, rows.position), draws)
            tokens = torch.where(state.masked, tokens, state.tokens)
            if process.ending is None:
                return StudentTexts(tokens, None)
            closed = process.closed(tokens, state.masked)
            return StudentTexts(closed, state.masked & (closed == tokens))

    def shown(self, written: Tensor, process: Process) -> Noised:
        """z̃, the input of teacher and auxiliary."""
        keys = fold(self.keys, Purpose.COPY, 1)  # noise of its own: the student's, which shaped x̃, would betray it
        tokens, masked = self._with_masks(written, self.again, process)
        noise = process.mask.draw(keys, torch.zeros_like(written), masked)
        return Noised(tokens, masked, noise, self.t, process.latents(keys), self.keys)

    def _with_masks(self, text: Tensor, masked: Tensor, process: Process) -> tuple[Tensor, Tensor]:
        """A text (b, L) with masks, and where they are: not where padding is certain."""
        if process.ending is None:
            return text.masked_fill(masked, process.mask_id), masked
        masked = masked & ~process.ending.marks(text) if self.ended else masked
        tokens = process.closed(text.masked_fill(masked, process.mask_id), masked)
        return tokens, masked & (tokens == process.mask_id)

    def open_rows(self, shown: Noised, process: Process) -> Rows:
        """The masked positions of z̃ that count: where rows are whole texts, those without padding that is certain."""
        rows = self.left_rows
        if process.ending is None:
            return rows
        there = rows.of(shown.masked)
        return rows._replace(counted=there if rows.counted is None else there & rows.counted)


class StudentTexts(NamedTuple):
    """x̃ (b, L). own (b, L): where a token is what the student drew, if rows are whole texts. After the first end
    token, draws other than padding are replaced by padding and give no gradient."""

    tokens: Tensor
    own: Tensor | None


def masked_again(masked: Tensor, fate: Tensor, share: Tensor) -> Tensor:
    """What stays masked (b, L) when a share (b,) of the masked positions is shown: those with `fate` in [0, 1) below
    it. The position with the largest fate always stays."""
    fate = torch.where(masked, fate, -1.0)
    return masked & ((fate >= share[:, None]) | (fate == fate.amax(1, keepdim=True)))


def evenly_masked(masked: Tensor, fate: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """What stays masked if k of n positions do, k uniform in 1 … n by u (b,) in [0, 1), and the NELBO's weight n/k
    (b,): averaged over k, the expectation of Σ weight·c is the KL of the samples."""
    n = masked.sum(1)
    k = (1 + (u * n).long()).clamp(max=n)
    rank = torch.where(masked, fate, -1.0).argsort(1, descending=True).argsort(1)
    return masked & (rank < k[:, None]), (n / k.clamp(min=1)).float()


def planned(
    process: Process,
    keys: Tensor,
    origin: Tensor,
    t: Tensor,
    masked: Tensor,
    again: Tensor,
    weight: Tensor | None = None,
    step: Step | None = None,
    noise_keys: Tensor | None = None,
) -> Planned:
    """The plan of sequences with these masks in z_t and in z̃. step: pads the rows, if given; noise_keys (b,): of the
    student's noise, if they differ."""
    noise_keys, fill = keys if noise_keys is None else noise_keys, step is not None and step.fill
    # With `fill` both numbers of rows take few values, each with a CUDA graph; the rows that pad are not counted.
    rows = Rows.filled(masked) if fill else Rows.where(masked)
    there = rows.of(again)
    size = size_of_rows(int(there.sum()), len(there), len(keys)) if fill else 0
    left = filled_places(there, size) if fill else there.nonzero()[:, 0]
    left_rows = Rows(rows.sequence[left], rows.position[left], counted=there[left] if fill else None)
    noise = process.mask.draw(noise_keys, torch.zeros_like(masked, dtype=torch.int64), masked)
    ended, latent = process.lengths is not None, process.latents(noise_keys)
    return Planned(keys, origin, t, masked, again, noise, latent, weight, rows, left, left_rows, ended=ended)


class Write(NeedsAllRows):
    """The reading of the student's rows: sample x̃, mask it again and compute the auxiliary's cross-entropy, (R̃,);
    where the student is updated, compare with the teacher too, (R̃, 2)."""

    def __init__(
        self, plan: Planned, text: Tensor, companion: MatchState, auxiliary: nn.Module, how: Push | None
    ) -> None:
        self.plan, self.text, self.companion, self.auxiliary, self.how = plan, text, companion, auxiliary, how
        self.written = StudentTexts(text, None)
        self.rows = plan.left_rows

    def read(self, head: Head) -> Tensor:
        plan, teacher = self.plan, self.companion.model
        self.written = plan.written(self.companion.student, head.rows, self.text)
        shown = plan.shown(self.written.tokens, teacher.process)
        rows = self.rows = plan.open_rows(shown, teacher.process)
        targets = rows.of(self.written.tokens)
        if self.how is None:  # the auxiliary alone is updated; the student's pass, which calls this, has no gradient
            with torch.enable_grad():
                return -self.auxiliary(shown, rows=rows, reduce=Chosen(targets), generated=plan.generated)
        ours = head._replace(rows=head.rows[plan.left])
        with torch.no_grad():
            theirs = teacher.head_of(teacher.trunk_at(shown, rows))
        process = self.companion.student.process
        ours, theirs = (without_end_before_text(each, shown, rows, process) for each in (ours, theirs))
        compare = Compare(ours, theirs, targets, self.how)
        return self.auxiliary(shown, rows=rows, reduce=compare, generated=plan.generated)


def without_end_before_text(head: Head, shown: Noised, rows: Rows, process: Process) -> Head:
    """The head for rows of z̃: before a visible token of the text, end and padding have probability 0, for the student
    too, though it did not see that token. Else teacher and auxiliary would give them two tiny probabilities, whose
    ratio is meaningless but weighted by the student's probability."""
    barred, ending = process.barred(shown), process.ending
    if barred is None or ending is None:
        return head
    return head.without(rows.of(barred), (ending.end, ending.pad))


@dataclass(frozen=True)
class Compare(NeedsAllRows):
    """Both terms of each row of z̃, (R̃, 2), from the student's, the teacher's and the auxiliary's heads over it."""

    student: Head
    teacher: Any
    targets: Tensor
    how: Push

    def read(self, head: Head) -> Tensor:
        return match_rows(self.how.gradient, self.student, self.teacher, head, self.targets, self.how.clip)


class Auxiliary(Network):
    """A copy of the teacher with an additional input: which tokens the student generated, now or earlier, as embeddings
    that start at zero."""

    def __init__(self, config: Shape) -> None:
        super().__init__(config)
        self.generated = nn.Parameter(torch.zeros(2, config.width))

    @classmethod
    def of(cls, teacher: MaskedDiffusionLM, lengths: Sequence[float] | None = None) -> Auxiliary:
        """The auxiliary of a teacher, with its weights. lengths: the student's, if it has them."""
        changed = {"dropout": 0.0} | ({} if lengths is None else {"lengths": list(lengths)})
        auxiliary = cls(teacher.config.changed(**changed))
        missing, unknown = auxiliary.load_state_dict(teacher.state_dict(), strict=False)
        if unknown or missing != ["generated"]:
            odd = (unknown + [name for name in missing if name != "generated"])[0]
            raise UserError(
                f"objective 'match': the teacher's weights cannot be copied, {odd!r} has no place; "
                "use a model as it was saved, with no layer replaced"
            )
        nn.Module.to(auxiliary, teacher.device)
        return auxiliary

    def forward(  # type: ignore[override]
        self, state: Noised, rows: Rows, reduce: Any, generated: Tensor
    ) -> Tensor:
        x = self._embedded(state)
        whose = nn.functional.pad(generated, (0, x.shape[1] - generated.shape[1]))[..., None]
        for number, mark in enumerate(self.generated.to(x.dtype), 1):
            x = x + (whose == number) * mark
        head = self.head_of(self.backbone.at(x, rows, state.keys))
        return reduced(without_end_before_text(head, state, rows, self.process), reduce)


def _together() -> bool:
    """Whether there are other processes."""
    there = torch.distributed
    return there.is_available() and there.is_initialized() and there.get_world_size() > 1


def agreed(value: float, device: torch.device) -> float:
    """The first process' value: all processes must decide alike, and sums on a GPU differ in their last digits."""
    if not _together():
        return value
    first_value = torch.tensor(value, dtype=torch.float64, device=device)
    torch.distributed.broadcast(first_value, 0)
    return float(first_value)


class MatchState:
    """The state of `match` beside its networks: the teacher, the student's own samples, the scores of evaluations, the
    best EMA weights.

    phase, since    the phase, and the step at which it began
    scores          of the evaluations in this phase
    best            the EMA weights with the lowest score so far, by name
    """

    def __init__(self, teacher: MaskedDiffusionLM, student: MaskedDiffusionLM) -> None:
        self.student = student
        self.model = fixed(duplicate(teacher) if teacher is student else teacher, student)
        self.held: Tensor | None = None
        self.seen = torch.zeros(2, dtype=torch.float64, device=student.device)
        self.frontier: Frontier | None = None
        self.phase, self.since = 0, 0
        self.scores: list[float] = []
        self.best: dict[str, Tensor] = {}
        self.best_score: float | None = None

    def texts(self, capacity: int, length: int) -> Tensor:
        """The student's own recent one-step samples, each at an index given by its step and slot, the same on all
        processes; the last row is written and never read: (capacity + 1, L)."""
        if self.held is None:
            self.held = torch.zeros(capacity + 1, length, dtype=torch.int64, device=self.student.device)
        return self.held

    def remember(self, written: Tensor, places: Tensor) -> None:
        """Store texts (b, L) at their indices (b,)."""
        texts = self.texts(0, 0)
        if not _together():
            texts.index_copy_(0, places, written)
            return

        # An index is written by one process, and 0 marks those that none writes, hence + 1. (The spare row, to which
        # all write, becomes a sum without meaning, and is never read.)
        everyones = torch.zeros_like(texts).index_copy_(0, places, written + 1)
        torch.distributed.all_reduce(everyones)
        texts.copy_(torch.where(everyones > 0, everyones - 1, texts))

    def count(self, nll: Tensor, rows: Rows, chosen: Tensor) -> None:
        """Accumulate the auxiliary's training cross-entropy (R̃,) over the chosen sequences (b,)."""
        mine = chosen[rows.sequence] if rows.counted is None else chosen[rows.sequence] & rows.counted
        self.seen += torch.stack((torch.where(mine, nll.double(), 0.0).sum(), mine.double().sum()))

    def counted(self) -> float | None:
        """The mean of the auxiliary's training cross-entropy (`count`) since the last call; None without any."""
        seen = self.seen.clone()
        if _together():
            torch.distributed.all_reduce(seen)
        self.seen.zero_()
        total, many = seen.tolist()
        return total / many if many else None

    def look(self, value: float, weights: Mapping[str, Tensor]) -> None:
        """Store the score of these weights, and the weights if they are the best."""
        self.scores.append(value)
        if self.best_score is None or value < self.best_score:
            self.best_score = value
            self.best = {name: weight.detach().clone() for name, weight in weights.items() if weight.requires_grad}

    def idle(self, patience: int) -> bool:
        """Whether the last `patience` evaluations brought no better score than the earlier ones of this phase."""
        return len(self.scores) > patience and min(self.scores[:-patience]) <= min(self.scores[-patience:])

    @torch.no_grad()
    def enter(self, phase: int, step: int, average: Mapping[str, Tensor]) -> None:
        self.phase, self.since, self.scores = phase, step, []
        for name, parameter in weights_of(self.student).items():
            if name in self.best:
                parameter.copy_(self.best[name])
            if name in self.best and name in average:  # frozen weights have no average
                average[name].copy_(self.best[name])

    def tensors(self) -> dict[str, Tensor]:
        tensors = {"seen": self.seen} | {f"best.{name}": weight for name, weight in self.best.items()}
        tensors |= {f"teacher.{name}": weight for name, weight in weights_of(self.model).items()}
        return tensors | ({"texts": self.held[:-1]} if self.held is not None else {})

    def values(self) -> dict[str, Any]:
        frontier = None if self.frontier is None else self.frontier.values()
        looks = {"scores": self.scores, "best_score": self.best_score, "frontier": frontier}
        return {"phase": self.phase, "since": self.since, **looks}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        device, teacher = self.student.device, weights_of(self.model)
        if {f"teacher.{name}" for name in teacher} != {name for name in tensors if name.startswith("teacher.")}:
            raise UserError("checkpoint: the teacher in it does not match the model; it is not of this run")
        self.held = None
        if "texts" in tensors:
            texts = tensors["texts"].to(device)
            self.held = torch.cat((texts, torch.zeros_like(texts[:1])))
        self.seen = tensors["seen"].to(device)
        best = {n.removeprefix("best."): w for n, w in tensors.items() if n.startswith("best.")}
        weights = weights_of(self.student)
        self.best = {name: shared_like(weight, weights[name]) for name, weight in best.items()}
        with torch.no_grad():
            for name, parameter in teacher.items():
                parameter.copy_(shared_like(tensors[f"teacher.{name}"], parameter))
        self.phase, self.since, self.scores = values["phase"], values["since"], list(values["scores"])
        self.best_score = values["best_score"]
        self.frontier = None if values["frontier"] is None else Frontier.from_points(values["frontier"])
