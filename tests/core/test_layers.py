"""The layers of the package: what a room may use. CONTRIBUTING lists the rooms from below."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "imdm"
ROOMS = (
    "core", "kernels", "diffusion", "sampling", "shipped", "models", "data", "adopting", "theory", "objectives",
    "training", "evaluation", "experiments", "writer", "report",
)  # fmt: skip
LEAVES = ("costing", "serving", "lm_eval", "exporting", "benchmarks")
"""Used by `cli` and the public names alone; `benchmarks` may use the others."""
TOP = {
    "writer": "writer",
    "film": "writer",
    "showing": "writer",
    "__main__": "cli",
    "__init__": "public",
}
"""The rooms of the modules at the top: those around the writer are one."""


def imports(file: Path) -> Iterator[str]:
    """The modules of ours that a module imports, wherever it does, but for those that only types need."""
    package = list(file.relative_to(PACKAGE.parent).parent.parts)

    def within(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for other in child.orelse:
                    yield from within(ast.Module([other], []))
            elif isinstance(child, ast.Import):
                yield from (name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package[: len(package) + 1 - child.level] if child.level else []
                place = ".".join([*above, *([child.module] if child.module else [])])
                for name in child.names:
                    known = PACKAGE.parent / place.replace(".", "/") / name.name
                    module = known.is_dir() or known.with_suffix(".py").exists()
                    yield f"{place}.{name.name}" if module or name.name == "__version__" else place
            else:
                yield from within(child)

    found = within(ast.parse(file.read_text(encoding="utf-8")))
    return (name for name in found if name.split(".")[0] == "imdm" and name != "imdm.__version__")


def room(module: str) -> str:
    first = module.split(".")[1] if "." in module else "__init__"
    return TOP.get(first, first)


def used() -> dict[tuple[str, str], list[str]]:
    """Which room uses which, and where."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        here = room(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
        for module in imports(file):
            if room(module) != here:
                found.setdefault((here, room(module)), []).append(f"{file.relative_to(PACKAGE)} imports {module}")
    return found


def test_every_room_is_known() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == {*ROOMS, *LEAVES, "cli"} - {"writer"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == set(TOP)  # at most ten


def test_arrows_go_down() -> None:
    """So no two rooms use each other, nor do any in a ring."""
    rank = {name: place for place, name in enumerate(ROOMS)}
    up = [
        line
        for (here, there), lines in used().items()
        if here in rank and rank.get(there, 99) > rank[here]
        for line in lines
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_are_used_by_the_command_and_the_public_names(leaf: str) -> None:
    users = {here for here, there in used() if there == leaf}
    assert users <= {"cli", "public", "benchmarks"} - {leaf}
    assert (leaf, "public") not in used()


def test_nobody_uses_the_command() -> None:
    assert {here for here, there in used() if there == "cli"} <= {"public"}


def test_contributing_lists_the_rooms_from_below() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text[text.index("src/imdm/") : text.index("tests/  ")]
    listed = re.findall(r"^  (\w+)(?:/|\.py)", tree, re.MULTILINE)
    assert [name for name in listed if name in ROOMS] == list(ROOMS)
    assert {*ROOMS, *LEAVES, "cli"} <= set(listed)


def test_what_is_found() -> None:
    """Late imports, and those of several names, count; those that only types need do not."""
    here = PACKAGE / "exporting" / "hub" / "modeling_imdm.py"
    assert "imdm.exporting.hub.configuration_imdm" in set(imports(here))
    assert "imdm.experiments.run" in set(imports(PACKAGE / "cli" / "making.py"))  # inside a function
    assert "imdm.writer" not in set(imports(PACKAGE / "core" / "console.py"))  # of types
