"""Ratios of perplexity over student seeds: by hand, and their intervals by what must hold."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from imdm.core.files import write_json
from imdm.evaluation import Row
from imdm.experiments import Recipe, load_recipe
from imdm.report import Report, Results, build_report
from imdm.report.ratios import interval, ratio_table, ratios
from imdm.report.text import curves, highlights, quality_by, several_masks, usual
from imdm.report.trained import overlap


def row(mask: str, seed: int, value: float, steps: int = 2, metric: str = "gen_ppl", **changes: object) -> Row:
    values = {
        "experiment": "e", "method": "redi", "model": "mdlm" if mask == "single" else "imdm", "mask": mask,
        "steps": steps, "evaluations": steps, "metric": metric, "value": value, "stderr": 0.0, "n": 8, "seed": seed,
        "sample_seed": seed, "split": None,
        "judge": "j" if metric == "gen_ppl" else None, "precision": "float32", "length": 8, "temperature": 1.0,
        "recipe_hash": "h", "time": "now",
    }  # fmt: skip
    return Row.parse(values | changes, "row")


SINGLE = "student, single mask (ReDi)"
ROWS = [
    row("single", 0, 100.0), row("infinite-uniform-2-1.0", 0, 50.0), row("single", 1, 80.0),
    row("infinite-uniform-2-1.0", 1, 60.0),
    row("single", 0, 4.0, metric="entropy"), row("infinite-uniform-2-1.0", 0, 4.1, metric="entropy"),
    row("infinite-uniform-2-1.0", 2, 1.0),  # nothing to compare with
    row("infinite-uniform-2-1.0", 0, 1.0, temperature=0.5), row("infinite-uniform-4-1.0", 0, 200.0),
]  # fmt: skip


def test_a_ratio_is_the_geometric_mean_over_seeds() -> None:
    first, second = ratios(ROWS)
    assert (first.mask, first.seeds, first.steps, first.judge) == ("infinite-uniform-2-1.0", 2, 2, "j")
    assert first.value == pytest.approx(exp((log(0.5) + log(0.75)) / 2))
    assert first.entropy == pytest.approx(0.1)
    assert 0.5 - 1e-9 <= first.low < first.value < first.high <= 0.75 + 1e-9
    assert (second.mask, second.seeds, second.value, second.entropy) == (
        "infinite-uniform-4-1.0",
        1,
        pytest.approx(2.0),
        None,
    )
    assert second.low == pytest.approx(2.0) == second.high


def test_intervals_grow_with_errors_and_shrink_with_seeds() -> None:
    nothing = torch.zeros(3, dtype=torch.float64)
    low, high = interval(nothing, torch.full((3,), 0.1, dtype=torch.float64))
    assert -low == pytest.approx(1.96 * 0.1 / 3**0.5, rel=0.1)
    assert high == pytest.approx(-low, rel=0.15)
    many = torch.linspace(-1, 1, 100, dtype=torch.float64)
    low, high = interval(many, torch.zeros(100, dtype=torch.float64))
    assert high - low == pytest.approx(2 * 1.96 * float(many.std(correction=0)) / 10, rel=0.1)


def test_the_table_and_the_page_tell_masks_and_judges_apart() -> None:
    table = ratio_table(ROWS)
    assert table is not None
    assert [cells[0] for cells in table.rows] == [
        "infinite masks, uniform noise, d = 2, scale 1",
        "infinite masks, uniform noise, d = 4, scale 1",
    ]  # one method: masks alone
    assert table.rows[0][1].startswith("0.612 (0.5")
    assert table.rows[0][1].endswith("[+0.10]")
    assert ratio_table(ROWS[:1]) is None
    assert set(curves(ROWS, "gen_ppl")) == {
        "single mask",
        "infinite masks, uniform noise, d = 2, scale 1",
        "infinite masks, uniform noise, d = 4, scale 1",
    }
    other = [row("single", 0, 7.0, judge="k"), row("infinite-uniform-2-1.0", 0, 7.7, judge="k")]
    (first, masks), (second,) = (quality_by(ROWS + other, judge, number, {"j"}) for number, judge in enumerate("jk"))
    assert first.title == "Quality over steps"
    assert first.text.endswith("Judge: j, a model that this run trained on the same text.")
    assert masks.title == "ReDi: masks compared"
    assert second.title == "Quality over steps, by k"
    assert second.text.endswith("Judge: k.")
    shown = [part.markdown() for part in second.parts if hasattr(part, "markdown")]
    assert "1.100 (1.100–1.100)" in "".join(shown)


def test_of_several_masks_the_one_of_most_students_stands_for_its_kind() -> None:
    masks = [
        row("single", 0, 9.0),
        row("infinite-uniform-4-1.0", 0, 5.0),
        row("infinite-uniform-2-1.0", 0, 4.0),
        row("infinite-uniform-2-1.0", 1, 4.0),
    ]
    assert {one.mask for one in usual(masks)} == {"single", "infinite-uniform-2-1.0"}
    assert {one.mask for one in usual(masks[:3])} == {"single", "infinite-uniform-4-1.0"}  # as many of each: the first
    assert curves(usual(masks), "gen_ppl").keys() == {SINGLE, "student, infinite masks (ReDi)"}
    assert several_masks(masks) == {"redi": masks}
    assert several_masks(usual(masks)) == {}
    assert usual([]) == []


def test_means_over_seeds_have_the_larger_error_and_real_text_its_own() -> None:
    same = [row("single", seed, 50.0, metric="real_ppl", stderr=2.0) for seed in (0, 1)]
    assert curves(same, "real_ppl") == {SINGLE: {2: (50.0, 2.0)}}
    near = [row("single", seed, 50.0 + seed, stderr=3.0) for seed in (0, 1)]
    assert curves(near, "gen_ppl")[SINGLE][2] == pytest.approx((50.5, (2 * 9.0) ** 0.5 / 2))
    far = [row("single", seed, 50.0 + 20 * seed, stderr=3.0) for seed in (0, 1)]
    assert curves(far, "gen_ppl")[SINGLE][2] == pytest.approx((60.0, 10.0))


def test_headlines_say_how_sure_they_are() -> None:
    (first, *_) = highlights(ROWS)
    assert first[0] == "0.61"
    assert first[1].startswith("(0.5")
    assert first[1].endswith("of the single mask's perplexity with infinite masks, ReDi, 2 steps")
    more = [
        row(mask, 0, value, method="sdtt+redi") for mask, value in (("single", 2.0), ("infinite-uniform-2-1.0", 1.0))
    ]
    assert [words for _, words in highlights([*more, *ROWS])] == [words for _, words in highlights(ROWS)]


def test_the_overlap_with_the_pairs_stands_beside_that_of_their_maker() -> None:
    """Rows are found by method, mask and seed, at the most steps that both were measured at."""
    recipe, infinite = load_recipe("grid"), "infinite-uniform-768-1.0"
    rows = [
        row("single", 0, 0.001, 8, "pair_overlap", method="teacher"),
        row("single", 0, 0.002, 16, "pair_overlap", method="teacher"),
        row("single", 1, 0.01, 16, "pair_overlap"),
        row(infinite, 0, 0.02, 16, "pair_overlap"),
        row(infinite, 1, 0.03, 16, "pair_overlap"),
        row(infinite, 1, 0.04, 32, "pair_overlap"),
        row(infinite, 1, 0.05, 16, "pair_overlap", temperature=0.5),
        row("single", 0, 0.07, 32, "pair_overlap", method="redi, 4 × pairs"),
    ]
    assert overlap(recipe, rows, "imdm-redi-1") == "3.00% (0.20%)"
    assert overlap(recipe, rows, "mdlm-redi-1") == "1.00% (0.20%)"
    assert overlap(recipe, rows, "imdm-redi-2") == ""  # not measured
    assert overlap(recipe, rows, "mdlm-redi-more") == "7.00%"  # the teacher was measured on other pairs


def page_of(run: Path, rows: list[Row]) -> Report:
    """The page of these rows, with the recipe in the folder if there is one."""
    (run / "results.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in rows))
    return build_report(run)


def test_what_settings_were_chosen_on_is_shown_apart(tmp_path: Path) -> None:
    """By the seed of its samples: the methods are called the same."""
    tried = {"models": {"mdlm-redi": "redi", "imdm-redi": "redi"}, "metrics": ["gen_ppl"], "seed": 1}
    write_json(tmp_path / "recipe.json", _with_choice(tried).resolved())
    infinite = "infinite-uniform-768-1.0"
    mine = [row("single", 0, 100.0), row(infinite, 0, 50.0)]
    rows = [*mine, *(one.model_copy(update={"sample_seed": 1, "value": one.value + 7}) for one in mine)]
    page = page_of(tmp_path, rows)
    assert [value for value, _ in page.highlights] == ["0.50"]
    said = {section.title: "".join(part.markdown() for part in section.parts) for section in page.sections}
    assert "100.0" in said["Quality over steps"]
    assert "107.0" not in said["Quality over steps"]
    assert "107.0" in said["What settings were chosen on"]
    (tmp_path / "seed-1").mkdir()  # a run on that seed reports it, unless it is only ever chosen on
    assert Results(tmp_path, _with_choice(tried), rows).tried == []
    alone = _with_choice(tried | {"models": {"mdlm-redi": "tried"}})
    named = [one.model_copy(update={"method": "tried"}) for one in rows]
    results = Results(tmp_path, alone, named)
    assert (results.reported, results.tried) == (named[:2], named[2:])


def _with_choice(choice: dict[str, Any]) -> Recipe:
    values = load_recipe("grid").resolved()
    values["stages"]["choose"] |= choice
    values["data"] = {"kind": "prepared", "path": "nowhere"}
    return Recipe.parse(values)
