"""Writers that are made without `transformers` write what the others write, and leave to them what they do not know."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from imdm import MaskedDiffusionLM, UserError, shipped
from imdm.light import LightTokenizer, light_model, light_tokenizer, load_light
from imdm.models import Network
from imdm.writer import Writer, load

TEXTS = ["Once upon a time", "It 's the “night” <mask> of <eos>, naïve 🦉  !", " said he . \n\nAnd"]


@pytest.fixture(scope="module")
def pair() -> tuple[Writer, Writer]:
    return load_light(shipped.DEFAULT), load(shipped.DEFAULT)


def test_the_same_texts(pair: tuple[Writer, Writer]) -> None:
    light, full = pair
    assert type(light.model) is Network
    assert type(full.model) is MaskedDiffusionLM
    assert isinstance(light.tokenizer, LightTokenizer)
    for options in ({"noise": "posterior"}, {"temperature": 0.7, "length": 60}, {"top_p": 0.9, "trace": True}):
        how = {"length": 40, "seed": 3, "steps": 2} | options
        assert light.write(TEXTS, **how) == full.write(TEXTS, **how)
    assert light.write(num=2, steps=1) == full.write(num=2, steps=1)
    assert light.infill("The ___ sat on ___ .", steps=2) == full.infill("The ___ sat on ___ .", steps=2)


def test_a_tied_embedding_is_one_tensor(pair: tuple[Writer, Writer]) -> None:
    light, full = (writer.model for writer in pair)
    assert light.config.tie_word_embeddings
    assert light.output.weight is light.embedding.weight
    assert light.policies() == full.policies()
    assert sum(p.numel() for p in light.parameters()) == sum(p.numel() for p in full.parameters())


def test_the_same_weights_and_law(pair: tuple[Writer, Writer]) -> None:
    light, full = (writer.model for writer in pair)
    assert light.config.law == full.config.law
    mine, theirs = light.state_dict(), full.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not light.training


@pytest.mark.parametrize("name", shipped.names())
def test_every_model_that_ships_is_read_so(name: str) -> None:
    """Those that read from left to right too, with a tied embedding or two, of whole texts or of a stream."""
    light = load_light(name)
    assert type(light.model) is Network
    assert light.write("Once", steps=2, length=20) == load(name).write("Once", steps=2, length=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped.find(shipped.DEFAULT), tmp_path / "model"))


def changed(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize(
    "fields", [{"tie_word_embeddings": False}, {"model_type": "bert"}, {"nosuch": 1}, {"backbone": {"kind": "dit"}}]
)
def test_what_is_not_plain_is_left_to_others(folder: Path, fields: dict[str, object]) -> None:
    changed(folder / "config.json", **fields)
    assert light_model(folder) is None


def test_weights_of_another_shape_are_left_to_others(folder: Path) -> None:
    changed(folder / "config.json", blocks=1)
    assert light_model(folder) is None


def test_no_folder_is_left_to_others(tmp_path: Path) -> None:
    assert light_model(tmp_path / "owner" / "name") is None
    assert light_model(tmp_path) is None


@pytest.mark.parametrize(
    "fields", [{"clean_up_tokenization_spaces": True}, {"tokenizer_class": "BertTokenizer"}, {"eos_token": "the"}]
)
def test_a_tokenizer_that_is_not_plain_is_left_to_others(folder: Path, fields: dict[str, object]) -> None:
    changed(folder / "tokenizer_config.json", **fields)
    assert light_tokenizer(folder) is None
    (folder / "tokenizer_config.json").unlink()
    assert light_tokenizer(folder) is None


def test_a_damaged_tokenizer_is_left_to_others(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert light_tokenizer(folder) is None
    with pytest.raises(UserError, match="cannot be loaded"):
        load_light(folder)


def test_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged: its contents are not what was written"):
        load_light(folder)


def test_weights_that_are_no_numbers_are_refused(folder: Path) -> None:
    model = light_model(folder)
    assert model is not None
    weights = model.state_dict()
    weights["embedding.weight"][0, 0] = float("nan")
    del weights["output.weight"]  # tied
    save_file(weights, folder / "model.safetensors")
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    with pytest.raises(UserError, match="'embedding.weight' has weights that are NaN or infinite"):
        load_light(folder)


def test_a_configuration_that_was_changed_is_refused(folder: Path) -> None:
    changed(folder / "config.json", heads=2)
    with pytest.raises(UserError, match="is not the one that model.safetensors was saved with"):
        load_light(folder)


def test_the_command_writes_without_transformers(tmp_path: Path) -> None:
    """The deterministic part of a first token within three seconds on two cores."""
    command = [sys.executable, "-X", "importtime", "-m", "imdm", "generate", "--steps", "2", "--prompt", "Once"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("Once")
    imported = {row.split("|")[-1].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert "torch" in imported
    assert not imported & {"transformers", "accelerate", "torch._dynamo", "torch.distributed.tensor", "scipy", "pandas"}
