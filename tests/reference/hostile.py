"""Values that nobody should give, and how their refusal is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
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
