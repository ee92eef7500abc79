"""Errors a user can act on: one sentence that names what was wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints the sentence and exits with code 2; Python callers see a ValueError."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The answer to an unknown name: the known ones."""
    return UserError(f"unknown {kind} {str(name)!r}; known: {', '.join(sorted(known)) or 'none'}")
