"""What all commands share: the app, its options, how it speaks, and how it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement

from imdm.errors import UserError
from imdm.shipped import find

app = typer.Typer(
    name="imdm",
    help="Infinite mask diffusion: text from a diffusion language model in a handful of network evaluations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
judges = typer.Typer(no_args_is_help=True, help="Language models that score generated text.")
app.add_typer(judges, name="judge")
console = Console()
INTERRUPTED = 130  # what Typer exits with on Ctrl-C

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as stages.teacher.training.steps=100.")
]
OutRun = Annotated[Path | None, typer.Option("--out", help="Folder of the run; runs/RECIPE unless given.")]


def located(name: str | None) -> str | None:
    """A model as it was named; one that ships by its folder."""
    return None if name is None else str(find(name))


ModelPath = Annotated[
    str, typer.Argument(help="Model folder, the name of one that ships (imdm models), or hub id.", callback=located)
]
Data = Annotated[
    str,
    typer.Option("--data", help="A language (aligned:length=2,symbols=2), prepared text, or a file of tokens."),
]
Seed = Annotated[int, typer.Option(help="Everything random follows from it.")]
Noise = Annotated[
    str, typer.Option(help="What a mask's noise does while it stays masked: posterior (the paper) or keep.")
]


STOPPED = ["stopped; run the same command again to go on"]
"""What is said after Ctrl-C; a command that could not go on adds its own words."""


def _version(asked: bool) -> None:
    if asked:
        from imdm import __version__

        print(f"imdm {__version__}")
        raise typer.Exit


@app.callback()
def _quiet(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # ours show what matters
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # and our refusals say what is wrong


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    if is_main():
        console.print(text, highlight=False, soft_wrap=True)


def show(*things: Any, soft_wrap: bool = False) -> None:
    """Print tables and other things of rich."""
    console.print(*things, soft_wrap=soft_wrap)


def in_colour() -> bool:
    """Whether colours can be seen."""
    return console.is_terminal and not console.no_color


def wide() -> bool:
    """Whether there is a terminal with room for two columns of text."""
    return console.is_terminal and console.width >= 80


def reporter() -> Any:
    from imdm.console import Terminal
    from imdm.pipeline import Quiet

    return Terminal() if is_main() else Quiet()


def device() -> Any:
    from imdm.devices import processes

    return processes().device


def show_tables(made: Any) -> None:
    """The tables of a report's first section."""
    from imdm.report import Table

    for part in made.sections[0].parts:
        if isinstance(part, Table):
            show()
            _whole(part.rich())
    show()


def _whole(table: Any) -> None:
    """Print a table as wide as it is, unless there is a window that is narrower."""
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    if console.is_terminal or needed <= console.width:
        show(table)
    else:
        Console(file=console.file, width=needed).print(table)


def main() -> None:
    """Bad input is one sentence and exit code 2; a stop by Ctrl-C says how to go on."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve a busy machine
    del STOPPED[1:]
    try:
        app(standalone_mode=True)
    except (UserError, OSError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            print(STOPPED[-1], file=sys.stderr)
        raise


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
