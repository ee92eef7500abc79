"""What was written is recognised: flipped bits, cut tails and foreign files are noticed or do no harm."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from imdm.core.errors import UserError
from imdm.core.files import (
    parse_json,
    read_lines,
    read_recorded,
    read_tensors,
    working_in,
    write_json,
    write_recorded,
    write_tensors,
)
from imdm.data.corpora import Corpus
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.packing import PrepareConfig
from imdm.data.packing import prepare as prepare_text
from imdm.data.prepared import PreparedSource
from imdm.data.source import LanguageSource, TokenData
from imdm.data.synthetic import aligned
from imdm.experiments.status import status
from imdm.models.loading import load_model
from imdm.report import build_report
from tests.cli.test_cli import SMALL, imdm, refused
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES
from tests.reference.hostile import refusal

# Damage


Read = Callable[[Path], Any]


def model_bits(folder: Path) -> Any:
    return {name: weight.tolist() for name, weight in load_model(folder).state_dict().items()}, load_model(
        folder
    ).config.law


def pair_bits(folder: Path) -> Any:
    return {name: column.tolist() for name, column in Coupling(folder).rows(torch.arange(12)).items()}


def text_bits(folder: Path) -> Any:
    source = PreparedSource(folder)
    return source.rows(torch.arange(len(source)))["tokens"].tolist(), source.length, source.vocab_size, source.mask_id


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Read]]:
    """One of each kind of folder that we write."""
    home = tmp_path_factory.mktemp("made")
    tiny_model(mask="infinite-uniform-4-1.0").save_pretrained(home / "model")
    couple(
        tiny_model(vocab_size=3, length=3),
        LanguageSource(aligned(3, 2)),
        CoupleConfig(pairs=12, steps=4, shard=6),
        home / "pairs",
    )
    (home / "text.txt").write_text("\n".join(SENTENCES * 4))
    prepare_text(Corpus(str(home / "text.txt")), PrepareConfig(train_bpe=300, length=16), home / "text")
    return {
        "model": (home / "model", model_bits),
        "pairs": (home / "pairs", pair_bits),
        "text": (home / "text", text_bits),
    }  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["model", "pairs", "text"]), st.randoms(use_true_random=False), st.integers(0, 7), st.booleans())
def test_one_flipped_bit_or_a_cut_tail_is_noticed_or_harmless(
    made: dict[str, tuple[Path, Read]],
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    chance: random.Random,
    bit: int,
    cut: bool,
) -> None:
    folder, read = made[kind]
    damaged = tmp_path_factory.mktemp("damaged") / kind
    shutil.copytree(folder, damaged)
    file = chance.choice(sorted(path for path in damaged.iterdir() if path.name != "README.md"))
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content))
    if cut:
        del content[place:]
    else:
        content[place] ^= 1 << bit
    file.write_bytes(content)
    try:
        found = read(damaged)
    except UserError:
        return
    assert found == read(folder), f"{file.name}, byte {place}"


def test_ids_in_another_order_of_bytes_are_noticed(made: dict[str, tuple[Path, Read]], tmp_path: Path) -> None:
    """One flipped bit in the header of a shard makes '<u2' of it '>u2', and the digest of the bytes stays the same."""
    copied = shutil.copytree(made["text"][0], tmp_path / "text")
    shard = copied / "tokens-00000.npy"
    content = shard.read_bytes()
    assert content.count(b"'<u2'") == 1
    shard.write_bytes(content.replace(b"'<u2'", b"'>u2'"))
    with pytest.raises(UserError, match=r"tokens-00000.npy does not hold \d+ rows of 16 ids"):
        text_bits(copied)


def with_settings(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def in_parts(folder: Path, index: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)


BESIDE: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: in_parts(folder, "{"), "index.json is not valid JSON"),
    (lambda folder: in_parts(folder, "[]"), "index.json holds no JSON object"),
    (lambda folder: in_parts(folder, '{"weight_map": 3}'), "does not list the file of each tensor"),
    (lambda folder: in_parts(folder, '{"weight_map": {"a": "../x"}}'), "does not list the file of each tensor"),
    (lambda folder: write_json(folder / "adapter_config.json", {}), "an adapter is beside it"),
    (lambda folder: with_settings(folder, quantization_config={"quant_method": "gptq"}), "quantization_config"),
    (lambda folder: with_settings(folder, attn_implementation="flash_attention_2"), "attn_implementation ="),
    (lambda folder: with_settings(folder, _attn_implementation=3), "_attn_implementation = 3"),
]


@pytest.mark.parametrize(("add", "message"), BESIDE)
def test_what_a_library_would_load_beside_a_model_is_refused(
    made: dict[str, tuple[Path, Read]], tmp_path: Path, add: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(made["model"][0], tmp_path / "model")
    add(folder)
    with pytest.raises(UserError, match=message):
        load_model(folder)
    assert message in refused(imdm("generate", folder))


def test_complex_numbers_are_no_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens.safetensors"
    save_file({"tokens": torch.zeros(4, 6, dtype=torch.complex64)}, file)
    with pytest.raises(UserError, match="holds complex numbers"):
        TokenData(path=file, vocab_size=5).source(0)


def test_a_card_that_is_no_text_is_refused(made: dict[str, tuple[Path, Read]], tmp_path: Path) -> None:
    (tmp_path / "card.md").write_bytes(bytes(range(256)))
    words = "export", made["model"][0], "--card", tmp_path / "card.md", "--out", tmp_path / "out"
    assert "card.md is not UTF-8 text" in refused(imdm(*words))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trust") / "synthetic"
    assert imdm("reproduce", "synthetic", *SMALL, "--out", out).returncode == 0
    return out


FOREIGN = [
    "",
    "{",
    "[]",
    "null",
    "3",
    '"x"',
    "{}",
    "[" * 3000,
    '{"a": NaN}',
    "9" * 5000,
    '{"step": "x"}',
    '{"settings": 3}',
    "\udcff",
]


STATE = [
    "recipe.json",
    "results.jsonl",
    "seed-0/teacher/done.json",
    "seed-0/teacher/history.jsonl",
    "seed-0/pairs/manifest.json",
    "seed-0/pairs/pairs-00000.safetensors",
    "seed-0/teacher/checkpoints/step-00000040/state.json",
    "seed-0/imdm/model/config.json",
    "seed-0/imdm/model/model.safetensors",
]


def looked_at(run: Path, copied: Path, name: str, content: str) -> None:
    """A copy of a run with another file in one place is refused with a sentence, or read as if nothing was there."""
    shutil.copytree(run, copied)
    (copied / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    (copied / "seed-0/teacher/checkpoints/step-abc").mkdir()
    (copied / "seed-abc").mkdir()
    for read in (status, build_report):
        told = refusal(lambda read=read: read(copied))
        assert told is None or str(copied) in told


def gone_on_with(copied: Path, name: str) -> None:
    """Running it again makes what is missing, or refuses; what was made from is refused."""
    again = imdm("reproduce", "synthetic", *SMALL, "--out", copied)
    assert again.returncode == 0 or refused(again)
    if name.endswith((".safetensors", "done.json", "manifest.json", "config.json")):
        assert again.returncode == 2, f"{name} was accepted"


@pytest.mark.parametrize("name", ["recipe.json", "results.jsonl", "seed-0/teacher/done.json"])
def test_a_state_file_that_is_cut_short_gets_a_sentence(run: Path, tmp_path: Path, name: str) -> None:
    looked_at(run, tmp_path / "copied", name, "{")
    gone_on_with(tmp_path / "copied", name)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATE)
def test_state_files_that_are_damaged_or_foreign_get_a_sentence(run: Path, tmp_path: Path, name: str) -> None:
    for number, content in enumerate(FOREIGN):
        looked_at(run, tmp_path / str(number), name, content)
        if number <= 2:
            gone_on_with(tmp_path / str(number), name)


def test_a_truncated_model_is_not_already_there(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    weights = copied / "seed-0/teacher/model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "to make it again" in refused(imdm("reproduce", "synthetic", *SMALL, "--out", copied))


def test_a_finished_stage_is_looked_at_by_its_numbers(run: Path, tmp_path: Path) -> None:
    """A model that is whole, but not the one that was made there."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    shutil.rmtree(copied / "seed-0/imdm/model")
    shutil.copytree(copied / "seed-0/imdm/raw", copied / "seed-0/imdm/model")
    assert "is damaged, or was changed since" in refused(imdm("reproduce", "synthetic", *SMALL, "--out", copied))


