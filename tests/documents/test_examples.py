"""Examples that are shown are examples that run: docstrings, and the Python, shell and YAML of the documents.

A page's blocks run one after another in one folder, in tiny sizes. A block whose first line is `# name.py` or
`# name.yaml` is that file. One that cannot run has its reason on the line above it: `<!-- not run: needs a GPU -->`;
the options of its commands are checked all the same.
"""

from __future__ import annotations

import ast
import doctest
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from transformers import BertConfig, BertForMaskedLM

from imdm.data.tokenizers import load_tokenizer
from imdm.experiments import load_recipe
from imdm.exporting import export_transformers
from imdm.objectives import objectives
from imdm.shipped import DEFAULT
from tests.cli.test_cli import COMMANDS, imdm

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
DOCUMENTED = sorted(file for file in SOURCE.rglob("*.py") if ">>>" in file.read_text(encoding="utf-8"))
LANGUAGES = {"python", "sh", "console", "yaml", "text", "bibtex"}
SLOW = {
    f"docs/{name}.md" for name in ("quickstart", "tutorials/own-text", "tutorials/objective", "tutorials/paper")
}  # they train
SERVED = {"docs/serving.md"}  # its blocks need a service: tests/serving/test_serving.py


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; reason: why it cannot run."""

    place: str
    language: str
    text: str
    reason: str | None

    @property
    def file(self) -> str | None:
        """The file that it is."""
        found = re.match(r"# (\w+\.(?:py|yaml))\n", self.text)
        return found[1] if found else None

    def lines(self) -> list[list[str]]:
        """Of a shell block, its commands in words."""
        if self.language == "console":
            return [shlex.split(line[2:]) for line in self.text.splitlines() if line.startswith("$ ")]
        whole = self.text.replace("\\\n", " ").splitlines()
        return [words for line in whole if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        said = re.fullmatch(r"<!-- not run: (.+) -->", lines[start - 1]) if start else None
        text = "".join(f"{inside}\n" for inside in lines[start + 1 : number])
        yield Block(f"{page.relative_to(ROOT)}:{start + 1}", lines[start][3:].strip(), text, said[1] if said else None)
        start = None


PAGES = {
    str(page.relative_to(ROOT)): [block for block in blocks(page) if not block.language.startswith("{")]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in page.parts
}
RUN = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name, found in PAGES.items()
    if name not in SERVED and any(block.language in ("python", "sh", "yaml") for block in found)
]


def named(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("name", map(named, DOCUMENTED))
def test_a_docstrings_examples_run(name: str) -> None:
    if ".kernels." in name and find_spec("triton") is None:
        pytest.skip("kernels need Triton")
    module = import_module(name)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert found, "its examples are in no docstring"
    assert not any(doctest.SKIP in example.options for test in found for example in test.examples)
    runner = doctest.DocTestRunner()
    for test in found:
        said: list[str] = []
        assert runner.run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("block", [block for found in PAGES.values() for block in found], ids=lambda block: block.place)
def test_a_block_says_what_it_is_and_its_options_are_known(block: Block) -> None:
    """Also of blocks that cannot run."""
    assert block.language in LANGUAGES, f"{block.place}: begin it with ``` and one of {', '.join(sorted(LANGUAGES))}"
    assert block.reason is None or block.language in ("python", "sh"), f"{block.place}: only code can be not run"
    for words in block.lines() if block.language in ("sh", "console") else ():
        check_options(words, block.place)


def arguments(words: list[str]) -> list[str]:
    """What the `imdm` command is given, however it is called: by name, as a module, or by a file that ends in it."""
    for start in (["imdm"], ["python", next((word for word in words if word.endswith(".py")), "")]):
        if words[: len(start)] == start:
            return words[len(start) :]
    return words[words.index("-m") + 2 :] if "-m" in words and "imdm" in words else []


def check_options(words: list[str], place: str) -> None:
    """Refuse a line whose command or options nobody knows."""
    told = {
        "pip": lambda: {extra for word in words for extra in re.findall(r"imdm\[(.*)\]", word)} <= extras(),
        "make": lambda: all(re.search(rf"^{target}:", makefile(), re.MULTILINE) for target in words[1:]),
    }
    if words[0] in told:
        assert told[words[0]](), f"{place}: {shlex.join(words)}"
    if not (asked := arguments(words)):
        return
    name = next((name for name in COMMANDS if asked[: len(name.split())] == name.split()), None)
    assert name is not None, f"{place}: no command {asked[:1]}"
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    given = {word.partition("=")[0] for word in asked if word.startswith("--")}
    assert given <= options, f"{place}: imdm {name} has no {', '.join(sorted(given - options))}"


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def prepared(name: str, folder: Path) -> None:
    """What the page takes for granted."""
    (folder / "results").symlink_to(ROOT / "results")
    text = (SOURCE / "imdm/data/sample/train.txt").read_text(encoding="utf-8").splitlines()[:400]
    (folder / "books").mkdir()
    for file in ("books/some.txt", "text.txt"):
        (folder / file).write_text("\n".join(text), encoding="utf-8")
    if name == "docs/adopting.md":
        export_transformers(DEFAULT, folder / "hub")
        tokenizer = load_tokenizer("sentences-judge")
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **small)).save_pretrained(folder / "mybert")
        tokenizer.save_pretrained(folder / "mybert")


def smaller(words: list[str]) -> list[str]:
    """What makes a command a matter of seconds: settings or options that are added to it."""
    asked = arguments(words)
    if asked[0] == "distill":
        return ["--rounds", "1", "--iterations", "2", "--batch", "4"]
    if asked[0] == "evaluate":
        return ["--samples", "4"]
    if asked[0] == "show":
        return ["--steps", "1"]
    return smaller_recipe(asked[1]) if asked[0] == "reproduce" else []


def smaller_recipe(name: str) -> list[str]:
    recipe, out = load_recipe(name), []
    if recipe.data.kind == "text":
        out += ["data.train_bpe=400", "model.preset=null", "model.width=16", "model.heads=2", "model.blocks=1"]
    for stage, settings in recipe.stages.items():
        at = f"stages.{stage}"
        if settings.kind == "train":
            rounds = getattr(settings.objective, "rounds", None)
            out += [f"{at}.training.steps={rounds or 2}", f"{at}.training.batch=8", f"{at}.training.warmup=1"]
            out += [f"{at}.objective.iterations=1"] if rounds else []
            out += [f"{at}.watch.every=1", f"{at}.watch.samples=8"] if settings.watch else []
        elif settings.kind == "couple":
            out += [f"{at}.pairs=16", f"{at}.steps=4"]
        else:
            out += [f"{at}.samples=40"]
            out += [f"{at}.draws=20"] if "factorization_error" in settings.metrics else []
    return out


def run_line(words: list[str], place: str) -> None:
    """`pip` and `make` are not called here: `check_options` has seen to what they ask for."""
    if words[0] in ("pip", "make"):
        return
    assert words[0] in ("imdm", "python"), f"{place}: {words[0]} is not run here; say why above the block"
    if words[0] == "imdm":
        done = imdm(*words[1:], *smaller(words))
        assert done.returncode == 0, f"{place}: {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    else:
        told = [sys.executable, *words[1:], *smaller(words)]
        done = subprocess.run(told, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{place}: {shlex.join(words)}\n{done.stdout}\n{done.stderr}"


def run_python(text: str, names: dict[str, object]) -> None:
    """The last expression of a block gives something."""
    tree = ast.parse(text)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr), "the last line of a block gives something"
    exec(compile(tree, "block", "exec"), names)
    assert eval(compile(ast.Expression(last.value), "block", "eval"), names)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in; what pages add to Python and to the library goes with it."""
    known, loaded = set(objectives), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(objectives) - known:
        del objectives._entries[name]
    for name in set(sys.modules) - loaded:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("name", RUN)
def test_a_pages_blocks_run(name: str, folder: Path) -> None:
    prepared(name, folder)
    names: dict[str, object] = {"__name__": "page"}
    for block in PAGES[name]:
        if block.reason is not None:
            continue
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run_python(block.text, names)
        elif block.language == "yaml":
            assert yaml.safe_load(block.text)
        elif block.language == "sh":
            for words in block.lines():
                run_line(words, block.place)
