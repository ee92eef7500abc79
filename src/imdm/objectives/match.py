"""On-policy distillation: the student's own samples are pushed towards the teacher's distribution.

What is minimised, with gradient `kl`: KL(student ‖ teacher) of the tokens that a step writes, on the student's own
samples. The student's log-probabilities of joint tokens are not known, so an auxiliary network learns them.

A step, for each sequence of the batch:

1.  A start z_t: all masks (`prior`), or at a random time one of the student's own recent one-step samples (`own`) or
    data (`data`).
2.  The student reads z_t and fresh noise ε once, and every masked position is drawn: x̃.
3.  A random share of the new tokens is shown, u^(1/context)·min(1, 1/(N·t)) with u ~ U(0, 1) and N drawn from `steps`;
    the rest, at least one, is masked again: z̃. N-step writing reveals a share 1/(N·t) from here (where α falls
    linearly), so N's weights choose the step count that is optimised.
4.  The teacher p_T, frozen, and an auxiliary network p_ψ read z̃. The auxiliary is trained throughout to predict x̃ at
    the masked positions of z̃, by cross-entropy: it is the denoiser of the student's own distribution. It starts as a
    copy of the teacher, and also gets as input which tokens were generated.
5.  The student's gradient is given at its logits, at the positions that are masked in z̃; c = log p_ψ − log p_T:

    fkl    p_ψ − p_T, as Di[M]O has it
    kl     p_θ·(c − E_θ c): the gradient of Σ_U λ(U)·KL(student_U ‖ teacher_U) over sets U of positions, under the
           conditions that docs/concepts.md names
    ipf    p_θ − normalise(p_θ·e^−c), a step of iterative proportional fitting; `kl` to first order
    soft   as kl, as IDLM has it: of n masked positions k stay masked, k uniform in 1 … n, and each row has the NELBO's
           weight n/k; `steps` and `context` are not used

One forward pass of the auxiliary serves both its own update and the student's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from imdm.core.config import Config
from imdm.core.errors import UserError
from imdm.diffusion.process import NoisePolicy, Process
from imdm.diffusion.randomness import Purpose, as_key, fold, uniform
from imdm.diffusion.schedule import EARLIEST
from imdm.models.readout import Chosen, Gradient, reduced
from imdm.models.sharding import weights_of
from imdm.objectives.base import FROZEN, STUDENT, Extent, Objective, Pass, Signal, Stages, Step, Trained, objectives
from imdm.objectives.onpolicy import (
    DATA,
    OWN,
    PRIOR,
    Auxiliary,
    MatchState,
    Planned,
    Write,
    agreed,
    evenly_masked,
    masked_again,
    planned,
)
from imdm.objectives.texts import (
    READINGS,
    TEMPERATURES,
    Frontier,
    many_steps,
    mean_log,
    score,
    shares_of_lengths,
    text_stats,
)
from imdm.sampling import Sampling, sample
from imdm.sampling.options import RevealOrder

if TYPE_CHECKING:
    from imdm.data.source import Source
    from imdm.models.denoiser import MaskedDiffusionLM

AUXILIARY = "auxiliary"
AT_ONCE = 256  # texts that are sampled at once in an evaluation
GOLDEN = (5**0.5 - 1) / 2
TIMES = 256  # diffusion times to average over in `masked`
Share = Annotated[float, Field(ge=0)]


class Starts(Config):
    """Shares of the starts of a step: all masks, the student's own one-step samples, data."""

    prior: Share = 0.5
    own: Share = 0.25
    data: Share = 0.25

    @model_validator(mode="after")
    def _some(self) -> Starts:
        if self.prior + self.own + self.data <= 0 or (self.own and not self.prior):
            raise ValueError("shares: at least one above 0; own texts are those of the prior, which then needs a share")
        return self

    def counts(self, batch: int) -> tuple[int, int, int]:
        """Sequences of a batch for each start: rounded, and summing to the batch. With own texts, which come from the
        prior's, the prior has at least one."""
        total = self.prior + self.own + self.data
        first = max(round(batch * self.prior / total), 1 if self.own else 0)
        second = max(0, round(batch * (self.prior + self.own) / total) - first)
        return first, second, batch - first - second