def test_a_torn_tokenizer_is_mended_or_refused(made: dict[str, tuple[Path, Read]], tmp_path: Path) -> None:
    home = made["text"][0].parent
    shutil.copytree(home / "text", tmp_path / "text")
    torn = tmp_path / "text" / "tokenizer.json"
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"tokenizer.json is missing or damaged"):
        PreparedSource(tmp_path / "text")
    corpus, config = Corpus(str(home / "text.txt")), PrepareConfig(tokenizer=str(home / "text"), length=16)
    prepare_text(corpus, config, tmp_path / "other")
    torn = tmp_path / "other" / "tokenizer.json"
    torn.write_bytes(whole[: len(whole) // 2])
    prepare_text(corpus, config, tmp_path / "other")
    assert parse_json(torn.read_text())["model"]
    PreparedSource(tmp_path / "other")


def test_what_is_recorded_is_recognised(tmp_path: Path) -> None:
    write_recorded(tmp_path / "a.json", {"step": 3, "name": "x"})
    assert read_recorded(tmp_path / "a.json", "test", step=int) == {"step": 3, "name": "x"}
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text().replace("3", "4", 1))
    with pytest.raises(UserError, match="not what was written"):
        read_recorded(tmp_path / "a.json", "test")
    tensors = {"a": torch.arange(5), "b": torch.rand(2, 3).bfloat16(), "c": torch.tensor(True), "d": torch.empty(0)}
    write_tensors(tmp_path / "t.safetensors", tensors, {"more": "1"})
    first = (tmp_path / "t.safetensors").read_bytes()
    write_tensors(tmp_path / "t.safetensors", tensors, {"more": "1"})
    assert (tmp_path / "t.safetensors").read_bytes() == first
    found = read_tensors(tmp_path / "t.safetensors", "test")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_stage_is_compared_with_what_it_made_whatever_was_loaded_before(run: Path, tmp_path: Path) -> None:
    """A folder that was found whole is not yet the one that the stage made."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    shutil.rmtree(copied / "seed-0/imdm/model")
    shutil.copytree(copied / "seed-0/imdm/raw", copied / "seed-0/imdm/model")
    load_model(copied / "seed-0/imdm/model")
    assert "is damaged, or was changed since" in refused(imdm("reproduce", "synthetic", *SMALL, "--out", copied))


def test_finished_text_is_read_by_several_at_once(made: dict[str, tuple[Path, Read]], tmp_path: Path) -> None:
    """Whoever finds everything there needs no folder for itself."""
    home = made["text"][0].parent
    corpus, config = Corpus(str(home / "text.txt")), PrepareConfig(train_bpe=300, length=16)
    with working_in(home / "text"):
        assert prepare_text(corpus, config, home / "text").finished


def test_a_refused_preparation_leaves_what_was_there(made: dict[str, tuple[Path, Read]], tmp_path: Path) -> None:
    home = made["text"][0].parent
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(home / "text" / name, tokenizer)
    before = {file.name: file.read_bytes() for file in tokenizer.iterdir()}
    (tmp_path / "few.txt").write_text("Too little.\n")
    with pytest.raises(UserError, match="is the tokenizer's own folder"):
        prepare_text(Corpus(str(tmp_path / "few.txt")), PrepareConfig(tokenizer=str(tokenizer)), tokenizer)
    assert {file.name: file.read_bytes() for file in tokenizer.iterdir()} == before
    with pytest.raises(UserError, match="too little text"):
        prepare_text(Corpus(str(tmp_path / "few.txt")), PrepareConfig(tokenizer=str(tokenizer)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trained_tokenizer_that_is_gone_is_trained_again(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 4))
    corpus, config = Corpus(str(tmp_path / "text.txt")), PrepareConfig(train_bpe=300, length=16)
    prepare_text(corpus, config, tmp_path / "rows")
    whole = (tmp_path / "rows/tokenizer.json").read_bytes()
    for damage in (b"", whole[:100]):
        (tmp_path / "rows/tokenizer.json").write_bytes(damage)
        prepare_text(corpus, config, tmp_path / "rows")
        assert (tmp_path / "rows/tokenizer.json").read_bytes() == whole


def test_a_run_that_fails_on_the_way_is_still_a_run(tmp_path: Path) -> None:
    """What refuses the first step leaves nothing; what fails later leaves what was made, and says what it is."""
    failing = imdm("reproduce", "synthetic", *SMALL, "stages.mdm.training.lr=1e30", "--out", tmp_path / "run")
    assert "the loss is" in failing.stderr
    assert [row.state for row in status(tmp_path / "run")["seed 0"]][:2] == ["done", "done"]
    before = (tmp_path / "run/recipe.json").read_bytes()
    refused(imdm("reproduce", "synthetic", *SMALL, "stages.teacher.training.lr=0.5", "--out", tmp_path / "run"))
    assert (tmp_path / "run/recipe.json").read_bytes() == before


def test_a_line_cut_inside_a_letter_and_figures_that_were_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes('{"m": "é"}\n{"v": NaN, "w": Infinity}\n{"m": "é'.encode()[:-1])
    assert read_lines(file) == [{"m": "é"}, {"v": None, "w": None}]
