"""Benchmarks at sizes of seconds: rows that add up, a table, a plot, JSON; and ratios that a regression would lower."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imdm.benchmarks import Row, benchmarks, couplings, losses, machine, sampling, scaling, training
from imdm.benchmarks.measure import Took, head_flops, network_flops
from imdm.benchmarks.table import table
from imdm.cli.app import app
from imdm.models import MaskedDiffusionConfig, MaskedDiffusionLM

SMALL = {"preset": "tiny", "length": 16, "vocab_size": 512}


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sampling.SIZES, "tiny", SMALL | {"vocab_size": 8192, "batch": 4, "steps": (8,)})
    monkeypatch.setitem(couplings.SIZES, "tiny", SMALL | {"pairs": 8, "batch": 4, "steps": 32})
    monkeypatch.setitem(training.SIZES, "tiny", (SMALL | {"batch": 4},))
    monkeypatch.setitem(losses.SIZES, "tiny", ((32, 16, 256),))
    monkeypatch.setitem(scaling.BASE, "tiny", SMALL | {"batch": 2, "steps": 2})
    few = {"batch": (1, 8), "vocab_size": (256, 512), "length": (8, 16), "steps": (1, 4)}
    monkeypatch.setitem(scaling.ALONG, "tiny", few)
    for module in (sampling, losses, scaling):
        monkeypatch.setattr(module, "REPEATS", 2)
    for name in ("STEPS", "PLAIN_STEPS"):
        monkeypatch.setattr(training, name, 2)


@pytest.mark.parametrize("name", list(benchmarks))
def test_rows_say_what_was_done(name: str) -> None:
    rows = list(benchmarks[name]("tiny"))
    assert rows
    for row in rows:
        written = json.loads(json.dumps(row.json()))
        assert written["ours"]["ms"] > 0
        assert written["tokens_per_second"] == pytest.approx(1e3 * row.tokens / row.ours.ms)
        assert 0 < written["mfu"] < 2
        assert written["machine"]["tflops"] > 0
        assert written["settings"]
        assert (row.plain is None) == (row.ratio is None) == (name == "scaling")


def test_a_long_loop_is_worth_avoiding() -> None:
    """Eight steps at V = 8,192 beside the plain loop, which builds (B, L, V) each time; and couplings."""
    (row,) = benchmarks["sampling"]("tiny")
    assert row.ratio is not None
    assert row.ratio > 1.5
    (pairs,) = benchmarks["couplings"]("tiny")
    assert pairs.ratio is not None
    assert pairs.ratio > 1.5


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


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    file, plot = tmp_path / "rows.jsonl", tmp_path / "scaling.svg"
    done = CliRunner().invoke(app, ["bench", "losses", "scaling", "--json", str(file), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert machine().name in done.output
    assert "linear + KL" in done.output
    assert len(file.read_text().splitlines()) == 2 + 8
    assert "written token" in plot.read_text()


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
