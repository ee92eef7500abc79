"""What must hold on a GPU as on a CPU. Skipped where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from imdm.benchmarks.training import Pairs
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource, TokenSource
from imdm.data.synthetic import aligned
from imdm.diffusion.ending import Ends
from imdm.diffusion.masks import Mask, NoisePath
from imdm.diffusion.randomness import Purpose, bits, fold, normal, survivors, symmetric, uniform
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import faster
from imdm.models.layers import attend, capped_attention, gelu_of, rotary, turned_back
from imdm.models.loading import load_model
from imdm.models.readout import Gradient, Head, matched
from imdm.objectives import SDTT, Autoregressive, Match, Nelbo, Objective, ReDi, Step
from imdm.objectives.onpolicy import Auxiliary
from imdm.sampling import Sampling, draw_tokens, sample
from imdm.sampling.categorical import draw
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_model
from tests.models.test_hf import FAMILIES, made
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of
from tests.training.test_recording import Pair

Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]
NOISY = "infinite-uniform-8-1.0"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_bits_and_noise_are_the_same_on_every_device() -> None:
    keys = fold(0, Purpose.SAMPLE, torch.arange(1000))
    position = torch.arange(16)
    for law in (bits, uniform):
        assert torch.equal(
            law(keys[:, None], Purpose.NOISE, position),
            law(keys.cuda()[:, None], Purpose.NOISE, position.cuda()).cpu(),
        )
    here = symmetric(keys[:, None], Purpose.NOISE, position, 0, 37)
    assert torch.equal(here, symmetric(keys.cuda()[:, None], Purpose.NOISE, position.cuda(), 0, 37).cpu())
    here = normal(keys[:, None], Purpose.NOISE, position, 0, 37)
    there = normal(keys.cuda()[:, None], Purpose.NOISE, position.cuda(), 0, 37).cpu()
    ulp = torch.maximum(here.abs(), there.abs()) * 2.0**-23
    assert ((here - there).abs() <= ulp).all()


def test_ways_between_noises_are_the_same_on_every_device(mask: Mask) -> None:
    keys, others = (fold(seed, Purpose.SAMPLE, torch.arange(64)) for seed in (1, 2))
    draws, everywhere = torch.zeros(64, 9, dtype=torch.int64), torch.ones(64, 9, dtype=torch.bool)
    for s in (0.0, 0.3, 1.0):
        path = NoisePath.at(keys, others, s)
        here, there = mask.draw(path, draws, everywhere), mask.draw(path.to("cuda"), draws.cuda(), everywhere.cuda())
        if here is None:
            assert there is None
            continue
        assert (here - there.cpu()).abs().max() <= 2.0**-20
    model, canvas = tiny_model(mask=mask.name).cuda(), torch.full((64, 6), 4, device="cuda")
    path = NoisePath.at(keys, others, 0.5).to("cuda")
    made = sample(model, canvas, keys=keys.cuda(), noise_keys=path, how=Sampling(3))
    assert (made.tokens != 4).all()


def test_keys_and_empty_draws_are_the_same_on_every_device() -> None:
    keys = fold(7, Purpose.SAMPLE, torch.arange(300))
    step = torch.arange(5)[:, None]
    assert torch.equal(fold(keys, Purpose.STEP, step, 9), fold(keys.cuda(), Purpose.STEP, step.cuda(), 9).cpu())
    assert uniform(keys.cuda()[:0], Purpose.TIME).shape == (0,)
    assert symmetric(keys.cuda()[:0], Purpose.NOISE, 0, 0, 5).shape == (0, 5)
    for dim in (1, 4, 768, 2048):
        here = symmetric(keys[:9], Purpose.NOISE, 2, 3, dim)
        assert torch.equal(here, symmetric(keys[:9].cuda(), Purpose.NOISE, 2, 3, dim).cpu())


@pytest.fixture
def draw_from_head() -> Draw:
    return pytest.importorskip("imdm.kernels.draw", exc_type=ImportError).draw_from_head


def head(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(*shape, device="cuda", generator=generator)
        for shape in ((rows, width), (vocabulary, width), (vocabulary,))
    ]
    return made[0].to(dtype), (made[1] / width**0.5 * 2).to(dtype), made[2].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [3, 128, 5001, 50258])
def test_the_fused_draw_is_the_plain_one(draw_from_head: Draw, vocabulary: int, dtype: torch.dtype) -> None:
    rows, weight, bias = head(3000, 96, vocabulary, dtype)
    never = vocabulary - 1
    u = uniform(fold(1, Purpose.SAMPLE, torch.arange(3000)).cuda(), Purpose.TOKEN)
    tokens, log_probs = draw_from_head(rows, weight, bias, never, u)
    logits = rows.double() @ weight.double().T + bias.double()
    logits[:, never] = -torch.inf
    exact = logits.log_softmax(-1)
    edge = exact.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]  # the drawn token's slice holds u, up to rounding
    width = exact.gather(1, tokens[:, None])[:, 0].exp()
    assert bool(((u > edge - width - 1e-5) & (u < edge + 1e-5)).all())
    assert (tokens == draw(exact, u)).double().mean() > 0.95
    assert torch.allclose(log_probs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-3)


@pytest.mark.parametrize("pad", [1, 2])
def test_draws_of_an_end_are_those_of_a_cpu(pad: int) -> None:
    """One number decides on end and padding; where a text goes on, neither is drawn."""
    model = tiny_model(vocab_size=300, bos_token_id=0, eos_token_id=1, pad_token_id=pad)
    with torch.no_grad():
        model.output.bias[1:3] += 5.0
    rows, keys = (
        torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)),
        fold(3, Purpose.SAMPLE, torch.arange(2000)),
    )
    u, barred = uniform(keys, Purpose.TOKEN), torch.arange(2000) % 2 == 0
    ends = Ends(barred, uniform(keys, Purpose.ENDING))
    here = draw_tokens(model, rows, u, ends=ends)
    there = draw_tokens(model.cuda(), rows.cuda(), u.cuda(), ends=Ends(*(each.cuda() for each in ends)))
    assert not torch.isin(there.tokens.cpu()[barred], torch.tensor([1, pad])).any()
    for mark in {1, pad}:
        assert 100 < int((there.tokens.cpu()[~barred] == mark).sum()) < 800
    assert (there.tokens.cpu() == here.tokens).double().mean() > 0.99
    same = there.tokens.cpu() == here.tokens
    assert torch.allclose(there.log_probs.cpu()[same], here.log_probs[same], atol=1e-3)


def test_the_fused_draw_finds_every_token_in_the_tail(draw_from_head: Draw) -> None:
    """u in the middle of each token's slice, for probabilities from e⁻⁶³ on: if u can lie there, the token is found."""
    logits = torch.linspace(-60.0, 0.0, 600)
    weight, rows = torch.zeros(600, 16, device="cuda"), torch.zeros(599, 16, device="cuda")
    p = logits[:-1].double().softmax(0)
    tokens, _ = draw_from_head(rows, weight, logits.cuda(), 599, (p.cumsum(0) - p / 2).cuda())
    assert torch.equal(tokens.cpu(), torch.arange(599))


