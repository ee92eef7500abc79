"""The documentation site: links that lead somewhere, figures that are measured, pages that open with no network."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from imdm import cost
from tests.cli.test_cli import COMMANDS
from tests.conftest import chromium

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
WRITTEN += [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
MODULES = re.findall(
    r"automodule:: (\S+)", "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").iterdir())
)


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """On GitHub, where documents are read as they are."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        place, _, anchor = link.partition("#")
        if urlsplit(link).scheme:
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_advice_has_the_figures_of_the_results() -> None:
    """Rows of figures are rows of docs/results.md, and so is every decimal number in the prose."""
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    known, text = results.splitlines(), prose(DOCS / "choosing.md")
    rows = [line for line in text.splitlines() if line.startswith("|") and re.search(r"\d\.\d.*\d\.\d", line)]
    assert len(rows) > 20
    assert [row for row in rows if row not in known] == []
    numbers = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", "\n".join(set(text.splitlines()) - set(rows))))
    assert {number for number in numbers if number not in results} == set()


@pytest.mark.parametrize("gpus", [1, 8])
def test_recipes_cost_what_the_tutorial_says(gpus: int) -> None:
    text = (DOCS / "tutorials/paper.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `([\w-]+)` \|.*?\| ([\d.]+) \|(?: ([\d.]+) \|)?$", text, re.MULTILINE)
    assert len(told) == 12
    for name, one, eight in told:
        said = one if gpus == 1 else eight
        if said:
            hours = cost(name, gpus=gpus).hours
            assert float(said) == pytest.approx(hours, rel=0.05), f"{name} on {gpus}: {hours:.3g} hours"


class Links(HTMLParser):
    """Where a page leads, what it loads, and the places on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads, self.loads, self.places = list[str](), list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attributes if value is not None}
        if "id" in given:
            self.places.add(given["id"])
        if tag == "a" and "href" in given:
            self.leads.append(given["href"])
        if tag in ("script", "img", "iframe", "object") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and "stylesheet" in given.get("rel", ""):
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    for needed in ("sphinx", "furo", "myst_parser", "latex2mathml"):
        pytest.importorskip(needed, reason="the site needs imdm[docs]")
    out = tmp_path_factory.mktemp("site")
    told = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", out / "trees", DOCS, out / "html"]
    done = subprocess.run(told, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return out / "html"


@pytest.mark.slow
def test_the_site_is_whole_and_needs_no_network(site: Path) -> None:
    pages = {
        page: Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html") if "_downloads" not in page.parts
    }
    assert len(pages) > 20
    for page, found in pages.items():
        for link in found.loads:
            assert not urlsplit(link).netloc, f"{page.name} loads {link}"
        for link in found.leads + found.loads:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert target.exists(), f"{page.name}: {link} leads nowhere"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{page.name}: {link} has no such place"
    assert (site / "searchindex.js").exists()


def is_code(thing: object) -> bool:
    """A class or a function; what else is public, such as a table of names, has no docstring of its own."""
    return inspect.isclass(thing) or inspect.isfunction(thing)


@pytest.mark.slow
def test_references_have_every_command_and_every_public_name(site: Path) -> None:
    commands = Links((site / "commands.html").read_text(encoding="utf-8")).places
    assert {f"imdm-{name.replace(' ', '-')}" for name in COMMANDS} <= commands
    places = set[str]().union(
        *(Links(page.read_text(encoding="utf-8")).places for page in (site / "api").glob("*.html"))
    )
    assert "imdm" in MODULES
    missing = {
        f"{module}.{name}"
        for module in MODULES
        for name in getattr(import_module(module), "__all__", ())
        if is_code(getattr(import_module(module), name)) and not {f"{module}.{name}", f"imdm.{name}"} & places
    }
    assert missing == set()


@pytest.mark.slow
def test_equations_are_shown_by_the_browser_itself(site: Path) -> None:
    text = (site / "concepts.html").read_text(encoding="utf-8")
    equations = len(re.findall(r"^\$\$$", (DOCS / "concepts.md").read_text(encoding="utf-8"), re.MULTILINE)) // 2
    assert text.count('display="block"') == equations > 5
    assert "merror" not in text
    assert "<script" in text
    assert not re.search(r"<script[^>]*mathjax", text, re.IGNORECASE)


@pytest.mark.parametrize(("ci", "lacking"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_without_a_browser_its_tests_are_skipped_but_fail_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, lacking: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    nowhere = SimpleNamespace(chromium=SimpleNamespace(executable_path="/no/such/browser"))
    with pytest.raises(lacking, match="no chromium here"):
        chromium(nowhere)


@pytest.fixture(scope="module")
def opened(site: Path) -> Iterator[Callable[[str, int], Any]]:
    """Opens a page of the site from its file, at a width; pages that ask for anything from elsewhere are wrong."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the site is tried with playwright")
    with playwright.sync_playwright() as running:
        browser, wrong = chromium(running), list[str]()

        def opening(page: str, width: int) -> Any:
            tab = browser.new_page(viewport={"width": width, "height": 844})
            tab.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or wrong.append(asked.url))
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.goto((site / page).as_uri())
            return tab

        yield opening
        browser.close()
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(site: Path, opened: Callable[[str, int], Any], width: int) -> None:
    for page in sorted(site.rglob("*.html")):
        if "_downloads" in page.parts:
            continue
        tab = opened(str(page.relative_to(site)), width)
        over = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, f"{page.name} is {over} pixels too wide at {width}"
        tab.close()


@pytest.mark.slow
def test_the_search_finds_from_a_file(site: Path, opened: Callable[[str, int], Any]) -> None:
    tab = opened("index.html", 1280)
    tab.fill("input[name=q]", "pair_bound")
    tab.press("input[name=q]", "Enter")
    tab.wait_for_selector("#search-results li a", timeout=20_000)
    assert "imdm.theory.pair_bound" in tab.inner_text("#search-results")
