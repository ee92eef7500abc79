"""What docs/results.md and the cards of the shipped models say of whole stories, against the recorded rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import imdm
from imdm.core.files import read_json, read_lines
from imdm.evaluation import Row, read
from imdm.experiments import Recipe, load_recipe
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.report.equal import Multiple, equal_entropy
from imdm.shipped import HERE
from tests.documents.test_results import DOCUMENT, INFINITE, table
from tests.documents.test_results_match import cell, difference

STORIES = Path(__file__).parents[2] / "results" / "stories"
STEPS = (1, 2, 4, 8, 16, 32)
SOURCE, JUDGE = "stories-source (bf16)", "stories-judge"
STUDENT, TEACHER = ("match", INFINITE), ("teacher", "single")
METHODS = {
    "teacher": TEACHER,
    "SDTT, single": ("sdtt", "single"),
    "SDTT, infinite": ("sdtt", INFINITE),
    "Di4C, 2 rounds after SDTT": ("di4c", "single+mixture"),
    "match, infinite": STUDENT,
}


@cache
def reported() -> Sequence[Row]:
    return [row for row in read(STORIES / "results.jsonl") if row.sample_seed == 0]


def one(metric: str, method: str, mask: str, steps: int, judge: str | None = None, **how: float) -> Row:
    how = {"temperature": 1.0, "top_p": 1.0} | how
    wanted = {"metric": metric, "method": method, "mask": mask, "steps": steps, **how}
    (found,) = (
        row
        for row in reported()
        if all(getattr(row, name) == value for name, value in wanted.items()) and judge in (None, row.judge)
    )
    return found


def real(metric: str, judge: str | None = None) -> Row:
    return next(row for row in reported() if row.metric == f"real_{metric}" and judge in (None, row.judge))


@cache
def found(judge: str | None, metric: str = "gen_ppl") -> dict[tuple[str, str, int], Multiple]:
    """Every figure beside the teacher's in 256 steps at equal entropy, by method, mask and steps."""
    rows = [row for row in reported() if row.judge in (None, judge)]
    theirs = [row for row in rows if (row.method, row.steps) == ("teacher", 256)]
    return {
        (each.method.split(", noise")[0], each.mask, each.steps): each
        for each in equal_entropy(rows, metric=metric, against=theirs)
    }


ORDERED = (1, 2, 4, 8, 16)


@cache
def in_spread() -> dict[tuple[str, str | None, str, int], Row]:
    """The rows of samples in spread order, by metric, judge, method and steps. The judges ran in float32; they are
    called as in the run."""
    found = [row for row in read(STORIES / "spread.jsonl") if row.order == "spread"]
    named = {"stories-source": SOURCE, JUDGE: JUDGE, None: None}
    return {(row.metric, named[row.judge], row.method, row.steps): row for row in found}


@cache
def multiples(judge: str) -> dict[int, Multiple]:
    """The student in spread order beside the teacher's frontier, by steps."""
    ours = [row.model_copy(update={"judge": judge_}) for (_, judge_, *_), row in in_spread().items()]
    theirs = [row for row in reported() if (row.method, row.steps) == ("teacher", 256) and row.judge in (None, judge)]
    ours = [row for row in ours if row.method == "match" and row.judge in (None, judge)]
    return {each.steps: each for each in equal_entropy(ours, against=theirs)}


