"""What a training step minimises. One file an objective; each registers itself by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from imdm.core.config import Config
from imdm.core.errors import UserError
from imdm.core.registry import Registry, parse_kind
from imdm.diffusion.process import NoisePolicy, Process
from imdm.diffusion.randomness import Purpose, as_key, fold, uniform
from imdm.diffusion.schedule import EARLIEST
from imdm.diffusion.state import Noised, Rows
from imdm.models.readout import Chosen

if TYPE_CHECKING:
    from imdm.data.source import Source
    from imdm.models.denoiser import MaskedDiffusionLM

objectives: Registry[type[Objective]] = Registry("objective")

Stages = dict[str, dict[str, Any]]
"""The stages of a recipe by name, as plain settings."""
STUDENT = "student"
"""The network that every objective trains, and that a run exports."""
FROZEN = "teacher"
"""A teacher, in `Pass`: it is evaluated, not trained."""


@dataclass(frozen=True)
class Step:
    """The position of a batch in the run, which keys all randomness; the process that computes it does not.

    index: the number of the step; during CUDA-graph capture of `loss`, a tensor () that holds it. slots (b,): the
    places of these sequences in the global batch of size `batch`. start: the result of `Objective.start` for them, if
    it was called beforehand. update, updated: the number of this update within its step, and the names of the networks
    that it updates. networks: the objective's other networks by name; those that are not updated receive no gradient.
    companion: what the objective keeps beside the student, for `Objective.start`. fill: whether to pad to few shapes,
    since each shape needs a CUDA graph of its own.
    """

    seed: int
    index: int | Tensor
    slots: Tensor
    batch: int
    start: Any = None
    update: int = 0
    updated: tuple[str, ...] = (STUDENT,)
    networks: Mapping[str, nn.Module] = field(default_factory=dict)
    companion: Any = None
    fill: bool = False

    def keys(self) -> Tensor:
        """One key a sequence: (b,); different in each update of a step."""
        return self._keys

    @cached_property
    def _keys(self) -> Tensor:
        key = fold(as_key(self.seed, self.slots.device), Purpose.STEP, self.index)
        if self.update:
            key = fold(key, Purpose.UPDATE, self.update)
        return fold(key, Purpose.SAMPLE, self.slots)

    def everyone(self) -> Step:
        """This step with all sequences of the global batch: keyed randomness is known for other processes'
        sequences too."""
        return replace(self, slots=torch.arange(self.batch, device=self.slots.device), start=None)

    def times(self) -> Tensor:
        """Low-discrepancy times: slot i of B draws from the i-th of B equal parts of [10⁻³, 1]: (b,), float32."""
        within = uniform(self.keys(), Purpose.TIME)
        return (EARLIEST + (1 - EARLIEST) * (self.slots + within) / self.batch).float()

    def rows(self, chosen: Tensor) -> Rows:
        """The positions where `chosen` (b, L) is True, padded if `fill`; pass values read there through
        `Rows.counting`."""
        return Rows.filled(chosen) if self.fill else Rows.where(chosen)


@dataclass(frozen=True)
class Trained:
    """A network that is trained beside the student. Settings that are None are those of the run's `TrainConfig`;
    warm-up and EMA count the network's own updates."""

    module: nn.Module
    lr: float | None = None
    warmup: int | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    clip: float | None = None
    ema: float | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in vars(self).items() if name != "module" and value is not None}


class Pass(NamedTuple):
    """One pass of a network in a training step, from which the time and the memory of a step are estimated
    (`Objective.cost`). Numbers of tokens and positions are relative to those of the batch.

    network  STUDENT, FROZEN, or the name of another of `Objective.networks`, which counts as large as the teacher
    trained  whether it is differentiated, and an update of the network follows; else it is a forward pass alone
    tokens   tokens that it reads
    rows     positions at which the head reads it
    heads    products with the head's weights at each of them: 1 to draw a token, 4 for the cross-entropy's gradient
    fused    whether kernels do without storing all log-probabilities of a position
    """

    network: str = STUDENT
    trained: bool = True
    tokens: float = 1.0
    rows: float = 0.5
    heads: float = 4.0
    fused: bool = True


class Extent(NamedTuple):
    """How much a run trains: steps, sequences of a step in each process, tokens of a sequence, and how often `signals`
    looks at the student."""

    steps: int
    batch: int
    length: int
    looks: int = 0