def test_the_fused_draw_has_the_law_of_the_head(draw_from_head: Draw) -> None:
    rows, weight, bias = head(1, 32, 40, torch.bfloat16)
    n = 1_000_000
    u = uniform(fold(2, Purpose.SAMPLE, torch.arange(n)).cuda(), Purpose.TOKEN)
    tokens, _ = draw_from_head(rows.expand(n, -1), weight, bias, 39, u)
    logits = rows.double() @ weight.double().T + bias.double()
    logits[:, 39] = -torch.inf
    assert_law(torch.bincount(tokens, minlength=40).cpu(), logits.softmax(-1)[0].cpu())


def test_reveals_and_noise_agree_across_devices(mask: Mask) -> None:
    model = tiny_model(mask=mask.model_dump())
    here = model.generate(num=64, steps=3, seed=1, trace=True)
    there = model.cuda().generate(num=64, steps=3, seed=1, trace=True)
    assert torch.equal(here.revealed_at, there.revealed_at.cpu())
    assert torch.equal(here.evaluations, there.evaluations.cpu())
    assert (here.tokens == there.tokens.cpu()).double().mean() > 0.95


def test_outputs_agree_with_the_cpu(mask: Mask) -> None:
    model = tiny_model(mask=mask.model_dump())
    tokens = torch.tensor([[4, 1, 4, 4, 0, 2]])
    here = model(model.noised(tokens))
    there = model.cuda()(model.noised(tokens.cuda())).cpu()
    assert torch.allclose(here, there, atol=1e-3)


def test_soft_cap_kernels_agree_forward_and_backward() -> None:
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", requires_grad=True) for _ in range(3))
    plain, fused = capped_attention(q, k, v, 20.0), attend(q, k, v, 20.0)
    assert torch.allclose(plain, fused, atol=2e-3)
    weight = torch.randn_like(plain)
    expected = torch.autograd.grad((plain * weight).sum(), (q, k, v))
    found = torch.autograd.grad((fused * weight).sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=2e-2) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_train_couple_distil_and_write(tmp_path: Path, precision: str) -> None:
    """The whole chain on the GPU, in both precisions; IMDM passes the single mask's floor."""
    language = aligned()
    source = LanguageSource(language)
    config = TrainConfig(steps=300, batch=256, lr=3e-3, warmup=20, ema=0.99, precision=precision, log_every=100)
    model = tiny_model(trained=False, vocab_size=3, length=2, width=64, heads=4)
    teacher = load_model(Trainer(model, Nelbo(), source, config, tmp_path / "teacher").train()).cuda()
    couple(teacher, source, CoupleConfig(pairs=512, steps=64), tmp_path / "pairs")
    from imdm.models.variants import to_infinite

    student = to_infinite(teacher, dim=256)
    config = config.model_copy(update={"steps": 600, "lr": 1e-3})
    run = Trainer(student, ReDi(), Coupling(tmp_path / "pairs"), config, tmp_path / "student")
    student = load_model(run.train()).cuda()
    assert language.valid(student.generate(num=4000, steps=1).tokens.cpu()).double().mean() > 0.85
    assert language.valid(teacher.generate(num=4000, steps=1).tokens.cpu()).double().mean() < 0.6