def test_stories_in_spread_order() -> None:
    def cells(who: tuple[str, str]) -> list[str]:
        pairs = [(one("gen_ppl", *who, n, SOURCE).value, one("entropy", *who, n).value) for n in ORDERED]
        return [f"{plain(ppl)} ({entropy:.2f})" for ppl, entropy in pairs]

    def spread(method: str) -> list[str]:
        rows = in_spread()
        pairs = [(rows.get(("gen_ppl", SOURCE, method, n)), rows.get(("entropy", None, method, n))) for n in ORDERED]
        return [f"{plain(ppl.value)} ({entropy.value:.2f})" if ppl and entropy else "" for ppl, entropy in pairs]

    ours = multiples(SOURCE)
    assert told("source, entropy in brackets, and the multiple") == {
        "teacher, random": cells(TEACHER),
        "teacher, spread": spread("teacher"),
        "match, infinite, random": cells(STUDENT),
        "match, infinite, spread": spread("match"),
        "multiple, random": [cell(found(SOURCE)[(*STUDENT, n)]) for n in ORDERED],
        "multiple, spread": [cell(ours[n]) for n in ORDERED],
    }
    for steps, bar, aim in ((2, 3.0, 2.0), (4, 1.6, 1.3), (8, 1.15, 1.0)):
        assert ours[steps].high < bar, "met, and so is the upper end of the interval"
        assert ours[steps].value <= aim
    readme = " ".join((DOCUMENT.parents[1] / "README.md").read_text(encoding="utf-8").split())
    two, four, eight = (f"{ours[steps].value:.2f}" for steps in (2, 4, 8))
    assert f"in 2, 4 and 8 steps has {two}, {four} and {eight} times the perplexity that its" in readme
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for metric, judge, form in (
        ("known_words", None, "{:.2%}"),
        ("coherence", SOURCE, "{:.3f}"),
        ("novelty", None, "{:.1%}"),
    ):
        few, more = (form.format(in_spread()[metric, judge, "match", steps].value) for steps in (4, 8))
        assert f"{few} and {more}" in text, metric
    plainly = [row for row in read(STORIES / "spread.jsonl") if (row.order, row.metric) == ("random", "gen_ppl")]
    (again,) = (row for row in plainly if row.judge == "stories-source")
    assert f"{again.value:.2f} ± {again.stderr:.2f}" in text  # the shipped weights in float32, in random order


STUDENTS = STORIES.parent / "stories-students"


@cache
def students(metric: str, judge: str | None, seed: int | None = None) -> dict[tuple[str, int], Multiple]:
    """Students of the teacher that ships beside that teacher at equal entropy, by mask and steps."""
    rows = [row for row in read(STUDENTS / "results.jsonl") if row.judge in (None, judge)]
    theirs = [row for row in rows if (row.method, row.steps) == ("teacher", 256)]
    ours = [row for row in rows if row.method == "match" and seed in (None, row.seed)]
    return {(each.mask, each.steps): each for each in equal_entropy(ours, metric=metric, against=theirs)}


def marked_end(one: Multiple) -> str:
    return cell(one) + (" †" if one.end else "")


def test_three_students_and_a_single_mask() -> None:
    def cells(judge: str, mask: str, seed: int | None = None) -> list[str]:
        return [marked_end(students("gen_ppl", judge, seed)[mask, steps]) for steps in ORDERED]

    each = {f"student {seed}": cells(SOURCE, INFINITE, seed) for seed in range(3)}
    both = {judge: {"match, single": cells(judge, "single")} for judge in (SOURCE, JUDGE)}
    for judge, rows in both.items():
        rows["match, infinite (3)"] = cells(judge, INFINITE)
    assert told("what that teacher has in 256 steps at the same entropy, by the source") == both[SOURCE] | each
    assert told("By `stories-judge`:") == both[JUDGE]
    for judge in (SOURCE, JUDGE):
        for steps, bar, aim in ((2, 3.0, 2.0), (4, 1.6, 1.3), (8, 1.15, 1.0)):
            found = [students("gen_ppl", judge, seed)[INFINITE, steps] for seed in range(3)]
            assert all(one.value <= aim and one.high < bar for one in found)
            assert (students("gen_ppl", judge)["single", steps].value <= bar) == (steps == 8)
    found = students("gen_ppl", SOURCE)
    times = [found["single", steps].value / found[INFINITE, steps].value for steps in (1, 2, 4, 8)]
    assert [f"{value:.1f}" for value in times] == ["10.1", "2.9", "1.6", "1.3"]
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert "ten times their multiple at 1 step, 2.9 times at 2, 1.6 times at 4, and is a third above them at 8" in text
    ours = multiples(SOURCE)
    values = [f"{ours[steps].value:.2f}" for steps in ORDERED]
    assert f"student that ships ({', '.join(values[:-1])} and {values[-1]} in spread order)" in text
    assert all(found[INFINITE, steps].value < ours[steps].value for steps in ORDERED)
    theirs = [row for row in reported() if (row.method, row.steps) == ("teacher", 256) and row.judge in (None, SOURCE)]
    rows = [row for row in read(STUDENTS / "results.jsonl") if row.method == "match" and row.judge in (None, SOURCE)]
    again = {one.steps: one.value for one in equal_entropy(rows, against=theirs) if one.mask == INFINITE}
    values = [f"{again[steps]:.2f}" for steps in ORDERED]
    assert f"by that student's frontier the three have {', '.join(values[:-1])} and {values[-1]}." in text
    judged = students("gen_ppl", JUDGE, 0)[INFINITE, 2]
    assert f"by `stories-judge` ({judged.value:.2f}, up to {judged.high:.2f})" in text


