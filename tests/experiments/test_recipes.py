"""Recipes: typed, validated, extended, overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from imdm.core.errors import UserError
from imdm.experiments import TrainStage, load_recipe, recipe_names, summaries
from imdm.models.denoiser import MaskedDiffusionLM


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_parses_and_builds_its_model(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.summary
    vocabulary = recipe.data.vocabulary() if recipe.data.is_ready else (recipe.data.train_bpe or 30522, 3)
    config = recipe.model.build(*vocabulary, length=8)
    with torch.device("meta"):
        MaskedDiffusionLM(config)
    assert summaries()[name] == recipe.summary  # which is read without parsing


# What the paper says (§5.1, §5.3, App. B, Tables 4–13), typed from it; where it is silent, its authors' public code.
UNIFORM = {"kind": "infinite", "law": "uniform", "scale": 1.0}
LM1B = {
    "data.path": "lm1b",
    "data.tokenizer": "bert-base-uncased",
    "data.length": 128,
    "model.preset": "small",
    "model.softcap": 50.0,
    "stages.evaluate.steps": [2, 4, 8, 16],
    "stages.sdtt.training.batch": 32,
}
OWT = {
    "data.path": "openwebtext",
    "data.tokenizer": "gpt2",
    "data.length": 1024,
    "model.preset": "small",
    "model.softcap": None,
    "stages.evaluate.steps": [2, 4, 8, 16, 32, 64],
    "stages.sdtt.training.batch": 128,
    "stages.continue.conditional.prompts": 256,
    "stages.continue.conditional.prefix": 50,
    "stages.continue.conditional.continuations": 5,
    "stages.continue.conditional.tokens": 100,
}
SDTT = {
    "stages.sdtt.start": "teacher",
    "stages.sdtt.objective.kind": "sdtt",
    "stages.sdtt.objective.rounds": 7,
    "stages.sdtt.objective.iterations": 10_000,
    "stages.sdtt.training.steps": 70_000,
    "stages.sdtt.training.lr": 6e-5,
    "stages.sdtt.training.warmup": 500,
    "stages.sdtt.training.ema": 0.9999,
    "stages.evaluate.samples": 1024,
    "stages.evaluate.judge": "gpt2-large",
    "stages.evaluate.judge_precision": "float32",
    "stages.evaluate.noise": "posterior",
    "stages.evaluate.temperatures": [1.0],
}
REDI = {
    "stages.pairs.teacher": "sdtt",
    "stages.pairs.pairs": 100_000,
    "stages.pairs.steps": 1024,
    "stages.pairs.noise": "posterior",
    "stages.pairs.start": "perturbed",
    "stages.redi.start": "sdtt",
    "stages.redi.data": "pairs",
    "stages.redi.objective.kind": "redi",
    "stages.redi.training.steps": 50_000,
    "stages.redi.training.batch": 512,
    "stages.redi.training.lr": 3e-4,
    "stages.redi.training.warmup": 2500,
    "stages.redi.training.ema": 0.9999,
}
PAPER = {
    "lm1b-mdlm": LM1B | SDTT | REDI | {"stages.sdtt.mask": None},
    "lm1b-imdm": LM1B | SDTT | REDI | {"stages.sdtt.mask": UNIFORM | {"dim": 768}},
    "owt-imdm": OWT | SDTT | REDI | {"stages.sdtt.mask": UNIFORM | {"dim": 2048}},
    "owt-860m-imdm": OWT
    | SDTT
    | REDI
    | {
        "model.preset": "large",
        "stages.sdtt.mask": UNIFORM | {"dim": 2048},
        "stages.teacher.training.steps": 400_000,
        "stages.redi.training.steps": 30_000,
    },
    "owt-di4c": OWT
    | SDTT
    | {
        "stages.sdtt.mask": None,
        "stages.di4c.start": "sdtt",
        "stages.di4c.mixture": True,
        "stages.di4c.objective.kind": "di4c",
        "stages.di4c.objective.rounds": 2,
    },
    "lm1b-compatibility": {
        "data.path": "lm1b",
        "data.length": 128,
        "stages.imdm.mask": UNIFORM | {"dim": 768},
        "stages.mdlm-finetuned.start": "mdlm",
        "stages.mdlm-finetuned.training.steps": 10_000,
        "stages.imdm-finetuned.start": "mdlm",
        "stages.imdm-finetuned.mask": UNIFORM | {"dim": 768},
        "stages.imdm-finetuned.training.steps": 10_000,
    },
    "synthetic": {
        "data.name": "aligned",
        "data.settings": {"length": 2, "symbols": 2},
        "stages.evaluate.steps": [1],
        "stages.evaluate.samples": 20_000,
        "stages.evaluate.draws": 10_000,
        "stages.pairs.steps": 1024,
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes_have_the_papers_settings(name: str) -> None:
    settings = load_recipe(name).resolved()
    for key, value in PAPER[name].items():
        found = settings
        for part in key.split("."):
            found = found[part]
        assert found == value, key


def test_the_papers_models_have_the_papers_sizes() -> None:
    """12 blocks of width 768 with 12 heads; 24 of 1,536 with 16 (the 860M)."""
    for name, size in (("lm1b-imdm", (12, 768, 12)), ("owt-imdm", (12, 768, 12)), ("owt-860m-imdm", (24, 1536, 16))):
        config = load_recipe(name).model.build(50258, 50257, length=8)
        assert (config.blocks, config.width, config.heads) == size


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
    assert yaml.safe_load(path.read_text())["stages"]["imdm"]["training"]["betas"] == [0.9, 0.999]  # defaults too


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.imdm.training.step=7"], "unknown key 'stages.imdm.training.step'"),
        (["stages.imd.training.steps=7"], "unknown stage 'imd'; known: evaluate, imdm, mdm, pairs, teacher"),
        (
            ["colour=red"],
            r"unknown key 'colour' \(known: data, experiment, model, name, quick, report, seed, stages, summary",
        ),
        (
            ["stages.imdm.training.steps=many"],
            "'stages.imdm.training.steps' = 'many': input should be a valid integer",
        ),
        (["stages.imdm.mask=triple"], "unknown mask 'triple'; known: finite, infinite, single"),
        (["stages.imdm.objective=gan"], "unknown objective 'gan'"),
        (["stages.evaluate.metrics=[bleu]"], "unknown metric 'bleu'"),
        (["stages.imdm.start=evaluate"], "stage 'imdm' builds on 'evaluate', which must come before it"),
        (["data.kind=audio"], "data"),
        (["seed"], "write key=value"),
        (["name.first=x"], "'name' is a value, not a section"),
        (["seed=[1"], "is not a valid value"),
    ],
)
def test_bad_overrides_get_a_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("synthetic", overrides)


def test_settings_of_an_objective_that_is_named_can_be_overridden() -> None:
    """`objective: redi` stands for its default settings."""
    recipe = load_recipe("synthetic", ["stages.imdm.objective=sdtt", "stages.imdm.objective.rounds=2"])
    assert (recipe.stages["imdm"].objective.kind, recipe.stages["imdm"].objective.rounds) == ("sdtt", 2)
    with pytest.raises(UserError, match="unknown key 'objective.rounded'"):
        load_recipe("synthetic", ["stages.imdm.objective=sdtt", "stages.imdm.objective.rounded=2"])


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


def test_missing_data_is_refused_before_a_run_and_only_there(tmp_path: Path) -> None:
    """Of every variant that would run; what is not even a path is left to parsing."""
    here, nowhere = tmp_path / "rows.safetensors", tmp_path / "nosuch.safetensors"
    here.touch()
    values = load_recipe("synthetic").resolved() | {"data": {"kind": "tokens", "path": str(nowhere), "vocab_size": 3}}
    file = tmp_path / "mine.yaml"

    def refused(**changes: Any) -> str:
        file.write_text(yaml.safe_dump(values | changes, sort_keys=False))
        load_recipe(file)
        with pytest.raises(UserError) as found:
            load_recipe(file, to_run=True)
        return str(found.value)

    assert refused() == f"data: {nowhere}: no such file"
    one = {"one": {"data": {"path": str(here)}}}
    assert refused(variants=one | {"two": {"data": {"vocab_size": 4}}}) == f"data: {nowhere}: no such file"
    file.write_text(yaml.safe_dump(values | {"variants": one}, sort_keys=False))
    assert load_recipe(file, to_run=True).variants.keys() == {"one"}
    assert load_recipe(file, [f"data={here}"], to_run=True).data.path == here  # type: ignore[union-attr]
    for data in ({"kind": "prepared"}, {"kind": "prepared", "path": 5}, {"kind": "text", "path": [1]}, 3):
        file.write_text(yaml.safe_dump(values | {"data": data}, sort_keys=False))
        with pytest.raises(UserError, match="data"):
            load_recipe(file, to_run=True)
    text = {"kind": "text", "train_bpe": 400}
    file.write_text(yaml.safe_dump(values | {"data": text}, sort_keys=False))
    assert load_recipe(file, ["data=sample"], to_run=True).data.path == "sample"  # type: ignore[union-attr]
