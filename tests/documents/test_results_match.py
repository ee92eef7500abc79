"""What docs/results.md says of `match`, and of every method at equal entropy, against the recorded rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import fmean

import pytest

from imdm.core.files import read_json
from imdm.evaluation import Row, read
from imdm.experiments import Recipe, load_recipe
from imdm.report.equal import Multiple, equal_entropy
from tests.documents.test_results import BARS, DOCUMENT, INFINITE, METHODS, table

ROOT = Path(__file__).parents[2]
STEPS = (1, 2, 4, 8, 16, 32)
JUDGES = {"sentences-judge": "sentences-judge", "SmolLM2": "smollm2 (bf16)"}
TO_REACH, AIM = {1: 8, 2: 3.0, 4: 1.6, 8: 1.1, 16: 0.97}, {1: 4, 2: 1.8, 4: 1.3, 8: 1.05, 16: 0.95}
STUDENT = ("match", INFINITE)
METHOD = {  # as the document calls them: where the rows are, method and mask
    "teacher": ("grid", "teacher", "single"),
    "ReDi, single (3)": ("grid", "redi", "single"),
    "ReDi, infinite (3)": ("grid", "redi", INFINITE),
    "SDTT+ReDi, single (3)": ("grid", "sdtt+redi", "single"),
    "SDTT+ReDi, infinite (3)": ("grid", "sdtt+redi", INFINITE),
    "SDTT, single": ("grid", "sdtt", "single"),
    "SDTT, infinite": ("grid", "sdtt", INFINITE),
    "Di4C, 2 rounds after SDTT": ("grid", "di4c", "single+mixture"),
    "match, single (3)": ("match", "match", "single"),
    "match, infinite (3)": ("match", *STUDENT),
}
TOLD_APART = {
    "teacher": ("teacher", "single"),
    "SDTT, single": ("sdtt", "single"),
    "SDTT, infinite": ("sdtt", INFINITE),
    "SDTT+ReDi, single": ("sdtt+redi", "single"),
    "SDTT+ReDi, infinite": ("sdtt+redi", INFINITE),
    "match, single (3)": ("match", "single"),
    "match, infinite (3)": STUDENT,
}
PARTS = {
    "`kl`, from SDTT": ("match, 1200 steps", INFINITE),
    "`fkl`": ("match by fkl, 1200 steps", INFINITE),
    "`ipf`": ("match by ipf, 1200 steps", INFINITE),
    "`soft`": ("match by soft, 1200 steps", INFINITE),
    "`kl`, from the teacher": ("match, cold, 1200 steps", INFINITE),
    "… single mask": ("match, cold, 1200 steps", "single"),
    "… noise of 1,536": ("match, cold, 1200 steps", "infinite-uniform-1536-1.0"),
    "… scale 2": ("match, cold, 1200 steps", "infinite-uniform-768-2.0"),
    "… normal noise": ("match, cold, 1200 steps", "infinite-normal-768-1.0"),
}


@cache
def reported(folder: str) -> Sequence[Row]:
    """The rows of a run, without what settings were chosen on."""
    return [row for row in read(ROOT / "results" / folder / "results.jsonl") if row.sample_seed == 0]


@cache
def teachers() -> Sequence[Row]:
    return [row for row in reported("match") if (row.method, row.steps) == ("teacher", 1024)]


@cache
def found(
    folder: str, judge: str | None, metric: str = "gen_ppl", envelope: bool = False
) -> dict[tuple[str, str, int], Multiple]:
    """Every figure beside the teacher's at equal entropy, by method, mask and steps."""
    rows = [row for row in reported(folder) if row.judge in (None, judge)]
    assert {row.noise for row in rows if (row.method, row.metric) == ("match", metric)} <= {"keep"}
    multiples = equal_entropy(rows, metric=metric, against=teachers(), envelope=envelope)
    named = {(one.method.split(", noise")[0], one.mask, one.steps): one for one in multiples}
    assert len(named) == len(multiples)  # one noise policy each
    return named


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 30 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(one: Multiple) -> str:
    return f"{number(one.value)} ({number(one.low)}–{number(one.high)})"


def difference(one: Multiple, digits: int, times: int = 1) -> str:
    value, low, high = (f"{times * x:+.{digits}f}" for x in (one.value, one.low, one.high))
    return f"{value} ({low} to {high})"