def test_resume_on_the_gpu(tmp_path: Path) -> None:
    source = LanguageSource(aligned())

    def run(steps: int, out: str) -> dict[str, torch.Tensor]:
        config = TrainConfig(steps=steps, batch=16, lr=1e-2, warmup=5, checkpoint_every=5)
        model = tiny_model(trained=False, vocab_size=3, length=2, dropout=0.1)
        return load_model(Trainer(model, Nelbo(), source, config, tmp_path / out).train()).state_dict()

    whole = run(20, "whole")
    run(10, "parts")
    parts = run(20, "parts")
    assert all(torch.allclose(whole[name], parts[name], atol=1e-5) for name in whole)


def test_a_small_model_writes_long_text() -> None:
    """GPT-2 Small's size, length 1,024, IMDM, bf16 trunk: it runs and reveals everything."""
    from imdm.models.configuration import MaskedDiffusionConfig
    from imdm.models.denoiser import MaskedDiffusionLM

    config = MaskedDiffusionConfig.preset("small", vocab_size=50_258, length=1024, mask="infinite-uniform-768-1.0")
    model = MaskedDiffusionLM(config).cuda().eval()
    with torch.autocast("cuda", torch.bfloat16):
        made = model.generate(num=8, steps=4)
    assert not (made.tokens == config.mask_token_id).any()
    assert made.evaluations.tolist() == [4] * 8


@pytest.mark.parametrize("policy", ["posterior", "keep"])
def test_the_sampler_has_the_plain_loops_law(policy: str) -> None:
    denoiser = TableDenoiser(symbols=2, length=2, masks=2, seed=2, device="cuda")
    keys = fold(3, Purpose.SAMPLE, torch.arange(40_000)).cuda()
    made = sample(denoiser, torch.full((40_000, 2), 2, device="cuda"), keys=keys, how=Sampling(3, policy))
    reference = TableDenoiser(symbols=2, length=2, masks=2, seed=2)
    law = sequence_law(chain_law(reference, all_masked(2, 2), 3, policy), 2, 2)
    assert_law(counts_of(made.tokens.cpu(), 2), law)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("objective", [Nelbo(), SDTT(rounds=1, iterations=4)])
def test_compiled_training_has_the_same_losses(tmp_path: Path, softcap: float | None, objective: Objective) -> None:
    """With dropout, which is keyed. SDTT's student has a teacher unlike itself: of its own copy it could learn nothing
    at first but rounding, which Adam would make large."""
    source = TokenSource(torch.arange(64 * 16).view(64, 16) * 7 % 4, 5, 4)
    losses = {}
    for compiled in (False, True):
        config = TrainConfig(steps=4, batch=32, lr=1e-4, warmup=0, compile=compiled)
        model = tiny_model(length=16, width=64, heads=4, softcap=softcap, dropout=0.1)
        teacher = tiny_model(length=16, width=64, heads=4, softcap=softcap, seed=1)
        trainer = Trainer(model, objective, source, config, tmp_path / str(compiled), start=teacher)
        trainer.model.train()
        losses[compiled] = [float(trainer.train_step()) for _ in range(4)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("objective", "mask"),
    [
        (Nelbo(), "single"),
        (Nelbo(), "infinite-uniform-8-1.0"),
        (ReDi(), "infinite-uniform-8-1.0"),
        (SDTT(rounds=2, iterations=7, first_dt=0.1), "infinite-uniform-8-1.0"),
        (SDTT(rounds=1, divergence="tv", first_dt=0.1, teacher_steps=3), "finite-7"),
        (Autoregressive(), "single"),
    ],
)
def test_recorded_training_has_the_same_losses(tmp_path: Path, objective: Objective, mask: str, compiled: bool) -> None:
    """In bf16, with dropout, a rate that warms up, a student that becomes the teacher, looks and checkpoints in
    between, and what was beyond a checkpoint trained again. Few graphs are recorded."""
    tokens = torch.arange(256 * 32).view(256, 32) * 31 % 299
    source = (Pairs if isinstance(objective, ReDi) else TokenSource)(tokens, 300, 299)
    losses, weights = {}, {}
    for recorded in (False, True):
        config = TrainConfig(
            steps=14, batch=128, lr=1e-4, warmup=6, ema=0.9, precision="bf16", compile=compiled, graphs=recorded
        )
        settings = {"vocab_size": 300, "length": 32, "width": 64, "heads": 4, "mask": mask, "dropout": 0.1}
        settings["causal"] = objective.causal
        model, teacher = (tiny_model(seed=seed, **settings) for seed in (0, 1))
        trainer = Trainer(model, objective, source, config, tmp_path / str(recorded), start=teacher)
        trainer.model.train()
        found = [float(trainer.train_step()) for _ in range(12)]
        assert (trainer.recorder is not None) == recorded
        assert trainer.recorder is None or 1 <= len(trainer.recorder.recorded) <= 4
        trainer.save()
        with trainer.averaged():
            trainer.bare.trunk(trainer.bare.noised(source.rows(torch.arange(4))["tokens"].cuda()))
        found += [float(trainer.train_step()) for _ in range(2)]
        trainer.resume()
        found += [float(trainer.train_step()) for _ in range(5)]
        losses[recorded], weights[recorded] = found, list(trainer.ema.weights.values())
    # compiled blocks round otherwise for a graph's padded sizes, and a token that SDTT's teacher draws may turn
    within = 5e-2 if compiled and isinstance(objective, SDTT) else 5e-3
    assert losses[True] == pytest.approx(losses[False], rel=within, abs=1e-4)
    assert losses[True][12:14] == pytest.approx(losses[True][14:16], rel=within, abs=1e-4)
    assert_near(weights[True], weights[False], within=1e-2)


