"""The notebooks run from their first cell to their last, and what they show is in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LARGEST = 300_000  # bytes


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_has_been_run(file: Path) -> None:
    """As it is: every cell once, in order, without complaint; nothing in it tells of a machine."""
    text = file.read_text(encoding="utf-8")
    cells = code(json.loads(text))
    assert "%pip install" in "".join(cells[0]["source"]), "the first cell installs what is needed"
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    assert len(text.encode()) < LARGEST
    assert "site-packages" not in text


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell shows as many things as it did when it was last run."""
    pytest.importorskip("nbclient", reason="notebooks are run by nbclient")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = [sys.executable, file.parent / "run.py", file, "--into", tmp_path]
    done = subprocess.run(told, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    before, after = (json.loads(one.read_text(encoding="utf-8")) for one in (file, tmp_path / file.name))
    assert [len(cell["outputs"]) for cell in code(after)] == [len(cell["outputs"]) for cell in code(before)]
