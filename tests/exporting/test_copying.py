"""Modules of a package as files of one folder: every way to import, and what stays as it is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from imdm.exporting.copying import copies

ZOO = {
    "zoo/__init__.py": "raise ImportError('the package itself is not needed')\n",
    "zoo/keeping.py": '''"""from zoo.animals.cat import Cat: text stays."""

from pkgutil import iter_modules

KNOWN = []


def import_all(name, path):
    raise AssertionError("its modules are imported by name")
''',
    "zoo/animals/__init__.py": """from zoo.keeping import KNOWN as names, import_all
from .base import (
    Animal,  # in several lines
    sound as said,
)

import_all(__name__, __path__)
""",
    "zoo/animals/base.py": """from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.owners import Owner
else:
    from ..keeping import KNOWN


class Animal:
    owner: Owner


def sound():
    ε = "ä"; from zoo.words import MIAOW as word  # late
    return ε + word
""",
    "zoo/animals/cat.py": "from zoo.keeping import KNOWN\n\nKNOWN.append('cat')\n",
    "zoo/words.py": "MIAOW = 'miaow'\n",
    "zoo/owners.py": "import pydantic\n",
    "zoo/visit.py": "from zoo.animals import Animal, names, said\n",
}


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    for name, text in ZOO.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_copy_does_what_the_package_does(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = copies({"zoo.visit": "visit"}, zoo, "zoo")
    names = {"visit", "animals", "animals_base", "animals_cat", "keeping", "words"}  # no owners: types alone
    assert set(found) == {f"{name}.py" for name in names}
    (zoo / "flat").mkdir()
    for name, text in found.items():
        (zoo / "flat" / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(zoo))
    visit = importlib.import_module("flat.visit")
    assert (visit.names, visit.said()) == (["cat"], "ämiaow")
    assert "zoo" not in sys.modules


def test_only_imports_differ(zoo: Path) -> None:
    found = copies({"zoo.visit": "visit"}, zoo, "zoo")
    assert '    ε = "ä"; from .words import MIAOW as word  # late\n' in found["animals_base.py"]
    head, _, rest = found["keeping.py"].partition("\n")
    assert rest == ZOO["zoo/keeping.py"]
    assert head.startswith("# zoo/keeping.py of zoo ")


@pytest.mark.parametrize("line", ["import zoo.words", "from zoo import words", "from . import words"])
def test_modules_as_names_are_refused(line: str, zoo: Path) -> None:
    """`transformers` does not follow them."""
    (zoo / "zoo" / "visit.py").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"write 'from zoo.words import …'"):
        copies({"zoo.visit": "visit"}, zoo, "zoo")


def test_two_modules_do_not_become_one_file(zoo: Path) -> None:
    (zoo / "zoo" / "animals_cat.py").write_text("")
    (zoo / "zoo" / "visit.py").write_text("from zoo.animals_cat import x\nfrom zoo.animals.cat import KNOWN\n")
    with pytest.raises(ValueError, match="would become one file"):
        copies({"zoo.visit": "visit"}, zoo, "zoo")