def test_recorded_steps_take_turns(tmp_path: Path) -> None:
    """Two networks, one after the other and at once, and a batch large enough that memory is reused between graphs."""
    source = TokenSource(torch.arange(256 * 32).view(256, 32) * 31 % 299, 300, 299)
    for together in (False, True):
        losses = {}
        for recorded in (False, True):
            config = TrainConfig(steps=12, batch=256, lr=1e-4, warmup=6, precision="bf16", graphs=recorded)
            model = tiny_model(vocab_size=300, length=32, width=64, heads=4, dropout=0.1)
            trainer = Trainer(model, Pair(together=together), source, config, tmp_path / f"{together}-{recorded}")
            for network in trainer.networks.values():
                network.model.train()
            losses[recorded] = [float(trainer.train_step()) for _ in range(12)]
        assert losses[True] == pytest.approx(losses[False], rel=5e-3)


def test_dropout_is_the_same_on_every_device() -> None:
    keys, place = fold(3, Purpose.SAMPLE, torch.arange(32)), torch.arange(4096)
    here = survivors(keys[:, None], place, 0.1)
    assert torch.equal(survivors(keys.cuda()[:, None], place.cuda(), 0.1).cpu(), here)
    model = tiny_model(dropout=0.5).train()
    state = model.noised(torch.full((8, 6), 4)).dropping(keys[:8])
    wanted = model.trunk(state)
    there = model.cuda().trunk(model.noised(torch.full((8, 6), 4).cuda()).dropping(keys[:8].cuda()))
    assert torch.allclose(there.cpu(), wanted, atol=1e-4)


@pytest.fixture
def losses() -> Any:
    return pytest.importorskip("imdm.kernels.losses", exc_type=ImportError)


