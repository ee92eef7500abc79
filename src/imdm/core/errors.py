"""Errors a user can act on: one sentence that names what was wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real

LARGEST = 1e300  # larger numbers are surely mistakes


class UserError(ValueError):
    """Bad input. The command line prints the sentence and exits with code 2; Python callers see a ValueError."""


class AgreedError(UserError):
    """Bad input that all processes of a run refuse; the first of them says so."""


def check_whole(name: str, value: object, least: int = 1, most: int = (1 << 63) - 1) -> None:
    """Refuse what is not a whole number in this range."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        limit = f"of at least {least:,}" if most == (1 << 63) - 1 else f"from {least:,} to {most:,}"
        raise UserError(f"{name} = {shown(value)}: must be a whole number {limit}")


def check_is(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse an argument that is not of this kind."""
    if not isinstance(value, kind):
        raise UserError(f"{name} = {shown(value)}: expected {what}")


def check_function(name: str, value: object) -> None:
    """Refuse an argument that can neither be called nor is None."""
    if value is not None and not callable(value):
        raise UserError(f"{name} = {shown(value)}: expected a function")


def check_seed(value: object, name: str = "seed") -> None:
    """Refuse what is not a 64-bit integer."""
    check_whole(name, value, -(1 << 63), (1 << 64) - 1)


def check_blanks(text: str, marker: str) -> None:
    """Refuse a text without blanks to fill."""
    if not marker:
        raise UserError("marker = '': nothing to look for; the usual one is '___'")
    if marker not in text:
        raise UserError(
            f"nothing to fill in: the text {shown(text)} has no {shown(marker)}; put it where text is missing"
        )


def check_number(name: str, value: object) -> None:
    """Refuse what is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not abs(value) <= LARGEST:  # type: ignore[operator]
        raise UserError(f"{name} = {shown(value)}: must be a number")


def shown(value: object) -> str:
    """The repr of a value, shortened."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        text = "a number of thousands of digits"
    except RecursionError:
        text = "a value nested too deeply"
    return shorter(text, 80)


def shorter(text: str, most: int = 300) -> str:
    """A text without its middle, if it is long."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 4 :]}"


def reason_of(error: BaseException) -> str:
    """The first line of a library's error message; the second one if the first only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    first = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return shorter(f"no entry {first}" if isinstance(error, KeyError) else first.rstrip(".: "))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on any device: torch has several messages for it."""
    messages = ("can't allocate memory", "not enough memory", "out of memory", "Unable to allocate")
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError | OSError) and any(part in str(error) for part in messages))


def is_lost_peer(error: BaseException) -> bool:
    """Whether another process of a distributed run has ended."""
    messages = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
    return isinstance(error, RuntimeError) and any(part in str(error) for part in messages)


class WriteError(UserError):
    """A file could not be written: disk full or no permission. Files written before are intact."""


MANY_NAMES = 8  # beyond which the closest is named as well


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """An error for an unknown name that lists the known ones, and of many the closest."""
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1) if len(names) > MANY_NAMES else []
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return UserError(f"unknown {kind} {str(name)!r}; known: {', '.join(names) or 'none'}{meant}")


MOST_STEPS = 1_000_000
TEMPERATURES = "must be 0 (the likeliest token) or in [1e-6, 1e6] (1.0 samples the model as it is)"


def is_temperature(value: float) -> bool:
    return value == 0 or 1e-6 <= value <= 1e6
