"""Files that are whole or not there: everything is written aside, flushed, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from imdm.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial-"  # a name that begins so is an unfinished write and is never read


def home() -> Path:
    """Where fetched judges and text prepared on the way are kept: IMDM_HOME, or a cache folder of the user."""
    return Path(os.environ.get("IMDM_HOME", Path.home() / ".cache" / "imdm"))


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a place to write; on success it replaces `path` (a file, or a folder that is not there yet)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    _remove(aside)
    try:
        yield aside
        for file in [aside] if aside.is_file() else [f for f in aside.rglob("*") if f.is_file()]:
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if aside.is_dir():
            _remove(path)
        os.replace(aside, path)
    except BaseException as error:
        _remove(aside)
        if isinstance(error, SafetensorError):  # what safetensors makes of a full disk
            raise UserError(f"{path} cannot be written: {error}") from None
        raise


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Without the bars that `transformers` shows while it loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process in this block with the same path, where the system can lock files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "wb") as file, _alone(file):
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with written_aside(path) as aside:
        aside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{what}: {path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: {path} is not valid JSON ({error}); it is damaged or not ours") from None


def read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Tensors by name from safetensors; nothing is ever unpickled."""
    with _safetensors(path, what):
        return load_file(path)


def read_metadata(path: Path, what: str) -> dict[str, str]:
    """What was written beside the tensors."""
    with _safetensors(path, what), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


@contextmanager
def _safetensors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{what}: {path} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{what}: {path} is not a readable safetensors file ({error})") from None


@contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """No other process in this block with the same file, where the system can lock one (closing unlocks it)."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
    yield


def append_line(path: Path, value: Any) -> None:
    """One JSON object a line. A last line that a crash cut short is dropped first, so that it cannot spoil this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file, _alone(file):
        file.seek(0)
        whole = file.read()
        if whole and not whole.endswith(b"\n"):
            file.truncate(whole.rfind(b"\n") + 1)
        file.write((json.dumps(value, ensure_ascii=False) + "\n").encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise UserError(f"{path}: line {number} is not JSON") from None
    return rows
