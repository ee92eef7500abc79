"""Run notebooks from their first cell to their last and keep what they show: `python notebooks/run.py FILE …`.

With `--into FOLDER` the results go there, and the notebooks stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient


def run(file: Path, into: Path) -> None:
    """Execute one notebook in an empty folder; times and other traces of the machine are left out."""
    notebook = nbformat.read(file, as_version=4)
    with TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1800, kernel_name="python3", coalesce_streams=True, resources=where).execute()
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
    notebook["metadata"]["language_info"] = {"name": "python"}
    nbformat.write(notebook, into / file.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run notebooks and keep what they show.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    for one in given.files:
        run(one, given.into or one.parent)
