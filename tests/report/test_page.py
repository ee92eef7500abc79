"""The page of a run as a reader finds it: tables that fit, curves told apart without colour, plain names, one loss."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from imdm.core.console import Terminal, ink, plain_console
from imdm.core.files import append_line, write_recorded
from imdm.experiments import Bar, Run, load_recipe
from imdm.experiments.status import status
from imdm.report import Picture, Results, Section, Table, build_report
from imdm.report.names import distinct_names, mask_in_words, metric_in_words, model_in_words, row_names
from imdm.report.page import Beside, Report
from imdm.report.plots import STYLE as DRAWN
from imdm.report.plots import curve_styles, error_over_steps, frontier, over_steps, spread, svg, training_curve
from imdm.report.tables import figure
from imdm.report.text import other_figures
from imdm.report.trained import training
from imdm.training.history import last_loss, loss_in_words, read_history
from tests.experiments.test_grid import row
from tests.report.test_report import text_run

VOID = {"meta", "img", "br"}


class Tree(HTMLParser):
    """A page read strictly: every element is closed in its turn. `found` has each with its attributes and those that
    it stands in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.found: list[tuple[str, dict[str, str | None], list[dict[str, str | None]]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), [around for _, around in self.open]))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def all(self, tag: str) -> list[tuple[dict[str, str | None], list[dict[str, str | None]]]]:
        return [(attributes, around) for name, attributes, around in self.found if name == tag]


@pytest.mark.parametrize(
    ("method", "mask", "words"),
    [
        ("teacher", "single", "teacher"),
        ("teacher", "infinite-uniform-8-1.0", "teacher, infinite masks"),
        ("sdtt+redi", "infinite-uniform-768-1.0", "student, infinite masks (SDTT + ReDi)"),
        ("match", "single", "student, single mask (match)"),
        ("redi, 4 × pairs", "finite-6144", "student, 6,144 masks (ReDi, 4 × pairs)"),
        ("redi at 0.001", "single", "student, single mask (ReDi at 0.001)"),
        ("di4c", "single+mixture", "student, single mask with a latent (Di4C)"),
        ("from scratch", "single", "from scratch, single mask"),
        ("matched", "single", "matched, single mask"),  # only whole words are methods
        ("model", "mine", "model, mask mine"),
        ("redi", "infinite-mine-3", "student, mask infinite-mine-3 (ReDi)"),  # of a mask that is known no longer
        ("nelbo", "single", "data (NELBO), single mask"),  # no distillation
    ],
)
def test_models_are_named_in_words(method: str, mask: str, words: str) -> None:
    assert model_in_words(method, mask) == words


def test_models_of_one_name_say_their_masks_settings() -> None:
    one, two = "infinite-normal-768-1.0", "infinite-uniform-1536-0.5"
    assert mask_in_words(two, exact=True) == "infinite masks, uniform noise, d = 1,536, scale 0.5"
    assert distinct_names([("redi", "single"), ("redi", one)]) == [
        "student, single mask (ReDi)",
        "student, infinite masks (ReDi)",
    ]
    assert distinct_names([("redi", "single"), ("redi", one), ("redi", two)]) == [
        "single mask",
        "infinite masks, normal noise, d = 768, scale 1",
        "infinite masks, uniform noise, d = 1,536, scale 0.5",
    ]
    mixed = distinct_names([("teacher", "single"), ("redi", one), ("redi", two)])
    assert mixed[:2] == ["teacher", "student, infinite masks, normal noise, d = 768, scale 1 (ReDi)"]
    assert metric_in_words("novelty") == "6-grams not in the training text (share)"
    assert metric_in_words("mine") == "mine"


def test_samples_drawn_in_two_ways_have_two_names() -> None:
    rows = [
        row("mdlm", 1, 1.0, 0.1).model_copy(update={"metric": "entropy", "noise": noise})
        for noise in ("keep", "posterior")
    ]
    name = row_names(rows)
    assert list(map(name, rows)) == [
        "student, single mask (ReDi, noise keep)",
        "student, single mask (ReDi, noise posterior)",
    ]


def test_a_page_is_whole_labelled_and_light(tmp_path: Path) -> None:
    page = build_report(text_run(tmp_path / "run")).html()
    tree = Tree(page)
    assert not re.search(r"(src|href)=\"?http|<script|@import|url\((?!%23)", page)
    assert len(tree.all("h1")) == len(tree.all("main")) == len(tree.all("title")) == 1
    assert all(attributes.get("alt") for attributes, _ in tree.all("img"))
    assert "redi mdlm" not in page
    assert "student, infinite masks (ReDi)" in page
    assert len(page.encode()) < 150_000


