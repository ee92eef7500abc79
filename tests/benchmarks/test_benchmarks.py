"""Benchmarks at sizes of seconds, by a clock that counts operations instead of time: what a row says then follows from
what was computed, whatever else the machine is doing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typer.testing import CliRunner

from imdm.benchmarks import (
    HOMES,
    benchmark,
    couplings,
    large,
    llada,
    losses,
    match,
    measure,
    sampling,
    scaling,
    training,
)
from imdm.benchmarks.measure import Machine, Row, Took, machine, paced, timed
from imdm.benchmarks.table import table
from imdm.cli.app import app
from imdm.costing.work import head_flops, network_flops
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM

SMALL = {"preset": "tiny", "length": 16, "vocab_size": 512}
PAPER = Machine("a machine of paper", "2.x", tflops=1.0, terabytes=1.0)
"""It does 10⁹ operations a millisecond and nothing else takes time."""
COUNTED = [name for name in HOMES if name != "serving"]  # which works in another thread: tests/serving/test_serving.py
LEAST = {"large": 0.6, "training": 0.8, "sdtt": 0.8, "graphs": 0.8, "scaling": 0.8}


class Operations(TorchDispatchMode):
    """Counts those of every product, forward and backward, and of attention forward."""

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is self.attention:
            self.done += sdpa_flop_count(*(each.shape for each in args[:3]))
        elif count := flop_registry.get(func._overloadpacket):
            self.done += count(*args, **(kwargs or {}), out_val=out)
        return out


@pytest.fixture(scope="module")
def paper() -> Iterator[None]:
    """That machine, small sizes, and a clock that shows how many operations were done."""
    with pytest.MonkeyPatch.context() as patch, Operations() as operations:
        clock = SimpleNamespace(perf_counter=lambda: operations.done / 1e12)
        for module in (measure, couplings):
            patch.setattr(module, "time", clock)
        patch.setattr(measure, "gc", SimpleNamespace(collect=int))  # which takes long where so much is loaded
        patch.setattr(measure, "machine", lambda: PAPER)
        patch.setitem(sampling.SIZES, "tiny", SMALL | {"vocab_size": 8192, "batch": 4, "steps": (8,)})
        patch.setitem(couplings.SIZES, "tiny", SMALL | {"pairs": 96, "batch": 8, "steps": 32})
        patch.setitem(training.SIZES, "tiny", (SMALL | {"batch": 8},))
        patch.setitem(training.RECORDED, "tiny", SMALL | {"batch": 8})
        patch.setitem(large.SIZES, "tiny", SMALL)
        patch.setitem(large.BATCH, "tiny", 8)
        patch.setitem(large.COUPLING, "tiny", {"pairs": 96, "batch": 8, "steps": 16})
        patch.setattr(large, "STEPS", 2)
        patch.setitem(match.SIZES, "tiny", (SMALL | {"batch": 8},))
        patch.setitem(losses.SIZES, "tiny", ((32, 16, 256),))
        patch.setitem(scaling.BASE, "tiny", SMALL | {"batch": 2, "steps": 2})
        few = {"batch": (1, 8), "vocab_size": (256, 512), "length": (8, 16), "steps": (1, 4)}
        patch.setitem(scaling.ALONG, "tiny", few)
        shape = llada.SIZES["tiny"]["fields"] | {"num_hidden_layers": 1}
        patch.setitem(llada.SIZES, "tiny", llada.SIZES["tiny"] | {"fields": shape, "length": 16, "steps": (4,)})
        for module in (sampling, losses, scaling, llada):
            patch.setattr(module, "REPEATS", 1)
        for name in ("STEPS", "PLAIN_STEPS"):
            for module in (training, match):
                patch.setattr(module, name, 2)
        patch.setattr(match, "WARM", 1)
        yield


@pytest.fixture(scope="module")
def rows(paper: None) -> dict[str, list[Row]]:
    return {name: list(benchmark(name)("tiny")) for name in COUNTED}


@pytest.mark.parametrize("name", COUNTED)
def test_rows_say_what_was_done(name: str, rows: dict[str, list[Row]]) -> None:
    """The necessary operations (`flops`) are counted by hand, those that were done by torch: none is done without need,
    but for masks that happen to be more than their expected number (training) and what is cheap (scaling)."""
    assert rows[name]
    for row in rows[name]:
        written = json.loads(json.dumps(row.json()))
        done = row.ours.ms * 1e9
        assert done > 0
        assert written["mfu"] == pytest.approx(row.flops / done)
        assert LEAST.get(name, 0.95) < written["mfu"] < 1.05
        assert written["tokens_per_second"] == pytest.approx(1e3 * row.tokens / row.ours.ms)
        assert written["machine"] == {"name": PAPER.name, "torch": "2.x", "tflops": 1.0, "terabytes": 1.0}
        assert written["settings"]
        assert (row.plain is None) == (row.ratio is None) == (name in ("large", "scaling"))


def test_a_long_loop_is_worth_avoiding(rows: dict[str, list[Row]]) -> None:
    """Eight steps at V = 8,192 beside the plain loop, which builds (B, L, V) each time; and couplings of 32 steps of
    length 16, whose sequences need at most 16 evaluations each."""
    (row,) = rows["sampling"]
    assert row.ratio is not None
    assert row.ratio > 2
    (pairs,) = rows["couplings"]
    assert pairs.ratio is not None
    assert pairs.ratio > 4


def test_at_size_no_logits_of_all_positions_are_made(rows: dict[str, list[Row]]) -> None:
    """The published way reveals all there is, and makes all of (B, L, V) at every step; ours never does."""
    (row,) = rows["llada"]
    assert row.ratio is not None
    assert row.ratio > 1.5  # operations: the head at a quarter of the rows each step
    small = {**llada.SIZES["tiny"]["fields"], "num_hidden_layers": 1, "hidden_size": 32}
    model = llada.fresh(small, 2047, 16, torch.float32)
    start, whole = torch.full((4, 16), 2047), 4 * 16 * 2048
    with Largest() as theirs:
        found = llada.published(model.backbone.get_network(), start, 2047, 4)
    assert not bool((found == 2047).any())
    assert theirs.elements == whole
    with Largest() as ours:
        model.generate(num=4, steps=4)
    assert ours.elements <= whole // 2 == model.get_input_embeddings().weight.numel()


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            self.elements = max(self.elements, one.numel() if isinstance(one, torch.Tensor) else 0)
        return out


def test_three_networks_are_read_where_they_must(rows: dict[str, list[Row]]) -> None:
    """Plainly, each is asked at all positions, and all of (B, L, V) is there; not recorded, as much is computed."""
    (row,) = rows["match"]
    assert row.ratio is not None
    assert row.ratio > 1
    assert row.also["not recorded"].ms == pytest.approx(row.ours.ms)


def test_a_row_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "machine", lambda: Machine("another", "2.x", tflops=2.0, terabytes=1.0))
    row = Row("work", Took(4.0, None), Took(12.0, None), tokens=10, flops=2e9, settings={})
    assert (row.ratio, row.tokens_per_second, row.utilisation) == (3.0, 2500.0, 0.25)


@pytest.mark.parametrize("way", [timed, paced])
def test_the_median_of_what_comes_after_warming_up(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("paced by the GPU's own clock")
    seconds = iter([50.0, 40.0, 0.001, 0.009, 0.002])  # two runs to warm up
    now = [0.0]

    def run() -> None:
        now[0] += next(seconds)

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert way(run, 3, 2).ms == pytest.approx(2.0)
    assert next(seconds, None) is None


def test_a_machine_is_as_fast_as_its_product_and_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("other sizes")
    ticks = itertools.count()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))  # 1 ms each
    here = machine.__wrapped__()
    assert here.tflops == pytest.approx(2 * 1024**3 / 1e-3 / 1e12)
    assert here.terabytes == pytest.approx(2 * 2**26 / 1e-3 / 1e12)


def test_operations_are_counted() -> None:
    """Against the parameters of a model, each used once a token, and the two products of attention."""
    config = MaskedDiffusionConfig(vocab_size=10, length=8, width=32, blocks=3, heads=2, condition=0)
    model = MaskedDiffusionLM(config)
    weights = sum(p.numel() for block in model.blocks for p in block.parameters() if p.ndim == 2)
    assert network_flops(config, 80, 8, 80, 0) == 2 * 80 * weights + 3 * 80 * 4 * 8 * 32
    unread = 2 * (weights // 3 - 2 * 32**2) + 4 * 8 * 32  # all of the last block but keys and values
    assert network_flops(config, 80, 8, 80, 0) - network_flops(config, 80, 8, 30, 0) == 50 * unread
    assert head_flops(config, 5) == 2 * 5 * model.output.weight.numel()
    noisy = MaskedDiffusionConfig(vocab_size=10, length=8, width=32, blocks=3, heads=2, condition=0, mask="infinite")
    extra = sum(p.numel() for p in MaskedDiffusionLM(noisy).mask_embedding.parameters() if p.ndim == 2)
    assert network_flops(noisy, 80, 8, 80, 40) - network_flops(config, 80, 8, 80, 0) == 2 * 40 * extra


def test_the_command_prints_writes_and_draws(paper: None, tmp_path: Path) -> None:
    file, plot = tmp_path / "rows.jsonl", tmp_path / "scaling.svg"
    done = CliRunner().invoke(app, ["bench", "losses", "scaling", "--json", str(file), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert f"{PAPER.name}, torch 2.x: products 1 TFLOP/s, copies 1 TB/s" in done.output
    assert "linear + KL" in done.output
    assert len(file.read_text().splitlines()) == 2 + 8
    assert "generated token" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nonsense"], "nonsense"), (["--size", "huge"], "full or tiny"), (["losses", "--plot", "x.svg"], "scaling")],
)
def test_refusals(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code != 0
    assert said in str(done.exception)


def test_a_table_shows_others_and_notes() -> None:
    row = Row("work", Took(1.0, 2.0), Took(3.0, None), 10, 1e9, {}, also={"other": Took(2.0, None)}, note="remarkable")
    shown = table([row])
    assert shown.row_count == 3
    assert row.ratio == 3.0


def test_blocks_computed_twice_count_once(rows: dict[str, list[Row]]) -> None:
    """On the machine of paper, whose time is the number of operations: a step takes up to a third longer."""
    by = {row.work: row for row in rows["large"]}
    for name in ("MDLM", "IM-ReDi"):
        once, twice = by[f"train tiny {name}, L=16"], by[f"train tiny {name}, blocks recomputed, L=16"]
        assert twice.flops == once.flops
        assert 1.05 < twice.ours.ms / once.ours.ms < 4 / 3
        assert twice.settings["checkpoint_blocks"]


def test_couplings_are_timed_without_what_comes_first(paper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes longer by a constant, as compilation does, has the same rate."""
    given = SMALL | {"pairs": 12, "batch": 4, "steps": 8}
    teacher = MaskedDiffusionLM(MaskedDiffusionConfig.preset("tiny", length=16, vocab_size=512)).eval()
    plain = couplings.coupled(teacher, given, "pairs", beside_plain=False)
    make, late = couplings.couple, SimpleNamespace(seconds=0.0)
    clock = couplings.time

    def slowly(*args: Any, **kwargs: Any) -> Any:
        late.seconds += 1.0
        return make(*args, **kwargs)

    monkeypatch.setattr(couplings, "couple", slowly)
    now = SimpleNamespace(perf_counter=lambda: clock.perf_counter() + late.seconds)
    monkeypatch.setattr(couplings, "time", now)
    assert couplings.coupled(teacher, given, "pairs", beside_plain=False).ours.ms == pytest.approx(plain.ours.ms)
