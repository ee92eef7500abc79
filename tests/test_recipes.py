"""Recipes: typed, validated, extended, overridden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from imdm.errors import UserError
from imdm.models import MaskedDiffusionLM
from imdm.recipes import TrainStage, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_parses_and_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.summary
    vocabulary = recipe.data.vocabulary() if recipe.data.is_ready else (recipe.data.train_bpe or 30522, 3)
    config = recipe.model.build(*vocabulary, length=8)
    with torch.device("meta"):
        MaskedDiffusionLM(config)
    assert load_recipe(name).digest() == recipe.digest()


def test_overrides_change_what_they_name() -> None:
    plain = load_recipe("synthetic")
    changed = load_recipe("synthetic", ["stages.imdm.training.steps=7", "stages.imdm.mask=finite-9", "seed=4"])
    assert isinstance(changed.stages["imdm"], TrainStage)
    assert changed.stages["imdm"].training.steps == 7
    assert changed.stages["imdm"].mask.name == "finite-9"
    assert changed.stages["mdm"] == plain.stages["mdm"]
    assert changed.digest() != plain.digest()
    assert load_recipe("synthetic", ["seed=4"]).digest() == plain.digest()


def test_extends_merges_one_level(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: synthetic\nname: child\nstages: {imdm: {mask: finite-5}}\n")
    recipe = load_recipe(child)
    assert recipe.name == "child"
    assert recipe.stages["imdm"].mask.name == "finite-5"
    assert recipe.stages["imdm"].objective.kind == "redi"
    grandchild = tmp_path / "grandchild.yaml"
    grandchild.write_text(f"extends: {child}\nname: grandchild\n")
    with pytest.raises(UserError, match="one level is allowed"):
        load_recipe(grandchild)


def test_the_resolved_recipe_is_itself_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "whole.yaml"
    path.write_text(yaml.safe_dump(load_recipe("synthetic").resolved(), sort_keys=False))
    assert load_recipe(path) == load_recipe("synthetic")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.imdm.training.step=7"], "unknown key 'stages.imdm.training.step'"),
        (["stages.imd.training.steps=7"], "unknown stage 'imd'; known: evaluate, imdm, mdm, pairs, teacher"),
        (
            ["colour=red"],
            r"unknown key 'colour' \(known: data, experiment, model, name, quick, seed, stages, summary, threads",
        ),
        (
            ["stages.imdm.training.steps=many"],
            "'stages.imdm.training.steps' = 'many': input should be a valid integer",
        ),
        (["stages.imdm.mask=triple"], "unknown mask 'triple'; known: finite, infinite, single"),
        (["stages.imdm.objective=gan"], "unknown objective 'gan'"),
        (["stages.evaluate.metrics=[bleu]"], "unknown metric 'bleu'"),
        (["stages.imdm.start=evaluate"], "stage 'imdm' builds on 'evaluate', which must stand above it"),
        (["data.kind=audio"], "data"),
        (["seed"], "write key=value"),
        (["name.first=x"], "'name' is a value, not a section"),
        (["seed=[1"], "is not a valid value"),
    ],
)
def test_bad_overrides_get_a_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("synthetic", overrides)


def test_bad_files_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown recipe 'lm2b'; known: .*synthetic"):
        load_recipe("lm2b")
    with pytest.raises(UserError, match="no such file"):
        load_recipe(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(UserError, match="not valid YAML"):
        load_recipe(broken)
    broken.write_text("- a list")
    with pytest.raises(UserError, match="expected a mapping"):
        load_recipe(broken)
    broken.write_text("name: short")
    with pytest.raises(UserError, match="'summary' is required"):
        load_recipe(broken)
