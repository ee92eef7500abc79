"""The promise: bad input is one sentence, damage is noticed, nothing is lost. Inputs are generated, not listed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from imdm.config import check_name
from imdm.data import Corpus, CoupleConfig, Coupling, LanguageSource, PrepareConfig, PreparedSource, aligned, couple
from imdm.data import prepare as prepare_text
from imdm.errors import UserError, check_number, check_whole, is_out_of_memory
from imdm.evaluation import load_embedder, load_judge
from imdm.files import (
    PARTIAL,
    _machine,
    append_lines,
    parse_json,
    parse_yaml,
    read_lines,
    read_recorded,
    read_tensors,
    working_in,
    write_recorded,
    write_tensors,
)
from imdm.models import MaskedDiffusionConfig, load_model
from imdm.recipes import Recipe, load_recipe, parse_recipe
from imdm.report import build_report
from imdm.room import check_room, memory
from imdm.status import status
from imdm.writer import Writer, load
from tests.conftest import tiny_model
from tests.test_cli import SMALL, imdm, refused
from tests.test_corpora import SENTENCES

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
HUGE = 10**18
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [0, -1, 1.5, HUGE, 10**1000, float("inf"), float("nan"), "", "../x", "/abs", "[/x]", "a/b", "\udcff"]
    ),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


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
    try:
        recipe = parse_recipe(put(SYNTHETIC, place, value))
    except UserError as error:
        assert str(error)
        assert len(str(error)) < 3000
    else:
        assert isinstance(recipe, Recipe)


@few
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_file_as_a_recipe_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.mktemp("recipe") / "r.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError):
        load_recipe(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a0: &a [x, x]\n" + "".join(f"a{i}: &{chr(97 + i)} [*{chr(96 + i)}, *{chr(96 + i)}]\n" for i in range(1, 25)), "more than 100,000 values"),
        ("a: &a {b: *a}", "refers to what it is part of"),
        ("[" * 60 + "]" * 60, "nested too deeply"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: " + "9" * 5000, "digits"),
        ("a: " + "x" * (1 << 20), "too many for settings"),
        ("{", "expected"),
    ],
)  # fmt: skip
def test_settings_that_explode_are_refused_at_once(text: str, message: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)
    assert time.perf_counter() - started < 5


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
    with pytest.raises(UserError, match="keeps something else under that name"):
        parse_recipe(SYNTHETIC | {"variants": {"seed-0": {}}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.imdm.start=pairs", "start names 'pairs', which trains no model"),
        ("stages.imdm.data=teacher", "data names 'teacher', which makes no pairs"),
        ("stages.pairs.teacher=nothing", None),
        ("stages.evaluate.models={pairs: x}", "models names 'pairs', which trains no model"),
        ("stages.evaluate.temperatures=[0]", "greater than or equal"),
        ("stages.evaluate.steps=[]", "at least 1 item"),
        ("stages.evaluate.metrics=[]", "at least 1 item"),
    ],
)
def test_what_is_wrong_is_seen_before_training(override: str, message: str | None, tmp_path: Path) -> None:
    told = refused(imdm("reproduce", "synthetic", override, "--out", tmp_path / "run"))
    assert message is None or message in told
    assert not list(tmp_path.iterdir())


@few
@given(st.sampled_from(["model.width", "model.blocks", "model.heads", "model.length", "model.condition",
                        "stages.pairs.pairs", "stages.pairs.steps", "stages.evaluate.samples", "stages.evaluate.draws",
                        "stages.teacher.training.batch", "stages.imdm.watch.samples", "stages.imdm.watch.steps",
                        "threads", "seed", "stages.imdm.mask"]), st.integers(12, 40))  # fmt: skip
def test_sizes_that_no_machine_has_are_refused_before_anything_is_made(
    tmp_path_factory: pytest.TempPathFactory, field: str, digits: int
) -> None:
    out = tmp_path_factory.mktemp("huge")
    value = f"infinite-uniform-{10**digits}-1.0" if field.endswith("mask") else str(10**digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", None)  # what an allocation would run into
        started = time.perf_counter()
        result = imdm("reproduce", "synthetic", *SMALL, f"{field}={value}", "--out", out / "run")
    if result.returncode == 0 or "NoneType" in result.stderr:
        pytest.fail(f"{field}: {result.stderr}")
    refused(result)
    assert time.perf_counter() - started < 20
    assert not list(out.iterdir())


def test_room_says_what_would_fit() -> None:
    with pytest.raises(UserError, match=r"pairs = 1,000,000,000,000: that would take 1e\+03 TB, .* at most \d"):
        check_room("pairs", 10**12, 1000)
    check_room("pairs", 1, memory())
    for value in (0, -1, 1.5, True, "3", None, 10**30):
        with pytest.raises(UserError, match="n = .*: must be a whole number"):
            check_whole("n", value)
    for value in (float("inf"), float("nan"), "x", None, True):
        with pytest.raises(UserError, match="must be a number"):
            check_number("x", value)


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


@pytest.mark.parametrize("name", ["recipe.json", "results.jsonl", "seed-0/teacher/done.json", "seed-0/teacher/history.jsonl",
                                  "seed-0/pairs/manifest.json", "seed-0/pairs/pairs-00000.safetensors",
                                  "seed-0/teacher/checkpoints/step-00000040/state.json", "seed-0/imdm/model/config.json",
                                  "seed-0/imdm/model/model.safetensors"])  # fmt: skip
def test_state_files_that_are_damaged_or_foreign_get_a_sentence(run: Path, tmp_path: Path, name: str) -> None:
    for number, content in enumerate(FOREIGN):
        copied = tmp_path / str(number)
        shutil.copytree(run, copied)
        (copied / name).write_bytes(content.encode("utf-8", "surrogateescape"))
        (copied / "seed-0/teacher/checkpoints/step-abc").mkdir()
        (copied / "seed-abc").mkdir()
        for read in (status, build_report):
            try:
                read(copied)
            except UserError as error:
                assert str(copied) in str(error)
        again = imdm("reproduce", "synthetic", *SMALL, "--out", copied)
        assert again.returncode == 0 or refused(again)
        if name.endswith((".safetensors", "done.json", "manifest.json", "config.json")):
            assert again.returncode == 2, f"{name}: {content[:20]!r} was accepted"


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
    assert "is not what it made" in refused(imdm("reproduce", "synthetic", *SMALL, "--out", copied))


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


# One process in a folder, and what it leaves


HOLD = "import sys, time; from pathlib import Path; from imdm.files import working_in\nwith working_in(Path(sys.argv[1])):\n    print('in', flush=True); time.sleep(60)"


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    """The second gets a sentence; a killed one leaves no lock, and what it left unfinished goes."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"in\n"
    half = tmp_path / "run" / "deep" / "half"
    try:
        with pytest.raises(UserError, match=r"another process is at work in .*run"), working_in(tmp_path / "run"):
            pass
        assert "another process is at work" in refused(
            imdm("reproduce", "synthetic", *SMALL, "--out", tmp_path / "run")
        )
        half.parent.mkdir()
        (half.parent / f"{PARTIAL}{_machine()}-{other.pid}-half").write_text("what a killed process leaves")
    finally:
        other.kill()
        other.wait()
    assert list(half.parent.iterdir())
    with working_in(tmp_path / "run"):
        assert not list(half.parent.iterdir())


