"""Values that nobody should give, and how their refusal is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from imdm.core.errors import UserError

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
HUGE = 10**18
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-50, 50),
    st.sampled_from(
        [0, -1, 1.5, HUGE, 10**1000, float("inf"), float("nan"), "", "../x", "/abs", "[/x]", "a/b", "\udcff"]
    ),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def refusal(work: Callable[[], Any]) -> str | None:
    """What a refusal says; None where there is none. Anything but a UserError is a fault."""
    try:
        work()
    except UserError as error:
        return str(error)
    return None


def odd_values(number: int, chosen: int = 0) -> list[Any]:
    """So many of `ODD`, the same ones for the same seed."""
    found: list[Any] = []

    @seed(chosen)
    @settings(few, max_examples=number, database=None, phases=[Phase.generate])
    @given(ODD)
    def collected(value: Any) -> None:
        found.append(value)

    collected()
    return found[:number]


WORDS = (
    *("", " ", "-", "--", ".", "..", "/", "../x", "/proc/x", "/dev/null", "/dev/zero", "nowhere", "nowhere.txt", "a/b"),
    *("nan", "inf", "-inf", "1e400", "-1", "0", "1.5", str(HUGE), "9" * 5000, "0x10", "１", "True", "null", "None"),
    *("[" * 5000, "[" * 700 + "]" * 700, "{a: " * 300, "x" * 300, "x/" * 3000, "a=b", "=", "a=", ",", "1,2,x", "1,,2"),
    *("\0", "a\0b", "a\0.txt", "\udcff", "\x1b[31m", "\n", "~", "$HOME", "%s", "{x}", "[/x]", "é" * 200, "*"),
)
"""Words that a command should not be given: as values of options and as arguments."""

DEEP = "[" * 900 + "]" * 900
CONTENTS: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b"{}",
    bytes(range(256)),
    b"\xff\xfe" * 50,
    b"\0" * 100,
    DEEP.encode(),
    b'{"a": ' * 400 + b"1" + b"}" * 400,
    b"9" * 5000,
    b"PK\x03\x04" + b"\0" * 50,
    b"\x93NUMPY\x01\x00v\x00{'descr': '<u2'",
    (10**12).to_bytes(8, "little") + b"{}",
    b"name: [",
    b"a: &a [*a]",
)
"""What a file should not hold, whatever its kind."""
