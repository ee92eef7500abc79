"""Docstrings are plain text: paragraphs, examples, and lists of a name, two spaces or more, and what it means."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import groupby

from sphinx.application import Sphinx

ENTRY = re.compile(r"(?P<name>\S(?:.*?\S)?) {2,}(?P<told>\S.*)")
CODE = re.compile(r"(`[^`]*`)")


def plain(text: str) -> str:
    """Text that reStructuredText takes as it is, but for code in backticks."""
    parts = CODE.split(text)
    return "".join(part if CODE.fullmatch(part) else re.sub(r"([\\*|_])", r"\\\1", part) for part in parts)


def listed(lines: list[str]) -> list[str]:
    """A definition list, where each line is an entry or goes on with the one before; else nothing."""
    out: list[str] = []
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if entry:
            out += [f"``{entry['name']}``", f"    {plain(entry['told'])}"]
        elif out and line.startswith("  "):
            out.append(f"    {plain(line.strip())}")
        else:
            return []
    return out


def translated(lines: list[str]) -> list[str]:
    """A docstring in reStructuredText."""
    out: list[str] = []
    for blank, group in groupby(lines, key=lambda line: not line.strip()):
        block = list(group)
        if blank:
            continue
        example = block[0].lstrip().startswith(">>>")
        out += (block if example else listed(block) or [plain(line.strip()) for line in block]) + [""]
    return out


def process(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = translated(lines)


def found(app: Sphinx) -> None:
    """Public names are imported when first used, and autodoc looks for them in the module: use them once."""
    imdm = import_module("imdm")
    for name in imdm.__all__:
        setattr(imdm, name, getattr(imdm, name))


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process)
    app.connect("builder-inited", found)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
