"""What docs/adopting.md says of `adapt-smollm2`, against the recorded rows and losses."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from imdm.evaluation import read
from imdm.files import read_json, read_lines
from tests.test_results import table

ROOT = Path(__file__).parents[1]
DOCUMENT, RUN = ROOT / "docs" / "adopting.md", ROOT / "results" / "adapt-smollm2"
HEADING = "From causal to diffusion, in one recipe"
METHODS = {"`match`, infinite masks": "match", "autoregressive": "left-to-right"}
COLUMNS = {"gen_ppl": "{:.1f}", "entropy": "{:.2f}", "pooled_entropy": "{:.2f}", "tokens_per_second": "{:,.0f}"}


def section() -> str:
    """The paragraphs of the section, each on one line."""
    text = DOCUMENT.read_text(encoding="utf-8").split(f"## {HEADING}", 1)[1].split("\n## ", 1)[0]
    return " ".join(text.split())


def test_the_table_has_the_rows() -> None:
    found = {(row.method, row.steps, row.metric): row.value for row in read(RUN / "results.jsonl")}
    method = ""
    shown = table(DOCUMENT, HEADING).rows
    for name, steps, *cells in shown:
        method = METHODS.get(name, method)
        for metric, cell in zip(COLUMNS, cells, strict=True):
            value = found.get((method, int(steps), metric))
            if metric == "tokens_per_second" and value is not None:
                value = round(value, -2)
            assert cell == ("" if value is None else COLUMNS[metric].format(value)), (method, steps, metric)
    assert {(steps, metric) for _, steps, metric in found if metric in COLUMNS} == {
        (int(row[1]), metric) for row in shown for metric, cell in zip(COLUMNS, row[2:], strict=True) if cell
    }
    counts = {row.method: row.n for row in read(RUN / "results.jsonl") if row.metric == "gen_ppl"}
    assert f"512 texts that have as many ({counts['match']} and {counts['left-to-right']})" in section()
    assert f"validation perplexity {found['left-to-right', 256, 'val_ppl']:.2f}" in section()


def test_the_text_has_the_losses() -> None:
    logged = {name: read_lines(RUN / "seed-0" / name / "history.jsonl") for name in ("adapted", "fresh")}
    last = {name: fmean(line["loss"] for line in lines[-4:]) for name, lines in logged.items()}
    assert f"{last['adapted']:.2f} nats a position with SmolLM2's weights, {last['fresh']:.2f} with random" in section()
    (*_, seen) = (line for line in read_lines(RUN / "seed-0" / "imdm-match" / "history.jsonl") if "ratio_4" in line)
    ratios = [f"{seen[f'ratio_{steps}']:.2f}" for steps in (1, 2, 4, 8, 16)]
    assert f"{', '.join(ratios[:-1])} and {ratios[-1]} times the perplexity" in section()


def test_the_text_has_the_times() -> None:
    for name in ("adapted", "fresh", "left-to-right", "imdm-match"):
        seconds = read_json(RUN / "seed-0" / name / "done.json", "results")["seconds"]
        assert f"{seconds:.0f} s (`{name.removeprefix('imdm-')}`" in section(), name
