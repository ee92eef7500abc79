"""Examples that are shown are examples that run: docstrings, and the Python of the documents."""

from __future__ import annotations

import doctest
import re
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from imdm.exporting import export_transformers
from imdm.shipped import HERE
from tests.conftest import tiny_model

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
DOCUMENTED = sorted(file for file in SOURCE.rglob("*.py") if ">>>" in file.read_text(encoding="utf-8"))
PAGES = {
    page.name: re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.name != "serving.md"  # which needs a service: tests/test_serving.py
}


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


@pytest.mark.parametrize("name", [name for name, blocks in PAGES.items() if blocks])
def test_a_pages_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block after another, in a folder where the runs they speak of have been; the last line of each gives
    something."""
    tiny_model(vocab_size=3, length=2).save_pretrained(tmp_path / "runs/synthetic/seed-0/teacher/model")
    shutil.copytree(HERE / "sentences-imdm", tmp_path / "runs/mine/seed-0/student/model")
    if name == "adopting.md":
        export_transformers("sentences-imdm", tmp_path / "hub")
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in PAGES[name]:
        *before, last = block.strip().splitlines()
        exec("\n".join(before), names)
        assert eval(last, names)
