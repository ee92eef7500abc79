"""The promise: bad input is one sentence, before anything is made. Inputs are generated, not listed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imdm.core import files
from imdm.core.config import check_name
from imdm.core.errors import UserError, check_number, check_whole, shown
from imdm.core.files import check_writable, parse_json, parse_yaml
from imdm.core.memory import check_memory, memory
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig
from imdm.data.packing import prepare as prepare_text
from imdm.data.tokenizers import train_bpe
from imdm.evaluation import load_embedder, load_judge
from imdm.experiments import load_recipe, parse_recipe
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.writer import Writer
from tests.cli.test_cli import SMALL, imdm, refused
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES
from tests.reference.hostile import ODD, few, refusal


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested settings."""
    if above:
        yield above
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*above, key))


def put(value: Any, place: tuple[Any, ...], what: Any) -> Any:
    copied = json.loads(json.dumps(value))
    spot = copied
    for key in place[:-1]:
        spot = spot[key]
    spot[place[-1]] = what
    return copied


SYNTHETIC = load_recipe("synthetic").resolved()
PLACES = list(places(SYNTHETIC))


# Settings


@few
@given(st.sampled_from(PLACES), ODD)
def test_any_value_anywhere_in_a_recipe_is_taken_or_refused(place: tuple[Any, ...], value: Any) -> None:
    told = refusal(lambda: parse_recipe(put(SYNTHETIC, place, value)))
    assert told is None or 0 < len(told) < 3000


