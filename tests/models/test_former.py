"""Models that shipped before: refused, with a sentence that says where they can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from imdm import UserError, load
from imdm.adopting.sources import check_source
from imdm.data.tokenizers import load_tokenizer
from imdm.evaluation import load_judge
from imdm.experiments import load_recipe
from imdm.shipped import DEFAULT, FORMER, find, folder_of


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
