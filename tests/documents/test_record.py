"""tools/record: what it says of two records."""

from __future__ import annotations

import json
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def record() -> Any:
    loader = SourceFileLoader("record", str(Path(__file__).parents[2] / "tools" / "record"))
    spec = spec_from_loader("record", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def written(folder: Path, device: str = "cpu", **parts: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, values in {"about": {"device": device}, **parts}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


TOKENS = {"a": {"tokens": [list(range(1000))]}}
ONE_OTHER = {"a": {"tokens": [[*range(999), 7]]}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "equal": ("cpu", {"samples": TOKENS, "hashes": {"x": "1"}}, {"samples": TOKENS, "hashes": {"x": "1"}}, False),
    "a token": ("cpu", {"samples": TOKENS}, {"samples": ONE_OTHER}, True),
    "a token in a thousand on a GPU": ("cuda", {"samples": TOKENS}, {"samples": ONE_OTHER}, False),
    "a hash": ("cpu", {"hashes": {"x": "1"}}, {"hashes": {"x": "2"}}, True),
    "a loss up to rounding": (
        "cpu",
        {"losses": {"plain t": {"losses": [[1.0, None]]}}},
        {"losses": {"plain t": {"losses": [[1 + 1e-7, None]]}}},
        False,
    ),
    "a loss": (
        "cpu",
        {"losses": {"plain t": {"losses": [[1.0, None]]}}},
        {"losses": {"plain t": {"losses": [[1.01, None]]}}},
        True,
    ),
    "a step less": (
        "cpu",
        {"losses": {"plain t": {"losses": [[1.0], [2.0]]}}},
        {"losses": {"plain t": {"losses": [[1.0]]}}},
        True,
    ),
    "missing": ("cpu", {"hashes": {"x": "1", "y": "2"}}, {"hashes": {"x": "1"}}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_found(record: Any, case: str, tmp_path: Path) -> None:
    device, old, new, differs = CASES[case]
    places = written(tmp_path / "old", device, **old), written(tmp_path / "new", device, **new)
    assert record.compare(*places) == int(differs)
