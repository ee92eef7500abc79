"""Names of 0.1 that are others now: found for one more version, with a warning that says what they are called. Models
that shipped before: refused, with a sentence that says where they can be had."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from imdm import UserError, load
from imdm.data.tokenizers import load_tokenizer
from imdm.evaluation import load_judge
from imdm.evaluation.text import pooled_entropy
from imdm.recipes import load_recipe
from imdm.runs import Bar, Quiet, Reporter, Run
from imdm.shipped import DEFAULT, FORMER, find, folder_of
from imdm.sources import check_source

MOVED = {
    ("imdm.pipeline", "Run"): ("imdm.runs.Run", Run),
    ("imdm.pipeline", "Bar"): ("imdm.runs.Bar", Bar),
    ("imdm.pipeline", "Quiet"): ("imdm.runs.Quiet", Quiet),
    ("imdm.pipeline", "Reporter"): ("imdm.runs.Reporter", Reporter),
    ("imdm.evaluation.entropy", "token_entropy"): ("imdm.evaluation.text.pooled_entropy", pooled_entropy),
}


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_a_moved_name_is_found_with_a_warning(module: str, name: str) -> None:
    new, thing = MOVED[module, name]
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is {new} now") as told:
        assert getattr(importlib.import_module(module), name) is thing
    assert told[0].filename == __file__


def test_what_never_was_is_still_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Walk'; it is 'imdm.runs' now"):
        importlib.import_module("imdm.pipeline").Walk  # noqa: B018


@pytest.mark.parametrize("name", FORMER)
def test_a_model_that_shipped_before_can_be_trained_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of it; a folder of that name is another model."""
    stage = FORMER[name]
    told = rf"{name}' is no longer in the package, which has {DEFAULT}, .*'imdm reproduce grid data=.* stage '{stage}'"
    for ask in (load, load_tokenizer, load_judge, check_source, folder_of):
        with pytest.raises(UserError, match=told):
            ask(name)
    assert getattr(load_recipe("grid").stages[stage], "kind", None) == "train"
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert find(name) == name
