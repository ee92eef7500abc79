"""Processes and their devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from imdm.core.devices import processes


def test_processes_wait_as_long_as_preparing_text_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prepares it, and the others wait in a barrier, which torch would end after half an hour."""
    monkeypatch.setattr("accelerate.PartialState", lambda **how: how)
    how = cast(dict[str, Any], processes())
    assert how["timeout"] >= timedelta(days=1)
