"""Di4C: the latent of a sequence, the losses against plain loops, the control variate against enumeration."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import parse_mask
from imdm.diffusion.process import Process
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.schedule import LogLinear
from imdm.diffusion.state import Noised
from imdm.evaluation import Evaluation, Subject, measure
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.variants import fold_conditioning, with_mask
from imdm.objectives import Di4C, Step, parse_objective
from imdm.objectives.di4c import Ahead, kl, look_ahead, mixture_log
from imdm.objectives.rounds import Teacher
from imdm.sampling import Sampling, sample, time_grid
from imdm.theory import Tabulated
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_model
from tests.reference.enumeration import TableDenoiser
from tests.reference.statistics import assert_mean

LATENTS = [{"mixture": True}, {"mask": "finite-5"}, {"mask": "infinite-uniform-4-1.0"}]
SOURCE = LanguageSource(aligned(length=3, symbols=2), seed=0)
KEYS = fold(5, Purpose.SAMPLE, torch.arange(20_000))


def student(**changes: object) -> MaskedDiffusionLM:
    return tiny_model(**({"vocab_size": 3, "length": 3} | changes))


# The latent


class Coin(Tabulated):
    """Every position says whether λ < ½."""

    vocab_size, length = 3, 2

    def __init__(self) -> None:
        self.process = Process(LogLinear(), parse_mask("single"), 2, mixture=True)

    def trunk(self, state: Noised) -> Tensor:
        assert state.latent is not None
        said = (state.latent < 0.5).long()[:, None].expand_as(state.tokens)
        return torch.nn.functional.one_hot(said, 3).double().log()


@pytest.mark.parametrize("steps", [2, 3])
def test_one_latent_a_step_is_shared_by_the_sequence(steps: int) -> None:
    made = sample(Coin(), torch.full((20_000, 2), 2), keys=KEYS, how=Sampling(steps))
    alpha = Coin().process.schedule.alpha(time_grid(steps, torch.ones(1))[0])
    share = ((alpha[1:] - alpha[:-1]) / (1 - alpha[0])).square().sum()  # both revealed in one step
    assert_mean((made.tokens[:, 0] == made.tokens[:, 1]).double(), float(share + (1 - share) / 2))
    assert_mean((made.tokens[:, 0] == 1).double(), 0.5)


@pytest.mark.parametrize(("steps", "policy"), [(1, "posterior"), (4, "keep")])
def test_under_one_latent_all_positions_agree(steps: int, policy: str) -> None:
    made = sample(Coin(), torch.full((2000, 2), 2), keys=KEYS[:2000], how=Sampling(steps, policy))
    assert torch.equal(made.tokens[:, 0], made.tokens[:, 1])


def test_the_law_of_a_mixture_is_known_from_its_last_latent() -> None:
    """The estimate of the output's law agrees with counting samples."""
    model = student(mixture=True)
    for steps in (1, 3):
        subject = Subject(model, how=Sampling(steps=steps), samples=4000, truth=aligned(length=3, symbols=2))
        found = measure(["validity", "tv", "kl", "factorization_error"], subject)
        counted = torch.bincount(subject.truth.index(Evaluation(subject).generation.tokens), minlength=8) / 4000
        tv = 0.5 * float((subject.truth.joint.flatten() - counted).abs().sum())
        assert found["tv"].value == pytest.approx(tv, abs=0.03)
        if steps == 1:
            assert found["factorization_error"].stderr > 0  # many components, not one
            spread = (found["kl"].stderr ** 2 + found["factorization_error"].stderr ** 2) ** 0.5
            assert abs(found["kl"].value - found["factorization_error"].value) < 5 * spread


