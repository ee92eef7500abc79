"""What the repository says it measured: the documents against the recorded rows, and the shipped models themselves."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load_file

import imdm
from imdm.core.files import read_json, read_lines
from imdm.data.tokenizers import load_tokenizer
from imdm.evaluation import Row, Subject, load_judge, measure, read
from imdm.evaluation.judge import judge_at_hand
from imdm.experiments import Recipe, load_recipe
from imdm.models.loading import load_model
from imdm.report.ratios import ratios
from imdm.report.text import curves, usual
from imdm.sampling import Sampling
from imdm.shipped import DEFAULT, HERE, PROMPT, TEACHER, listed, recorded
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused

ROOT = Path(__file__).parents[2]
GRID, DOCUMENT = ROOT / "results" / "grid", ROOT / "docs" / "results.md"
INFINITE = "infinite-uniform-768-1.0"
BARS = {"redi": {2: 0.54, 4: 0.75, 8: 0.90, 16: 0.95}, "sdtt+redi": {2: 0.47, 4: 0.75, 8: 0.90, 16: 0.95}}
METHODS = {"redi": "ReDi", "sdtt+redi": "SDTT+ReDi", "sdtt": "SDTT, one seed"}  # columns
STEPS = (1, 2, 4, 8, 16, 32, 128, 1024)
NAMES = {
    "teacher": "teacher",
    "SDTT, single": "student, single mask (SDTT)",
    "SDTT, infinite": "student, infinite masks (SDTT)",
    "ReDi, single (3)": "student, single mask (ReDi)",
    "ReDi, infinite (3)": "student, infinite masks (ReDi)",
    "ReDi, single, 32,768 pairs": "student, single mask (ReDi, 4 × pairs)",
    "SDTT+ReDi, single (3)": "student, single mask (SDTT + ReDi)",
    "SDTT+ReDi, infinite (3)": "student, infinite masks (SDTT + ReDi)",
    "SDTT+ReDi, 6,144 masks": "student, 6,144 masks (SDTT + ReDi)",
    "Di4C, 2 rounds after SDTT": "student, single mask with a latent (Di4C)",
}
MASKS = {
    "uniform, 8": ("infinite-uniform-8-1.0", "noise-dim-8"),
    "uniform, 256": ("infinite-uniform-256-1.0", "noise-dim-256"),
    "uniform, 768": (INFINITE, "imdm-sdtt-redi"),
    "uniform, 1,536": ("infinite-uniform-1536-1.0", "noise-dim-1536"),
    "normal, 768": ("infinite-normal-768-1.0", "noise-normal"),
    "uniform, 768, scale 0.5": ("infinite-uniform-768-0.5", "noise-scale-half"),
    "uniform, 768, scale 2": ("infinite-uniform-768-2.0", "noise-scale-two"),
    "one of 6,144 masks": ("finite-6144", "finite-sdtt-redi"),
}
BESIDE = {
    "ReDi, single": ("redi", "single", "mdlm-redi", "teacher"),
    "ReDi, infinite": ("redi", INFINITE, "imdm-redi", "teacher"),
    "SDTT+ReDi, single": ("sdtt+redi", "single", "mdlm-sdtt-redi", "sdtt"),
    "SDTT+ReDi, infinite": ("sdtt+redi", INFINITE, "imdm-sdtt-redi", "sdtt"),
}
ORDERS = ("random", "spread")
SHIPS = ["stories-imdm", "stories-judge", "stories-teacher", "sentences-judge"]


@dataclass
class Table:
    """heading: of the section it is in; lead: the paragraph above it; head and rows: cells, without emphasis."""

    heading: str
    lead: str
    head: list[str]
    rows: list[list[str]]

    def column(self, name: str) -> int:
        assert self.head.count(name) == 1
        return self.head.index(name)


def tables(file: Path) -> list[Table]:
    """The Markdown tables of a document."""
    found, heading, lead = [], "", ""
    for block in re.split(r"\n\s*\n|(?<=\n)(?=#)", file.read_text(encoding="utf-8")):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("#"):
            heading = lines.pop(0).strip("# ")
        if lines and lines[0].startswith("|"):
            cells = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]
            found.append(Table(heading, lead, cells[0], cells[2:]))
        elif lines:
            lead = " ".join(lines)
    return found


def table(file: Path, heading: str = "", lead: str = "", corner: str = "") -> Table:
    """The one table of a document in the section of this name, below a paragraph with these words, or with this in its
    corner."""
    (found,) = (
        one for one in tables(file) if heading in ("", one.heading) and lead in one.lead and corner in ("", one.head[0])
    )
    return found


def test_tables_are_found_by_what_stands_above_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\nFirst:\n\n| a | b |\n|---|---|\n| **1** | 2 |\n\n## Part\nSecond:\n\n| c |\n|---|\n| 3 |\n"
    )
    assert table(page, lead="First") == Table("Page", "First:", ["a", "b"], [["1", "2"]])
    assert table(page, "Part") == table(page, corner="c") == Table("Part", "Second:", ["c"], [["3"]])
    for wanted in ({}, {"heading": "Chapter"}):
        with pytest.raises(ValueError, match="unpack"):
            table(page, **wanted)


def measured(judge: str = "sentences-judge") -> list[Row]:
    """What the grid reports, without what settings were chosen on."""
    return [row for row in everything() if row.sample_seed == 0 and row.judge in (None, judge)]


@cache
def everything() -> list[Row]:
    return read(GRID / "results.jsonl")


@pytest.mark.parametrize(
    ("lead", "judge"), [("by `sentences-judge`", "sentences-judge"), ("By SmolLM2", "smollm2 (bf16)")]
)
def test_the_documents_ratios_are_those_of_the_rows(lead: str, judge: str) -> None:
    told = table(DOCUMENT, "Perplexity as a share of the single mask's", lead)
    columns = {method: told.column(name) for method, name in METHODS.items()}
    steps = {int(cells[told.column("steps")]): cells for cells in told.rows}
    found = [ratio for ratio in ratios(measured(judge)) if ratio.mask == INFINITE]
    assert {(ratio.method, ratio.steps) for ratio in found} == {
        (method, count) for method in columns for count in steps
    }
    for ratio in found:
        cell = steps[ratio.steps][columns[ratio.method]]
        assert cell == f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})"


def test_the_documents_perplexities_are_those_of_the_rows() -> None:
    rows = usual(measured())
    ppl, entropy = curves(rows, "gen_ppl"), curves(rows, "entropy")
    whole = table(DOCUMENT, "Generative perplexity")
    assert [int(name.removesuffix(" step")) for name in whole.head[1:]] == list(STEPS)
    told = {cells[0]: cells[1:] for cells in whole.rows}
    assert set(told) == set(NAMES)
    for name, cells in told.items():
        points = {k: f"{value:,.0f} ({entropy[NAMES[name]][k][0]:.2f})" for k, (value, _) in ppl[NAMES[name]].items()}
        assert cells == [points.get(k, "") for k in STEPS]


def test_the_documents_masks_and_what_stands_beside_the_ratios() -> None:
    folder = GRID / "seed-0"
    compared, beside = table(DOCUMENT, "Masks compared"), table(DOCUMENT, "What stands beside the ratios")
    assert [name for name, *_ in compared.rows] == list(MASKS)
    assert compared.head == ["ε", "1 step", "2 steps", "4 steps", "8 steps", "loss", "fitted"]
    assert beside.head[:5] == ["", "pairs", "passes", "loss at the end", "fitted"]
    assert [cells[:3] for cells in beside.rows] == [[name, "8,192", "125"] for name in BESIDE]
    for name, *cells in compared.rows:
        mask, stage = MASKS[name]
        figures = [
            {row.steps: row.value for row in measured(judge) if place(row) == ("sdtt+redi", mask, 0, "gen_ppl")}
            for judge in ("sentences-judge", "smollm2 (bf16)")
        ]
        assert cells[:4] == [f"{figures[0][k]:,.0f} ({figures[1][k]:,.0f})" for k in (1, 2, 4, 8)]
        assert cells[4:] == [f"{loss(folder / stage):.3f}", f"{fitted(folder / stage):.1%}"]
    for name, *cells in beside.rows:
        method, mask, stem, maker = BESIDE[name]
        stages = [folder / f"{stem}{seed}" for seed in ("", "-1", "-2")]
        assert cells[2:4] == [
            ", ".join(f"{loss(stage):.2g}" for stage in stages),
            ", ".join(f"{fitted(stage):.1%}" for stage in stages),
        ]
        for steps, cell in ((32, cells[4]), (8, cells[5])):
            rows = [row for row in measured() if row.metric == "pair_overlap" and row.steps == steps]
            mine = [next(r.value for r in rows if place(r)[:3] == (method, mask, seed)) for seed in range(3)]
            theirs = next(row.value for row in rows if place(row)[:3] == (maker, "single", 0))
            told = ", ".join(f"{100 * value:.2f}" for value in mine)
            assert cell == f"{told}% ({'SDTT' if maker == 'sdtt' else maker}: {100 * theirs:.2f}%)"


def place(row: Row) -> tuple[str, str, int, str]:
    return row.method, row.mask, row.seed, row.metric


def loss(stage: Path) -> float:
    """As the report has it: the mean of the last four that were logged."""
    return fmean([row["loss"] for row in read_lines(stage / "history.jsonl") if "loss" in row][-4:])


def fitted(stage: Path) -> float:
    return float([row["fitted"] for row in read_lines(stage / "history.jsonl") if "fitted" in row][-1])


def test_the_bars_are_met_at_entropies_within_a_twentieth_over_three_students() -> None:
    found = {
        (r.method, r.steps): r for r in ratios(everything()) if r.judge == "sentences-judge" and r.mask == INFINITE
    }
    for method, bars in BARS.items():
        for steps, bar in bars.items():
            ratio = found[method, steps]
            assert ratio.seeds == 3
            assert ratio.high <= bar
            assert ratio.entropy is not None
            assert abs(ratio.entropy) < 0.05


def test_the_page_can_be_made_again_and_its_tables_are_printed_whole(tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in GRID.iterdir() if file.is_file()}
    done = command("report", GRID, "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "0.783 (0.762–0.804) [+0.01]" in done.stdout
    assert "…" not in done.stdout
    assert "SDTT + ReDi: masks compared, by smollm2" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert {file: file.read_bytes() for file in GRID.iterdir() if file.is_file()} == before
    assert "is a folder; name a file" in refused(command("report", GRID, "--html", tmp_path))


def test_the_recorded_recipe_is_a_part_of_the_packages_own() -> None:
    """Rows keep the hash of the recipe that made them. Stages that have come since only add to it: every recorded one
    is what it was, in the same order."""
    recorded_recipe = Recipe.parse(read_json(GRID / "recipe.json", "recipe"))
    whole = load_recipe("grid", ["data=sentences"])
    part = whole.model_copy(update={"stages": {name: whole.stages[name] for name in recorded_recipe.stages}})
    assert part.digest() == recorded_recipe.digest()
    assert list(whole.stages)[: len(part.stages)] == list(part.stages)
    assert {row.recipe_hash for row in everything()} == {recorded_recipe.digest()}


def test_the_grids_frontier_is_the_teachers_at_every_temperature_and_top_p() -> None:
    """As `equal_entropy` wants it: one step count, four temperatures or more, every point by both judges."""
    recipe = load_recipe("grid", ["data=sentences"])
    stages = {name: stage for name, stage in recipe.evaluations().items() if name.startswith("frontier")}
    assert all((list(s.models.values()), s.steps, s.samples) == (["teacher"], (1024,), 1024) for s in stages.values())
    assert {stage.precision for stage in stages.values()} == {recipe.evaluations()["measure"].precision}
    points = {
        judge: {(t, s.top_p) for s in stages.values() for t in s.temperatures if s.judge_label == judge}
        for judge in ("sentences-judge", "smollm2 (bf16)")
    }
    assert points["sentences-judge"] == points["smollm2 (bf16)"]
    assert sum(top_p == 1 for _, top_p in points["sentences-judge"]) == 6
    assert {top_p for t, top_p in points["sentences-judge"] if t == 1} == {0.8, 0.9, 0.95, 1.0}


@pytest.mark.parametrize(
    ("name", "teacher", "seeds"), [("grid", "teacher", [None]), ("match", "sentences-teacher", [None, 1, 2])]
)
def test_students_of_match_have_one_teacher_and_one_noise_policy(name: str, teacher: str, seeds: list[Any]) -> None:
    """From the SDTT model that has their mask; under both judges the same samples."""
    recipe = load_recipe(name, ["data=sentences"] if name == "grid" else [])
    students = {name: stage for name, stage in recipe.stages.items() if getattr(stage, "teacher", None) == teacher}
    students = {name: stage for name, stage in students.items() if stage.kind == "train"}
    assert {stage.objective.kind for stage in students.values()} == {"match"}
    for model, start in (("imdm", "imdm-sdtt"), ("mdlm", "mdlm-sdtt")):
        mine = [stage for name, stage in students.items() if name.startswith(f"{model}-match")]
        assert [(stage.start, stage.seed) for stage in mine] == [(start, seed) for seed in seeds]
    places = ("measure-match", "measure-match-again") if name == "grid" else ("measure", "measure-again")
    first, again = (recipe.evaluations()[place] for place in places)
    assert {one for one in students if "-match" in one} <= set(first.models)
    assert (first.models, first.steps, first.noise) == (again.models, again.steps, again.noise)
    assert again.judge_label == "smollm2 (bf16)"


def test_what_is_chosen_for_match_is_chosen_on_other_samples() -> None:
    recipe = load_recipe("match")
    chosen, reported = recipe.evaluations()["choose"], recipe.evaluations()["measure"]
    assert chosen.seed not in (None, recipe.seed)
    assert (chosen.noise, recipe.evaluations()["choose-posterior"].noise) == ("keep", "posterior")
    assert chosen.models.items() <= reported.models.items()


def test_what_ships_is_small_whole_and_described() -> None:
    models = listed()
    assert [one.name for one in models] == SHIPS
    assert sum((HERE / name / "model.safetensors").stat().st_size for name in SHIPS) <= 50e6
    for one in models:
        assert one.parameters <= (22_000_000 if one.name.startswith("stories-") else 7_000_000)
        card = (HERE / one.name / "README.md").read_text(encoding="utf-8")
        assert all(f"## {part}" in card for part in ("Data", "Recipe", "Numbers", "Limits"))
        config = json.loads((HERE / one.name / "config.json").read_text())
        assert (config["dtype"], config["condition"]) == ("float32", 0)  # adaLN folded
        weights = HERE / one.name / "model.safetensors"
        bits = sorted({len(t) for name, t in load_file(weights).items() if name.endswith(".planes")})
        told = " ".join(card.split())
        assert re.search(rf"whole numbers of {bits[0]} (or|to) {bits[-1]} bits with one scale a row", told)
        assert f"{weights.stat().st_size / 1e6:.1f} MB instead of" in told
        mean, error = re.search(r"changes the distribution by ([\d.]+) ± ([\d.]+) nats a token", told).groups()  # type: ignore[union-attr]
        assert float(mean) + 2 * float(error) < (2e-2 if one.name.startswith("stories-") else 2e-3)


def test_the_judge_goes_on_and_fills_in_nothing() -> None:
    assert load_model("sentences-judge").config.causal
    assert imdm.load("sentences-judge").write("It was", length=8)[0].text.startswith("It was")
    with pytest.raises(imdm.UserError, match="cannot infill"):
        imdm.load("sentences-judge").infill("It ___ a day")


def test_without_a_model_the_student_writes() -> None:
    from typer.testing import CliRunner

    from imdm.cli.app import app

    done = CliRunner().invoke(app, ["generate", "--steps", "4", "--prompt", PROMPT])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(PROMPT)
    assert len(done.output.split()) > 40


# Stories: what ships, against its own rows


def beside(name: str, steps: int) -> dict[str, Row]:
    """The rows beside the weights, by metric."""
    rows = [row for row in read(HERE / name / "results.jsonl") if row.steps == steps]
    return {row.metric: row for row in rows if row.judge in (None, "stories-judge")}


def anew(name: str, steps: int, texts: int, seed: int = 5) -> tuple[float, float]:
    """Entropy and log Gen. PPL by the judge that ships, of so many texts, with the noise policy and as much of each
    story as the rows say."""
    writer, row = imdm.load(name), beside(name, steps)["gen_ppl"]
    subject = Subject(
        writer.model,
        Sampling(steps=steps, noise=row.noise, order=row.order),
        samples=texts,
        seed=seed,
        tokenizer=writer.tokenizer,
        judge=load_judge("stories-judge"),
        first=row.first,
    )
    values = measure(["entropy", "gen_ppl"], subject)
    return values["entropy"].value, log(values["gen_ppl"].value)


def test_twice_the_steps_write_as_much_better_stories_as_was_measured() -> None:
    """Four texts in 8 steps and in 4, with the same random numbers: log Gen. PPL differs by what the rows say (0.38),
    and in 8 steps it is what they say. One standard error over texts is 0.08 of the difference and 0.16 of the other;
    this seed's texts are near the mean, so that half the steps do not pass."""
    said = {steps: log(beside(DEFAULT, steps)["gen_ppl"].value) for steps in (4, 8)}
    few, more = (anew(DEFAULT, steps, texts=4, seed=7)[1] for steps in (4, 8))
    assert said[4] - said[8] > 0.35
    assert few - more == pytest.approx(said[4] - said[8], abs=0.2)
    assert more == pytest.approx(said[8], abs=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", [DEFAULT, TEACHER])
def test_a_model_of_stories_writes_as_well_as_was_measured(name: str) -> None:
    """48 texts in 8 steps: entropy and log Gen. PPL within four standard errors over texts or more."""
    rows, (entropy, perplexity) = beside(name, 8), anew(name, 8, texts=48)
    assert entropy == pytest.approx(rows["entropy"].value, abs=0.08)
    assert perplexity == pytest.approx(log(rows["gen_ppl"].value), abs=0.25)


@pytest.mark.parametrize("name", [DEFAULT, TEACHER])
def test_the_figures_of_stories_are_by_the_judge_that_ships(name: str) -> None:
    assert {one.judge for one in recorded(name).values()} == {"stories-judge"}


@pytest.mark.parametrize("name", [DEFAULT, TEACHER])
def test_a_model_of_stories_ends_them_and_keeps_what_is_given(name: str) -> None:
    writer = imdm.load(name)
    config = writer.model.config
    assert config.ending is not None
    assert config.tie_word_embeddings
    assert (name == DEFAULT) == (config.lengths is not None) == (config.noise == "keep") == (config.order == "spread")
    (story,) = writer.write(PROMPT, steps=2)
    assert name != DEFAULT or story.tokens[-1] == config.eos_token_id  # in few steps a teacher may leave it out
    assert story.text.startswith(PROMPT)
    before, after = "Tom lost his red ball.", "He was happy again."
    (filled,) = writer.infill(f"{before} ___ {after}", blank=12, steps=2)
    assert filled.text.startswith(before)
    assert filled.text.endswith(f" {after}")
    assert filled.revealed_at.count(-1) == len(filled.tokens) - 12


def test_a_model_of_stories_is_judged_by_the_judge_of_stories() -> None:
    assert judge_at_hand(load_tokenizer(DEFAULT)) == judge_at_hand(load_tokenizer(TEACHER)) == "stories-judge"
    assert judge_at_hand(load_tokenizer("sentences-judge")) == "sentences-judge"
    texts = ["Once upon a time, there was a little girl. She had a red ball.", "Ball little was. Once had girl red, a."]
    score = load_judge("stories-judge").score(texts)
    assert float(score.nll[0] / score.count[0]) < float(score.nll[1] / score.count[1]) - 1


def test_sentences_in_spread_order() -> None:
    (table,) = [one for one in tables(DOCUMENT) if one.head[0] == "sentences"]
    rows = {(row.method, row.order, row.metric, row.steps): row for row in read(GRID / "order.jsonl")}
    names = {"teacher": "teacher", "SDTT+ReDi, infinite": "sdtt+redi"}

    def values(method: str, order: str, metric: str) -> list[float]:
        return [rows[method, order, metric, steps].value for steps in (2, 4, 8, 16)]

    assert {tuple(row[:1]) for row in table.rows} == {(f"{name}, {order} order",) for name in names for order in ORDERS}
    for name, *cells in table.rows:
        method, order = next(
            (names[one], order) for one in names for order in ORDERS if name == f"{one}, {order} order"
        )
        pairs = zip(values(method, order, "gen_ppl"), values(method, order, "entropy"), strict=True)
        assert cells == [f"{f'{ppl:,.0f}' if ppl >= 100 else f'{ppl:.1f}'} ({entropy:.2f})" for ppl, entropy in pairs]
    said = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for method, form in (
        ("teacher", "to {:.0%} and {:.0%} of what it was for the teacher"),
        ("sdtt+redi", "to {:.0%} and {:.0%} for"),
    ):
        shares = [after / before for before, after in zip(*(values(method, o, "gen_ppl") for o in ORDERS), strict=True)]
        assert form.format(*shares[1:3]) in said
        entropy = [
            after - before for before, after in zip(*(values(method, o, "entropy") for o in ORDERS), strict=True)
        ]
        assert abs(entropy[0]) < 0.045
        assert max(map(abs, entropy[1:])) < 0.02
        pooled = zip(*(values(method, order, "token_entropy")[1:] for order in ORDERS), strict=True)
        assert max(before - after for before, after in pooled) < 0.08
    assert {(row.n, row.noise, row.precision, row.sample_seed) for row in rows.values()} == {
        (256, "posterior", "float32", 0)
    }
