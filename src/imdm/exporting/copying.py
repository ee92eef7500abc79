"""Modules of the package as files of one folder, which `transformers` can load where there is no `imdm`.

`imdm/diffusion/masks/base.py` becomes `diffusion_masks_base.py`, and `from imdm.diffusion.masks.base import Mask`
becomes `from .diffusion_masks_base import Mask`: `transformers` follows only such imports, and no folders in folders.
All else stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from imdm import __version__

ROOT = Path(__file__).parents[2]
"""Where the package lies."""


def copies(entries: Mapping[str, str], root: Path = ROOT, package: str = "imdm") -> dict[str, str]:
    """Files by name: modules of the package, and all that they import, wherever they do, but for types alone.

    entries    modules to begin with, and the names of their files, without `.py`
    """
    names, texts, waiting = dict(entries), {}, list(entries)
    while waiting:
        module = waiting.pop()
        file = _module_file(module, root)
        source = file.read_text(encoding="utf-8")
        edits: list[tuple[ast.stmt, str]] = []
        for statement, types in _statements(ast.parse(source)):
            imported = _imported(statement, module, package, file, root)
            for other in [] if types else imported:
                if other not in names:
                    names[other] = other.removeprefix(f"{package}.").replace(".", "_")
                    waiting.append(other)
            if types and imported:
                edits.append((statement, "pass"))
            elif isinstance(statement, ast.ImportFrom) and imported:
                edits.append((statement, f"from .{names[imported[0]]} import {_imported_names(statement)}"))
            elif imported:
                edits.append((statement, "\n".join(f"from .{names[other]} import __name__ as _" for other in imported)))
        head = f"# {file.relative_to(root).as_posix()} of {package} {__version__}; only its imports differ\n"
        texts[f"{names[module]}.py"] = head + _edited(source, edits)
    if len(texts) < len(names):
        raise ValueError(f"two modules would become one file: {sorted(names)}")
    return dict(sorted(texts.items()))


def _module_file(module: str, root: Path) -> Path:
    place = root / module.replace(".", "/")
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _statements(node: ast.AST, types: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """All imports and calls of `import_all`, and whether only types need them."""
    for child in ast.iter_child_nodes(node):
        only = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if only and isinstance(child, ast.If):
            yield from _statements(ast.Module(child.body, []), True)
            yield from _statements(ast.Module(child.orelse, []), types)
        elif isinstance(child, ast.Import | ast.ImportFrom) or ast.unparse(child) == "import_all(__name__, __path__)":
            yield child, types  # type: ignore[misc]
        else:
            yield from _statements(child, types)


def _imported(statement: ast.stmt, module: str, package: str, file: Path, root: Path) -> list[str]:
    """The modules of the package that a statement imports."""
    if isinstance(statement, ast.Expr):  # each registers what it has
        return [f"{module}.{one.stem}" for one in sorted(file.parent.glob("*.py")) if one.stem != "__init__"]
    if isinstance(statement, ast.Import):
        names = [one.name for one in statement.names if one.name.split(".")[0] == package]
        if names:
            raise ValueError(f"{module}: 'import {names[0]}': write 'from {names[0]} import …'")
        return []
    assert isinstance(statement, ast.ImportFrom)
    here = module.split(".") + ["__init__"] * (file.stem == "__init__")
    above = here[: len(here) - statement.level] if statement.level else []
    place = ".".join([*above, *([statement.module] if statement.module else [])])
    if place.split(".")[0] != package:
        return []
    for one in statement.names:
        if _module_file(f"{place}.{one.name}", root).exists():
            raise ValueError(
                f"{module}: imports the module {place}.{one.name}: write 'from {place}.{one.name} import …'"
            )
    return [place]


def _imported_names(statement: ast.ImportFrom) -> str:
    words = ", ".join(one.name if one.asname is None else f"{one.name} as {one.asname}" for one in statement.names)
    return f"({words})" if statement.lineno != statement.end_lineno else words


def _edited(source: str, edits: list[tuple[ast.stmt, str]]) -> str:
    """The source with other text in place of statements. Columns of `ast` count bytes."""
    lines = source.encode().splitlines(keepends=True)
    for statement, text in sorted(edits, key=lambda edit: -edit[0].lineno):
        first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
        before, after = lines[first][: statement.col_offset], lines[last][statement.end_col_offset :]
        lines[first : last + 1] = [before + text.encode() + after]
    return b"".join(lines).decode()
