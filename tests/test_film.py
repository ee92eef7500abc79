"""The film in the terminal: what each scene shows, and what is left where there is no terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from imdm.console import colour, plain_console
from imdm.data.tokenizers import train_bpe
from imdm.film import SECONDS, play, scene, scenes
from imdm.writer import Piece
from tests.conftest import tiny_model
from tests.test_cli import imdm, refused

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
    assert lines[0] == "step 0 of 1  1 ░░2"
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