def told(lead: str, width: int, heading: str = "", corner: str = "") -> dict[str, list[str]]:
    """A table's rows by their first cell, without emphasis."""
    return {
        name: [text.replace("*", "") for text in cells[:width]]
        for name, *cells in table(DOCUMENT, heading, lead, corner).rows
    }


@pytest.mark.parametrize(
    ("lead", "judge"), [("Gen. PPL as a multiple", "sentences-judge"), ("By SmolLM2, which has read", "SmolLM2")]
)
def test_every_method_at_equal_entropy(lead: str, judge: str) -> None:
    shown = told(lead, len(STEPS), "What should I use to write in N steps?")
    few = {"ReDi, single (3)", "ReDi, infinite (3)", "SDTT+ReDi, single (3)", "SDTT, single"}
    assert set(shown) == set(METHOD) - (few if judge == "SmolLM2" else set())
    for name, cells in shown.items():
        folder, *who = METHOD[name]
        ours = [found(folder, JUDGES[judge])[(*who, steps)] for steps in STEPS]
        assert cells == [cell(one) for one in ours]
        assert {one.seeds for one in ours} == {3 if name.endswith("(3)") else 1}


def seconds(folder: str, *stages: str) -> float:
    files = [ROOT / "results" / folder / "seed-0" / stage / "done.json" for stage in stages]
    return float(sum(read_json(file, "done")["seconds"] for file in files))


def test_the_minutes_are_those_of_the_stages() -> None:
    shown = told("Gen. PPL as a multiple", 7, "What should I use to write in N steps?")
    before = {"redi": ["pairs"], "sdtt-redi": ["mdlm-sdtt", "sdtt-pairs"]}
    wanted: dict[str, list[float]] = {"teacher": []}
    wanted["Di4C, 2 rounds after SDTT"] = [seconds("grid", "mdlm-sdtt", "mdlm-di4c")]
    for mask, model in {"single": "mdlm", "infinite": "imdm"}.items():
        wanted[f"SDTT, {mask}"] = [seconds("grid", f"{model}-sdtt")]
        for method, made in (("ReDi", "redi"), ("SDTT+ReDi", "sdtt-redi")):
            each = [seconds("grid", *before[made], f"{model}-{made}{seed}") for seed in ("", "-1", "-2")]
            wanted[f"{method}, {mask} (3)"] = each
        each = [seconds("match", f"{model}-sdtt", f"{model}-match{seed}") for seed in ("", "-1", "-2")]
        wanted[f"match, {mask} (3)"] = each
    for name, each in wanted.items():
        ends = list(dict.fromkeys(f"{end / 60:.1f}" for end in (min(each), max(each)))) if each else []
        assert shown[name][6] == "–".join(ends), name


def test_the_readmes_table() -> None:
    short = table(ROOT / "README.md", corner="times the teacher's at equal entropy")
    names = {
        "teacher": "teacher",
        "SDTT+ReDi, single mask": "SDTT+ReDi, single (3)",
        "SDTT+ReDi, infinite masks": "SDTT+ReDi, infinite (3)",
        "Di4C": "Di4C, 2 rounds after SDTT",
        "`match`, single mask": "match, single (3)",
        "`match`, infinite masks": "match, infinite (3)",
    }
    assert [cells[0] for cells in short.rows] == list(names)
    by_other: dict[str, list[float]] = {}
    for name, *cells in short.rows:
        folder, *who = METHOD[names[name]]
        multiples = {
            judge: [found(folder, judge)[(*who, steps)].value for steps in STEPS[:5]] for judge in JUDGES.values()
        }
        assert [text.replace("*", "") for text in cells] == [number(value) for value in multiples["sentences-judge"]]
        by_other[name] = multiples["smollm2 (bf16)"]
    ours = by_other.pop("`match`, infinite masks")
    best = [min(column) for column in zip(*by_other.values(), strict=True)]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for line, words in ((ours, "the last row is {}"), (best, "the best of the others {}")):
        *first, last = map(number, line)
        assert words.format(f"{', '.join(first)} and {last}") in text


def test_what_was_to_be_reached_is_reached_and_the_aim_is_met_at_one_step_alone() -> None:
    bars = told("", 5, corner="set beforehand")
    assert bars["to reach"] == [f"{bar}" for bar in TO_REACH.values()]
    assert bars["aim"] == [f"{bar}" for bar in AIM.values()]
    ours = {steps: found("match", "sentences-judge")[(*STUDENT, steps)] for steps in TO_REACH}
    assert all(ours[steps].value <= bar and ours[steps].seeds == 3 for steps, bar in TO_REACH.items())
    assert [steps for steps, bar in TO_REACH.items() if ours[steps].high > bar] == [8, 16]
    assert [steps for steps, bar in AIM.items() if ours[steps].value <= bar] == [1]
    assert ours[16].value == pytest.approx(0.95 * 1.005, rel=1e-3)


