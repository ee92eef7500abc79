"""tools/campaign: what it takes for a right answer; and a small one."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def campaign() -> Any:
    loader = SourceFileLoader("campaign", str(Path(__file__).parents[2] / "tools" / "campaign"))
    spec = spec_from_loader("campaign", loader)
    assert spec is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.modules", __import__("sys").modules | {"campaign": module})
        loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("code", "said", "left", "verdict"),
    [
        (2, "error: a is missing\n", [], "refused"),
        (2, "a.txt: documents   3\nerror: a is missing\n", [], "refused"),
        (0, "", [], "taken"),
        (1, "error: imdm couple failed: ValueError\n", [], "exit code 1"),
        (2, "error: a is missing\n", ["manifest.json"], "left manifest.json"),
        (2, "error: a is missing\nerror: b too\n", [], "not one sentence"),
        (2, "Traceback (most recent call last):\n", [], "not one sentence"),
        (2, "", [], "not one sentence"),
    ],
)
def test_what_is_a_right_answer(campaign: Any, code: int, said: str, left: list[str], verdict: str) -> None:
    assert campaign.judged(code, said, left).verdict == verdict


def test_a_small_campaign(campaign: Any) -> None:
    answers = list(campaign.campaign(60, 7, list(campaign.DOORS)))
    assert {case.door for case, _ in answers} == set(campaign.DOORS)
    assert [(case.name, answer) for case, answer in answers if answer.verdict not in ("refused", "taken")] == []
