"""The README: short, and what it shows is what one gets."""

from __future__ import annotations

import re
import shlex
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from imdm.shipped import DEFAULT, TEACHER
from tests.cli.test_cli import imdm
from tests.writer.test_film import texts_in

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILM = ROOT / "docs/film.svg"


def test_it_is_short_and_its_picture_small() -> None:
    assert len(README.split()) < 900
    assert "docs/film.svg)" in README
    assert FILM.stat().st_size <= 150_000


def test_the_picture_is_of_the_models_that_ship() -> None:
    """Where it is not: imdm show --steps 8 --film docs/film.svg."""
    named = [text for kind, text, *_ in texts_in(FILM.read_text(encoding="utf-8")) if kind == "quiet"]
    assert named == [TEACHER, DEFAULT]


@pytest.mark.parametrize(("page", "asked"), [("README.md", "--prompt"), ("docs/quickstart.md", "--infill")])
def test_the_command_prints_what_is_shown(page: str, asked: str) -> None:
    """Another machine rounds otherwise, and may draw some other words: most are the same."""
    blocks = rf"```sh\n(imdm generate {asked} [^`]*)\n```\n\n```text\n([^`]*)\n```"
    ((command, shown),) = re.findall(blocks, (ROOT / page).read_text(encoding="utf-8"))
    words = shown.removesuffix(" …").split()
    printed = imdm(*shlex.split(command)[1:]).stdout.split()[: len(words)]
    assert len(words) > 30
    assert SequenceMatcher(None, words, printed, autojunk=False).ratio() > 0.6