def test_no_rival_is_below_by_either_judge() -> None:
    for judge in JUDGES.values():
        for envelope in (False, True):
            ours = found("match", judge, envelope=envelope)
            rivals = found("grid", judge, envelope=envelope) | {k: v for k, v in ours.items() if k[:2] != STUDENT}
            for (method, _, steps), rival in rivals.items():
                if steps in STEPS and "1200" not in method:
                    assert ours[(*STUDENT, steps)].value < rival.value
    last, di4c = found("match", "sentences-judge")[(*STUDENT, 32)], found("grid", "sentences-judge")
    assert last.high > di4c["di4c", "single+mixture", 32].low  # a tie
    better = {
        (name, steps)
        for name, (folder, *who) in METHOD.items()
        for steps in STEPS
        if found(folder, "smollm2 (bf16)")[(*who, steps)].value
        < found("grid", "smollm2 (bf16)")["teacher", "single", steps].value
    }
    di4c_from_4 = {("Di4C, 2 rounds after SDTT", steps) for steps in (4, 8, 16, 32)}
    assert better == {("match, infinite (3)", steps) for steps in STEPS} | di4c_from_4


def test_the_lower_envelope() -> None:
    shown = told("lower envelope of both", len(STEPS))
    for name, cells in shown.items():
        judge, method = name.split(": ")
        folder, *who = METHOD[{"Di4C": "Di4C, 2 rounds after SDTT"}.get(method, method)]
        assert cells == [cell(found(folder, JUDGES[judge], envelope=True)[(*who, steps)]) for steps in STEPS]
    assert len(shown) == 6
    ours = found("match", "sentences-judge", envelope=True)
    assert [steps for steps, bar in TO_REACH.items() if ours[(*STUDENT, steps)].value > bar] == [4, 8, 16]


def values(metric: str, method: str, mask: str, steps: int, judge: str | None = None) -> list[float]:
    return [
        row.value
        for row in reported("match")
        if (row.metric, row.method, row.mask, row.steps, row.judge) == (metric, method, mask, steps, judge)
    ]


def test_the_classifier() -> None:
    shown = told("accuracy of a classifier", len(STEPS))
    assert list(shown) == list(TOLD_APART)
    known = {
        name: {steps: 100 * fmean(values("told_apart", *who, steps)) for steps in STEPS}
        for name, who in TOLD_APART.items()
    }
    for name, cells in shown.items():
        assert cells == [f"{known[name][steps]:.1f}%" for steps in STEPS]
    ours = known.pop("match, infinite (3)")
    ahead = {steps: min(rival[steps] for rival in known.values()) - ours[steps] for steps in STEPS}
    assert [f"{ahead[steps]:.1f}" for steps in (1, 2, 4)] == ["19.3", "14.4", "5.5"]
    assert all(ahead[steps] < 0 for steps in (8, 16, 32))
    (real,) = {row.value for row in reported("match") if row.metric == "real_told_apart"}
    assert f"{real:.1%}" == "72.1%"


def test_variety_beside_the_teachers_at_the_same_entropy() -> None:
    shown = told("in 1,024 steps at the temperature that has the same entropy", len(STEPS))
    ours = {
        metric: [found("match", None, metric)[(*STUDENT, steps)] for steps in STEPS]
        for metric in ("pooled_entropy", "shared_4grams", "novelty", "told_apart")
    }
    assert shown == {
        "pooled entropy, difference": [difference(one, 3) for one in ours["pooled_entropy"]],
        "shared 4-grams, ratio": [cell(one) for one in ours["shared_4grams"]],
        "novelty, difference in points": [difference(one, 1, 100) for one in ours["novelty"]],
        "told apart, difference in points": [difference(one, 1, 100) for one in ours["told_apart"]],
    }
    assert all(abs(one.value) < 0.1 for one in ours["pooled_entropy"])
    assert [one.steps for one in ours["shared_4grams"] if one.value > 1.3] == [32]
    assert [one.steps for one in ours["novelty"] if abs(one.value) > 0.01] == [1, 2]


