"""The directive `imdm-commands`: every command with its arguments and options, read from the command itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from imdm.cli.app import app as command_line
from imdm.cli.options import LateHelp


def commands(group: Any, words: str = "imdm") -> Iterator[tuple[str, Any]]:
    """Each command by its words, in alphabetical order, those of groups too."""
    for name, command in sorted(group.commands.items()):
        if getattr(command, "commands", None):
            yield from commands(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def described(words: str, command: Any) -> str:
    """One command in Markdown: what it does, how it is called, and a line for each argument and option."""
    if isinstance(command, LateHelp):
        command.fill_in()
    context = command.make_context(words, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    records = [parameter.get_help_record(context) for parameter in command.params]
    lines = [f"`{name}`\n: {told}\n" for name, told in filter(None, records)]
    return "\n".join([f"## {words}\n", f"{command.help}\n", f"```text\n{words} {usage}\n```\n", *lines])


TEXT = "\n".join(described(words, command) for words, command in commands(get_command(command_line)))
"""All of them, a section each; made before autodoc replaces the defaults of functions, which help names."""


class Commands(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(TEXT, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("imdm-commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
