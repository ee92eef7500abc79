"""The film: in the terminal, where there is none, and as a picture."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from imdm.core.console import colour, plain_console
from imdm.data.tokenizers import train_bpe
from imdm.film import COLUMNS, LINES, SECONDS, picture, play, scene, scenes
from imdm.shipped import DEFAULT, TEACHER
from imdm.writer import Piece
from tests.cli.test_cli import imdm, refused
from tests.conftest import tiny_model
from tests.report.test_page import contrast

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PIECES = [Piece("The", -1), Piece(" cat", 1), Piece(" [b]sat", 0), Piece(".", 3)]


def test_a_scene_shows_what_is_written_by_then() -> None:
    shown = [scene(PIECES, after, 4).plain for after in range(5)]
    assert shown[0] == "The░░░░░░░░░░░░"
    assert shown[1] == "The░░░░ [b]sat░"
    assert shown[2] == shown[3] == "The cat [b]sat░"
    assert shown[4] == "The cat [b]sat."


def test_what_is_new_is_underlined_and_what_was_given_is_bold() -> None:
    shown = scene(PIECES, 2, 4)
    style = {shown.plain[span.start : span.end]: str(span.style) for span in shown.spans}
    assert style["The"] == "bold"
    assert "underline" in style[" cat"]
    assert "underline" not in style[" [b]sat"]
    assert style[" cat"].split()[0] != style[" [b]sat"].split()[0]  # another step, another colour


def test_steps_that_write_nothing_have_no_scene() -> None:
    assert scenes([PIECES]) == [0, 1, 2, 4]
    assert scenes([PIECES, [Piece("a", 2)]]) == [0, 1, 2, 3, 4]


def test_without_a_terminal_a_line_a_scene() -> None:
    console = plain_console(file=io.StringIO(), width=40)
    play([PIECES], 4, console, wait=lambda _: pytest.fail("nobody is watching"))
    assert console.file.getvalue().splitlines() == [
        "step 0 of 4  The░░░░░░░░░░░░",
        "step 1 of 4  The░░░░ [b]sat░",
        "step 2 of 4  The cat [b]sat░",
        "step 4 of 4  The cat [b]sat.",
    ]
    console = plain_console(file=io.StringIO())
    play([PIECES, PIECES], 4, console)
    assert "step 1 of 4  text 2  The░░░░ [b]sat░" in console.file.getvalue()


def test_in_a_terminal_it_is_played_in_one_place_and_stays() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system="truecolor")
    waited: list[float] = []
    play([PIECES], 4, console, wait=waited.append)
    said = console.file.getvalue()
    assert len(waited) == 3
    assert 0 < sum(waited) <= SECONDS
    assert said.count("\x1b[2K") >= 3 * 3  # three scenes of three lines are wiped out
    places = [said.index(f"step {n} of 4") for n in (0, 1, 2, 4)]
    assert places == sorted(places)
    assert "given" in said
    assert "masked" in said


def test_the_command_plays_prompts_blanks_and_ids(tmp_path: Path) -> None:
    for options in (["--prompt", "The cat"], ["--infill", "The ___ sat."]):
        lines = imdm("generate", *options, "--film", "--steps", "3").stdout.splitlines()
        assert lines[0].startswith("step 0 of 3  The")
        assert "░" in lines[0]
        assert lines[-1].startswith("step 3 of 3  The")
        assert "░" not in lines[-1]
    tiny_model().save_pretrained(tmp_path / "model")
    lines = imdm("generate", str(tmp_path / "model"), "--canvas", "1 ? 2", "--film", "--steps", "1").stdout.splitlines()
    assert lines[0] == "step 0 of 1  1 ░ 2"
    assert len(lines) == 2


def test_a_causal_model_takes_a_step_a_token(tmp_path: Path) -> None:
    tokenizer = train_bpe(["the cat sat on the mat"] * 4, 300)
    tiny_model(causal=True, vocab_size=len(tokenizer), mask_token_id=3, length=16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    many = 16 - 2 - len(ids)
    asked = ("generate", str(tmp_path), "--prompt", "the cat", "--steps", "2")
    lines = imdm(*asked, "--film").stdout.splitlines()
    assert lines[0].startswith(f"step 0 of {many}  the cat")
    traced = imdm(*asked, "--trace").stdout.splitlines()
    assert traced[-1].split()[0] == str(many)
    assert "░" in traced[0]
    assert "░" not in traced[-1]
    lines = imdm("generate", str(tmp_path), "--canvas", "0 ? ? ?", "--film", "--steps", "1").stdout.splitlines()
    assert [line[:11] for line in lines] == [f"step {n} of 3" for n in range(4)]
    assert colour(200, 8) == colour(7, 8)


def test_a_film_is_neither_a_trace_nor_json() -> None:
    assert "leave out --trace and --json" in refused(imdm("generate", "--film", "--json"))


def texts_in(svg: str) -> list[tuple[str, str, float, float]]:
    """Class, text and place of every text in a picture."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [(one.get("class", ""), one.text or "", float(one.get("x", 0)), float(one.get("y", 0))) for one in found]