def test_every_table_scrolls_in_a_labelled_frame_or_becomes_cards(tmp_path: Path) -> None:
    report = build_report(text_run(tmp_path / "run"))
    tree = Tree(report.html())
    tables = tree.all("table")
    assert len(tables) > 14
    for attributes, around in tables:
        frame = around[-1]
        assert (frame["class"], frame["role"], frame["tabindex"]) == ("scroll", "region", "0")
        assert frame["aria-label"]
        assert ("cards" in (attributes.get("class") or "")) == ("style" in attributes)
    assert all("scope" in attributes for attributes, _ in tree.all("th"))


def test_a_table_that_a_telephone_cannot_hold_names_each_figure() -> None:
    narrow = Table("t", ("model", "1 step"), [("teacher", "1.0"), ("student, infinite masks (SDTT + ReDi)", "2.0")])
    assert 'class="w1"' in narrow.html()  # words may be broken; figures stand at the right
    wide = Table("it's", ("model", *(f"{2**k:,} step's" for k in range(8))), [("teacher", *(["1234.5 (4.40)"] * 8))])
    ((attributes, _),) = Tree(wide.html()).all("table")
    assert attributes["class"] == "w1 cards"
    assert attributes["style"] is not None
    assert re.findall(r"--c(\d)", attributes["style"]) == list("123456789")
    assert r"--c2:'1 step\'s'" in attributes["style"]
    css = Path(__file__).parents[2] / "src/imdm/report/page.css"
    told = css.read_text(encoding="utf-8")
    for place in range(2, 13):  # as many columns as any table has
        assert f"td:nth-child({place})::before {{ content: var(--c{place}) }}" in told
        assert f".w{place} tr > :nth-child({place})" in told


def test_figures_are_not_broken_and_headings_reach_across() -> None:
    table = Table("t", ("model", "a", "b"), [("novelty", "", ""), ("x (y)", "0.5 (0.4–0.6) [-0.01]", "1.0 ± 0.1")])
    shown = table.html()
    assert "<th scope=rowgroup colspan=3>novelty</th>" in shown
    assert "<td>0.5 <small>(0.4–0.6)</small> <small>[-0.01]</small></td><td>1.0 ±&nbsp;0.1</td>" in shown
    assert "<th scope=row>x (y)</th>" in shown
    assert figure(-0.00001, 0.002) == "0.0000 ± 0.0020"


def test_what_does_not_go_with_steps_stands_apart_from_what_does() -> None:
    def made(model: str, metric: str, steps: int, value: float) -> object:
        mask = {"mdlm": "single", "imdm": "infinite-uniform-8-1.0"}[model]
        return row(model, steps, value, 0.1, mask=mask).model_copy(update={"metric": metric})

    rows = [made(model, "val_ppl", 1, 20.0 + len(model)) for model in ("mdlm", "imdm")]
    rows += [made(model, "repetition", steps, 0.5) for model in ("mdlm", "imdm") for steps in (1, 2)]
    rows += [made("mdlm", "novelty", 1, 0.7), made("imdm", "novelty", 2, 0.8)]
    once, over = other_figures(rows)
    assert [cells[:2] for cells in once.rows] == [("validation perplexity (bound)", "all")]
    assert over.columns == ("model", "1 step", "2 steps")
    assert [cells[0] for cells in over.rows] == [
        "4-grams repeated in a sample (share), all",
        "6-grams not in the training text (share)",
        "student, single mask (ReDi)",
        "student, infinite masks (ReDi)",
    ]
    assert over.rows[2][1:] == ("0.7000 ± 0.1000", "")


def drawn(axis: object) -> dict[str, tuple[object, str]]:
    """Each curve's dash (as drawn) and marker, by its name without its number."""
    handles, labels = axis.get_legend_handles_labels()  # type: ignore[attr-defined]
    lines = [getattr(handle, "lines", [handle])[0] for handle in handles]
    return {
        re.sub(r"^\d+  ", "", label): (str(line._dash_pattern), line.get_marker())
        for line, label in zip(lines, labels, strict=True)
    }


NAMES = [f"student, {mask} ({method})" for method in "ABCD" for mask in ("single mask", "64 masks", "infinite masks")]