@few
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_as_a_recipe_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("recipe") / "r.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError):
        load_recipe(file)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 25))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100,000 values"),
        ("a: &a {b: *a}", "refers to what it is part of"),
        ("[" * 60 + "]" * 60, "nested too deeply"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "digits"),
        ("a: " + "x" * (1 << 20), "too many for settings"),
        ("{", "expected"),
    ],
)
def test_settings_that_explode_are_refused_at_once(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at no more values than the text has characters."""
    extent, looked = files._count_values, []
    monkeypatch.setattr(files, "_count_values", lambda *given: (looked.append(0), extent(*given))[1])
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)
    assert len(looked) <= len(text)


@few
@given(st.text(max_size=120))
def test_names_stay_in_their_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    try:
        check_name(name)
    except ValueError:
        return
    root = tmp_path_factory.getbasetemp() / "names"
    assert (root / name).resolve().parent == root.resolve()
    assert not name.startswith(".")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/abs", "a/b", "a\\b", ".hidden", "x" * 101, "a b", "[/x]", "a\0"]
)
def test_names_that_are_no_folder_are_refused_everywhere(name: str) -> None:
    stages = SYNTHETIC["stages"]
    for values in (
        SYNTHETIC | {"name": name},
        SYNTHETIC | {"stages": stages | {name: stages["teacher"]}},
        SYNTHETIC | {"variants": {name: {}}},
    ):
        with pytest.raises(UserError, match="a name has letters"):
            parse_recipe(values)
    with pytest.raises(UserError, match="uses that name for something else"):
        parse_recipe(SYNTHETIC | {"variants": {"seed-0": {}}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.imdm.start=pairs", "start names 'pairs', which trains no model"),
        ("stages.imdm.data=teacher", "data names 'teacher', which makes no pairs"),
        ("stages.pairs.teacher=nothing", "neither a stage (teacher, "),
        ("stages.evaluate.models={pairs: x}", "models names 'pairs', which trains no model"),
        ("stages.evaluate.temperatures=[-1]", "must be 0 (the likeliest token) or in [1e-6, 1e6]"),
        ("model.backbone=mamba", "unknown backbone 'mamba'; known: dit"),
        ("stages.evaluate.steps=[]", "at least 1 item"),
        ("stages.evaluate.metrics=[]", "at least 1 item"),
    ],
)
def test_what_is_wrong_is_seen_before_training(override: str, message: str, tmp_path: Path) -> None:
    told = refused(imdm("reproduce", "synthetic", override, "--out", tmp_path / "run"))
    assert message in told
    assert not list(tmp_path.iterdir())


@few
@given(st.sampled_from(["model.width", "model.blocks", "model.heads", "model.length", "model.condition",
                        "stages.pairs.pairs", "stages.pairs.steps", "stages.evaluate.samples", "stages.evaluate.draws",
                        "stages.teacher.training.batch", "stages.imdm.watch.samples", "stages.imdm.watch.steps",
                        "threads", "stages.imdm.mask"]), st.integers(12, 40))  # fmt: skip
def test_sizes_that_no_machine_has_are_refused_before_anything_is_made(
    tmp_path_factory: pytest.TempPathFactory, field: str, digits: int
) -> None:
    out = tmp_path_factory.mktemp("huge")
    value = f"infinite-uniform-{10**digits}-1.0" if field.endswith("mask") else str(10**digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", None)  # what an allocation would run into
        result = imdm("reproduce", "synthetic", *SMALL, f"{field}={value}", "--out", out / "run")
    if result.returncode == 0 or "NoneType" in result.stderr:
        pytest.fail(f"{field}: {result.stderr}")
    refused(result)
    assert not list(out.iterdir())


def test_room_says_what_would_fit() -> None:
    with pytest.raises(UserError, match=r"pairs = 1,000,000,000,000: that would take 1e\+03 TB, .* at most \d"):
        check_memory("pairs", 10**12, 1000)
    check_memory("pairs", 1, memory())
    for value in (0, -1, 1.5, True, "3", None, 10**30):
        with pytest.raises(UserError, match="n = .*: must be a whole number"):
            check_whole("n", value)
    for value in (float("inf"), float("nan"), "x", None, True):
        with pytest.raises(UserError, match="must be a number"):
            check_number("x", value)


@pytest.mark.parametrize("key", ["variants.a", "stages.teacher.training"])
def test_an_override_may_not_go_deeper_than_settings_do(key: str, tmp_path: Path) -> None:
    override = ".".join([key, *["a"] * 900]) + "=1"
    assert "nested too deeply" in refused(imdm("reproduce", "synthetic", override, "--out", tmp_path / "run"))


def test_json_and_arguments_that_are_nested_too_deeply_are_refused() -> None:
    """Also where Python can still read them: what works on them later cannot."""
    parse_json("[" * 40 + "]" * 40)
    for text in ("[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert refusal(lambda: check_whole("n", deep))


# Paths, and what is no file


@pytest.mark.parametrize(
    "words",
    [
        ["couple", "MODEL", "--data", "aligned:length=" + "[" * 5000, "--out", "out"],
        ["evaluate", "MODEL", "--data", "a\0b.txt"],
        ["prepare", "a\0b.txt", "--train-bpe", "300", "--out", "out"],
        ["prepare", "x" * 300 + ".txt", "--train-bpe", "300", "--out", "out"],
        ["couple", "MODEL", "--data", "x\0y.safetensors", "--out", "out"],
    ],
)
def test_what_can_be_no_path_is_refused_as_such(words: list[str], tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    given = [str(tmp_path / word.lower()) if word in ("MODEL", "out") else word for word in words]
    assert "that cannot be a path" in refused(imdm(*given))
    assert not (tmp_path / "out").exists()


def test_a_folder_to_write_that_can_be_no_path_is_refused() -> None:
    told = imdm("reproduce", "synthetic", "--out", "a\0b")
    assert told.returncode == 2
    assert "Invalid value for '--out'" in told.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt", ["prepare", "PIPE", "--train-bpe", "300", "--out", "out"]),
        ("a.parquet", ["prepare", "PIPE", "--train-bpe", "300", "--out", "out"]),
        ("a.txt", ["generate", "--prompts", "PIPE"]),
        ("recipe.json", ["status", "FOLDER"]),
        ("config.json", ["generate", "FOLDER"]),
        ("tokenizer.json", ["prepare", "sample", "--tokenizer", "FOLDER", "--out", "out"]),
    ],
)
def test_nothing_is_read_from_a_pipe(name: str, words: list[str], tmp_path: Path) -> None:
    """It would wait for ever."""
    folder = tmp_path / "given"
    folder.mkdir()
    os.mkfifo(folder / name)
    places = {"PIPE": folder / name, "FOLDER": folder, "out": tmp_path / "out"}
    told = refused(imdm(*[places.get(word, word) for word in words]))
    assert f"{folder / name} is a pipe or a device" in told
    assert not (tmp_path / "out").exists()


def test_a_place_where_nothing_can_be_made_is_told_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in /proc, where permissions do not say so."""

    def fails(**given: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory", "/proc/.partial-1")

    monkeypatch.setattr("imdm.core.files.tempfile.mkdtemp", fails)
    wanted = tmp_path / "a" / "b"
    told = refusal(lambda: check_writable(wanted)) or ""
    assert told.startswith(f"{wanted} cannot be written into (nothing can be made in {tmp_path}:")
    monkeypatch.undo()
    check_writable(wanted)
    assert not list(tmp_path.iterdir())


def test_a_refusal_on_the_way_leaves_no_manifest(tmp_path: Path) -> None:
    tiny_model(vocab_size=3, length=2, causal=True).save_pretrained(tmp_path / "model")
    told = refused(imdm("couple", tmp_path / "model", "--data", "aligned:length=2", "--out", tmp_path / "out"))
    assert "autoregressive" in told
    (tmp_path / "few.txt").write_text("\n".join(SENTENCES * 4))
    made = imdm("prepare", tmp_path / "few.txt", "--train-bpe", "300", "--length", "16", "--hold-out", "100000",
                "--out", tmp_path / "out")  # fmt: skip
    assert made.returncode == 2
    assert "--hold-out 100000: too little is held out" in made.stderr
    assert not (tmp_path / "out").exists()


# Other people's models, and the Python API


def test_pickles_and_remote_code_are_never_loaded(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2Config(vocab_size=300, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(small)
    prepare_text(Corpus("sample"), PrepareConfig(train_bpe=300, length=16, limit=50), tmp_path / "text")
    for folder in (tmp_path / "pickled", tmp_path / "remote"):
        shutil.copytree(tmp_path / "text", folder)
        model.save_pretrained(folder)
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    config = json.loads((tmp_path / "remote" / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoModel": "evil.M"},
    }
    (tmp_path / "remote" / "config.json").write_text(json.dumps(config))
    (tmp_path / "remote" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for folder in ("pickled", "remote"):
        with pytest.raises(UserError, match="judge .* cannot be loaded"):
            load_judge(str(tmp_path / folder))
        with pytest.raises(UserError, match="embedder .* cannot be loaded"):
            load_embedder(str(tmp_path / folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": "float33"},
        {"dtype": torch.int32},
        {"dtype": 3},
        {"torch_dtype": torch.complex64},
        {"device_map": "nowhere"},
        {"device_map": {"": "cuda:99"}},
        {"device_map": 99},
        {"attn_implementation": "flash_attention_2"},
    ],
)
def test_a_model_is_loaded_as_asked_or_refused(given: dict[str, Any], tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    told = refusal(lambda: MaskedDiffusionLM.from_pretrained(tmp_path, **given)) or ""
    assert next(iter(given)).removesuffix("_map") in told
    asked = MaskedDiffusionLM.from_pretrained(tmp_path, dtype="bfloat16", device_map="cpu", attn_implementation="sdpa")
    assert (asked.dtype, asked.device.type) == (torch.bfloat16, "cpu")


@few
@given(
    st.sampled_from(["num", "steps", "length", "temperature", "top_p", "noise", "seed", "batch_size", "input_ids"]), ODD
)
def test_generate_takes_or_refuses_any_argument(name: str, value: Any) -> None:
    model = tiny_model()
    said = refusal(lambda: model.generate(**{"num": 1, "steps": 1, name: value})) or ""
    assert "--" not in said.replace(shown(value), "")


@few
@given(st.sampled_from(["vocab_size", "length", "width", "blocks", "heads", "condition", "dropout", "softcap", "mask",
                        "schedule", "mixture", "causal", "backbone", "mask_token_id", "tie_word_embeddings"]),
       ODD)  # fmt: skip
def test_a_configuration_takes_or_refuses_any_value(name: str, value: Any) -> None:
    try:
        config = MaskedDiffusionConfig(**{name: value})
    except UserError:
        return
    assert config.parameters < 10**13


@cache
def writer() -> Writer:
    tokenizer = train_bpe(SENTENCES * 5, 320)
    return Writer(tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=24), tokenizer)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["prompts", "num", "length", "steps", "seed"]), ODD)
def test_a_writer_takes_or_refuses_any_argument(name: str, value: Any) -> None:
    said = refusal(lambda: writer().write(**{"steps": 1, "length": 8, name: value})) or ""
    assert "--" not in said.replace(shown(value), "")