def test_a_mixture_reads_its_latent_and_only_its_own() -> None:
    model = student(mixture=True)
    state = model.noised(torch.full((4, 3), 2))
    same = Noised(state.tokens, state.masked, None, state.t, torch.full((4,), 0.3))
    with torch.no_grad():
        assert not torch.allclose(model(state)[0], model(state)[1], atol=1e-4)
        assert torch.allclose(model(same)[0], model(same)[1])
        assert torch.allclose(model(state)[2:3], model(state[2:3]), atol=1e-6)
        assert torch.allclose(model(state), fold_conditioning(model)(state), atol=1e-5)
    assert model(state).shape == (4, 3, 3)
    with pytest.raises(UserError, match="the state carries no latent, but the model is a mixture"):
        model.trunk(Noised(state.tokens, state.masked, None, state.t))


def test_a_mixture_is_made_saved_and_loaded(tmp_path: Path) -> None:
    base = student()
    mixture = with_mask(base, seed=3, mixture=True)
    mixture.save_pretrained(tmp_path)
    again = MaskedDiffusionLM.from_pretrained(tmp_path)
    assert again.config.mixture
    assert torch.equal(again.generate(num=20, steps=2).tokens, mixture.generate(num=20, steps=2).tokens)
    kept = {name: w for name, w in mixture.state_dict().items() if not name.startswith("mixture.")}
    assert all(torch.equal(w, base.state_dict()[name]) for name, w in kept.items())


# The losses