def test_every_curve_has_a_dash_and_marker_of_its_own() -> None:
    points = {1: (2.0, 0.1), 2: (1.0, 0.1)}
    curves = dict.fromkeys(NAMES, points)
    pictures = [
        over_steps("t", curves),
        frontier("t", {name: [(0.7, 4.0, 9.0), (1.0, 4.2, 12.0)] for name in NAMES}, None),
    ]
    pictures.append(error_over_steps("t", {name: {1: [0.4, 0.5], 2: [0.3]} for name in NAMES}, (0.3, 0.5), 0.4, "b"))
    pictures.append(training_curve("t", {name: [(0, 1.0), (9, 2.0)] for name in NAMES}))
    for picture in pictures:
        found = drawn(picture.axes[0])
        assert len({found[name] for name in NAMES}) == len(NAMES)
        assert len({found[name][1] for name in NAMES}) == len(NAMES)  # markers alone do
    assert len({str(look["linestyle"]) for look in curve_styles(NAMES[:8]).values()}) == 8


def test_colours_say_the_mask_and_can_be_seen_on_white() -> None:
    found = curve_styles(["teacher", *NAMES])
    kinds = {kind: {found[name]["color"] for name in NAMES if kind in name} for kind in ("single", "64", "infinite")}
    assert not kinds["single"] & kinds["infinite"]
    assert all(contrast(look["color"]) >= 3 for look in found.values())
    for step in range(16):
        assert contrast(tuple(part / 255 for part in ink(step, 16))) >= 4.5