class PairNeeds(NamedTuple):
    """What an objective asks of the stored pairs that it trains on.

    seeded  whether it reads the noise of their seeds, which is then that of the student's mask
    policy  the noise policy under which the teacher completed them; None: any
    """

    seeded: bool = True
    policy: NoisePolicy | None = None


class Companion(Protocol):
    """State that an objective keeps beside the student during training, such as a teacher. Every checkpoint holds it,
    as the first process has it."""

    def tensors(self) -> dict[str, Tensor]: ...

    def values(self) -> dict[str, Any]: ...

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Signal:
    """One of the values of `Objective.signals` that `imdm status` and reports show, as `ratio 1.62`.

    name: as `signals` returns it; label: as it is shown; form: the format of its value, such as `.3g`; meaning: what it
    is, in a line; of: its values so far → the one that is shown, the last unless given.
    """

    name: str
    label: str
    form: str
    meaning: str
    of: Callable[[Sequence[float]], float] = itemgetter(-1)


class Objective(Config):
    """One objective: its settings, its loss, and what others say and show of it.

    `needs` names the columns a batch must have. `loss` divides by constants of the global batch only, so that the mean
    over processes is the loss of the whole batch. One that trains more than the student names the others in `networks`,
    and those that a step updates in `updates`.
    """

    kind: str
    causal: ClassVar[bool] = False  # whether it trains autoregressive models
    recordable: ClassVar[bool] = False
    """Whether `loss` can be captured as a CUDA graph (`training.graphs`): its operations depend only on the shapes of
    the batch and of `step.start`, and on `graph_key`; it never waits for a value from the GPU, and keeps its state in
    tensors."""

    heeds_looks: ClassVar[bool] = False  # whether the results of `signals` affect training
    title: ClassVar[str] = ""  # its name in words, such as `SDTT`; empty: the name it is registered by
    shows: ClassVar[tuple[Signal, ...]] = ()  # those of its `signals` that are shown, in order
    preset: ClassVar[Callable[..., Stages] | None] = None
    """What `imdm distill` runs, whose models are then called students; None: the objective is no distillation. A static
    method that returns the stages, given the settings of the student's, whose `start` is the teacher and whose
    `objective` is this one's name. The options that the method has are keywords with defaults: `rounds`, `iterations`,
    `batch`, `pairs`, `start`. It may have `precision` too, where that changes other settings."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("tokens",)

    @property
    def pair_needs(self) -> PairNeeds:
        """What this objective needs of stored pairs, if it trains on them; others are refused."""
        return PairNeeds()

    @property
    def takes_teacher(self) -> bool:
        """Whether the `teacher` of a stage may be another model than the one it starts from: `companion` gets it."""
        return type(self).companion is not Objective.companion

    def check(self, noisy: bool) -> None:
        """Refuse a student that this objective cannot train; noisy: its states carry noise or λ."""
        return

    def prepare(self, model: MaskedDiffusionLM, source: Source) -> None:
        """Change the student by statistics of the data, before it is copied or trained."""
        return

    def companion(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None = None) -> Companion | None:
        """The state to keep beside the student, before the first step; start: the model the student was made from, if
        it is another."""
        return None

    def networks(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None = None) -> Mapping[str, Trained]:
        """The other networks to train, by name, before the first step: new modules or copies. Their settings should be
        settings of this objective. New layers are initialised under the run's seed."""
        return {}

    def updates(self, step: int) -> Sequence[Sequence[str]]:
        """What a step updates: for each of its updates, in order, the networks that are updated together. Others keep
        their weights, moments and EMA."""
        return ((STUDENT,),)

    def waits(self) -> str | None:
        """The setting by which the student waits for other networks, with its value; None where there is none."""
        return None

    def first_update(self, steps: int) -> int | None:
        """The first of so many steps that updates the student; None: none does."""
        return next((step for step in range(steps) if any(STUDENT in names for names in self.updates(step))), None)

    def check_steps(self, steps: int, where: str = "") -> None:
        """Refuse so few steps that the student would never be updated; where: prefix of the settings' names."""
        if self.first_update(steps) is not None:
            return
        more = "give more steps"
        if (waits := self.waits()) is not None:
            more = f"give more than {where}objective.{waits}, or lower that"
        raise UserError(
            f"{where}training.steps = {steps}: objective {self.kind!r} would never update the student in so few steps; "
            f"{more}"
        )

    def check_reading(self, causal: bool) -> None:
        """Refuse an autoregressive model where diffusion models are trained, and the other way round."""
        if causal and not self.causal:
            raise UserError(
                f"objective {self.kind!r} trains diffusion models, and this one is autoregressive (causal); make a "
                "diffusion model of it first ('imdm adopt --adapt')"
            )
        if self.causal and not causal:
            raise UserError(
                f"objective {self.kind!r} trains autoregressive models, and this one is a diffusion model; take a "
                "causal one, or another objective"
            )

    def cost(self, run: Extent) -> Sequence[Pass]:
        """The passes of a step, in the mean over a run. Unless an objective declares others: one of the student, by the
        cross-entropy at half of the positions."""
        return (Pass(),)

    def turn(self, companion: Any, step: int, average: Mapping[str, Tensor]) -> bool:
        """Called before each step with the student's EMA weights; True: the student gets a new optimiser."""
        return False

    def lr_factor(self, companion: Any) -> float:
        """The student's learning rate in the next step, as a multiple of the run's."""
        return 1.0

    def ended(self, companion: Any, step: int) -> bool:
        """Whether the run is over before its last step."""
        return False

    def best(self, companion: Any) -> Mapping[str, Tensor] | None:
        """The student's weights to export, by name; None: its EMA weights at the end."""
        return None

    @property
    def has_signals(self) -> bool:
        """Whether `signals` measures something: then sharded networks are gathered for it."""
        return type(self).signals is not Objective.signals

    def signals(
        self,
        model: MaskedDiffusionLM,
        source: Source,
        seed: int,
        companion: Any = None,
        networks: Mapping[str, nn.Module] | None = None,
    ) -> dict[str, float]:
        """Diagnostics of training beside the loss, measured without dropout on EMA weights. companion, networks: as in
        `loss`; a companion may store the results."""
        return {}

    def looking(self, companion: Any, length: int) -> str:
        """What `signals` is about to do on rows of this length, in a few words, if it takes long; else nothing."""
        return ""

    def worry(self, signals: Sequence[tuple[int, Mapping[str, float]]], steps: int) -> str | None:
        """A warning if the signals (step, values) so far predict that the run will fail, in a sentence; None: no
        warning."""
        return None

    def graph_key(self, companion: Any) -> Hashable:
        """What `loss` reads of the companion beside the values of its tensors: when it changes, steps are captured
        anew. With rounds it is the round, as each has its own teacher."""
        return getattr(companion, "round", None)

    def start(self, process: Process, batch: Mapping[str, Tensor], step: Step) -> Any:
        """The value of `step.start` in `loss`, such as z_t and its masked positions: it needs no weights, so a GPU can
        compute it during the previous step. Tensors in tuples, mappings and dataclasses, and plain values; each plain
        value needs its own CUDA graph. None: `loss` computes its own."""
        return None

    @abstractmethod
    def loss(
        self, model: nn.Module, process: Process, batch: Mapping[str, Tensor], step: Step, companion: Any = None
    ) -> Tensor | Mapping[str, Tensor]:
        """The loss of these sequences, as their share of the global batch times the number of such shares.

        Where an update is of several networks, a loss for each by name. Their sum is differentiated in one backward
        pass: detach what must not train another network.
        """