def test_figures_of_the_three_students() -> None:
    rows = [row for row in read(STUDENTS / "results.jsonl") if row.judge in (None, SOURCE)]

    def value(metric: str, mask: str, seed: int, steps: int) -> float:
        wanted = ("match", metric, mask, seed, steps)
        (row,) = (row for row in rows if (row.method, row.metric, row.mask, row.seed, row.steps) == wanted)
        return row.value

    def figures(mask: str, seed: int) -> list[str]:
        pairs = [(value("gen_ppl", mask, seed, n), value("entropy", mask, seed, n)) for n in ORDERED]
        return [f"{plain(ppl)} ({entropy:.2f})" for ppl, entropy in pairs]

    def pooled(mask: str, seed: int) -> list[float]:
        return [students("pooled_entropy", None, seed)[mask, n].value for n in ORDERED]

    def shared(mask: str) -> list[str]:
        return [f"{students('shared_4grams', None)[mask, n].value:.2f}" for n in ORDERED]

    wanted = {"match, single": figures("single", 0)}
    wanted |= {f"student {seed}": figures(INFINITE, seed) for seed in range(3)}
    whose = {"single": ("single", 0)} | {f"student {seed}": (INFINITE, seed) for seed in range(3)}
    wanted |= {f"pooled entropy, {name}": [f"{x:.3f}" for x in pooled(*who)] for name, who in whose.items()}
    wanted |= {"shared 4-grams, single": shared("single"), "shared 4-grams, infinite (3)": shared(INFINITE)}
    assert told("The figures behind them, by the source") == wanted
    within = {seed: [n for n, x in zip(ORDERED, pooled(INFINITE, seed), strict=True) if x >= -0.1] for seed in range(3)}
    assert within == {0: [], 1: [4, 8, 16], 2: [4, 8, 16]}
    assert max(students("shared_4grams", None)[mask, n].value for mask in ("single", INFINITE) for n in ORDERED) < 1.3
    (warm,) = (
        row for row in rows if (row.metric, row.judge, row.temperature) == ("gen_ppl", SOURCE, 1.0) and row.steps == 256
    )
    (entropy,) = (row for row in rows if (row.metric, row.temperature, row.steps) == ("entropy", 1.0, 256))
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"has a perplexity of {warm.value:.2f} by the source and an entropy of {entropy.value:.2f}" in text