def contrast(colour: tuple[float, ...]) -> float:
    """With white, as WCAG 2 defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 1.05 / (sum(w * part for w, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05)


def test_many_curves_are_numbered_where_they_end() -> None:
    curves = {name: {1: (2.0, 0.1), 2: (1.0, 0.1)} for name in NAMES[:5]}
    (axis,) = over_steps("t", curves).axes
    numbers = {text.get_text(): text.xyann[1] for text in axis.texts}
    assert list(numbers) == ["1", "2", "3", "4", "5"]
    heights = sorted(numbers.values())
    assert all(high - low >= 0.04 for low, high in pairwise(heights))
    (axis,) = over_steps("t", dict(list(curves.items())[:3])).axes
    assert not list(axis.texts)
    assert spread([0.1, 0.11, 0.5], 0.05) == pytest.approx([0.1 - 0.04 / 3, 0.15 - 0.04 / 3, 0.5 - 0.04 / 3])
    assert min(spread([0.0, 0.0, 0.0], 0.05)) == 0.0


def test_names_fit_below_their_picture() -> None:
    long = "student, infinite masks, uniform noise, d = 1,536, scale 0.5 (SDTT + ReDi, noise posterior)"
    picture = over_steps("t", {long: {1: (2.0, 0.1)}, "teacher": {1: (1.0, 0.1)}})
    svg(picture)
    (legend,) = picture.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= picture.bbox.width


def test_a_picture_in_the_page_is_the_picture() -> None:
    text = svg(over_steps("a & b <50%> #1 “x”", {"teacher": {1: (2.0, 0.1)}}))
    ((attributes, _),) = Tree(Picture("p", text, "c").html()).all("img")
    head, _, body = (attributes["src"] or "").partition(",")
    assert head == "data:image/svg+xml"
    tags = [[part.tag for part in ElementTree.fromstring(one).iter()] for one in (text, unquote(body))]
    assert tags[0] == tags[1]
    assert "a & b <50%> #1 “x”" in ["".join(part.itertext()) for part in ElementTree.fromstring(unquote(body)).iter()]
    assert DRAWN["svg.fonttype"] == "none"  # words stay words
    page = Report("r", "", sections=[Section("s", parts=[Beside([Picture("p", text, "c")])])]).html()
    assert 'class="beside pictures"' in page


def trained(folder: Path) -> Path:
    """A folder in which the stage `teacher` of sentences-cpu has logged six losses and ended."""
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(load_recipe("sentences-cpu").resolved()))
    stage = folder / "seed-0" / "teacher"
    stage.mkdir(parents=True)
    for step, loss in enumerate((9.0, 8.0, 4.0, 3.0, 2.0, 1.0), 1):
        append_line(stage / "history.jsonl", {"step": step * 50, "loss": loss, "steps_per_second": 1.0})
    append_line(stage / "history.jsonl", {"step": 300, "warning": "w"})
    write_recorded(stage / "done.json", {"inputs": "", "output": "", "seconds": 60.0})
    return folder


def test_the_page_and_the_terminal_give_one_loss(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    (section,) = training(Results(folder, load_recipe("sentences-cpu"), []))
    (table,) = section.parts
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    (stage,) = (one for one in status(folder)["seed 0"] if one.name == "teacher")
    assert cells["loss"] == loss_in_words(stage.loss) == "2.5000"  # the mean of 4, 3, 2, 1
    assert "Loss: the mean of the last 4 logged." in table.note
    assert last_loss(read_history(folder / "seed-0" / "teacher")) == 2.5
    assert last_loss([]) is None
    assert [loss_in_words(loss) for loss in (None, 0.00009, -0.5)] == ["", "9.00e-05", "-0.5000"]


def test_the_page_explains_the_signals_that_it_shows(tmp_path: Path) -> None:
    recipe = load_recipe("match-cpu")
    looks: dict[str, list[dict[str, float]]] = {
        "teacher": [],
        "mdlm": [{"passes": 1.0, "phase": 0.0, "score": 0.25}, {"passes": 2.0, "ratio": 1.5, "score": 0.5}],
    }
    for name, seen in looks.items():
        folder = tmp_path / "seed-0" / name
        folder.mkdir(parents=True)
        for step, look in enumerate(seen):
            append_line(folder / "history.jsonl", {"step": step, **look})
        write_recorded(folder / "done.json", {"inputs": "", "output": "", "seconds": 60.0})
    (section,) = training(Results(tmp_path, recipe, []))
    (table,) = section.parts
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["by"], row["signals"]) for row in cells] == [
        ("data (NELBO)", ""),
        ("match", "ratio 1.5, phase 1, best score 0.25"),
    ]
    assert re.findall(r"(\w[\w ]*): ", table.note) == ["Stage", "Loss", "Ratio", "Phase", "Best score", "Overlap"]
    assert "Best score: the lowest so far of the mean log ratio" in table.note


def test_a_training_ends_on_the_terminal_with_the_loss_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [
        "stages.teacher.training.steps=12",
        "stages.teacher.training.log_every=2",
        "model.width=8",
        "model.blocks=1",
    ]
    recipe = load_recipe("match-cpu", short)
    Run(recipe, tmp_path, Terminal(plain_console())).run(["teacher"])
    history = read_history(tmp_path / "seed-0" / "teacher")
    losses = [line["loss"] for line in history if "loss" in line]
    assert len(losses) == 6
    mean = f"{sum(losses[-4:]) / 4:.4f}"
    assert f"loss {mean} (mean of the last 4 logged)" in capsys.readouterr().out
    (section,) = training(Results(tmp_path, recipe, []))
    assert mean in section.parts[0].rows[0]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_bar_has_its_count_whole_and_an_estimate_of_the_time_left(width: int) -> None:
    out = StringIO()
    console = plain_console(width=width, file=out, force_terminal=True, color_system=None)
    clock = iter(range(10_000))
    console.get_time = lambda: float(next(clock))
    with Terminal(console).bar("a-long-name-of-a-student: match", 12_000) as bar:
        for step in (2, 4, 1050):
            bar(step, "loss 4.0213  12,345 tok/s")
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[[0-9?;]*[A-Za-z]", out.getvalue()) if "1050/" in line]
    assert drawn
    assert all("1050/12000" in line and "loss 4.0" in line and len(line) <= width for line in drawn)
    assert re.search(r"left \d:\d\d:\d\d", drawn[-1])


def test_an_evaluation_and_the_first_steps_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imdm.training.trainer.TELL", 0.0)
    few = ["teacher.training.steps=4", "mdlm.training.steps=4", "mdlm.watch.every=2", "mdlm.training.batch=8"]
    few += ["mdlm.objective={kind: match, looks: 8, steps: {1: 1}, auxiliary: {ahead: 1}}"]
    recipe = load_recipe("match-cpu", [f"stages.{one}" for one in few] + ["model.width=8", "model.blocks=1"])
    told = Told()
    Run(recipe, tmp_path, told).run(["teacher", "mdlm"])
    first = told.bars["teacher: nelbo"][:3]
    assert [(done, note.split()[0]) for done, note in first] == [(1, "loss"), (2, "loss"), (3, "loss")]
    history = read_history(tmp_path / "seed-0" / "teacher")
    assert [row["step"] for row in history if "loss" in row] == [4]  # what is recorded is the same
    assert [text for text in told.said if "evaluating" in text] == [
        "mdlm: evaluating: the teacher writes 4 × 8 texts in 32 steps, once, to compare the student with",
        "mdlm: evaluating: the student writes 1 × 8 texts",
    ]
    student = told.bars["mdlm: match"]
    places = [number for number, (done, note) in enumerate(student) if note == "evaluating"]
    assert [student[place][0] for place in places] == [2, 4]
    assert all("loss" in student[place + 1][1] for place in places)  # not left standing


class Told:
    """A reporter that notes everything."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.bars: dict[str, list[tuple[int, str]]] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        notes = self.bars.setdefault(title, [])
        yield lambda done, note="": notes.append((done, note))


def test_a_line_of_the_terminal_is_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal(plain_console(width=40)).say("word " * 20)
    assert capsys.readouterr().out.count("\n") == 1
