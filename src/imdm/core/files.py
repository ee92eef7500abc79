"""Atomic file writes, with digests that detect damage.

Everything is written to a temporary file, flushed, then renamed. Tensors are stored with a digest, which is checked
when they are read. Unfinished files of a killed process are removed by the next one that works in the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from imdm.core.config import digest
from imdm.core.errors import UserError, WriteError, shown

if TYPE_CHECKING:
    from torch import Tensor

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = ".partial-"  # a name that begins so is an unfinished write and is never read
STALE = 24 * 3600  # seconds after which unfinished files of another machine are deleted
DIGEST = "digest"  # metadata key of the digest in a safetensors file
LARGEST_JSON = 1 << 28  # bytes
LARGEST_YAML, MOST_VALUES, DEEPEST = 1 << 20, 100_000, 50  # characters, values, levels


def home() -> Path:
    """The folder of downloaded judges and cached text: IMDM_HOME, or a cache folder of the user."""
    return Path(os.environ.get("IMDM_HOME", Path.home() / ".cache" / "imdm"))


def as_path(value: Any, what: str) -> Path:
    """A valid path."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise UserError(f"{what} = {shown(value)}: expected a path")
    text = os.fspath(value)
    if not text or "\0" in text or any(len(os.fsencode(part)) > 255 for part in Path(text).parts) or len(text) > 4000:
        raise UserError(f"{what} = {shown(text)}: that cannot be a path")
    return Path(text)


def check_file(path: Path, what: str) -> None:
    """Refuse to read from a pipe or a device, which may wait for ever. What is missing, or a folder, is refused by who
    reads it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{what}: {path} is a pipe or a device; give a file")


def check_folder(folder: Path, what: str) -> None:
    """Refuse a folder with a pipe or a device in it (`check_file`), as a library will read its files."""
    for file in folder.iterdir() if folder.is_dir() else ():
        check_file(file, what)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success it replaces `path` (a file, or a folder)."""
    aside = path.with_name(_unfinished(path.name))
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _remove(aside)
            yield aside
            # Contents reach the disk before the name does: after a power cut a rename may be there and the data not.
            # A folder cannot be renamed onto one with files, so the old one goes first; a crash between the two
            # leaves neither, as if the work had not been done.
            for file in [aside] if aside.is_file() else [f for f in aside.rglob("*") if f.is_file()]:
                with open(file, "r+b") as handle:
                    os.fsync(handle.fileno())
            if aside.is_dir():
                _remove(path)
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                _remove(aside)
            raise