def test_sense_and_words_of_a_student() -> None:
    rows = {(row.metric, row.steps): row for row in read(STUDENTS / "texts.jsonl")}
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for metric, form, words in (
        ("known_words", "{:.2%}", "of words known, coherence"),
        ("coherence", "{:.3f}", "(the unrounded teacher in 256 steps"),
        ("novelty", "{:.1%}", "of 6-grams new."),
    ):
        few, more = (form.format(rows[metric, steps].value) for steps in (4, 8))
        assert f"{few} and {more} {words}" in text
    assert rows["known_words", 8].value > 0.996
    assert rows["coherence", 8].value > 0.8 * one("coherence", *TEACHER, 256).value
    assert rows["unfinished", 8].value == 0


def test_which_weights_of_the_students_were_kept() -> None:
    folder = STUDENTS / "seed-0"
    looks = {
        name: [row for row in read_lines(folder / name / "history.jsonl") if "score" in row]
        for name in ("imdm-match", "imdm-match-1", "imdm-match-2", "mdlm-match")
    }
    best = [min(rows, key=lambda row: row["score"])["step"] for rows in looks.values()]
    assert best == [2500, 3750, 3750, 3750]
    falls = [f"{rows[1]['pooled_lacking']:.3f} to {rows[2]['pooled_lacking']:.3f}" for rows in looks.values()]
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"{falls[0]}, {falls[1]} and {falls[2]} for students 0, 1 and 2, {falls[3]} for the single mask" in text


def test_the_students_recipe_is_the_one_that_was_run() -> None:
    """With the source as second judge, and for whole texts, which the package does not have."""
    kept = Recipe.parse(read_json(STUDENTS / "recipe.json", "recipe"), "recipe")
    ours = load_recipe("stories-students", ["data={kind: prepared, path: rows}"])
    rows = read(STUDENTS / "results.jsonl")
    assert {row.recipe_hash for row in rows} == {kept.digest()}
    assert {(row.method, row.steps, row.order) for row in rows} == {
        ("teacher", 256, "random"),
        *(("match", steps, "spread") for steps in ORDERED),
    }
    assert {row.metric for row in rows if row.method == "match"} == set(kept.stages["measure"].metrics)
    assert list(kept.stages) == list(ours.stages)
    for name, stage in kept.stages.items():
        if stage.kind == "evaluate" and stage.judge == "stories-source":
            judged = {"judge": ours.stages[name].judge, "judge_precision": ours.stages[name].judge_precision}
            stage = stage.model_copy(update=judged)
        assert stage == ours.stages[name]


def told(lead: str) -> dict[str, list[str]]:
    """The rows of the table below a paragraph with these words, by their first cell, without emphasis."""
    return {name: [text.replace("*", "") for text in cells] for name, *cells in table(DOCUMENT, lead=lead).rows}


def plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@pytest.mark.parametrize(
    ("lead", "judge"), [("Gen. PPL by the source as a multiple", SOURCE), ("By `stories-judge`, which ships", JUDGE)]
)
def test_stories_at_equal_entropy(lead: str, judge: str) -> None:
    theirs = [row for row in reported() if (row.metric, row.method, row.steps) == ("entropy", "teacher", 256)]
    warm = [row.value for row in theirs if row.top_p == 1]

    def marked(who: tuple[str, str], steps: int) -> str:
        inside = min(warm) <= one("entropy", *who, steps).value <= max(warm)
        return cell(found(judge)[(*who, steps)]) + ("" if inside else " †")

    assert told(lead) == {name: [marked(who, steps) for steps in STEPS] for name, who in METHODS.items()}


def test_what_was_to_be_reached() -> None:
    ours = {steps: found(SOURCE)[(*STUDENT, steps)] for steps in STEPS}
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    said = "**the first is met at 2 steps, missed by 4% at 4 and by 2% at 8**, with both bounds inside the intervals"
    assert said in text
    assert ours[2].value <= 3.0
    for steps, bar, missed in ((4, 1.6, 4), (8, 1.15, 2)):
        assert round(100 * (ours[steps].value / bar - 1)) == missed
        assert ours[steps].low < bar < ours[steps].high
    for steps, aim in ((2, 2.0), (4, 1.3), (8, 1.0)):
        assert ours[steps].low > aim  # missed
    assert ours[16].value < 1