def test_a_picture_is_whole_without_motion_and_holds_no_script() -> None:
    svg = picture([("a & b", PIECES), ("other", [Piece("The <dog>", 0)])], 4)
    assert [text for kind, text, *_ in texts_in(svg) if kind in ("quiet", "given")] == ["a & b", "The", "other"]
    assert [(kind, text) for kind, text, *_ in texts_in(svg) if kind.startswith("r")] == [
        ("r2", "cat"), ("r1", "[b]sat"), ("r3", "."), ("r1", "The"), ("r1", "<dog>")
    ]  # fmt: skip
    assert [text for kind, text, *_ in texts_in(svg) if "last" in kind] == ["step 4 of 4"]
    still, moving = svg.split("@media (prefers-reduced-motion: no-preference)")
    assert "animation" not in still
    assert "keyframes" in moving
    assert ".mask { fill: #dedad3; opacity: 0 }" in still
    assert not re.search(r"<script|href|url\(|@import", svg)


def test_a_pictures_colours_can_be_read_on_light_and_on_dark_ground() -> None:
    pieces = [Piece("word ", step) for step in range(16)]
    light, dark = picture([("model", pieces)], 16).split("@media (prefers-color-scheme: dark)")
    sheet = contrast((0x1D / 255, 0x1F / 255, 0x23 / 255))
    assert ".sheet { fill: #1d1f23" in dark
    for rules, enough in ((light, lambda white: white >= 4.5), (dark, lambda white: sheet / white >= 4.5)):
        found = re.findall(r"fill: rgb\((\d+), (\d+), (\d+)\)", rules)
        assert len(found) == 16
        assert all(enough(contrast(tuple(int(part) / 255 for part in rgb))) for rgb in found)


def test_what_a_picture_has_no_room_for_is_cut_and_words_stay_together() -> None:
    words = " ".join(f"word{n}" for n in range(200))
    lines: dict[float, str] = {}
    for kind, text, x, y in texts_in(picture([("model", [Piece(words, 0)])], 1)):
        if "count" not in kind:
            assert 0 <= x < 2 * 18 + COLUMNS * 9.6
            lines[y] = f"{lines[y]} {text}" if y in lines else text
    name, *text = lines.values()
    assert name == "model"
    assert len(text) == LINES
    assert max(map(len, text)) <= COLUMNS
    assert words.startswith(" ".join(text).removesuffix(" …"))
    assert text[-1].endswith(" …")


def test_a_picture_takes_any_text() -> None:
    odd = [
        Piece("one\n\n", -1),
        Piece("tw", 0),
        Piece("o\x00\ud800", 1),
        Piece(" " + "x" * 300, 1),
        Piece("漢字" * 40, 0),
    ]
    shown = texts_in(picture([("m" * 300, odd)], 2))
    assert [text for _, text, *_ in shown if text in ("one", "tw", "o")] == ["one", "tw", "o"]
    rows = [y for kind, text, _, y in shown if text in ("one", "tw", "o") and "count" not in kind]
    assert rows[0] < rows[1] == rows[2]  # a line ends where the text says so, and a word is not torn
    assert max(len(text) for _, text, *_ in shown) <= COLUMNS
    assert texts_in(picture([("nothing", [])], 1))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_each_scene_of_a_picture_shows_what_is_written_by_then(tmp_path: Path) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="the picture is tried with playwright")
    (tmp_path / "film.svg").write_text(picture([("model", PIECES)], 4), encoding="utf-8")
    look = """at => {
        for (const one of document.getAnimations()) {
            one.pause();
            one.currentTime = at * one.effect.getTiming().duration;
        }
        const seen = name => [...document.querySelectorAll(name)].filter(one => getComputedStyle(one).opacity == 1);
        const lined = seen("text").filter(one => getComputedStyle(one).textDecorationLine == "underline");
        return [seen("text").map(one => one.textContent), seen(".mask").length, lined.map(one => one.textContent)];
    }"""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=flags)
        tab = browser.new_page()
        tab.goto((tmp_path / "film.svg").as_uri())
        pause, whole = 0.6, 3 * 0.6 + 4
        seen = [tab.evaluate(look, (cut + 0.5) * pause / whole) for cut in range(5)]
        still = browser.new_page(reduced_motion="reduce")
        still.goto((tmp_path / "film.svg").as_uri())
        assert still.evaluate("document.getAnimations().length") == 0
        assert still.evaluate(look, 0) == seen[-1]
        browser.close()
    new = [[], ["[b]sat"], ["cat"], ["."], []]
    for (texts, masks, lined), after, left, lines in zip(seen, (0, 1, 2, 4, 4), (3, 2, 1, 0, 0), new, strict=True):
        count, name, *words = texts
        assert (count, name, masks, lined) == (f"step {after} of 4", "model", left, lines)
        assert words == [piece.text.strip() for piece in PIECES if piece.step < after]


def test_the_command_draws_two_models(tmp_path: Path) -> None:
    out = tmp_path / "new/film.svg"
    done = imdm("show", "--steps", "2", "--prompt", "The cat", "--film", str(out))
    assert done.returncode == 0, done.stderr
    shown = texts_in(out.read_text(encoding="utf-8"))
    assert [text for kind, text, *_ in shown if kind == "quiet"] == [TEACHER, DEFAULT]
    assert [text for kind, text, *_ in shown if kind == "given"][:2] == ["The", "cat"]
    for wrong in (["--steps", "1,2", "--film", "x.svg"], ["--steps", "2", "--film", "x.gif"]):
        assert "--steps 8 --film film.svg" in refused(imdm("show", *wrong))
