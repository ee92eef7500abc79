"""One process a folder, full disks, signals, and text that no terminal can show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from imdm import writer
from imdm.core.errors import UserError, is_out_of_memory
from imdm.core.files import (
    PARTIAL,
    _machine,
    append_lines,
    read_lines,
    working_in,
)
from imdm.core.stopping import CODES, StopRequest, held_back
from imdm.experiments.jobs import _share
from imdm.models.loading import load_model
from imdm.training.agreement import Agreement
from tests.cli.test_cli import SMALL, imdm, refused
from tests.conftest import tiny_model
from tests.reference.endings import Ending
from tests.reference.hostile import few
from tests.reference.launching import ENVIRONMENT, Program, launched, run, torchrun
from tests.serving.test_serving import until

# One process in a folder, and what it leaves


HOLD = """
import sys, time
from pathlib import Path
from imdm.core.files import working_in
with working_in(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(60)
"""


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
from imdm.core.errors import UserError
from imdm.core.files import append_lines, write_json, write_tensors
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


def test_a_full_disk_names_the_file_and_leaves_it_as_it_was(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    aside = tmp_path_factory.mktemp("full")
    append_lines(tmp_path / "rows.jsonl", [{"x": 1}])
    (aside / "full.py").write_text(FULL)
    (said,) = launched([Program([str(aside / "full.py"), str(tmp_path)])], aside)
    told = said.strip().splitlines()
    assert len(told) == 3
    assert all(name in line for name, line in zip(("rows.jsonl", "state.json", "weights"), told, strict=True))
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


LOADED = cache(writer.load)


@few
@given(st.text(max_size=30) | st.sampled_from(["[/x]", "[bold]", ":smile:", "\x1b[2J", "\udcff", "a\0b", "[red]x[/]"]))
def test_any_text_can_be_a_path_or_a_name(text: str) -> None:
    for arguments in (
        ["report", text],
        ["status", text],
        ["generate", text],
        ["recipes", text],
        ["generate", "--steps", "1", "--length", "32", "--prompt", text],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("imdm.writer.load", LOADED)
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
    """Nobody reads any more when the command begins to write, as with `imdm recipes | head -1`."""
    end, pipe = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "imdm", "recipes"]
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, timeout=120)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_nobody_expected_is_one_line_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path))
    (tmp_path / "recipe.json").write_text("{}")
    monkeypatch.setattr("imdm.experiments.status.status", lambda run: 1 / 0)
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
    said = refused(imdm("generate", tmp_path))
    assert said.endswith("; ask for fewer or shorter texts, a smaller batch or model")
    assert "out of memory" in said
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("size mismatch"))


@pytest.mark.parametrize("command", ["train", "distill", "reproduce"])
def test_out_of_memory_in_training_names_settings_of_training(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("imdm.training.Trainer.train_step", full)
    words = {"distill": ["sdtt", tmp_path / "teacher", "--data", "aligned:length=3,symbols=2"]}
    tiny_model(length=3, vocab_size=3).save_pretrained(tmp_path / "teacher")
    result = imdm(command, *words.get(command, ["synthetic"]), "--out", tmp_path / "run")
    said = result.stderr.splitlines()[-1]
    assert result.returncode == 2
    assert "out of memory (CUDA out of memory" in said
    for setting in ("training.micro_batch", "training.checkpoint_blocks=true", "training.shard=full"):
        assert setting in said
    assert "texts" not in said


# Signals


SLOW = ["stages.teacher.training.steps=100000", "stages.teacher.training.checkpoint_every=50000"]


def start(*arguments: str, wait_for: str) -> subprocess.Popen[bytes]:
    begun = subprocess.Popen(
        [sys.executable, "-m", "imdm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would ignore it
    )
    deadline = time.monotonic() + 100
    while not list(Path(arguments[-1]).glob(wait_for)):
        assert time.monotonic() < deadline
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.05)
    return begun


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_training_with_a_checkpoint(tmp_path: Path, number: signal.Signals, code: int) -> None:
    out = str(tmp_path / "run")
    begun = start("train", "synthetic", *SLOW, "--out", out, wait_for="seed-0/teacher/history.jsonl")
    begun.send_signal(number)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == code
    assert told.splitlines()[-1] == b"stopped; run the same command again to resume"
    assert b"Traceback" not in told
    (saved,) = (tmp_path / "run/seed-0/teacher/checkpoints").iterdir()
    assert load_file(saved / "ema.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_signal_ends_several_processes_with_a_checkpoint(tmp_path: Path, number: signal.Signals, shard: str) -> None:
    """Sent to the launcher, or to one process alone: all save at one step, and one process goes on from there."""
    out = tmp_path / "run"
    given = ["train", "synthetic", *SLOW, "stages.teacher.training.log_every=1", "--out", str(out)]
    line = [*torchrun(2), "-m", "imdm", *given, f"stages.teacher.training.shard={shard}"]
    environment = os.environ | ENVIRONMENT
    begun = subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        until(lambda: (out / "seed-0/teacher/history.jsonl").exists())
        if shard == "none":
            begun.send_signal(number)
        else:
            os.kill(int(workers_of(begun.pid)[-1]), number)
        told, _ = begun.communicate(timeout=90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(begun.pid, signal.SIGKILL)
    assert told.count(b"stopped; run the same command again to resume") == 1, told.decode()
    (saved,) = (out / "seed-0/teacher/checkpoints").iterdir()
    at = int(saved.name.removeprefix("step-"))
    last = read_lines(out / "seed-0/teacher/history.jsonl")[-1]["step"]
    assert last == at > 0
    done = imdm(*given[:-2], "--out", out, f"stages.teacher.training.steps={at + 2}")
    assert done.returncode == 0, done.stderr
    assert read_lines(out / "seed-0/teacher/history.jsonl")[-1]["step"] == at + 2


def workers_of(process: int) -> list[str]:
    """The processes that `torchrun` started."""
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def test_what_one_process_is_asked_all_do_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that take steps together: a signal is known to both one step after it was told."""
    asked = [StopRequest(), StopRequest()]
    agreed = [Agreement(one, torch.device("cpu"), alone=False) for one in asked]
    told: list[torch.Tensor] = []  # in this step

    def all_reduce(tensor: torch.Tensor, how: Any) -> None:
        assert how == torch.distributed.ReduceOp.MAX
        told.append(tensor)
        if len(told) == len(agreed):
            most = torch.stack(told).max()
            for each in told:
                each.copy_(most)
            told.clear()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def step() -> list[bool]:
        return [one() for one in agreed]

    assert step() == [False, False]
    asked[1].number = signal.SIGTERM
    assert step() == [False, False]
    assert asked[0].number is None
    assert step() == [True, True]
    assert asked[0].number == signal.SIGTERM
    alone = Agreement(StopRequest(), torch.device("cpu"), alone=True)
    assert not alone()
    alone.request.number = signal.SIGTERM
    assert alone()
    assert alone.at_last()


WHILE_LOADING = """
import os, signal, sys
from imdm.__main__ import main

module, number = sys.argv[1], int(sys.argv[2])

class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), number)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["imdm", *sys.argv[3:]]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["typer", "torch", "torch.nn"])
def test_a_signal_while_modules_are_loaded(tmp_path: Path, module: str, number: signal.Signals) -> None:
    """Sent by the import itself: at the first module of the command line, at torch, and in the middle of torch."""
    given = ["train", "synthetic", *SLOW, "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", WHILE_LOADING, module, str(int(number)), *given]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert done.returncode == CODES[number]
    assert (done.stdout, done.stderr) == (b"", b"stopped; run the same command again to resume\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
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
    assert told.splitlines()[-1] == b"stopped; run the same command again to resume"
    assert list((tmp_path / "run/seed-1/teacher/checkpoints").iterdir())


def test_a_second_ctrl_c_acts_at_once_a_second_sigterm_does_not() -> None:
    """A batch system sends SIGTERM to all processes, and `torchrun` sends it on to those it started: what is being
    saved is saved all the same."""
    asked = StopRequest()
    with asked.listening():
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert asked
    with pytest.raises(SystemExit):
        asked.end()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a job in a shell's background
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            again = StopRequest()
            with again.listening():
                signal.raise_signal(number)
                assert again
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            several = StopRequest()
            with several.listening(hasty=False):
                for _ in range(2):
                    signal.raise_signal(number)
            assert several.number == number
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_held_back_from_every_thread(number: signal.Signals) -> None:
    """torch has threads of its own, which blocking in this one does not concern."""
    before = signal.getsignal(number)
    signal.signal(number, lambda got, _: said.append(f"signal {got}"))
    said: list[str] = []
    gone = threading.Event()
    try:
        thread = threading.Thread(target=gone.wait)
        thread.start()
        with held_back():
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.05)  # for the other thread to receive it
            said.append("end of the block")
        said.append("after it")
    finally:
        gone.set()
        signal.signal(number, before)
    assert said == ["end of the block", f"signal {number}", "after it"]


class Heard:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("killed", RuntimeError, "killed: its process ended with exit code -9"),
        ("refused", UserError, "x" * 200_000),
        ("odd", RuntimeError, "OddError: 1 and 2"),
        ("broken", ZeroDivisionError, "not a matter of input"),
    ],
)
def test_what_ended_a_job_is_told_as_it_was(
    name: str, kind: type[Exception], message: str, request: pytest.FixtureRequest
) -> None:
    """The kind of error decides on the exit code of the command; where it was raised is in a note. One of the processes
    is begun anew, as they all are outside tests."""
    if name != "refused":
        request.getfixturevalue("forked")
    heard = Heard()
    with pytest.raises(kind) as found:
        _share([Ending(name)], 1, heard)  # type: ignore[list-item, arg-type]
    assert str(found.value) == message
    assert heard.lines == [f"{name}: failed: {message}; 1 of 1"]
    noted = "".join(getattr(found.value, "__notes__", []))
    assert ("in run" in noted) == (name in ("odd", "broken"))


LEAVING = """
import atexit, sys
import torch.distributed as dist
from imdm.core.devices import leave
leave()  # a single process goes on
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
atexit.register(print, "what was registered is done")
leave(int(sys.argv[1]))
print("not reached")
"""


@pytest.mark.parametrize("code", [0, 3])
def test_one_of_several_processes_ends_without_being_finalised(tmp_path: Path, code: int) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    (ended,) = run([Program([str(tmp_path / "leaving.py"), str(code)])])
    assert ended.said == "what was registered is done\n" + (f"\nprocess 0: exitcode: {code}" if code else "")


ENDING = """
import atexit, sys, threading
from types import SimpleNamespace
from imdm import __main__, cli
sys.modules["torch"] = SimpleNamespace()
code, threads = eval(sys.argv[1])

class Finalised:
    def __del__(self):
        print("finalised")

kept = Finalised()

def run():
    if threads:
        threading.Thread(target=print, args=["the thread is waited for"]).start()
        gone = threading.Event()
        thread = threading.Thread(target=gone.wait)
        thread.start()
        atexit.register(gone.set)
        threading._register_atexit(gone.set)
    atexit.register(print, "what was registered is done")
    sys.stdout.write("not yet flushed ")
    sys.exit(code)

cli.main = run
__main__.main()
"""


@pytest.mark.parametrize(
    ("code", "exits", "said"), [(0, 0, ""), (None, 0, ""), (3, 3, ""), ("a reason", 1, "a reason\n")]
)
def test_a_command_ends_without_finalising_torch(code: int | str | None, exits: int, said: str) -> None:
    told = [sys.executable, "-c", ENDING, repr((code, False))]
    done = subprocess.run(told, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (exits, said)
    assert done.stdout == "not yet flushed what was registered is done\n"


def test_a_command_waits_for_its_threads() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, "(0, True)"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "the thread is waited for" in done.stdout
    assert "finalised" in done.stdout


SHARED = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from imdm.experiments.jobs import _share
from imdm.core.stopping import StopRequest, catch_signals

@dataclass
class Task:
    name: str
    out: str

    def run(self, reporter):
        asked = StopRequest()
        with asked.listening():
            Path(self.out, self.name).touch()
            while self.name != "short" and not asked:
                time.sleep(0.02)
            time.sleep(0.5 if asked else 0)  # what the others send arrives while it saves
            Path(self.out, f"{self.name} saved").touch()
        asked.end()

class Say:
    def say(self, text):
        Path(sys.argv[1], text).touch()

if __name__ == "__main__":
    catch_signals()
    try:
        _share([Task("short", sys.argv[1]), Task("long", sys.argv[1])], 2, Say())
    except KeyboardInterrupt:
        sys.exit(130)  # how Python itself ends by it depends on what is installed beside torch
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_while_one_has_finished(tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal sends Ctrl-C, to every process. Those that work save their state first; nobody waits for ever."""
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(SHARED)
    out.mkdir()
    begun = subprocess.Popen([sys.executable, str(program), str(out)], start_new_session=True, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 100
        while not {"short: finished; 1 of 2", "long"} <= {file.name for file in out.iterdir()}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(begun.pid, number)
        _, told = begun.communicate(timeout=30)
    finally:
        begun.kill()
    assert begun.returncode == CODES[number]
    assert (out / "long saved").exists()
    assert b"Error" not in told