@contextmanager
def aside_in(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`, into which a library may write; deleted at the end."""
    aside = folder / _unfinished("aside")
    with _naming(folder):
        try:
            _remove(aside)
            aside.mkdir(parents=True)
            yield aside
        finally:
            with suppress(OSError):
                _remove(aside)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn errors of a full or read-only disk into a sentence that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:  # safetensors' error for a full disk
        raise WriteError(f"{path} cannot be written: {error}") from None
    except UnicodeEncodeError as error:
        raise UserError(f"{path} cannot be written: {error.object!r} is not text that UTF-8 can hold") from None
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(path.parent)):
            raise  # of another file
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None


def _unfinished(name: str) -> str:
    """The name of an unfinished file of this process: it has machine and process id."""
    return f"{PARTIAL}{_machine()}-{os.getpid()}-{name}"


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Inside this block the folder holds an empty file of this process, whose name is yielded. Folders that had to be
    made for it are removed again if they are empty."""
    mark, folders = folder / _unfinished(f"mark-{uuid.uuid4().hex}"), list[Path]()
    try:
        with _naming(mark):
            folders = _make_folders(folder)
            mark.touch()
        yield mark.name
    finally:
        with suppress(OSError):
            mark.unlink()
            for place in folders:
                place.rmdir()


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder, and those above it that are missing; returns them, innermost first."""
    try:
        folder.mkdir()
    except FileExistsError:
        return []
    except FileNotFoundError:
        above = _make_folders(folder.parent)
        return [*_make_folders(folder), *above]
    return [folder]


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:6]


def _is_left(path: Path) -> bool:
    """Whether an unfinished file's process is dead. Other processes of the run may be working in the same folder."""
    named = re.fullmatch(r"([0-9a-f]{6})-([0-9]+)-.*", path.name.removeprefix(PARTIAL))
    if named is None:
        return False  # not ours
    machine, number = named.groups()
    try:
        if machine != _machine() or os.name == "nt":  # where os.kill(pid, 0) kills
            return time.time() - path.stat().st_mtime > STALE
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # no permission, or already gone
        return False
    return int(number) == os.getpid()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Lock this folder, if the file system supports locks; another process that tries is refused. The lock ends with
    the process, however it ends. Unfinished files of killed processes are removed."""
    check_writable(folder)
    # The lock is on the folder itself, not on a file in it, so that nothing is left behind, and the system frees it
    # even when the process is killed. Folders that were made for nothing are removed again at the end, so a refused run
    # leaves no trace.
    with _naming(folder):
        folders = _new_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process is at work in {folder}; wait until it is done, or choose another folder"
                ) from None
            except OSError:  # a file system without locks, as some network file systems
                pass
        for left in folder.rglob(f"{PARTIAL}*"):
            if _is_left(left):
                _remove(left)
        yield
    finally:
        for place in folders:  # restore if nothing was written
            with suppress(OSError):
                place.rmdir()
        if lock is not None:
            os.close(lock)


def check_writable(folder: Path) -> None:
    """Refuse a folder in which nothing can be written, before any work."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir():
        instead = "give a folder" if place == folder else f"{folder} cannot be a folder"
        raise UserError(f"{place} is a file; {instead}")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=PARTIAL, dir=place))
    except OSError as error:
        inside = "" if place == folder else f"nothing can be made in {place}: "
        reason = error.strerror or str(error)
        raise UserError(f"{folder} cannot be written into ({inside}{reason}); choose another folder") from None


def _new_folders(folder: Path) -> list[Path]:
    """The folders that must be created for this one, innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside this block `transformers` shows no progress bars while it loads."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock on a path, if the system supports locks; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "wb") as file, _exclusive(file):
        yield


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, _dumped(value, indent=2) + "\n")


def write_lines(path: Path, values: Iterable[Any]) -> None:
    """Write a JSON-lines file: one object a line."""
    write_text(path, _json_lines(values))


def _json_lines(values: Iterable[Any]) -> str:
    return "".join(_dumped(value) + "\n" for value in values)


def _dumped(value: Any, indent: int | None = None) -> str:
    """JSON without ASCII escapes, except for lone surrogates, which file names may have."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


def read_text(path: Path, what: str) -> str:
    """Read a text file; errors are UserErrors."""
    check_file(path, what)
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise UserError(f"{what}: {path} has {path.stat().st_size:,} bytes; it is damaged or not ours")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{what}: {path} is missing") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: {path} is not UTF-8 text ({error}); it is damaged or not ours") from None
    except OSError as error:
        raise UserError(f"{what}: {path} cannot be read ({error.strerror or error})") from None


def parse_json(text: str, *, constants: bool = False) -> Any:
    """JSON, or a ValueError: also where it is nested too deeply, or a number has thousands of digits. constants: NaN
    and Infinity are null, not an error."""
    try:
        value = json.loads(text, parse_constant=(lambda name: None) if constants else _no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > DEEPEST and _deeper(value, DEEPEST):
        raise ValueError("nested too deeply")
    return value


def _deeper(value: Any, levels: int) -> bool:
    inside = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return isinstance(value, dict | list) and (not levels or any(_deeper(one, levels - 1) for one in inside))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def parse_yaml(text: str) -> Any:
    """YAML, or a ValueError: also where it is nested too deeply, refers to itself, or would be too large once its
    aliases are written out."""
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"{len(text):,} characters are too many for settings; at most {LARGEST_YAML:,}")
    try:
        value = yaml.safe_load(text)
        _count_values(value, {}, set())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    return value


def _count_values(value: Any, counts: dict[int, int], above: set[int]) -> int:
    """How many values there are once aliases, which are one object in several places, are written out."""
    if isinstance(value, str):
        value.encode()  # YAML can encode lone surrogates
    if not isinstance(value, dict | list):
        return 1
    if id(value) in above or len(above) > DEEPEST:
        raise ValueError("an alias refers to what it is part of" if id(value) in above else "nested too deeply")
    if id(value) not in counts:
        inside = value if isinstance(value, list) else [*value, *value.values()]
        counts[id(value)] = 1 + sum(_count_values(item, counts, above | {id(value)}) for item in inside)
    if counts[id(value)] > MOST_VALUES:
        raise ValueError(f"with its aliases written out it has more than {MOST_VALUES:,} values")
    return counts[id(value)]


def read_json(path: Path, what: str) -> Any:
    try:
        return parse_json(read_text(path, what))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what}: {path} is not valid JSON ({error}); it is damaged or not ours") from None


def read_object(path: Path, what: str, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """A JSON object that has these fields, of these types."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} holds no JSON object; it is damaged or not ours")
    for name, kind in fields.items():
        if not isinstance(value.get(name), kind) or isinstance(value[name], bool) != (kind is bool):
            raise UserError(f"{what}: {path} has no proper {name!r}; it is damaged or not ours")
    return value


def listed_files(index: Path, what: str) -> list[Path]:
    """The files of weights that an index of shards (`model.safetensors.index.json`) lists, all beside it."""
    parts = read_object(index, what).get("weight_map")
    names = list(parts.values()) if isinstance(parts, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{what}: {index} does not list the file of each tensor, beside it; it is damaged or not ours")
    return [index.parent / name for name in dict.fromkeys(names)]


def write_recorded(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a digest, which `read_recorded` checks."""
    write_json(path, {**value, DIGEST: digest(value)})


def read_recorded(path: Path, what: str, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """Read an object of `write_recorded`; one without a digest, of an earlier version, is not checked."""
    value = read_object(path, what, **fields)
    own_digest = value.pop(DIGEST, None)
    if own_digest is not None and own_digest != digest(value):
        raise UserError(f"{what}: {path} is damaged: its contents are not what was written")
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, with a digest, which `read_tensors` checks; contiguous, on the CPU, without shared
    memory."""
    from safetensors.torch import save_file

    with written_aside(path) as aside:
        by_name = dict(tensors)
        save_file(by_name, aside, metadata={"format": "pt", **(metadata or {}), DIGEST: digest_of(by_name)})
        _in_order(aside)
        os.chmod(aside, 0o666 & ~_mask())  # the library makes it private


def _mask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _in_order(file: Path) -> None:
    """Sort a safetensors file's metadata, whose order is random, so that the same tensors give the same bytes."""
    with open(file, "r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:
            opened.seek(8)
            opened.write(text.ljust(size))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes, types and every byte."""
    import torch

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        total.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def digest_file(path: Path) -> str:
    """A hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Read tensors by name from safetensors and check their digest; nothing is ever unpickled."""
    from safetensors.torch import load_file

    with _safetensors(path, what):
        tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise UserError(f"{what}: {path} holds complex numbers ({name!r}), which nothing here has; it is not ours")
    own_digest = read_metadata(path, what).get(DIGEST)
    if own_digest is not None and digest_of(tensors) != own_digest:
        raise UserError(f"{what}: {path} is damaged: its contents are not what was written")
    check_once([path], "digest", lambda: None)  # `check_tensors` need not read it again
    return tensors


def read_metadata(path: Path, what: str) -> dict[str, str]:
    """The metadata of a safetensors file."""
    from safetensors import safe_open

    with _safetensors(path, what), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def tensor_names(path: Path, what: str) -> list[str]:
    """The names of the tensors in a file, none of which is read."""
    from safetensors import safe_open

    with _safetensors(path, what), safe_open(path, framework="pt") as file:
        return list(file.keys())


_checked_files: dict[tuple[str, Path], tuple[int, int, int]] = {}


def check_once(paths: Sequence[Path], kind: str, check: Callable[[], object]) -> None:
    """Call `check` unless this process has checked these files in this way since they were last written."""
    try:
        stats = {(kind, path.absolute()): path.stat() for path in paths}
    except OSError:
        check()
        return
    states = {place: (now.st_ino, now.st_size, now.st_mtime_ns) for place, now in stats.items()}
    if not states or any(_checked_files.get(place) != state for place, state in states.items()):
        check()
        _checked_files.update(states)


def check_tensors(path: Path, what: str) -> None:
    """Refuse a safetensors file whose digest, if it has one, does not match; checked once a process."""
    check_once([path], "digest", lambda: read_tensors(path, what))


@contextmanager
def _safetensors(path: Path, what: str) -> Iterator[None]:
    from safetensors import SafetensorError

    check_file(path, what)
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{what}: {path} is missing") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{what}: {path} is not a readable safetensors file ({error})") from None


@contextmanager
def _exclusive(file: IO[bytes]) -> Iterator[None]:
    """A lock on an open file, if the system supports locks (closing unlocks it)."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
    yield


def append_line(path: Path, value: Any) -> None:
    append_lines(path, [value])


HELD = {
    "recipe.json": "it is not the folder of a run",
    "results.jsonl": "run 'imdm reproduce' or 'imdm evaluate' first",
}


def check_new(out: str | Path) -> Path:
    """The folder to be written; refused if it exists or cannot be written."""
    folder = as_path(out, "out")
    if folder.exists():
        raise UserError(f"{str(out)!r} is there already; choose another folder")
    check_writable(folder)
    return folder


def check_holds(folder: Path, file: str) -> None:
    """Refuse a folder without this file of a run."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not (folder / file).exists():
        raise UserError(f"{folder}: no {file} there; {HELD[file]}")


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append objects to a JSON-lines file, all or none of them. A last line that a crash cut short is dropped first."""
    with _naming(path):
        lines = _json_lines(values).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file, _exclusive(file):
            # Under the lock the file ends where the last whole line does. A crash while writing leaves at most a line
            # that is cut short, which the next writer drops; an error, as a full disk, restores the file here.
            end = _whole(file)
            try:
                file.truncate(end)
                file.seek(end)
                while lines:
                    lines = lines[file.write(lines) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(end)
                raise


def _whole(file: IO[bytes]) -> int:
    """Where the last whole line of a file ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _other_files(path: Path) -> set[tuple[Path, int]]:
    """The other files of a folder, and when each was last written."""
    files = [file for file in path.parent.rglob("*") if file.is_file() and file != path]
    return {(file, file.stat().st_mtime_ns) for file in files}


@contextmanager
def kept_if_refused(path: Path) -> Iterator[None]:
    """After an error in this block the file is restored, or removed if it is new, unless other files of its folder
    changed."""
    before, others = path.read_bytes() if path.is_file() else None, _other_files(path)
    try:
        yield
    except UserError:
        if _other_files(path) != others:
            raise
        if before is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_bytes() != before:
            with written_aside(path) as aside:
                aside.write_bytes(before)
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a crash is left out, and NaN and Infinity, which
    earlier versions wrote, are null."""
    if not path.exists():
        return []
    check_file(path, "rows")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line.decode(), constants=True)
        except ValueError:
            if number < len(lines):  # else it was cut short
                raise UserError(f"{path}: line {number} is not JSON; it is damaged or not ours") from None
            continue
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is no JSON object; it is damaged or not ours")
        rows.append(row)
    return rows