class Phase(Config):
    """A part of the run with one kind of gradient.

    steps     its most steps; None: to the end of the run
    clip      clips |log p_ψ − log p_T|; None: no clipping. `fkl` does not use it
    rate      the student's learning rate, times this
    patience  early stopping: ends once so many evaluations in a row brought no better `texts.score`; those before the
              student's first step do not count
    """

    gradient: Gradient = "kl"
    steps: int | None = Field(None, ge=1)
    clip: float | None = Field(8.0, gt=0)
    rate: float = Field(1.0, gt=0)
    patience: int = Field(8, ge=1)


class AuxiliarySettings(Config):
    """How the auxiliary network is trained. The student's gradient is only as good as this network: if it lags, the
    student collapses.

    updates  a step, each on new samples; the student's update uses the last of them
    ahead    steps that update it alone, before the student's first
    """

    lr: float = Field(4e-4, gt=0)
    warmup: int = Field(100, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = Field(1.0, gt=0)
    ema: float = Field(0.99, ge=0, lt=1)
    updates: int = Field(2, ge=1, le=16)
    ahead: int = Field(200, ge=0)


@objectives.register("match")
class Match(Objective):
    """On-policy distillation (see the module).

    starts      shares of the starts of a step
    steps       weights of the step counts N that are optimised, {N: weight}
    context     how much of what a step reveals is shown: the larger, the more
    phases      kinds of gradient, in order; each continues from the best EMA weights of those before
    remembered  how many of the student's own samples are kept
    auxiliary   how the auxiliary network is trained
    kept        whether own samples keep the noise that they were generated with; else it is fresh
    looks       samples in each evaluation of the student (`signals`); noise, order: their noise policy and order
    smooth      whether the teacher's figures at the temperatures that the student is compared with are smoothed. Where
                entropy hardly changes with temperature, as in whole stories, the noise of a few hundred samples exceeds
                the distance between neighbours, and the ratios of a student jump from evaluation to evaluation
    """

    kind: str = "match"
    recordable: ClassVar[bool] = True
    heeds_looks: ClassVar[bool] = True
    title: ClassVar[str] = "match"
    shows: ClassVar[tuple[Signal, ...]] = (
        Signal(
            "ratio",
            "ratio",
            ".3g",
            "perplexity of the student's samples under the teacher, as a multiple of the teacher's own at the same "
            "entropy; mean over step counts",
        ),
        Signal(
            "pooled_lacking",
            "lacking",
            ".2f",
            "entropy that the samples together lack, in nats; above 0.1 diversity is lost",
        ),
        Signal("phase", "phase", ".0f", "of those of the objective", lambda values: values[-1] + 1),  # counted from 1
        Signal(
            "score",
            "best score",
            ".3g",
            "the lowest so far of the mean log ratio plus what is lacking beyond 0.1; its weights are exported",
            min,
        ),
    )
    starts: Starts = Starts()
    steps: dict[Annotated[int, Field(ge=1, le=1 << 16)], Share] = Field(
        {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, min_length=1
    )
    context: float = Field(3.0, ge=1, le=100)
    phases: tuple[Phase, ...] = Field((Phase(),), min_length=1)
    remembered: int = Field(4096, ge=1, le=1 << 24)
    auxiliary: AuxiliarySettings = AuxiliarySettings()
    kept: bool = False
    looks: int = Field(256, ge=2, le=1 << 16)
    noise: NoisePolicy = "keep"
    order: RevealOrder = "random"
    smooth: bool = False

    @staticmethod
    def preset(
        student: dict[str, Any],
        *,
        start: str | None = None,
        iterations: int = 8000,
        batch: int = 256,
        precision: str = "float32",
    ) -> Stages:
        """Settings for `imdm distill`: short averages and moments, since the target changes with the student's samples.
        start: the model that the student is made from, where that is not its teacher."""
        training = {"steps": iterations, "batch": batch, "lr": 2e-4, "warmup": 100, "betas": (0.9, 0.99), "ema": 0.998}
        training |= {"dropout": 0.0, "graphs": precision == "bf16"}
        other = {} if start is None else {"start": start, "teacher": student["start"]}
        return {"student": student | other | {"training": training, "watch": {"every": 250}}}

    @model_validator(mode="after")
    def _ends(self) -> Match:
        if not any(self.steps.values()):
            raise ValueError("steps: at least one weight above 0")
        if any(phase.steps is None for phase in self.phases[:-1]):
            raise ValueError("phases: only the last may have no steps; set steps of the others")
        ahead, first = self.auxiliary.ahead, self.phases[0].steps
        if first is not None and first <= ahead:
            raise ValueError(f"phases: the first has {first} steps, and auxiliary.ahead = {ahead}; give it more")
        return self

    def prepare(self, model: MaskedDiffusionLM, source: Source) -> None:
        """A student of whole texts gets the distribution of their lengths, so that it does not decide where they end:
        under this objective it would prefer short ones, which are easier to generate. It writes with the noise policy
        it is evaluated with, unless another is asked for."""
        model.set_policies(self.noise, self.order if self.order != "random" else None)
        if model.config.ending is not None and model.config.lengths is None:
            model.set_lengths(shares_of_lengths(source, model.config.ending))

    def companion(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None = None) -> MatchState:
        return MatchState(self._teacher(model, start), model)

    def networks(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None = None) -> Mapping[str, Trained]:
        options = self.auxiliary.model_dump()
        del options["updates"], options["ahead"]
        auxiliary = Auxiliary.of(self._teacher(model, start), model.process.lengths)
        return {AUXILIARY: Trained(auxiliary, weight_decay=0.0, **options)}

    def _teacher(self, model: MaskedDiffusionLM, start: MaskedDiffusionLM | None) -> MaskedDiffusionLM:
        """The start, or the student before training; refused if it cannot read the student's samples."""
        if start is None:
            return model
        if start.causal:
            raise UserError("objective 'match': its teacher is causal; it needs a masked diffusion model")
        for name, theirs, ours in (
            ("vocab_size", start.vocab_size, model.vocab_size),
            ("mask_token_id", start.process.mask_id, model.process.mask_id),
            ("schedule", start.process.schedule, model.process.schedule),
            ("ending", start.process.ending, model.process.ending),
        ):
            if theirs != ours:
                raise UserError(
                    f"objective 'match': the teacher's {name} is {theirs}, the student's {ours}; "
                    "use a student that was made from this teacher, or from a similar model"
                )
        if start.length < model.length:
            raise UserError(
                f"objective 'match': the teacher takes at most {start.length} tokens, the student {model.length}; "
                "use a teacher of that length, or a shorter student"
            )
        return start

    def updates(self, step: int) -> Sequence[Sequence[str]]:
        last = (AUXILIARY,) if step < self.auxiliary.ahead else (STUDENT, AUXILIARY)
        return ((AUXILIARY,),) * (self.auxiliary.updates - 1) + (last,)

    def cost(self, run: Extent) -> Sequence[Pass]:
        """Each update draws samples and trains the auxiliary on them; the last trains the student too, and compares the
        teacher's head with the auxiliary's and its own. `signals` writes and reads texts: once the teacher's, of many
        steps, then the student's."""
        first, left = self.masked()
        sampling = Pass(trained=False, rows=first, heads=1.0), Pass(AUXILIARY, rows=left)
        last = Pass(rows=first, heads=1.0), Pass(AUXILIARY, rows=left, heads=13.0)
        teacher = Pass(FROZEN, trained=False, rows=left, heads=0.0)
        share, many = self.looks / (run.steps * run.batch), min(many_steps(run.length), run.length)
        reads = READINGS * (len(TEMPERATURES) + run.looks * len(self.steps))
        reading = Pass(FROZEN, False, share * (len(TEMPERATURES) * many + reads), 0.0, 0.0)
        writing = Pass(STUDENT, False, share * run.looks * sum(min(N, run.length) for N in self.steps), 0.0, 0.0)
        return (*sampling * (self.auxiliary.updates - 1), *last, teacher, reading, writing)

    def masked(self) -> tuple[float, float]:
        """The mean shares of positions that are masked in z_t, and still in z̃."""
        total = self.starts.prior + self.starts.own + self.starts.data
        weights = sum(self.steps.values())
        share = self.context / (self.context + 1)  # the mean of u^(1/context)

        def still(t: float) -> float:
            if self.phases[0].gradient == "soft":
                return t / 2
            revealed = sum(weight * min(1.0, 1 / (N * t)) for N, weight in self.steps.items()) / weights
            return t * (1 - share * revealed)

        times = [(k + 0.5) / TIMES for k in range(TIMES)]
        prior = self.starts.prior / total
        return (1 + prior) / 2, prior * still(1.0) + (1 - prior) * sum(map(still, times)) / TIMES

    def waits(self) -> str | None:
        return f"auxiliary.ahead = {self.auxiliary.ahead}"

    def origins(self, step: Step) -> tuple[Tensor, Tensor]:
        """The start of each sequence, and its time, low-discrepancy within each kind of start: (b,) each. Before the
        first step there are no own texts; those sequences start with all masks."""
        prior, own, data = self.starts.counts(step.batch)
        origin = torch.where(step.slots < prior, PRIOR, torch.where(step.slots < prior + own, OWN, DATA))
        if step.index == 0:
            origin = torch.where(origin == OWN, PRIOR, origin)
        first = torch.where(origin == OWN, prior, prior + own)
        many = torch.where(origin == OWN, max(1, own), max(1, data))
        place = (step.slots - first + uniform(step.keys(), Purpose.TIME)) / many
        return origin, torch.where(origin == PRIOR, 1.0, EARLIEST + (1 - EARLIEST) * place).float()

    def shares(self, process: Process, t: Tensor, place: Tensor, u: Tensor) -> Tensor:
        """The share of the new tokens that is shown, (b,): u^(1/context) times that which a step of 1/N reveals from t,
        min(1, 1/(N·t)) if α falls linearly; `place` selects N by its weights. place and u are in [0, 1)."""
        steps, weight = zip(*sorted(self.steps.items()), strict=True)
        counts = torch.tensor(steps, dtype=torch.float64, device=t.device)
        weights = torch.tensor(weight, dtype=torch.float64, device=t.device).cumsum(0)
        chosen = torch.searchsorted(weights, place * weights[-1], right=True).clamp(max=len(counts) - 1)
        later = (t.double() - 1 / counts[chosen]).clamp(min=0)
        return u ** (1 / self.context) * process.split(t, later).reveal

    def start(self, process: Process, batch: Mapping[str, Tensor], step: Step) -> Planned:
        """The plan of a step: which positions are masked in z_t and again in z̃. It depends on times and keys alone. N
        and u are low-discrepancy over the batch: each a lattice with an irrational step, shifted by a number of the
        training step."""
        origin, t = self.origins(step)

        # The slots of a lattice with an irrational step cover [0, 1) evenly, however the batch is divided among
        # processes; one shift for all makes each of them uniform. N and u have different irrational steps, so that
        # their pairs cover the square.
        shift = fold(as_key(step.seed, step.slots.device), Purpose.STEP, step.index)
        shift = fold(shift, Purpose.UPDATE, step.update + 1)
        lattice = step.slots.double()
        place = (uniform(shift, Purpose.TIME, 1) + lattice * 2**0.5) % 1
        u = (uniform(shift, Purpose.TIME, 2) + lattice * GOLDEN) % 1
        phase, keys = self.phases[0 if step.companion is None else step.companion.phase], step.keys()

        # Own texts lie in a ring, `new` more each step, and are numbered since the start of the run. One of the last
        # `there` is recalled, which leaves out those whose places this step fills. Its number says in which step, at
        # its last update, and in which slot it was drawn, and so the keys of its noise (`kept`).
        new, capacity = self.texts(step.batch)
        there = min(step.index * new, capacity - new)
        number = step.index * new - 1 - (uniform(keys, Purpose.DATA) * there).long()  # of the own text, since the start
        noise_keys = keys
        if self.kept:
            before = replace(
                step, index=number // max(1, new), slots=number % max(1, new), update=self.auxiliary.updates - 1
            )
            noise_keys = torch.where(origin == OWN, before.keys(), keys)

        # α(1) may exceed 0: a start from the prior is masked altogether all the same.
        masked = process.masks(t, keys, batch["tokens"].shape[1]) | (origin == PRIOR)[:, None]
        fate = uniform(keys[:, None], Purpose.REVEAL, torch.arange(masked.shape[1], device=keys.device))
        if phase.gradient == "soft":
            again, weight = evenly_masked(masked, fate, u)
        else:
            again, weight = masked_again(masked, fate, self.shares(process, t, place, u)), None
        plan = planned(process, keys, origin, t, masked, again, weight, step, noise_keys)

        # The first `new` slots are those of the prior, and are stored; the others write to the spare row at the end.
        slots = torch.where(step.slots < new, (step.index * new + step.slots) % capacity, capacity)
        return replace(plan, recalled=number % capacity, kept=slots)

    def texts(self, batch: int) -> tuple[int, int]:
        """Own texts that are added each step, and how many are kept, so that none is read while it is replaced."""
        new = self.starts.counts(batch)[0]
        return new, max(self.remembered, 2 * new)

    def loss(
        self,
        model: nn.Module,
        process: Process,
        batch: Mapping[str, Tensor],
        step: Step,
        companion: MatchState | None = None,
    ) -> Tensor | Mapping[str, Tensor]:
        """With x̃ ~ p_θ(· | z_t, ε), masked again to z̃, and sums over the positions that are masked in z̃, in nats a
        token of the batch:

            auxiliary   Σ −log p_ψ(x̃ | z̃)
            student     Σ Σ_v p_θ(v | z_t, ε) · clip(log p_ψ(v | z̃) − log p_T(v | z̃)), the clipped term without
                        gradient, for gradient `kl`; `readout.matched` has the others

        One pass of the student gives both: its head is read by `Write`, which samples x̃, masks it again, and runs
        teacher and auxiliary on z̃.
        """
        if companion is None:
            raise ValueError("Match.loss needs the companion that Match.companion(model) makes")
        x, phase, pushes = batch["tokens"], self.phases[companion.phase], STUDENT in step.updated

        # 1. z_t: a text with masks, planned; the text is of the data, the student's own, or hidden altogether.
        plan = step.start or self.start(process, batch, replace(step, companion=companion))
        texts = companion.texts(self.texts(step.batch)[1], x.shape[1])
        text = torch.where((plan.origin == OWN)[:, None], texts[plan.recalled], x)

        # 2. x̃, z̃ and both terms of each row: (R̃, 2), or (R̃,) where the auxiliary alone is updated.
        write = Write(plan, text, companion, step.networks[AUXILIARY], phase if pushes else None)
        with torch.set_grad_enabled(pushes and torch.is_grad_enabled()):
            terms = model(plan.state(text, process), rows=plan.rows, reduce=write)
        rows = write.rows  # of these fewer count than was planned where x̃ ends, as padding follows
        nll = rows.counting(terms[:, 1] if pushes else terms)

        # 3. What evaluations watch, and the student's new texts, which later steps start from.
        companion.count(nll.detach(), rows, plan.origin == PRIOR)
        if step.update == self.auxiliary.updates - 1:
            companion.remember(write.written.tokens, plan.kept)
        if not pushes:
            return nll.sum() / x.numel()

        # 4. The student's term counts where it drew the token itself; weight is n/k of `evenly_masked` (`soft`).
        push = rows.counting(terms[:, 0])
        if write.written.own is not None:
            push = torch.where(rows.of(write.written.own), push, 0.0)
        if plan.weight is not None:
            push = push * plan.weight[rows.sequence]
        return {STUDENT: push.sum() / x.numel(), AUXILIARY: nll.sum() / x.numel()}

    def graph_key(self, companion: MatchState) -> int:
        return companion.phase

    def lr_factor(self, companion: MatchState) -> float:
        return self.phases[companion.phase].rate

    def turn(self, companion: MatchState, step: int, average: Mapping[str, Tensor]) -> bool:
        """The next phase begins with the best average so far and a new optimiser."""
        if step == self.auxiliary.ahead:
            companion.scores.clear()  # of a student that was not trained yet
        if companion.phase == len(self.phases) - 1 or not self._is_over(companion, step):
            return False
        companion.enter(companion.phase + 1, step, average)
        return True

    def ended(self, companion: MatchState, step: int) -> bool:
        return companion.phase == len(self.phases) - 1 and self._is_over(companion, step)

    def _is_over(self, companion: MatchState, step: int) -> bool:
        phase = self.phases[companion.phase]
        late = phase.steps is not None and step - companion.since >= phase.steps
        return late or (step > self.auxiliary.ahead and companion.idle(phase.patience))

    def best(self, companion: MatchState) -> Mapping[str, Tensor] | None:
        return companion.best or None

    def looking(self, companion: Any, length: int) -> str:
        if companion is None or companion.frontier is not None:
            return f"the student writes {len(self.steps)} × {self.looks:,} texts"
        many = f"{len(TEMPERATURES)} × {self.looks:,} texts in {many_steps(length)} steps"
        return f"the teacher writes {many}, once, to compare the student with"

    @torch.no_grad()
    def signals(
        self,
        model: MaskedDiffusionLM,
        source: Source,
        seed: int,
        companion: Any = None,
        networks: Mapping[str, nn.Module] | None = None,
    ) -> dict[str, float]:
        """Evaluate samples of the EMA student, under the same keys each time, which training does not use.

        ratio_N         perplexity of its N-step samples under the teacher's NELBO, divided by that of the teacher's
                        many-step samples at equal entropy; ratio: the mean over `steps`
        entropy_N       of the tokens within a sample; pooled_N: of those of all samples, which shows collapse;
                        pooled_lacking: how much lower the latter is than the teacher's at equal entropy, at worst
        shared_N        the fraction of a sample's 4-grams that occur in another one
        kl_bound        CE_T − CE_ψ on its one-step samples, in nats a token: a lower bound of the KL, as tight as ψ is
                        good
        auxiliary_gap   CE_ψ there, minus its value in training since the last evaluation, also from all masks
        given_noise     H(θ | ε): entropy of one-step samples given the noise, in nats a token
        score           selects the best EMA weights, the lower the better (`texts.score`); phase: its number, from 0

        Where rows are whole texts, `length_N` is the mean number of tokens of an N-step sample, and `lengths_astray`
        the largest distance of lengths from the teacher's (`texts.Frontier.astray`), which counts in the score too.
        """
        if companion is None or networks is None:
            return {}
        key = fold(as_key(seed, model.device), Purpose.HELD_OUT)
        keys = fold(key, Purpose.SAMPLE, torch.arange(self.looks, device=model.device))
        teacher, length = companion.model, source.length
        if companion.frontier is None:
            companion.frontier = Frontier.of(teacher, self.looks, length, fold(keys, Purpose.COPY, 1), self.smooth)
        frontier, ratios, lacking, astray = companion.frontier, [], 0.0, 0.0
        signals: dict[str, float] = {}
        canvas = torch.full((self.looks, length), model.process.mask_id, device=model.device)
        for N, weight in sorted(self.steps.items()):
            how = Sampling(steps=N, noise=self.noise, order=self.order)
            written = sample(model, canvas, keys=keys, how=how, batch_size=AT_ONCE).tokens
            texts = text_stats(teacher, written, keys)
            signals |= {f"ratio_{N}": frontier.ratio(texts), f"entropy_{N}": texts.entropy, f"pooled_{N}": texts.pooled}
            signals |= {f"shared_{N}": texts.shared}
            if model.process.ending is not None:
                signals |= {f"length_{N}": texts.length}
                astray = max(astray, frontier.astray(texts))
            ratios.append((weight, signals[f"ratio_{N}"]))
            lacking = max(lacking, frontier.entropy_gap(texts))
        signals |= {"ratio": exp(mean_log(ratios)), "pooled_lacking": lacking}
        signals |= {} if model.process.ending is None else {"lengths_astray": astray}
        signals |= self._at_one_step(model, companion, networks[AUXILIARY], fold(keys, Purpose.COPY, 2), length)
        value = agreed(score(ratios, (lacking, astray), LACKING), model.device)
        companion.look(value, weights_of(model))
        return signals | {"score": value, "phase": float(companion.phase)}

    def _at_one_step(
        self, model: MaskedDiffusionLM, companion: MatchState, auxiliary: nn.Module, keys: Tensor, length: int
    ) -> dict[str, float]:
        teacher_nll, auxiliary_nll, open_ = [], [], []
        for some in keys.split(64):
            origin, t = torch.full_like(some, PRIOR), torch.ones(len(some), device=some.device)
            share = self.shares(model.process, t, uniform(some, Purpose.TIME, 1), uniform(some, Purpose.TIME, 2))
            masked = torch.ones(len(some), length, dtype=torch.bool, device=some.device)
            fate = uniform(some[:, None], Purpose.REVEAL, torch.arange(length, device=some.device))
            plan = planned(model.process, some, origin, t, masked, masked_again(masked, fate, share))
            blank = model.process.begun(torch.full_like(masked, model.process.mask_id, dtype=torch.int64), some)
            state = plan.state(blank, model.process)
            hidden = model.trunk_at(state, plan.rows)
            open_.append(reduced(model.head_of(hidden), _entropy)[plan.rows.of(state.masked)])
            written = plan.written(companion.student, hidden, blank).tokens
            shown = plan.shown(written, companion.model.process)
            rows, chosen = plan.left_rows, Chosen(plan.left_rows.of(written))
            there = rows.of(shown.masked)  # all of them, unless padding is certain
            teacher_nll.append(-companion.model(shown, rows=rows, reduce=chosen)[there])
            auxiliary_nll.append(-auxiliary(shown, rows=rows, reduce=chosen, generated=plan.generated)[there])
        ours, theirs = float(torch.cat(auxiliary_nll).double().mean()), float(torch.cat(teacher_nll).double().mean())
        training_nll = companion.counted()
        gap = {} if training_nll is None else {"auxiliary_gap": ours - training_nll}
        return {"kl_bound": theirs - ours, **gap, "given_noise": float(torch.cat(open_).double().mean())}

    def worry(self, signals: Sequence[tuple[int, Mapping[str, float]]], steps: int) -> str | None:
        """A warning of collapse or drift. Collapse: the pooled entropy lacks more than half a nat, three evaluations in
        a row in the second half of the run. Drift: the score is worse by a tenth than the best, and has been for five
        evaluations."""
        late = [row["pooled_lacking"] for step, row in signals if step >= steps / 2]
        if len(late) >= 3 and min(late[-3:]) > COLLAPSED:
            return (
                f"the student is collapsing: the entropy of all its texts together is {late[-1]:.2f} nats "
                "below the teacher's at equal entropy; lower the student's learning rate, or raise the auxiliary's"
            )
        scores = [row["score"] for _, row in signals]
        if len(scores) > 5 and (worse := min(scores[-5:]) - min(scores)) > DRIFTED:
            return (
                f"the student drifts: for five evaluations its score was worse than the best by {worse:.2f} or more; "
                "the best weights are kept, so the run may as well end"
            )
        return None


LACKING = 0.1  # nats of pooled entropy, or of lengths, that may be lacking without a penalty
COLLAPSED = 0.5
DRIFTED = 0.1


def _entropy(log_probs: Tensor, part: slice) -> Tensor:
    return -(log_probs.exp() * log_probs.clamp(min=-1e9)).sum(-1)