def test_the_frontier() -> None:
    shown = told("What every ratio on this page is measured by", 7)
    points = sorted({(row.top_p, row.temperature) for row in teachers()}, key=lambda how: (how[0] < 1, how))
    assert len(shown) == len(points) == 9
    for top_p, temperature in points:
        at = {
            (row.metric, row.judge): row
            for row in teachers()
            if (row.top_p, row.temperature, row.noise) == (top_p, temperature, "posterior")
        }
        judged = [at["gen_ppl", judge] for judge in JUDGES.values()]
        shares = [at[metric, None].value for metric in ("shared_4grams", "told_apart", "novelty")]
        assert shown[f"{temperature:g}" if top_p == 1 else f"1, top-p {top_p:g}"] == [
            f"{at['entropy', None].value:.3f}",
            *(f"{row.value:.1f} ± {row.stderr:.1f}" for row in judged),
            f"{at['pooled_entropy', None].value:.3f}",
            *(f"{share:.1%}" for share in shares),
        ]
        assert at["gen_ppl", "sentences-judge"].n == 1024


def test_parts_of_the_way() -> None:
    shown = told("One seed, 1,200 steps", 6)
    assert list(shown) == list(PARTS)
    for name, who in PARTS.items():
        pooled = [found("match", None, "pooled_entropy")[(*who, steps)].value for steps in (1, 8)]
        ratios = [cell(found("match", "sentences-judge")[(*who, steps)]) for steps in STEPS[:5]]
        assert shown[name] == [*ratios, ", ".join(f"{value:+.2f}" for value in pooled)]


def test_perplexities_and_what_noise_was_chosen_by() -> None:
    shown = told("The perplexities themselves", len(STEPS))
    for name, cells in shown.items():
        who = METHOD[name][1:]
        assert cells == [
            f"{fmean(values('gen_ppl', *who, steps, 'sentences-judge')):,.0f} "
            f"({fmean(values('entropy', *who, steps)):.2f})"
            for steps in STEPS
        ]
    tried = [row for row in read(ROOT / "results" / "match" / "results.jsonl") if row.sample_seed == 1]
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for noise, words in (("keep", "16 steps {}; drawn again"), ("posterior", "drawn again {}). Rate")):
        rows = [row for row in tried if row.noise == noise and row.mask == INFINITE]
        some = {one.steps: one.value for one in equal_entropy(rows, against=teachers())}
        assert words.format(", ".join(f"{some[steps]:.2f}" for steps in (2, 4, 8, 16))) in text


def test_infinite_over_single_masks_under_the_papers_methods() -> None:
    shown = table(DOCUMENT, "At equal entropy", "Infinite over single in this measure")
    assert [int(cells[0]) for cells in shown.rows] == list(STEPS)
    for method, column in METHODS.items():
        by_seed = []
        for seed in range(1 if method == "sdtt" else 3):
            rows = [row for row in reported("grid") if (row.method, row.seed) == (method, seed)]
            rows = [row for row in rows if row.judge in (None, "sentences-judge") and row.mask in (INFINITE, "single")]
            by_seed.append({(one.mask, one.steps): one.value for one in equal_entropy(rows, against=teachers())})
        for cells in shown.rows:
            steps = int(cells[0])
            ratio = exp(fmean(log(each[INFINITE, steps] / each["single", steps]) for each in by_seed))
            assert cells[shown.column(column)] == f"{ratio:.2f}"
            assert ratio <= BARS.get(method, {}).get(steps, 1.0)


def test_the_rows_are_of_the_recipe_that_ships() -> None:
    """But for the stage `rivals`, which measured two students that shipped, and for the teacher, which shipped too, its
    weights rounded to 5 to 7 bits. Now the recipe trains it, as the grid did: the same stage on the same rows, with the
    same model and seed."""
    kept = Recipe.parse(read_json(ROOT / "results" / "match" / "recipe.json", "recipe"), "recipe")
    ours, grid = load_recipe("match"), load_recipe("grid")
    assert {row.recipe_hash for row in reported("match")} == {kept.digest()}
    first, *others = ours.stages
    assert others == [name for name in kept.stages if name != "rivals"]
    assert all(ours.stages[name] == kept.stages[name] for name in others)
    assert (ours.name, ours.experiment, ours.seed) == (kept.name, kept.experiment, kept.seed)
    assert first == "sentences-teacher"
    assert ours.stages[first] == grid.stages["teacher"]
    assert (ours.data, ours.model, ours.seed) == (grid.data, grid.model, grid.seed)