def test_figures_of_stories() -> None:
    wanted = {}
    for name, who in METHODS.items():
        steps = (*STEPS, 256) if name == "teacher" else STEPS
        pairs = [(one("gen_ppl", *who, n, SOURCE).value, one("entropy", *who, n).value) for n in steps]
        wanted[name] = [f"{plain(ppl)} ({entropy:.2f})" for ppl, entropy in pairs] + [""] * (7 - len(steps))
    assert told("The figures themselves, by the source") == wanted
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    judged = [f"{real('ppl', judge).value:.2f}" for judge in (SOURCE, JUDGE)]
    assert f"have {judged[0]} and {judged[1]} with an entropy of {real('entropy').value:.2f}" in text
    (held,) = (row for row in reported() if row.metric == "val_ppl")
    assert f"its validation perplexity is {held.value:.2f} ± {held.stderr:.2f}" in text


SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens": ("length", "{:.1f}".format),
    "unfinished": ("unfinished", "{:.1%}".format),
    "lengths, distance": ("length_distance", "{:.1f}".format),
    "known words": ("known_words", "{:.2%}".format),
    "coherence": ("coherence", "{:.3f}".format),
    "new 6-grams": ("novelty", "{:.1%}".format),
    "repetition": ("repetition", "{:.1%}".format),
}


def test_what_stands_beside_the_stories() -> None:
    shown = told("Of the student in random order, beside real stories")
    assert set(shown) == set(SHOWN)
    for name, (metric, spelled) in SHOWN.items():
        there = any(row.metric == f"real_{metric}" for row in reported())
        values = [one(metric, *TEACHER, 256).value, *(one(metric, *STUDENT, steps).value for steps in STEPS)]
        assert shown[name] == [spelled(real(metric).value) if there else "", *map(spelled, values)]
    share = one("coherence", *STUDENT, 8).value / one("coherence", *TEACHER, 256).value
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"the student has {share:.0%} of the coherence" in text
    assert f"{one('coherence', *STUDENT, 8).value / real('coherence').value:.0%} of that of real stories" in text
    assert one("known_words", *STUDENT, 8).value > 0.996


def test_no_story_student_has_collapsed() -> None:
    shown = told("Beside the teacher in 256 steps at the temperature")
    pooled, shared = found(None, "pooled_entropy"), found(None, "shared_4grams")
    assert shown == {
        "pooled entropy, difference": [difference(pooled[(*STUDENT, steps)], 3) for steps in STEPS],
        "shared 4-grams, ratio": [cell(shared[(*STUDENT, steps)]) for steps in STEPS],
    }
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    over = [-0.1 - pooled[(*STUDENT, steps)].value for steps in STEPS]
    assert [steps for steps, much in zip(STEPS, over, strict=True) if much > 0] == [1, 2]
    assert f"misses it at 1 and 2 steps, by {over[0]:.3f} and {over[1]:.3f}" in text
    assert max(shared[(*STUDENT, steps)].value for steps in STEPS) < 1.3


def test_filling_in_the_middle() -> None:
    rows = {name: METHODS[name] for name in ("teacher", "match, infinite")}
    filled = {name: [one("infill_ppl", *who, steps) for steps in (4, 8, 16, 64)] for name, who in rows.items()}
    assert told("The middle third of 256 held-out stories") == {
        name: [f"{row.value:.2f} ± {row.stderr:.2f}" for row in found] for name, found in filled.items()
    }
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    alone = {row.metric: f"{row.value:.2f}" for row in reported() if row.metric.startswith("infill_")}
    assert f"Real stories have {alone['infill_real_ppl']}. If the source continues the beginning alone" in text
    assert f"the whole has {alone['infill_continued_ppl']} by the source" in text
    assert f"joins both sides, has {filled['match, infinite'][1].value:.2f} in 8 steps" in text
    assert {row.value for row in reported() if row.metric == "infill_kept"} == {1.0}


