"""Reports: the paper's tables whole, a page for text, several runs on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imdm.cli.app import app
from imdm.core.console import frames
from imdm.core.errors import UserError
from imdm.core.files import append_line
from imdm.evaluation import Row
from imdm.experiments import load_recipe
from imdm.report import Results, Section, all_results, build_report, combine, plots, sections
from imdm.report.page import Beside, Strip, Written
from imdm.report.paper import TABLES
from imdm.report.text import cost_of_steps, curves, frontier, other_figures, paper_beside, step_table
from tests.experiments.test_grid import row

ROWS = {1: 3, 2: 3, 3: 4, 4: 4, 5: 4, 6: 6, 7: 6, 8: 4, 9: 6, 10: 6, 11: 4, 12: 2, 13: 1, 14: 6}


def test_the_papers_fourteen_tables_are_whole() -> None:
    assert {table.number: len(table.rows) for table in TABLES} == ROWS
    for table in TABLES:
        assert all(len(cells) == len(table.columns) for cells in table.rows)
    by_number = {table.number: table for table in TABLES}
    assert by_number[4].rows[0] == ("2", "584.22", "524.31", "530.36", "284.62", "353.90", "165.85")
    assert by_number[9].rows[-1][-2:] == ("11.60 (14.90)", "4.95 (5.14)")
    assert by_number[2].rows[0][:2] == ("IMDM", "ε_A")
    assert [table.rows[0][-1] for table in (by_number[3], by_number[8])] == ["164.23", "4.14"]


def text_run(folder: Path, recipe: str = "sentences-cpu", **changes: object) -> Path:
    folder.mkdir()
    values = load_recipe(recipe).resolved() | changes
    (folder / "recipe.json").write_text(json.dumps(values))
    for model, factor in (("mdlm", 2.0), ("imdm", 1.0)):
        for steps in (1, 4):
            for metric, value in (("gen_ppl", 100 * factor / steps), ("entropy", 4.2)):
                made = row(model, steps, value, 1.0, "redi").model_dump()
                mask = {"mdlm": "single", "imdm": "infinite-uniform-4-1.0"}[model]
                append_line(folder / "results.jsonl", made | {"metric": metric, "judge": "j", "n": 64, "mask": mask})
    return folder


def test_a_page_of_text(tmp_path: Path) -> None:
    report = build_report(text_run(tmp_path / "run"))
    assert [value for value, _ in report.highlights] == ["0.50", "0.50"]
    assert [section.title for section in report.sections] == [
        "Quality over steps",
        "Everything measured",
        "The paper's tables",
    ]
    table = report.sections[0].parts[1]
    assert table.rows == [
        ("student, single mask (ReDi)", "200.0 (4.20)", "50.0 (4.20)"),
        ("student, infinite masks (ReDi)", "100.0 (4.20)", "25.0 (4.20)"),
    ]
    page = report.write(tmp_path / "run").read_text()
    assert page.count("<details>") == page.count("</details>") == 1
    assert "Judge: j." in page
    assert all(f"Table {number}." in page for number in ROWS)
    assert not re.search(r"(src|href)=\"?http", page)  # no network
    assert "Table 14." not in (tmp_path / "run/report.md").read_text()


def of(rows: list[Row], experiment: str | None = None) -> Results:
    """Rows of a folder that holds nothing else, with a recipe if it is of an experiment."""
    recipe = load_recipe("sentences-cpu").model_copy(update={"experiment": experiment})
    return Results(Path("nowhere"), recipe if experiment else None, rows)


def test_ours_stands_beside_the_papers() -> None:
    rows = [row("imdm", 4, 90.0, 1.0, "sdtt+redi", "infinite-normal-8-1.0").model_copy(update={"metric": "gen_ppl"})]
    rows.append(rows[0].model_copy(update={"metric": "entropy", "value": 4.2}))
    first, second = paper_beside(of(rows, "lm1b"))[0].parts
    assert first.columns[-1] == "ours: student, infinite masks (SDTT + ReDi), generative perplexity"
    assert [cells[-1] for cells in first.rows] == ["–", "90.00", "–", "–"]
    assert second.title.startswith("Table 5.")
    assert paper_beside(of(rows, "elsewhere")) == []
    after_prompts = [rows[0].model_copy(update={"metric": metric}) for metric in ("cond_gen_ppl", "cond_mauve")]
    (third,) = paper_beside(of(after_prompts, "owt"))[0].parts
    assert third.title.startswith("Table 7.")
    assert third.columns[-1] == "ours: student, infinite masks (SDTT + ReDi), MAUVE after prompts"


def test_a_recipe_chooses_its_sections_and_one_file_adds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its order, before what every page ends with; what was not measured is named."""
    monkeypatch.setattr(sections, "_entries", dict(sections.items()))

    @sections.register("count")
    def count(results: Results) -> list[Section]:
        return [Section("How many", f"{len(results.rows)} rows.", highlights=[("8", "rows")])]

    chosen = {"title": "Mine", "lead": "Of my own.", "sections": ["count", "margins", "quality"]}
    report = build_report(text_run(tmp_path / "run", report=chosen))
    assert [section.title for section in report.sections] == [
        "How many",
        "Quality over steps",
        "Everything measured",
        "The paper's tables",
    ]
    assert report.title == "Mine"
    assert report.lead.startswith("Of my own. Left out")
    assert report.lead.endswith(": margins.")
    assert report.highlights[0] == ("8", "rows")