def law_of(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Log-probabilities in float64 without the last token: (R, V − 1)."""
    return (rows.double() @ weight.double().T + bias.double())[:, :-1].log_softmax(-1)


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], within: float) -> None:
    """Each tensor within a relative distance of the one that was wanted."""
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double() - b.double()).norm()) <= within * float(b.double().norm())


@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(300, 64, 257), (1000, 96, 8192), (700, 768, 50258)])
@pytest.mark.parametrize("at_once", [1 << 29, 1 << 18])
def test_fused_losses_and_their_gradients(
    losses: Any, rows: int, width: int, vocabulary: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 on the same bf16 numbers: values to float32's rounding, gradients to bf16's; all rows at once and
    in parts."""
    monkeypatch.setattr(losses, "AT_ONCE", at_once)
    never = vocabulary - 1
    ours = [t.requires_grad_() for t in head(rows, width, vocabulary, torch.bfloat16)]
    others = [t.roll(1, 0) for t in head(rows, width, vocabulary, torch.bfloat16)]
    targets = torch.arange(rows, device="cuda") * 7 % never
    upstream = torch.linspace(-1.0, 1.0, rows, device="cuda")
    exact, teacher = law_of(*ours), law_of(*others)
    cases = {
        "chosen": (losses.log_prob_of(*ours, targets, never), exact.gather(1, targets[:, None])[:, 0]),
        "backward": (losses.kl(ours, others, never, False), (exact.exp() * (exact - teacher)).sum(-1)),
        "forward": (losses.kl(ours, others, never, True), (teacher.exp() * (teacher - exact)).sum(-1)),
    }
    for found, wanted in cases.values():
        assert torch.allclose(found.double(), wanted, atol=1e-4)
        gradients = [torch.autograd.grad((v * upstream).sum(), ours, retain_graph=True) for v in (found, wanted)]
        assert_near(*gradients, within=2.0**-7)


@pytest.fixture
def matching() -> Any:
    return pytest.importorskip("imdm.kernels.matching", exc_type=ImportError)


def three_heads(rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cuda") -> list[list[Tensor]]:
    """A student's, a teacher's and an auxiliary's, each of a width of its own."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    return [
        [
            normal(rows, width).to(dtype).requires_grad_(),
            (normal(vocabulary, width) * 2 / width**0.5).to(dtype).requires_grad_(),
            normal(vocabulary).requires_grad_(),
        ]
        for width in (96, 64, 100)
    ]


def assert_matched(
    matching: Any, rows: int, vocabulary: int, gradient: Gradient, clip: float | None, *how: Any
) -> None:
    """Against `readout.matched` in float64 on the same numbers: values to float32's rounding, gradients to that of half
    precision. Targets are the auxiliary's likeliest token, its least likely one, or any."""
    student, teacher, auxiliary = heads = three_heads(rows, vocabulary, *how)
    s, t, a = (law_of(*head) for head in heads)
    number = torch.arange(rows, device=a.device)
    any_token = number * 31 % (vocabulary - 1)
    targets = torch.where(number % 3 == 0, a.argmax(-1), torch.where(number % 3 == 1, a.argmin(-1), any_token))
    found = matching.matched(*(tuple(head) for head in heads), targets, vocabulary - 1, gradient, clip)
    wanted = matched(gradient, s, t, a, clip), -a.gather(1, targets[:, None])[:, 0]
    upstream = torch.linspace(-1.0, 1.0, rows, device=a.device), torch.linspace(2.0, 0.5, rows, device=a.device)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-3)
    totals = [sum((v * u).sum() for v, u in zip(values, upstream, strict=True)) for values in (found, wanted)]
    assert_near(*(torch.autograd.grad(total, student + auxiliary) for total in totals), within=2.0**-6)
    assert all(tensor.grad is None for tensor in teacher)


@pytest.mark.parametrize(("rows", "vocabulary"), [(70, 200), (1001, 5003)])
@pytest.mark.parametrize("gradient", get_args(Gradient))
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("part", [None, 30])
def test_three_heads_are_compared_without_storing_them(
    matching: Any,
    rows: int,
    vocabulary: int,
    gradient: Gradient,
    clip: float | None,
    part: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows at once and some at a time; rows and tokens that fill no tile."""
    if part is not None:
        monkeypatch.setattr("imdm.kernels.losses.AT_ONCE", 2 * part * (vocabulary + 64))
    assert_matched(matching, rows, vocabulary, gradient, clip, torch.bfloat16)


@pytest.mark.parametrize("gradient", get_args(Gradient))
def test_three_heads_without_some_tokens(matching: Any, gradient: Gradient) -> None:
    """As on a CPU, in float64 on the same numbers; what is barred gets no gradient."""
    torch.manual_seed(0)
    heads = []
    for width in (96, 64, 112):
        layer = nn.Linear(width, 300).cuda().bfloat16()
        heads.append(Head(torch.randn(500, width, device="cuda", dtype=torch.bfloat16).requires_grad_(), layer, 299))
    barred, targets = torch.arange(500, device="cuda") % 2 == 0, torch.arange(500, device="cuda") % 290 + 5
    tensors = [head.without(barred, (1, 2)).tensors for head in heads]
    value, said = matching.matched(*tensors, targets, 299, gradient, 1.0)
    exact = [Head(h.rows.double(), h.layer.double(), 299).without(barred, (1, 2)).log_probs().double() for h in heads]
    assert torch.allclose(value.double(), matched(gradient, *exact, 1.0), rtol=1e-3, atol=1e-2)
    assert torch.allclose(said.double(), -exact[2].gather(1, targets[:, None])[:, 0], rtol=1e-3, atol=1e-2)


def test_no_rows_are_compared_too(matching: Any) -> None:
    heads = three_heads(0, 200, torch.bfloat16)
    targets = torch.zeros(0, dtype=torch.int64, device="cuda")
    found = matching.matched(*(tuple(head) for head in heads), targets, 199, "kl", None)
    assert [len(values) for values in found] == [0, 0]


@pytest.mark.parametrize("gradient", get_args(Gradient))
def test_a_match_step_in_bf16_has_the_plain_gradients(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through both networks, with and without the kernel; what was drawn is the same."""
    settings = {"vocab_size": 300, "length": 16}
    model, teacher = (tiny_model(seed=k, mask=m, **settings).cuda() for k, m in enumerate((NOISY, "single")))
    objective = Match(phases=({"gradient": gradient},))
    companion, auxiliary = objective.companion(model, teacher), Auxiliary.of(tiny_model(seed=2, **settings).cuda())
    batch = {"tokens": torch.arange(64 * 16, device="cuda").view(64, 16) * 31 % 299}
    step = Step(0, 0, torch.arange(64, device="cuda"), 64, updated=("student", "auxiliary"))
    step = replace(step, networks={"auxiliary": auxiliary})
    weights = [*model.parameters(), *auxiliary.parameters()]

    def gradients() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            found = objective.loss(model, model.process, batch, step, companion)
        assert isinstance(found, dict)
        given = torch.autograd.grad(sum(found.values()), weights, allow_unused=True)
        return [torch.stack([loss.detach() for loss in found.values()]), *given]

    fused = gradients()
    with monkeypatch.context() as patch:
        patch.setattr("imdm.models.readout.kernels", lambda name: None)
        plain = gradients()
    present = [(a, b) for a, b in zip(fused, plain, strict=True) if a is not None]
    assert len(present) > 20
    largest = max(float(b.norm()) for _, b in present[1:])
    assert_near(*zip(*[pair for pair in present if float(pair[1].norm()) > 0.01 * largest], strict=True), within=0.05)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", ["single", NOISY])
def test_recorded_match_begins_with_the_same_losses(tmp_path: Path, mask: str, compiled: bool) -> None:
    """In bf16; later a draw may fall the other way, and then all that follows differs. A phase ends in between, a look
    and a checkpoint come after it."""
    source = TokenSource(torch.arange(256 * 32).view(256, 32) * 31 % 299, 300, 299)
    objective = Match(
        phases=({"gradient": "fkl", "steps": 14}, {"gradient": "ipf", "rate": 0.5}),
        auxiliary={"ahead": 2, "warmup": 4},
        looks=8,
    )
    losses = {}
    for recorded in (False, True):
        config = TrainConfig(
            steps=40, batch=128, lr=1e-4, warmup=6, ema=0.9, precision="bf16", compile=compiled, graphs=recorded
        )
        settings = {"vocab_size": 300, "length": 32, "width": 64, "heads": 4, "dropout": 0.1}
        model, teacher = (tiny_model(seed=k, mask=m, **settings) for k, m in enumerate((mask, "single")))
        trainer = Trainer(model, objective, source, config, tmp_path / str(recorded), start=teacher)
        for network in trainer.networks.values():
            network.model.train()
        found = [float(trainer.train_step()) for _ in range(20)]
        assert (trainer.recorder is not None) == recorded
        assert trainer.recorder is None or trainer.recorder.recorded
        assert trainer.companion is not None
        assert trainer.companion.values()["phase"] == 1
        trainer._evaluate_now(None)
        trainer.save()
        trainer.resume()
        found += [float(trainer.train_step()) for _ in range(4)]
        assert all(torch.isfinite(torch.tensor(found)))
        losses[recorded] = found
    within = 1e-1 if compiled else 1e-2  # compiled blocks round otherwise for a graph's padded sizes
    assert losses[True][:5] == pytest.approx(losses[False][:5], rel=within, abs=2e-3)


def check_kernels(
    monkeypatch: pytest.MonkeyPatch, model: Any, objective: Objective, batch: dict[str, Tensor], by: Any
) -> None:
    """Loss and gradients of a step in bf16, with the kernels and without; by: the objective's companion."""
    step = Step(0, 0, torch.arange(64, device="cuda"), 64)

    def gradients() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = objective.loss(model, model.process, batch, step, by)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    fused = gradients()
    with monkeypatch.context() as patch:
        patch.setattr("imdm.models.readout.kernels", lambda name: None)
        plain = gradients()
    present = [(a, b) for a, b in zip(fused, plain, strict=True) if a is not None]
    assert len(present) > 10
    assert_near(*zip(*present, strict=True), within=0.05)


def test_a_training_step_in_bf16_has_the_plain_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss with and without the kernels, through the whole model, for both kinds of loss."""
    model = tiny_model(vocab_size=300, length=16).cuda()
    batch = {"tokens": torch.arange(64 * 16, device="cuda").view(64, 16) * 31 % 299}
    teacher = SDTT().companion(tiny_model(vocab_size=300, length=16, seed=1).cuda())
    for objective in (Nelbo(), SDTT(), SDTT(divergence="forward-kl")):
        check_kernels(monkeypatch, model, objective, batch, teacher)


def test_a_backbones_head_has_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bias, and padded: 300 of its 320 rows mean something."""
    fields = FAMILIES["llama"] | {"vocab_size": 320}
    model, teacher = (made(fields, seed, vocab_size=300, mask_token_id=7).cuda() for seed in (0, 1))
    batch = {"tokens": 8 + torch.arange(64 * 6, device="cuda").view(64, 6) * 31 % 292}
    for objective in (Nelbo(), SDTT()):
        check_kernels(monkeypatch, model, objective, batch, objective.companion(model, teacher))
    written = faster(model, compile=False).generate(num=200, steps=2).tokens
    assert int(written.max()) < 300
    assert not bool((written == 7).any())


def test_two_samples_of_a_large_vocabulary_have_one_law(draw_from_head: Draw) -> None:
    """10⁶ draws of the fused and of the plain draw, under different numbers, at V = 50,258: a two-sample χ² test."""
    rows, weight, bias = head(1, 64, 50_258, torch.bfloat16)
    n, never = 1_000_000, 50_257
    u, v = uniform(fold(3, Purpose.SAMPLE, torch.arange(2 * n)).cuda(), Purpose.TOKEN).split(n)
    many = rows.expand(50_000, -1)
    fused = torch.cat([draw_from_head(many, weight, bias, never, some)[0] for some in u.split(50_000)])
    logits = rows.double() @ weight.double().T + bias.double()
    logits[:, never] = -torch.inf
    edge = logits.softmax(-1)[0].cumsum(0)
    plain = torch.searchsorted(edge, v * edge[-1], right=True)
    a, b = (torch.bincount(tokens, minlength=50_258).double() for tokens in (fused, plain))
    both = a + b > 0
    statistic = float(((a - b)[both].square() / (a + b)[both]).sum())  # χ² with (tokens seen − 1) degrees of freedom
    freedom = int(both.sum()) - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
    assert freedom > 20_000


@pytest.mark.parametrize(("mask", "steps"), [("single", 16), ("infinite-uniform-8-1.0", 3)])
def test_a_faster_model_writes_the_same(mask: str, steps: int) -> None:
    """Folded, compiled and recorded, in float32: nearly every token is the same one."""
    model = tiny_model(mask=mask, length=16).cuda()
    plain = model.generate(num=64, steps=steps, seed=3)
    fast = faster(model, dtype=torch.float32)
    for _ in range(3):  # run, recorded, replayed
        again = fast.generate(num=64, steps=steps, seed=3)
        assert torch.equal(again.revealed_at, plain.revealed_at)
        assert (again.tokens == plain.tokens).double().mean() > 0.97
    assert fast.replay is not None
    assert fast.replay.recorded
    unrecorded = faster(model, dtype=torch.float32, graphs=False).generate(num=64, steps=steps, seed=3)
    assert (unrecorded.tokens == plain.tokens).double().mean() > 0.97


def test_a_faster_model_in_bf16_gives_nearly_the_same_law() -> None:
    """Probabilities of a small model move by bf16's rounding alone."""
    model = tiny_model(vocab_size=50, length=16, width=128, heads=4).cuda()
    state = model.noised(torch.full((8, 16), 49, device="cuda"))
    there = faster(model, graphs=False)(state).exp()
    assert (there - model(state).exp()).abs().max() < 0.02


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(3, 40, 256), (7, 256), (0, 256), (1, 1, 256)])
def test_a_matmul_that_applies_gelu(shape: tuple[int, ...], compiled: bool) -> None:
    """As exact as GELU after the matmul, which rounds twice; by tanh, as on a CPU. With gradients it is that one."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(256, 1024).cuda().bfloat16(), 3 * torch.randn(shape, device="cuda").bfloat16()
    exact = torch.nn.functional.gelu(
        torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()), approximate="tanh"
    )
    run = torch.compile(gelu_of) if compiled else gelu_of
    with torch.no_grad():
        fused = run(layer, x)
    plain = gelu_of(layer, x)
    assert fused.shape == plain.shape == (*shape[:-1], 1024)
    assert plain.requires_grad
    errors = [float((one.double() - exact).abs().mean()) if one.numel() else 0.0 for one in (fused, plain)]
    assert errors[0] <= 1.05 * errors[1]
    if fused.numel():
        assert torch.allclose(fused.double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_projection_is_put_together_in_one_pass(dtype: torch.dtype) -> None:
    q, k = (torch.randn(3, 12, 40, 64, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.randn(3, 40, 12, 64, device="cuda", dtype=dtype).transpose(1, 2)
    cos, sin = rotary(40, 64, q.device)
    fused = pytest.importorskip("imdm.kernels.rotation", exc_type=ImportError).turned_back(q, k, v, cos, sin)
    assert torch.allclose(fused, turned_back(q, k, v, cos, sin), atol=1e-6 if dtype == torch.float32 else 2e-2)


# Models of transformers

FEW_STEPS = Match.parse({"remembered": 64, "looks": 8, "auxiliary": {"ahead": 1, "warmup": 0}})
OBJECTIVES = [Nelbo(), SDTT(rounds=2, iterations=3, first_dt=0.1), FEW_STEPS]
TOKENS_OF_16 = TokenSource(torch.arange(64 * 16).view(64, 16) * 7 % 10, 12, 11)


def llama_of_16(seed: int = 0, **changes: Any) -> MaskedDiffusionLM:
    fields = FAMILIES["llama"] | {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 3}
    return made(fields, seed, length=16, **changes)


def losses_of(model: MaskedDiffusionLM, objective: Objective, folder: Path, **settings: Any) -> list[float]:
    config = TrainConfig.parse({"steps": 6, "batch": 32, "lr": 1e-4, "warmup": 0} | settings)
    trainer = Trainer(model, objective, TOKENS_OF_16, config, folder, start=llama_of_16(seed=1))
    for network in trainer.networks.values():
        network.model.train()
    return [float(trainer.train_step()) for _ in range(6)]


@pytest.mark.parametrize("settings", [{}, {"opening": 4}, {"checkpoint_blocks": True}])
def test_compiled_layers_of_transformers_have_the_same_losses(tmp_path: Path, settings: dict[str, Any]) -> None:
    eager = losses_of(llama_of_16(), Nelbo(), tmp_path / "eager", **settings | {"checkpoint_blocks": False})
    found = losses_of(llama_of_16(), Nelbo(), tmp_path / "compiled", compile=True, **settings)
    assert found == pytest.approx(eager, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("objective", [*OBJECTIVES, Autoregressive()])
def test_recorded_steps_of_transformers_have_the_same_losses(
    tmp_path: Path, objective: Objective, compile: bool
) -> None:
    """A shape is captured when it occurs a third time, so that some of the steps are replayed. Under `match` rounding
    may make a sample differ in a token, and then all that follows does."""
    changes, many = {"causal": True} if objective.causal else {}, 3 if isinstance(objective, Match) else 6
    plain = losses_of(llama_of_16(**changes), objective, tmp_path / "plain")
    found = losses_of(llama_of_16(**changes), objective, tmp_path / "recorded", graphs=True, compile=compile)
    assert found[:many] == pytest.approx(plain[:many], rel=1e-3, abs=1e-4)


def test_a_faster_model_of_transformers_writes_the_same() -> None:
    """Compiled, and from the third batch of a shape on by a CUDA graph."""
    plain = llama_of_16(mask="infinite-uniform-8-1.0").cuda()
    fast = faster(plain, dtype=torch.float32)
    for seed in range(4):
        ours, theirs = (model.generate(num=8, seed=seed, steps=4).tokens for model in (plain, fast))
        assert float((ours == theirs).float().mean()) > 0.95  # a draw may fall on another token by rounding
    assert fast.replay is not None
    assert fast.replay.recorded


@pytest.mark.parametrize("graphs", [False, True])
def test_blocks_computed_again_have_the_same_losses(tmp_path: Path, graphs: bool) -> None:
    """Of our own transformer, recorded too: nothing asks for the generator's state."""
    losses = {}
    for again in (False, True):
        config = TrainConfig(
            steps=8, batch=32, lr=1e-4, warmup=0, precision="bf16", graphs=graphs, checkpoint_blocks=again
        )
        model = tiny_model(vocab_size=12, length=16, width=64, heads=4, dropout=0.1)
        trainer = Trainer(model, Nelbo(), TOKENS_OF_16, config, tmp_path / str(again))
        trainer.model.train()
        losses[again] = [float(trainer.train_step()) for _ in range(8)]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_adapters_on_frozen_weights_in_half_precision(tmp_path: Path, objective: Objective) -> None:
    """The losses of frozen weights in bf16 are about those in float32, whose products are of bf16 too."""
    pytest.importorskip("peft")
    found = {}
    for base in ("float32", "bf16"):
        model = llama_of_16(mask="infinite-uniform-8-1.0")
        how = {"precision": "bf16", "lora": {"rank": 4, "base": base}}
        found[base] = losses_of(model, objective, tmp_path / base, **how)
    assert found["bf16"][:2] == pytest.approx(found["float32"][:2], rel=0.1, abs=0.02)
    assert all(math.isfinite(loss) for loss in found["bf16"])


def test_a_model_of_transformers_writes_from_left_to_right_on_a_gpu() -> None:
    model = llama_of_16(causal=True, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    here = model.generate(num=64, seed=3).tokens
    there = model.cuda().generate(num=64, seed=3).tokens.cpu()
    assert float((here == there).float().mean()) > 0.95  # a draw may fall on another token by rounding


@pytest.mark.parametrize("ends", [False, True])
def test_steps_of_an_autoregressive_model_of_transformers_are_replayed(ends: bool) -> None:
    """Nearly every token is the one that is written without graphs, of every batch, also after another shape."""
    ending = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1} if ends else {}
    plain = llama_of_16(causal=True, **ending).cuda()
    fast = faster(plain, dtype=torch.float32)
    prompt = torch.tensor([[4, 3, 5]] * 32, device="cuda")
    for seed in range(3):
        for canvas in (prompt, prompt[:, :2], prompt[:24]):
            ours, theirs = (model.generate(canvas, seed=seed).tokens for model in (plain, fast))
            assert fast.steps.kept
            assert all(step is not None and step.graph is not None for step in fast.steps.kept.values())
            assert float((ours == theirs).float().mean()) > 0.95  # a draw may fall on another token by rounding
