"""Models and tokenizers that are loaded without `transformers` write what the others write."""

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
from imdm.data.tokenizers import PlainTokenizer, load_plain_tokenizer
from imdm.models import Network, Shape
from imdm.models.loading import load_config, load_model, load_network
from imdm.writer import Writer, load
from tests.models.test_hf import FAMILIES, made

TEXTS = ["Once upon a time", "It 's the “night” <mask> of <eos>, naïve 🦉  !", " said he . \n\nAnd"]


@pytest.fixture(scope="module")
def pair() -> tuple[Writer, Writer]:
    return load(shipped.DEFAULT, transformers=False), load(shipped.DEFAULT)


def test_the_same_texts(pair: tuple[Writer, Writer]) -> None:
    plain, full = pair
    assert type(plain.model) is Network
    assert type(full.model) is MaskedDiffusionLM
    assert isinstance(plain.tokenizer, PlainTokenizer)
    for options in ({"noise": "posterior"}, {"temperature": 0.7, "length": 60}, {"top_p": 0.9, "trace": True}):
        how = {"length": 40, "seed": 3, "steps": 2} | options
        assert plain.write(TEXTS, **how) == full.write(TEXTS, **how)
    assert plain.write(num=2, steps=1) == full.write(num=2, steps=1)
    assert plain.infill("The ___ sat on ___ .", steps=2) == full.infill("The ___ sat on ___ .", steps=2)


def test_a_tied_embedding_is_one_tensor(pair: tuple[Writer, Writer]) -> None:
    plain, full = (writer.model for writer in pair)
    assert plain.config.tie_word_embeddings
    assert plain.output.weight is plain.embedding.weight
    assert plain.policies() == full.policies()
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in full.parameters())


def test_the_same_weights_and_law(pair: tuple[Writer, Writer]) -> None:
    plain, full = (writer.model for writer in pair)
    assert plain.config.law == full.config.law
    mine, theirs = plain.state_dict(), full.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not plain.training


@pytest.mark.parametrize("name", shipped.names())
def test_every_model_that_ships_is_read_so(name: str) -> None:
    """Those that read from left to right too, with a tied embedding or two, of whole texts or of a stream."""
    plain = load(name, transformers=False)
    assert type(plain.model) is Network
    assert plain.write("Once", steps=2, length=20) == load(name).write("Once", steps=2, length=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped.find(shipped.DEFAULT), tmp_path / "model"))


def changed(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tie_word_embeddings": False}, "it lacks 'output.weight'"),
        ({"model_type": "bert"}, "is of type 'bert', not 'imdm'"),
        ({"blocks": 1}, "it has the unknown 'blocks.1"),
        ({"width": 28}, "its weights do not have the shapes of its config.json"),
        ({"quantization_config": {}}, "its config.json has quantization_config"),
    ],
)
def test_refusals_are_those_of_load_model(folder: Path, fields: dict[str, object], problem: str) -> None:
    changed(folder / "config.json", **fields)
    for loaded in (load_model, load_network):
        with pytest.raises(UserError, match=problem):
            loaded(folder)


def test_settings_of_transformers_are_left_out(folder: Path) -> None:
    changed(folder / "config.json", nosuch=1, backbone={"kind": "dit"})
    assert type(load_network(folder)) is Network


def test_sizes_by_their_names_in_transformers(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    renamed = {"hidden_size": fields.pop("width"), "num_hidden_layers": fields.pop("blocks")}
    (folder / "config.json").write_text(json.dumps(fields | renamed), encoding="utf-8")
    assert load_config(folder).width == renamed["hidden_size"]
    assert type(load_network(folder)) is Network


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(UserError, match="unknown model setting 'lenght'.*length"):
        Shape(vocab_size=5, lenght=8)


def test_weights_in_several_files_and_in_half_precision(folder: Path, tmp_path: Path) -> None:
    load_model(folder).save_pretrained(tmp_path / "parts", max_shard_size="4MB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    whole, parts = (load_network(place).state_dict() for place in (folder, tmp_path / "parts"))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    half = load_network(folder, "bf16").state_dict()
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole)


def test_another_backbone_is_that_of_transformers(tmp_path: Path) -> None:
    made(FAMILIES["gpt2"]).save_pretrained(tmp_path)
    assert type(load_network(tmp_path)) is MaskedDiffusionLM


@pytest.mark.parametrize(
    "fields", [{"clean_up_tokenization_spaces": True}, {"tokenizer_class": "BertTokenizer"}, {"eos_token": "the"}]
)
def test_a_tokenizer_that_is_not_plain_is_left_to_transformers(folder: Path, fields: dict[str, object]) -> None:
    changed(folder / "tokenizer_config.json", **fields)
    assert load_plain_tokenizer(folder) is None
    (folder / "tokenizer_config.json").unlink()
    assert load_plain_tokenizer(folder) is None


def test_a_damaged_tokenizer_is_left_to_transformers(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert load_plain_tokenizer(folder) is None
    with pytest.raises(UserError, match="cannot be loaded"):
        load(folder, transformers=False)


def test_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is damaged: its contents are not what was written"):
        load(folder, transformers=False)


def test_weights_that_are_no_numbers_are_refused(folder: Path) -> None:
    weights = load_network(folder).state_dict()
    weights["embedding.weight"][0, 0] = float("nan")
    del weights["output.weight"]  # tied
    save_file(weights, folder / "model.safetensors")
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    with pytest.raises(UserError, match="'embedding.weight' has weights that are NaN or infinite"):
        load(folder, transformers=False)


def test_a_configuration_that_was_changed_is_refused(folder: Path) -> None:
    changed(folder / "config.json", heads=2)
    with pytest.raises(UserError, match="is not the one that model.safetensors was saved with"):
        load(folder, transformers=False)


def test_the_command_writes_without_transformers(tmp_path: Path) -> None:
    """The deterministic part of a first token within three seconds on two cores."""
    command = [sys.executable, "-X", "importtime", "-m", "imdm", "generate", "--steps", "2", "--prompt", "Once"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("Once")
    imported = {row.split("|")[-1].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert "torch" in imported
    assert not imported & {"transformers", "accelerate", "torch._dynamo", "torch.distributed.tensor", "scipy", "pandas"}