def test_a_section_that_nobody_registered_does_not_cost_the_page(tmp_path: Path) -> None:
    report = build_report(text_run(tmp_path / "run", report={"lead": "Mine.", "sections": ["cuont", "quality"]}))
    assert report.lead.startswith("Mine. There is no section 'cuont'; import what registers it, or take it out of ")
    assert "Left out" not in report.lead
    assert report.sections[0].title == "Quality over steps"


def test_what_a_page_shows_enters_no_hash_and_is_checked_before_any_work(tmp_path: Path) -> None:
    plain, other = load_recipe("match-cpu"), load_recipe("match-cpu", ["report={sections: [qualities], title: T}"])
    assert plain.digest() == other.digest()
    asked = ["reproduce", "match-cpu", "report={sections: [qualities]}", "--out", str(tmp_path / "run")]
    refused = CliRunner().invoke(app, asked)
    assert isinstance(refused.exception, UserError)
    assert "unknown report section 'qualities'" in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_seeds_are_averaged() -> None:
    rows = [row("imdm", 1, value, 3.0).model_copy(update={"seed": seed}) for seed, value in enumerate((10.0, 20.0))]
    assert curves(rows, "kl") == {
        "student, single mask (ReDi)": {1: (15.0, pytest.approx(5.0))}
    }  # how the seeds differ


def test_several_runs_make_one_page(tmp_path: Path) -> None:
    reports = {name: build_report(text_run(tmp_path / name)) for name in ("a", "b")}
    whole = combine(reports)
    titles = [section.title for section in whole.sections]
    assert titles.count("The paper's tables") == 1
    assert "a: Quality over steps" in titles
    assert "b: Quality over steps" in titles
    page = whole.write(tmp_path, tmp_path / "both.html")
    assert page.read_text().count("<img") == 4


def test_written_text_is_escaped_and_coloured() -> None:
    shown = Written("x:", [("<b>", -1), (" & ", 0), ("late", 3)], steps=4)
    assert '<span style="font-weight:600" title="given">&lt;b&gt;</span>' in shown.html()
    assert 'color:rgb(43,79,173)" title="step 1"' in shown.html()
    assert 'color:rgb(173,79,43)" title="step 4"' in shown.html()
    assert shown.markdown() == "> **x:** *<b>* & late"


def test_a_text_appears_step_by_step() -> None:
    strip = Strip("imdm", [("The", -1), (" <cat>", 1), (" sat", 0)], steps=2)
    assert [frames(steps) for steps in (2, 6, 16)] == [[0, 1, 2], [0, 1, 2, 4, 6], [0, 1, 2, 4, 8, 16]]
    assert strip.html().count("<s>") == 3
    assert "<s> &lt;cat&gt;</s><span> sat</span>" in strip.html()
    assert strip.markdown().splitlines()[3:6] == [
        "    0  The░░░░░░░░░░",
        "    1  The░░░░░░ sat",
        "    2  The <cat> sat",
    ]


def test_texts_stand_beside_one_another() -> None:
    both = Beside([Written("a:", [("x", 0)], 1), Written("b:", [("y", 0)], 1)])
    assert both.html().count("class=written") == 2
    assert both.markdown() == "> **a:** x\n>\n> **b:** y"