def corrupted(process: Process, batch: Mapping[str, Tensor], step: Step) -> tuple[Noised, Rows]:
    """The batch's data at the step's times, and where it is masked."""
    keys = step.keys()
    state = process.corrupt(batch["tokens"], step.times(), keys).dropping(keys)
    return state, step.rows(state.masked)


def nelbo_terms(model: nn.Module, process: Process, state: Noised, x: Tensor, rows: Rows | None = None) -> Tensor:
    """Eq. 14 for each sequence, in nats a token: Σ over masked positions of −α'_t/(1 − α_t) · (−log⟨x_θ(z_t), x⟩),
    divided by L: (B,). rows: where the state is masked, if known."""
    rows = rows or Rows.where(state.masked)
    log_probs = rows.counting(model(state, rows=rows, reduce=Chosen(rows.of(x))))  # (R,)
    weight = process.schedule.weight(state.t.double()).float()  # (B,); 1 − α_t cancels in float32
    totals = torch.zeros(len(x), dtype=log_probs.dtype, device=x.device).index_add(0, rows.sequence, log_probs)
    return -weight * totals / x.shape[1]


def parse_objective(value: Any) -> Objective:
    """An objective from its name or its settings: `"nelbo"`, `{"kind": "redi", "noise": "fresh"}`."""
    return value if isinstance(value, Objective) else parse_kind(objectives, value)
