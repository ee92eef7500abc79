"""Common to all commands: the app, output, errors and exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import time
import traceback
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from imdm.core.console import plain_console
from imdm.core.errors import AgreedError, UserError, is_lost_peer, is_out_of_memory, reason_of, shorter
from imdm.core.files import home, write_text
from imdm.core.stopping import AGAIN, CODES, GO_ON
from imdm.core.stopping import is_first as is_main

app = typer.Typer(
    name="imdm",
    help="Infinite mask diffusion: text from a diffusion language model in a handful of network evaluations.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
judges = typer.Typer(no_args_is_help=True, help="Language models that score generated text.")
app.add_typer(judges, name="judge")
console = plain_console()

STOPPED = [GO_ON]
"""Messages after Ctrl-C or SIGTERM; a command that cannot resume adds its own."""
LONGEST = 2000  # characters of a message
TRAINING = ("train", "distill", "reproduce")  # commands that train
PATIENCE = 5.0  # seconds; torchrun ends a process earlier, when the first one has ended


def _version(flag: bool) -> None:
    if flag:
        from imdm import __version__

        print(f"imdm {__version__}")
        raise typer.Exit


@app.callback()
def _quiet(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # we have our own
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # our errors are enough


def say(text: str) -> None:
    if is_main():
        console.print(text, soft_wrap=True)


def show(*things: Any, soft_wrap: bool = False) -> None:
    """Print tables and other things of rich."""
    console.print(*things, soft_wrap=soft_wrap)


def terminal() -> Console:
    """The console for standard output."""
    return console


def in_colour() -> bool:
    """Whether the terminal shows colours."""
    return console.is_terminal and not console.no_color


def wide() -> bool:
    """Whether there is a terminal with room for two columns of text."""
    return console.is_terminal and console.width >= 80


def reporter() -> Any:
    from imdm.core.console import Terminal
    from imdm.experiments.run import Quiet

    return Terminal() if is_main() else Quiet()


def device() -> Any:
    from imdm.core.devices import own_device

    return own_device()


def show_tables(report: Any) -> None:
    """The tables of the sections of a report that are to be printed."""
    from imdm.report import Table

    for part in (part for section in report.sections if section.printed for part in section.parts):
        if isinstance(part, Table):
            show()
            show_whole(part.rich())
    show()


def show_whole(table: Any) -> None:
    """Print a table at its full width, or that of the terminal if it is narrower."""
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    if console.is_terminal or needed <= console.width:
        show(table)
    else:
        plain_console(file=console.file, width=needed).print(table)


def main() -> None:
    """Bad input is one sentence and exit code 2; after a signal a message says how to resume; any other error is one
    line too, with its traceback in a file."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow down a busy machine
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # characters that the terminal cannot show
    del STOPPED[1:]
    try:
        app(standalone_mode=True)
        _flush()
    except UserError as error:
        _let_the_first_speak()
        if _is_first_here() or not isinstance(error, AgreedError):
            _end(str(error), 2)
        sys.exit(2)
    except OSError as error:
        _forget_output(error)
        _end(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error), 2)
    except SystemExit as stop:
        if stop.code in CODES.values() and is_main():
            print(STOPPED[-1], file=sys.stderr)
        _flush()
        raise
    except Exception as error:
        if is_lost_peer(error):
            _let_the_first_speak()
            _end(f"another process of this run has ended, perhaps killed for lack of memory; {AGAIN}", 1)
        if is_out_of_memory(error):
            _end(f"out of memory ({reason_of(error)}); {_less_memory()}", 2)
        _end(f"{_doing()} failed: {type(error).__name__}: {reason_of(error)}; {_kept_traceback()}", 1)


def _is_first_here() -> bool:
    """Whether this process is the first of its machine, whose terminal may be another than that of the first of all."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def _let_the_first_speak() -> None:
    """Wait, so that of all processes only the first prints an error they share: torchrun ends this one meanwhile."""
    if not _is_first_here():
        time.sleep(PATIENCE)


def _flush() -> None:
    """Flush standard output now: Python would report a full disk in its own way at exit."""
    if sys.stdout is None:  # closed before Python started, as by >&-
        _end("standard output is closed; what was to be printed is lost", 2)
    try:
        sys.stdout.flush()
    except OSError as error:
        _forget_output(error)
        if error.errno != errno.EPIPE:
            _end(f"standard output cannot be written: {error.strerror}", 2)


def _forget_output(error: OSError) -> None:
    """Discard output that could not be printed."""
    if error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(sentence: str, code: int) -> NoReturn:
    plain_console(stderr=True).print(Text.assemble(("error:", "bold red"), " ", _one_line(sentence)), soft_wrap=True)
    sys.exit(code)


def _one_line(text: str) -> str:
    """A text without control characters and line breaks, and cut if long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    text = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return shorter(text, LONGEST)


def _less_memory() -> str:
    """What makes the command take less memory."""
    if _doing().removeprefix("imdm ") not in TRAINING:
        return "ask for fewer or shorter texts, a smaller batch or model"
    return (
        "for a stage that trains set a smaller training.micro_batch, training.checkpoint_blocks=true, or, with several "
        "processes (torchrun), training.shard=full; or use a smaller model"
    )


def _doing() -> str:
    """The command that was given, without its options."""
    words = [word for word in sys.argv[1:3] if word.isidentifier()]
    return " ".join(["imdm", *words[:1]])


def _kept_traceback() -> str:
    """Write the traceback of the current exception to a file; returns a note with its path."""
    for folder in (home() / "errors", Path(tempfile.gettempdir())):
        file = folder / f"imdm-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
        try:
            write_text(file, f"imdm {' '.join(sys.argv[1:])!r}\n\n{traceback.format_exc()}")
        except UserError:
            continue
        return f"the traceback is in {file}"
    return "its traceback could not be written"