def test_the_frontier_of_stories() -> None:
    for name, *cells in table(DOCUMENT, "The stories' frontier").rows:
        warm, _, cut = name.partition(", top-p ")
        how = {"temperature": float(warm), "top_p": float(cut or 1)}
        by = [one("gen_ppl", *TEACHER, 256, judge, **how) for judge in (SOURCE, JUDGE)]
        assert cells == [
            f"{one('entropy', *TEACHER, 256, **how).value:.3f}",
            *(f"{row.value:.2f} ± {row.stderr:.2f}" for row in by),
            f"{one('pooled_entropy', *TEACHER, 256, **how).value:.3f}",
            f"{one('shared_4grams', *TEACHER, 256, **how).value:.1%}",
        ]


def test_the_stories_recipe_is_the_one_that_was_run() -> None:
    """With the source as second judge, which the package does not have, in the place of SmolLM2."""
    kept = Recipe.parse(read_json(STORIES / "recipe.json", "recipe"), "recipe")
    ours = load_recipe("stories", ["data={kind: prepared, path: rows}"])
    assert {row.recipe_hash for row in read(STORIES / "results.jsonl")} == {kept.digest()}
    assert list(kept.stages) == list(ours.stages)
    for name, stage in kept.stages.items():
        if stage.kind == "evaluate" and stage.judge == "stories-source":
            stage = stage.model_copy(
                update={"judge": ours.stages[name].judge, "judge_stage": ours.stages[name].judge_stage}
            )
        assert stage == ours.stages[name]


def test_the_weights_kept_are_those_of_the_best_look() -> None:
    looks = [row for row in read_lines(STORIES / "seed-0" / "imdm-match" / "history.jsonl") if "score" in row]
    best = min(looks, key=lambda row: row["score"])
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    assert f"those of step {best['step']:,} of {looks[-1]['step']:,}" in text
    fours = [row["ratio_4"] for row in looks if row["step"] > 2000]
    assert f"at 4 steps the ratios of one student lay between {min(fours):.2f} and {max(fours):.2f}" in text


def spelled(row: Row) -> str:
    digits = 0 if row.value >= 1000 else 1 if row.value >= 100 else 2
    return f"{row.value:,.{digits}f} ± {row.stderr:,.{digits}f}"


REAL_STORIES = ["real stories", *(spelled(real("ppl", judge)) for judge in (JUDGE, SOURCE))]
REAL_STORIES.append(f"{real('entropy').value:.3f}")


def beside(name: str) -> dict[tuple[str, str | None, int], Row]:
    """The rows beside the weights of a shipped model."""
    return {(row.metric, row.judge, row.steps): row for row in read(HERE / name / "results.jsonl")}


def test_the_teachers_card_has_the_figures_of_the_run() -> None:
    card = table(HERE / "stories-teacher" / "README.md", "Numbers", corner="steps")
    assert [head.split()[-1] for head in card.head[1:]] == ["stories-judge", "(bf16)", "(nats)"]
    for steps, *cells in card.rows[:-1]:
        rows = [one("gen_ppl", *TEACHER, int(steps), judge) for judge in (JUDGE, SOURCE)]
        assert cells == [*map(spelled, rows), f"{one('entropy', *TEACHER, int(steps)).value:.3f}"]
    assert card.rows[-1] == REAL_STORIES
    rows = beside("stories-teacher")
    assert {row.recipe_hash for row in rows.values()} == {reported()[0].recipe_hash}
    assert all(one(metric, *TEACHER, n, judge).value == row.value for (metric, judge, n), row in rows.items())
    assert len(rows) == 3 * (len(card.rows) - 1)