def test_a_folder_that_nothing_came_of_is_gone(tmp_path: Path) -> None:
    with working_in(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from imdm.errors import UserError
from imdm.files import append_lines, write_json, write_tensors
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
home = Path(sys.argv[1])
for write in (lambda: append_lines(home / "rows.jsonl", [{"x": "y" * 3000}, {"x": "z" * 3000}]),
              lambda: write_json(home / "state.json", ["x" * 5000]),
              lambda: write_tensors(home / "weights.safetensors", {"a": torch.zeros(5000)})):
    try:
        write()
    except UserError as error:
        print(error)
"""


def test_a_full_disk_names_the_file_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    append_lines(tmp_path / "rows.jsonl", [{"x": 1}])
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    told = done.stdout.strip().splitlines()
    assert [name for name in ("rows.jsonl", "state.json", "weights.safetensors") if any(name in line for line in told)] == [
        "rows.jsonl", "state.json", "weights.safetensors"
    ]  # fmt: skip
    assert all("cannot be written" in line for line in told)
    assert read_lines(tmp_path / "rows.jsonl") == [{"x": 1}]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    append_lines(tmp_path / "rows.jsonl", [{"x": 2}])
    assert read_lines(tmp_path / "rows.jsonl") == [{"x": 1}, {"x": 2}]


def test_a_line_cut_short_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    append_lines(file, [{"x": 1}, {"x": 2}])
    file.write_bytes(file.read_bytes() + b'{"x": ')
    assert read_lines(file) == [{"x": 1}, {"x": 2}]
    append_lines(file, [{"x": 3}])
    assert read_lines(file) == [{"x": 1}, {"x": 2}, {"x": 3}]


# The terminal


@few
@given(st.text(max_size=30) | st.sampled_from(["[/x]", "[bold]", ":smile:", "\x1b[2J", "\udcff", "a\0b", "[red]x[/]"]))
def test_any_text_can_be_a_path_or_a_name(text: str) -> None:
    for arguments in (
        ["report", text],
        ["status", text],
        ["generate", text],
        ["recipes", text],
        ["generate", "--prompt", text],
    ):
        result = imdm(*arguments) if not text.startswith("-") else imdm(*arguments[:-1], "--", text)
        assert result.returncode in (0, 2), result.stderr
        assert "Traceback" not in result.stderr
        if result.returncode == 2 and result.stderr.startswith("error:"):
            refused(result)


def process(*arguments: str | bytes, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "imdm", *arguments], capture_output=True, timeout=120, **settings)


def test_bytes_that_are_not_text_and_a_locale_without_letters(tmp_path: Path) -> None:
    bare = {k: v for k, v in os.environ.items() if not k.startswith("LC_")} | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    for environment in (os.environ, bare):
        done = process("status", b"\xff[/x]", env=environment)
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.startswith(b"error: ")
        assert len(done.stderr.splitlines()) == 1
    done = process("recipes", "synthetic", env=bare)
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["name"] == "synthetic"


def test_a_closed_pipe_ends_quietly() -> None:
    done = subprocess.run(
        f"{sys.executable} -m imdm recipes grid | head -1", shell=True, capture_output=True, timeout=120
    )
    assert (done.stdout, done.stderr) == (b"name: grid\n", b"")


def test_what_nobody_expected_is_one_line_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path))
    monkeypatch.setattr("imdm.status.status", lambda run: 1 / 0)
    result = imdm("status", tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "error: imdm status failed: ZeroDivisionError: division by zero; the traceback is in "
    )
    (file,) = (tmp_path / "errors").iterdir()
    assert "ZeroDivisionError" in file.read_text()


def test_out_of_memory_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(tmp_path)
    assert "out of memory" in refused(imdm("generate", tmp_path))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("size mismatch"))


# Signals


SLOW = ["stages.teacher.training.steps=100000", "stages.teacher.training.checkpoint_every=50000"]


def start(*arguments: str, wait_for: str | None) -> subprocess.Popen[bytes]:
    begun = subprocess.Popen([sys.executable, "-m", "imdm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    while wait_for is not None and not list(Path(arguments[-1]).glob(wait_for)):
        assert time.monotonic() < deadline
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.05)
    return begun


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_training_with_a_checkpoint(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = str(tmp_path / "run")
    begun = start("train", "synthetic", *SLOW, "--out", out, wait_for="seed-0/teacher/history.jsonl")
    begun.send_signal(number)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == code
    assert told.splitlines()[-1] == b"stopped; run the same command again to go on"
    assert b"Traceback" not in told
    (saved,) = (tmp_path / "run/seed-0/teacher/checkpoints").iterdir()
    assert load_file(saved / "ema.safetensors")


@pytest.mark.parametrize("after", [0.15, 0.6, 1.5])
def test_a_signal_while_modules_are_loaded(tmp_path: Path, after: float) -> None:
    begun = start("train", "synthetic", *SLOW, "--out", str(tmp_path / "run"), wait_for=None)
    time.sleep(after)
    begun.send_signal(signal.SIGINT)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 130 or (after < 0.3 and begun.returncode == -2)  # before Python itself is there
    assert b"Traceback" not in told or after < 0.3


def test_a_signal_reaches_the_workers(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    begun = start(
        "reproduce",
        "synthetic",
        *SLOW,
        "--seeds",
        "2",
        "--workers",
        "2",
        "--out",
        out,
        wait_for="seed-1/teacher/history.jsonl",
    )
    begun.send_signal(signal.SIGTERM)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 143
    assert b"Traceback" not in told
    assert told.splitlines()[-1] == b"stopped; run the same command again to go on"
    assert list((tmp_path / "run/seed-1/teacher/checkpoints").iterdir())


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


@few
@given(
    st.sampled_from(["num", "steps", "length", "temperature", "top_p", "noise", "seed", "batch_size", "input_ids"]), ODD
)
def test_generate_takes_or_refuses_any_argument(name: str, value: Any) -> None:
    model = tiny_model()
    try:
        made = model.generate(**{"num": 1, "steps": 1, name: value})
    except UserError as error:
        assert "--" not in str(error)
    else:
        assert int(made.tokens.max()) < 5


@few
@given(st.sampled_from(["vocab_size", "length", "width", "blocks", "heads", "condition", "dropout", "softcap", "mask",
                        "schedule", "mixture", "causal", "mask_token_id", "tie_word_embeddings"]), ODD)  # fmt: skip
def test_a_configuration_takes_or_refuses_any_value(name: str, value: Any) -> None:
    try:
        config = MaskedDiffusionConfig(**{name: value})
    except UserError:
        return
    assert config.parameters < 10**13


@cache
def writer() -> Writer:
    return load("sentences-imdm")


@few
@given(st.sampled_from(["prompts", "num", "length", "steps", "seed"]), ODD)
def test_a_writer_takes_or_refuses_any_argument(name: str, value: Any) -> None:
    try:
        texts = writer().write(**{"steps": 1, "length": 8, name: value})
    except UserError as error:
        assert "--" not in str(error)
    else:
        assert all(isinstance(text.text, str) for text in texts)