def test_the_frontier_needs_several_temperatures() -> None:
    def at(metric: str, value: float, temperature: float) -> Row:
        changes = {"metric": metric, "temperature": temperature}
        return row("imdm", 4, value, 1.0).model_copy(update=changes)

    rows = [at("gen_ppl", 90.0, 1.0), at("entropy", 4.0, 1.0)]
    assert frontier(of(rows)) == []
    rows += [at("gen_ppl", 60.0, 0.8), at("entropy", 3.8, 0.8)]
    (section,) = frontier(of(rows))
    assert "star" not in section.text
    assert section.text.endswith("needs the teacher at 4 temperatures or more, in one step count.")
    assert "0.8" in section.parts[0].parts[0].svg
    rows += [at("real_ppl", 50.0, 1.0), at("real_entropy", 4.1, 1.0)]
    assert "star" in frontier(of(rows))[0].text
    assert curves(rows, "gen_ppl") == {"student, single mask (ReDi)": {4: (90.0, 1.0)}}  # the paper's temperature alone


def test_real_text_that_was_cut_stands_beside_texts_that_were_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the note, among the other figures, and as the star of its own picture."""

    def at(metric: str, value: float, temperature: float, first: int | None) -> Row:
        changes = {"metric": metric, "temperature": temperature, "first": first}
        return row("imdm", 4, value, 1.0).model_copy(update=changes)

    rows = [
        at(metric, value + (first or 0), temperature, first)
        for first in (None, 8)
        for temperature in (0.8, 1.0)
        for metric, value in (("gen_ppl", 90.0), ("entropy", 3.0 + temperature))
    ]
    rows += [at("real_ppl", 50.0, 1.0, None), at("real_entropy", 4.1, 1.0, None)]
    rows += [at("real_ppl", 30.0, 1.0, 8), at("real_entropy", 2.1, 1.0, 8)]
    drawn = {}
    monkeypatch.setattr(plots, "frontier", lambda title, found, goal: drawn.setdefault(title, (found, goal)))
    monkeypatch.setattr(plots, "svg", str)
    assert [picture.caption for picture in frontier(of(rows))[0].parts[0].parts] == [
        "Perplexity over entropy in 4 steps",
        "Perplexity over entropy in 4 steps, first 8 tokens",
    ]
    assert [goal for _, goal in drawn.values()] == [(4.1, 50.0), (2.1, 30.0)]
    assert [[point[2] for points in found.values() for point in points] for found, _ in drawn.values()] == [
        [90.0, 90.0],
        [98.0, 98.0],
    ]
    note = step_table(rows).note
    assert re.search(r"same judge: 50\S*.*; 30\S*.*, first 8 tokens\.", note)
    figures = {(cells[0], cells[-1].split()[0]) for table in other_figures(rows) for cells in table.rows}
    assert figures == {
        ("perplexity of real text", "50.00"),
        ("perplexity of real text, first 8 tokens", "30.00"),
        ("entropy of real text (nats)", "4.1000"),
        ("entropy of real text (nats), first 8 tokens", "2.1000"),
    }


def test_what_steps_cost_is_drawn_with_the_bound() -> None:
    rows = [
        row("imdm", 4, value, 1.0).model_copy(update={"metric": metric})
        for metric, value in (("step_correlation", 5.0), ("step_error", 3.0), ("pair_error", 0.1), ("pair_bound", 0.2))
    ]
    (section,) = cost_of_steps(of(rows))
    assert "total correlation of the text" in section.parts[0].parts[0].svg
    assert "bound of Theorem 4.1" in section.parts[0].parts[1].svg
    assert cost_of_steps(of(rows[:1])) == []


def test_no_results_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no results.jsonl there"):
        build_report(tmp_path)


def test_the_hash_of_a_metrics_settings_is_shown_where_it_tells_rows_apart() -> None:
    one = row("imdm", 4, 0.5, 0.1, "redi").model_copy(update={"metric": "mauve", "settings": "abc"})
    other = row("imdm", 4, 4.2, 0.1, "redi").model_copy(update={"metric": "entropy"})
    assert "settings" not in all_results([one, other]).columns
    assert "settings" in all_results([one, other, one.model_copy(update={"settings": "def"})]).columns