def test_the_students_card_is_of_the_order_that_it_writes_in() -> None:
    card = table(HERE / "stories-imdm" / "README.md", "Numbers", corner="steps")
    assert [int(row[0]) for row in card.rows[:-1]] == list(ORDERED)
    for steps, *cells in card.rows[:-1]:
        rows = [in_spread()["gen_ppl", judge, "match", int(steps)] for judge in (JUDGE, SOURCE)]
        assert cells == [*map(spelled, rows), f"{in_spread()['entropy', None, 'match', int(steps)].value:.3f}"]
    assert card.rows[-1] == REAL_STORIES
    rows = beside("stories-imdm")
    assert {row.order for row in rows.values()} == {"spread"}
    assert {row.recipe_hash for row in rows.values()} == {fingerprint(load_model("stories-imdm"))}
    kept = {row.key for row in in_spread().values()}
    assert len(rows) == 3 * len(ORDERED)
    assert all(row.key in kept for row in rows.values())


def in_the_page(seed: int, label: str) -> str:
    """A story of docs/stories.md, its white space as single spaces."""
    page = (DOCUMENT.parent / "stories.md").read_text(encoding="utf-8")
    part = page.partition(f"## Seed {seed}\n")[2].partition("\n## ")[0]
    text = part.partition(f"**{label}**\n")[2].partition("\n**")[0]
    return " ".join(line.removeprefix(">").strip() for line in text.splitlines()).strip()


@pytest.mark.parametrize(
    ("steps", "seeds"),
    [(8, range(1)), *(pytest.param(steps, range(20), marks=pytest.mark.slow) for steps in (4, 8, 16))],
)
def test_the_stories_of_the_page_are_what_the_student_writes(steps: int, seeds: range) -> None:
    """Nearly all of each: sums in another order may flip a token."""
    writer = imdm.load("stories-imdm")
    for seed in seeds:
        (story,) = writer.write(steps=steps, seed=seed)
        words, shown = story.text.split(), " ".join(in_the_page(seed, f"Student, {steps} steps").split()).split()
        assert SequenceMatcher(None, words, shown, autojunk=False).ratio() > 0.9


def test_the_page_has_twenty_stories_of_each() -> None:
    for label in (*(f"Student, {steps} steps" for steps in (4, 8, 16)), "Teacher, 256 steps", "The source"):
        stories = [in_the_page(seed, label) for seed in range(20)]
        assert len(set(stories)) == 20
        assert all(len(story.split()) > 30 for story in stories)


def test_what_the_page_says_of_the_stories() -> None:
    def doubled(label: str) -> int:
        """How often a word stands twice in a row."""
        words = [in_the_page(seed, label).replace("\\", "").split() for seed in range(20)]
        pairs = [pair for story in words for pair in pairwise(story)]
        return sum(first.isalpha() and first.lower() == re.sub(r"\W+$", "", second).lower() for first, second in pairs)

    text = " ".join((DOCUMENT.parent / "stories.md").read_text(encoding="utf-8").split())
    few, some, more = (doubled(f"Student, {steps} steps") for steps in (4, 8, 16))
    said = f"stands twice in a row {few} times in the twenty stories of 4 steps, {some} times in 8, {more} in 16; "
    assert f"{said}{doubled('Teacher, 256 steps')} in the teacher's of 256 steps, {doubled('The source')} in" in text
    perplexities = one("gen_ppl", *TEACHER, 256, SOURCE).value, in_spread()["gen_ppl", SOURCE, "match", 8].value
    assert f"(perplexity {perplexities[0]:.2f} and {perplexities[1]:.2f})" in text
    here = in_spread()["coherence", SOURCE, "match", 8].value
    coherent = one("coherence", *TEACHER, 256).value, here, real("coherence").value
    assert "(coherence {:.3f} and {:.3f} nats a token; real stories {:.3f})".format(*coherent) in text
    quotes = re.findall(r'"([^"]{12,})" \((\d+)\)', text.partition("## Seed 0")[0])
    assert len(quotes) >= 4
    assert all(quoted in in_the_page(int(seed), "Student, 8 steps") for quoted, seed in quotes)