def by_loops(objective: Di4C, model: MaskedDiffusionLM, teacher: MaskedDiffusionLM, x: Tensor, step: Step) -> float:
    """The loss of the module's docstring, sequence by sequence, position by position, in float64."""
    M, process, t, keys = objective.latents, model.process, objective.times(step), step.keys()
    tokens = process.corrupt(x, t, keys).tokens
    copies = fold(keys[:, None], Purpose.COPY, torch.arange(M)).flatten()
    state = process.noised(tokens.repeat_interleave(M, 0), t.repeat_interleave(M), copies)
    ahead = look_ahead(teacher, model, state, copies, M, objective.teacher_steps)
    at_t = model(state).exp().double()  # (B·M, L, V)
    elsewhere = process.noised(state.tokens, state.t, fold(copies, Purpose.COPY, 0))
    by_teacher = teacher(elsewhere).exp().double()  # under latents of its own
    at_u = model.head(ahead.hidden).exp().double()
    total = 0.0
    for b in range(len(x)):
        mine = range(b * M, (b + 1) * M)

        def mixture(said: Tensor, mine: range = mine) -> float:
            products = [torch.stack([at_t[i, p, v] for p, v in enumerate(said.tolist())]).prod() for i in mine]
            return float(torch.stack(products).mean().log())

        def independent(said: Tensor, mine: range = mine) -> float:
            return sum(float(at_t[list(mine), p, v].mean().log()) for p, v in enumerate(said.tolist()))

        distilled = to_teacher = to_ahead = 0.0
        for p in range(x.shape[1]):
            if tokens[b, p] != process.mask_id:
                continue
            q = by_teacher[list(mine), p].mean(0)
            later = torch.stack(
                [at_u[i, p] if ahead.masked[i, p] else torch.eye(3).double()[ahead.written[i, p]] for i in mine]
            ).mean(0)
            student_mean = at_t[list(mine), p].mean(0)
            for v in range(2):
                distilled += sum(float(q[v] * (q[v] / at_t[i, p, v]).log()) for i in mine) / M
                to_teacher += float(q[v] * (q[v] / student_mean[v]).log())
                to_ahead += float(later[v] * (later[v] / student_mean[v]).log()) if later[v] > 0 else 0.0
        weight = objective.data_weight / (1 + torch.exp(-20 * (t[b] - 0.5)))
        if objective.control_variate:
            data = float(weight) * (independent(x[b]) - mixture(x[b])) + to_teacher
            said = [ahead.written[i] for i in mine]
            consistency = sum(independent(s) - mixture(s) for s in said) / M + to_ahead
        else:
            data = -float(weight) * mixture(x[b])
            consistency = -sum(mixture(ahead.written[i]) for i in mine) / M
        total += (distilled if t[b] < objective.threshold else consistency) + data
    return total / x.numel()


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("control_variate", [True, False])
def test_the_loss_is_that_of_plain_loops(
    latent: dict[str, object], control_variate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = student(**latent)
    objective = Di4C(latents=3, threshold=0.4, teacher_steps=4, data_weight=0.7, control_variate=control_variate)
    step, x = Step(1, 2, torch.arange(12), 12), SOURCE.rows(torch.arange(12))["tokens"]
    for start in (student(seed=1), student(seed=1, **latent)):  # a teacher without a latent, and one with
        companion = Teacher(start, model)
        with torch.no_grad():
            expected = by_loops(objective, model, start, x, step)
            found = objective.loss(model, model.process, {"tokens": x}, step, companion)
            assert float(found) == pytest.approx(expected, rel=1e-4)
            monkeypatch.setattr("imdm.models.readout.AT_ONCE", 20)  # two positions of three latents at a time
            in_chunks = objective.loss(model, model.process, {"tokens": x}, step, companion)
            assert float(in_chunks) == pytest.approx(expected, rel=1e-4)
            monkeypatch.undo()


def test_shares_of_the_batch_add_up() -> None:
    model, objective = student(mixture=True), Di4C(latents=3, threshold=0.3, teacher_steps=4)
    companion = Teacher(student(), model)

    def share(slots: Tensor) -> float:
        with torch.no_grad():
            rows = SOURCE.rows(slots)
            return float(objective.loss(model, model.process, rows, Step(4, 2, slots, 32), companion))

    parts = [share(torch.arange(first, 32, 4)) for first in range(4)]
    assert sum(parts) / 4 == pytest.approx(share(torch.arange(32)), rel=1e-5)


def test_the_control_variate_leaves_the_mean_unchanged() -> None:
    """Σ_x q(x)·[Σ_ℓ log mean_λ p(x^ℓ|λ) − log mean_λ ∏ p(x^ℓ|λ)] + Σ_ℓ KL(q_ℓ ‖ mean_λ p_ℓ) is the cross-entropy of
    the mixture under q, less the entropies of q's marginals, which no student changes: by enumeration."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(1, 4, 3, 2, generator=generator, dtype=torch.float64).log_softmax(-1)  # (1, λ, L, V)
    q = torch.rand(2, 2, 2, generator=generator, dtype=torch.float64)
    q = q / q.sum()
    marginals = torch.stack([q.sum((1, 2)), q.sum((0, 2)), q.sum((0, 1))])  # (L, V)
    sampled = plain = torch.zeros((), dtype=torch.float64)
    for x in itertools.product(range(2), repeat=3):
        chosen = log_p[..., range(3), list(x)]  # (1, λ, L)
        likelihood = mixture_log(chosen.sum(-1))[0]
        sampled = sampled + q[x] * (mixture_log(chosen)[0].sum() - likelihood)
        plain = plain - q[x] * likelihood
    exact = sampled + kl(marginals.log(), mixture_log(log_p)[0]).sum()
    entropies = torch.special.entr(marginals).sum()
    assert float(exact) == pytest.approx(float(plain - entropies), rel=1e-12)


@pytest.mark.parametrize("latent", LATENTS)
def test_the_teachers_step_has_the_reverse_law(latent: dict[str, object]) -> None:
    """From z_t, a position is written by the teacher with the chance of Eq. 13 and otherwise completed at u."""
    model, n = student(**latent), 20_000
    state = model.process.noised(torch.full((n, 3), 2), torch.full((n,), 0.6), KEYS)
    ahead = look_ahead(student(), model, state, KEYS, 1, steps=4)
    t, u = torch.tensor(0.6, dtype=torch.float64), torch.tensor(0.35, dtype=torch.float64)
    assert_mean((~ahead.masked[:, 0]).double(), float(model.process.split(t, u).reveal))
    assert bool((ahead.written < 2).all())
    small = model.process.noised(torch.full((n, 3), 2), torch.full((n,), 0.1), KEYS)
    half = model.process.split(torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.05, dtype=torch.float64)).reveal
    assert_mean((~look_ahead(student(), model, small, KEYS, 1, steps=4).masked[:, 0]).double(), float(half))


class Table(TableDenoiser):
    """A table that may be asked to keep still."""

    training = False

    def eval(self) -> None: ...

    def train(self, mode: bool) -> None: ...


@pytest.fixture(scope="module")
def looked() -> tuple[Noised, Ahead, Tensor]:
    """20,000 looks ahead from two masks at t = 0.6 with a teacher's step of 1/4, and the exact law of x̂: (2, 2)."""
    teacher, learner = Table(symbols=2, length=2, masks=2, seed=3), Table(symbols=2, length=2, masks=2, seed=4)
    keys = fold(9, Purpose.SAMPLE, torch.arange(20_000))
    state = learner.process.noised(torch.full((20_000, 2), 2), torch.full((20_000,), 0.6), keys)
    ahead = look_ahead(teacher, learner, state, keys, 1, steps=4)
    times = torch.tensor([0.6, 0.35], dtype=torch.float64)
    reveal = float(learner.process.split(times[0], times[1]).reveal)
    noises = list(itertools.product(range(2), repeat=2))

    def law(table: Table, tokens: tuple[int, int], noise: tuple[int, int]) -> Tensor:
        z = torch.tensor([tokens])
        return table.trunk(Noised(z, z == 2, torch.tensor([noise]), torch.ones(1)))[0].exp()  # (L, V)

    exact = torch.zeros(2, 2, dtype=torch.float64)
    for noise, x in itertools.product(noises, noises):
        for shown in itertools.product((False, True), repeat=2):
            chance = torch.tensor([reveal if r else 1 - reveal for r in shown], dtype=torch.float64).prod() / 4
            first = law(teacher, (2, 2), noise)
            by_teacher = [first[i, x[i]] for i in range(2) if shown[i]]
            z_u = tuple(x[i] if shown[i] else 2 for i in range(2))
            by_student = [
                torch.stack([law(learner, z_u, other)[i, x[i]] for i in range(2) if not shown[i]]).prod()
                for other in noises
                if not all(shown)
            ]
            rest = torch.stack(by_student).mean() if by_student else torch.ones((), dtype=torch.float64)
            exact[x] += chance * torch.stack([*by_teacher, torch.ones((), dtype=torch.float64)]).prod() * rest
    return state, ahead, exact


@pytest.mark.parametrize("x", list(itertools.product(range(2), repeat=2)))
def test_what_is_said_ahead_has_the_enumerated_law(x: tuple[int, int], looked: tuple[Noised, Ahead, Tensor]) -> None:
    _, ahead, exact = looked
    assert float(exact.sum()) == pytest.approx(1)
    said = (ahead.written == torch.tensor(x)).all(1).double()
    assert_mean(said, float(exact[x]))


def test_what_is_said_ahead_does_not_know_the_latents_it_is_read_under(looked: tuple[Noised, Ahead, Tensor]) -> None:
    state, ahead, exact = looked
    for noise in itertools.product(range(2), repeat=2):
        mine = (state.noise == torch.tensor(noise)).all(1)
        for x in itertools.product(range(2), repeat=2):
            assert_mean((ahead.written[mine] == torch.tensor(x)).all(1).double(), float(exact[x]))


@pytest.mark.parametrize("latent", LATENTS)
def test_the_student_ahead_keeps_still(latent: dict[str, object]) -> None:
    """Dropout is for the student that learns, not for the one that it learns from."""
    model = student(**latent, dropout=0.5)
    state = model.process.noised(torch.full((500, 3), 2), torch.full((500,), 0.6), KEYS[:500])
    still = look_ahead(student(), model.eval(), state, KEYS[:500], 1, steps=4)
    moving = look_ahead(student(), model.train(), state, KEYS[:500], 1, steps=4)
    assert torch.equal(still.hidden, moving.hidden)
    assert torch.equal(still.written, moving.written)
    assert model.training


def test_times_have_their_share_below_the_threshold() -> None:
    step = Step(0, 0, torch.arange(1000), 1000)
    t = Di4C(threshold=0.2, distil_share=0.3).times(step)
    assert int((t < 0.2).sum()) == 300
    assert float(t.min()) >= 1e-3
    assert float(t.max()) <= 1
    assert float(t[t >= 0.2].mean()) == pytest.approx(0.6, abs=1e-3)
    assert bool((Di4C(threshold=0.0).times(step).diff() > 0).all())  # no distillation: times are even


# Training

TAUGHT = TrainConfig(steps=150, batch=64, lr=3e-3, warmup=20, ema=0.9, checkpoint_every=1000)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of {00, 11}."""
    fresh = tiny_model(trained=False, vocab_size=3, length=2, width=32, heads=4)
    out = tmp_path_factory.mktemp("teacher")
    return Trainer(fresh, parse_objective("nelbo"), LanguageSource(aligned(), seed=0), TAUGHT, out).train()


@pytest.mark.parametrize(
    "latent",
    [
        {"mixture": True},
        {"mask": "finite-16"},
        pytest.param({"mask": "infinite-uniform-32-1.0"}, marks=pytest.mark.slow),
    ],
)
def test_training_teaches_correlations(latent: dict[str, object], teacher: Path, tmp_path: Path) -> None:
    """The teacher knows {00, 11} but writes both tokens independently in one step; the student does not."""
    valid = taught(teacher, tmp_path, latent)
    assert valid[0] < 0.55
    assert valid[1] > 0.9


def taught(teacher: Path, out: Path, latent: dict[str, object]) -> list[float]:
    """The one-step validity of a teacher on {00, 11} and of its student."""
    truth, start = aligned(), MaskedDiffusionLM.from_pretrained(teacher)
    model = with_mask(start, latent.get("mask"), mixture=bool(latent.get("mixture", False)))
    objective = Di4C(latents=8, iterations=75, rounds=2, teacher_steps=8, threshold=0.05, data_weight=10.0)
    folder = Trainer(model, objective, LanguageSource(truth, seed=0), TAUGHT, out, start=start).train()
    return [
        measure(["validity"], Subject(m, samples=2000, truth=truth))["validity"].value
        for m in (start, MaskedDiffusionLM.from_pretrained(folder))
    ]


@pytest.mark.parametrize("stop", [2, 5])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, stop: int) -> None:
    """In round 0 the teacher has no λ token, in round 1 it has; both come back from a checkpoint."""

    def run(out: Path, steps: int) -> None:
        start = student()
        objective = Di4C(latents=3, rounds=2, iterations=4, teacher_steps=4)
        config = TrainConfig(steps=steps, batch=8, lr=1e-2, warmup=2, ema=0.9, checkpoint_every=1, dropout=0.1)
        Trainer(with_mask(start, mixture=True), objective, SOURCE, config, out, start=start).train()

    run(tmp_path / "whole", 8)
    run(tmp_path / "parts", stop)
    run(tmp_path / "parts", 8)
    for name in ("model", "ema", "optimizer", "companion"):
        whole, parts = (
            load_file(tmp_path / out / "checkpoints/step-00000008" / f"{name}.safetensors")
            for out in ("whole", "parts")
        )
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_a_single_mask_without_a_latent_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(steps=1, batch=8)
    with pytest.raises(UserError, match="needs a latent that the whole sequence shares, and this student has none"):
        Trainer(student(), Di4C(), SOURCE, config, tmp_path)
    assert not any(tmp_path.iterdir())
