"""An engine in a process of its own: the same texts as in this one, and neither process outlives the other."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imdm.cli.serving import _loaded, named
from imdm.errors import UserError
from imdm.serving import Apart, Busy, Engine, Frame, Job, Settings, Stopped, TooLong
from imdm.serving import apart as apart_module
from imdm.serving.server import Server, in_background
from imdm.writer import Writer
from tests.test_serving import ask, tiny_writer, until

HOLES = [None] * 24


def writers(seconds: float = 0.0) -> dict[str, Writer]:
    """Two models; each evaluation takes so many seconds longer."""
    made = {"a": tiny_writer(mask="infinite-uniform-8-1.0"), "b": tiny_writer(1)}
    for writer in made.values():
        run_at = writer.model.trunk_at

        def slowly(*given: Any, run_at: Any = run_at) -> Any:
            time.sleep(seconds)
            return run_at(*given)

        writer.model.trunk_at = slowly  # type: ignore[method-assign]
    return made


def refusing() -> dict[str, Writer]:
    raise UserError("there is no such model")


def failing() -> dict[str, Writer]:
    raise ZeroDivisionError


def hungry() -> dict[str, Writer]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")


def waiting() -> dict[str, Writer]:
    time.sleep(600)
    return {}


def faulty() -> dict[str, Writer]:
    """Its engine ends by a fault in the first turn."""
    made = writers()

    def fault(*_: Any) -> None:
        raise SystemError

    Engine._turn = fault  # type: ignore[method-assign, assignment]
    return made


def unchecked() -> dict[str, Writer]:
    """Its engine would refuse every job over there."""

    def check(*_: Any) -> Any:
        raise UserError("not this one")

    Engine.check = check  # type: ignore[method-assign, assignment]
    return writers()


def stuck() -> dict[str, Writer]:
    """Its first evaluation takes for ever, and its process tells nobody."""
    apart_module.Engine.stop = lambda *_: time.sleep(600)  # type: ignore[method-assign, assignment]
    return writers(600.0)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Apart, Server]]:
    engine = Apart(writers, Settings(queue=20))
    with in_background(engine) as server:
        yield engine, server


@pytest.fixture
def apart(served: tuple[Apart, Server]) -> Apart:
    return served[0]


@pytest.fixture
def slow() -> Iterator[Apart]:
    with Apart(partial(writers, 0.2)) as engine:
        yield engine


async def all_of(engine: Engine, jobs: list[Job]) -> list[list[Frame]]:
    async def frames(job: Job) -> list[Frame]:
        return [frame async for frame in engine.run(job)]

    return await asyncio.gather(*map(frames, jobs))


def told(stories: list[list[Frame]]) -> list[Any]:
    return [[(frame.step, frame.ids, frame.revealed, frame.done) for frame in story] for story in stories]


def test_texts_are_those_of_an_engine_in_this_process(apart: Apart) -> None:
    jobs = [Job(name, HOLES, steps=4, seed=i, frames=i % 2 == 0) for i in range(6) for name in ("a", "b")]
    before = apart.counts.sequences
    found = asyncio.run(all_of(apart, jobs))
    with Engine(writers()) as here:
        assert told(found) == told(asyncio.run(all_of(here, jobs)))
    assert apart.counts.sequences - before == len(jobs)
    until(lambda: apart.running == apart.waiting == 0)
    assert apart.alive


def test_here_are_no_weights_but_all_else(apart: Apart) -> None:
    for name, writer in writers().items():
        bare = apart.writers[name]
        assert {weight.device.type for weight in bare.model.parameters()} == {"meta"}
        assert bare.model.config.to_dict() == writer.model.config.to_dict()
        assert bare.prefixed("The cat", 24) == writer.prefixed("The cat", 24)


def test_what_cannot_be_written_is_refused_here(apart: Apart) -> None:
    async def first(*jobs: Job) -> Any:
        async for _, frame in apart.run_all(jobs):
            return frame
        return None

    for job, reason in (
        (Job("c", HOLES), "unknown model 'c'"),
        (Job("a", HOLES, steps=0), "steps = 0"),
        (Job("a", [None] * 25), "the row has 25 tokens"),
        (Job("a", [100_000]), "ids = 100000"),
    ):
        with pytest.raises(UserError, match=reason):
            asyncio.run(first(job))
    with pytest.raises(Busy, match="0 texts are running or waiting, of 20 at most"):
        asyncio.run(first(*[Job("a", HOLES)] * 21))


def test_the_service_answers_with_it(served: tuple[Apart, Server]) -> None:
    writer, (engine, server) = writers()["a"], served
    status, _, answer = ask(server, {"model": "a", "prompt": "The cat", "seed": 3, "steps": 4})
    assert status == 200
    (text,) = writer.write("The cat", seed=3, steps=4)
    assert "The cat" + answer["choices"][0]["text"] == text.text
    assert ask(server, path="/healthz", method="GET")[0] == 200
    assert ask(server, path="/metrics", method="GET")[0] == 200
    assert engine.processor() > time.process_time()


def test_its_state_is_known_here_without_frames(slow: Apart) -> None:
    """What runs; that a client has left; and that this makes room."""

    async def write() -> None:
        story = asyncio.ensure_future(all_of(slow, [Job("a", HOLES, steps=24)] * 3))
        await asyncio.to_thread(until, lambda: (slow.running, slow.waiting) == (3, 0))
        story.cancel()
        await asyncio.gather(story, return_exceptions=True)
        await asyncio.to_thread(until, lambda: slow.counts.dropped == 3)

    asyncio.run(write())
    assert (slow.running, slow.waiting, slow.counts.sequences) == (0, 0, 0)


def test_many_come_and_go(slow: Apart) -> None:
    """Requests that are cancelled at once, again and again, leave room for others: nothing waits for ever, and none is
    refused by the process, which has no limit of its own."""

    async def write() -> list[list[Frame]]:
        for _ in range(20):
            story = asyncio.ensure_future(all_of(slow, [Job("a", HOLES, steps=24, frames=True)] * 100))
            await asyncio.sleep(0.01)
            story.cancel()
            await asyncio.gather(story, return_exceptions=True)
        return await all_of(slow, [Job("b", HOLES, steps=1, seed=i) for i in range(256)])

    found = asyncio.run(asyncio.wait_for(write(), 60))
    assert all(story[-1].done for story in found)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
@pytest.mark.parametrize("first", [2000, 1], ids=["large", "many"])
def test_a_process_that_does_not_read_keeps_nobody_waiting(apart: Apart, first: int) -> None:
    """A letter that is larger than the line, or more letters than it holds, are sent when the process goes on; each is
    answered, and a drop comes after its jobs."""
    apart.settings, limits = apart.settings.model_copy(update={"queue": 10_000}), apart.settings
    pid, dropped = apart._process.pid, apart.counts.dropped
    assert pid is not None

    async def write() -> list[list[Frame]]:
        os.kill(pid, signal.SIGSTOP)
        try:
            started, asked = time.monotonic(), list[asyncio.Task[list[Frame]]]()
            for i in range(1000):
                jobs = [Job("a", HOLES, steps=1, seed=i + j) for j in range(first if i == 0 else 1)]
                asked.append(asyncio.ensure_future(apart.finish(jobs)))
                await asyncio.sleep(0)
            story = asyncio.ensure_future(apart.finish([Job("a", HOLES, steps=24)] * 3))
            await asyncio.sleep(0)
            story.cancel()
            await asyncio.gather(story, return_exceptions=True)
            assert time.monotonic() - started < 10
            assert apart._queued > 1
        finally:
            os.kill(pid, signal.SIGCONT)
        return await asyncio.gather(*asked)

    try:
        found = asyncio.run(asyncio.wait_for(write(), 60))
    finally:
        apart.settings = limits
    assert [len(frames) for frames in found] == [first] + [1] * 999
    assert all(frame.done for frames in found for frame in frames)
    until(lambda: apart._queued == 0 and apart.running == 0 and apart.counts.dropped == dropped + 3)


def test_letters_come_in_their_order(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they were written at once or by the thread."""
    came, room = list[str](), iter([True, False, False, True, True] * 8)
    monkeypatch.setattr(apart_module, "_has_room", lambda _: next(room))
    line = SimpleNamespace(send_bytes=lambda data: came.append(pickle.loads(data)[0]))
    with monkeypatch.context() as changed:
        changed.setattr(apart, "_line", line)
        for number in range(40):
            apart._post((str(number), None))
        until(lambda: apart._queued == 0)
    assert came == [str(number) for number in range(40)]


def test_jobs_that_come_together_are_one_letter(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent before a letter that is about them: one that drops them, or the end."""
    letters, post = list[tuple[str, int]](), apart._post

    def posted(letter: tuple[str, Any]) -> None:
        letters.append((letter[0], len(letter[1])))
        post(letter)

    monkeypatch.setattr(apart, "_post", posted)
    asyncio.run(all_of(apart, [Job("a", HOLES, steps=2, seed=i) for i in range(6)]))
    assert letters == [("jobs", 6)]

    async def leave() -> None:
        with pytest.raises(TooLong):
            async for _ in apart.run_all([Job("a", HOLES, steps=2)], seconds=0):
                pass

    letters.clear()
    asyncio.run(leave())
    assert letters == [("jobs", 1), ("drop", 1)]
    until(lambda: apart.running == apart.waiting == 0)
    assert not apart._jobs


def test_a_stop_lets_texts_finish_that_were_just_asked_for(slow: Apart) -> None:
    """Before the event loop has sent the jobs."""

    async def write() -> list[Frame]:
        working = asyncio.ensure_future(slow.finish([Job("a", HOLES, steps=1)]))
        asyncio.get_running_loop().call_soon(stopping.start)  # after the job is submitted, before it is sent
        asyncio.get_running_loop().call_soon(stopped.wait)
        return await working

    stopped, stop = threading.Event(), slow._post

    def post(letter: tuple[str, Any]) -> None:
        stop(letter)
        if letter[0] == "stop":
            stopped.set()

    slow._post = post  # type: ignore[method-assign]
    stopping = threading.Thread(target=slow.stop, args=(60.0,))
    (last,) = asyncio.run(write())
    stopping.join()
    assert last.done


def test_a_stop_lets_running_texts_finish(slow: Apart) -> None:
    async def write(grace: float) -> Any:
        loop, story = asyncio.get_running_loop(), asyncio.ensure_future(all_of(slow, [Job("a", HOLES, steps=3)]))
        await asyncio.sleep(0.3)
        await loop.run_in_executor(None, slow.stop, grace)
        return await story

    ((*_, last),) = asyncio.run(write(60.0))
    assert last.done
    assert not slow.alive
    assert not slow.broken
    with pytest.raises(Stopped, match=r"has ended \(0\); make another"):
        slow.start()


def test_a_second_stop_is_heard_and_who_leaves_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unheard, the text that runs would be finished."""
    monkeypatch.setattr(apart_module, "LAST_WORDS", 60.0)
    with Apart(partial(writers, 0.5)) as engine:

        async def write() -> None:
            loop = asyncio.get_running_loop()
            stories = [asyncio.ensure_future(all_of(engine, [Job("a", HOLES, steps=24)])) for _ in range(2)]
            await asyncio.sleep(0.3)
            stop = loop.run_in_executor(None, engine.stop, 60.0)
            await asyncio.sleep(0.1)
            stories[0].cancel()
            await loop.run_in_executor(None, engine.stop, 0.0)
            await stop
            with pytest.raises(Stopped):
                await stories[1]

        asyncio.run(write())


def test_a_process_that_dies_fails_what_it_was_asked_for(slow: Apart) -> None:
    async def write() -> None:
        story = asyncio.ensure_future(all_of(slow, [Job("a", HOLES, steps=24)] * 3))
        await asyncio.sleep(0.5)
        assert slow._process.pid is not None
        os.kill(slow._process.pid, signal.SIGKILL)
        with pytest.raises(Stopped, match="stopped before the text was finished"):
            await story

    asyncio.run(write())
    until(lambda: slow.broken)
    assert not slow.alive
    with pytest.raises(Stopped, match="is stopping"):
        asyncio.run(all_of(slow, [Job("a", HOLES)]))


def test_a_job_is_checked_once_by_the_service() -> None:
    with Apart(unchecked) as engine:
        (frames,) = asyncio.run(asyncio.wait_for(all_of(engine, [Job("a", HOLES, steps=2)]), 60))
        assert frames[-1].done


class Unreadable(list[None]):
    """Its pickle cannot be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raising, ()


def _raising() -> None:
    raise RuntimeError("no such row")


def test_a_process_that_cannot_read_a_letter_ends() -> None:
    """It would seem alive, and hear no more."""
    with Apart(writers) as engine:
        with pytest.raises(Stopped):
            asyncio.run(asyncio.wait_for(all_of(engine, [Job("a", Unreadable(HOLES))]), 60))
        until(lambda: engine.broken)
        assert not engine.alive


def late() -> dict[str, Writer]:
    """There a thread is alive only some time after it was started."""
    start = threading.Thread.start

    def slowly(self: threading.Thread) -> None:
        if self.name.startswith("Thread-"):
            time.sleep(1.0)
        start(self)

    threading.Thread.start = slowly  # type: ignore[method-assign]
    return writers(0.3)


def test_a_stop_that_begins_late_lets_jobs_finish() -> None:
    engine = Apart(late)
    engine.start()

    async def write() -> list[Any]:
        loop, story = asyncio.get_running_loop(), asyncio.ensure_future(all_of(engine, [Job("a", HOLES, steps=8)]))
        await asyncio.sleep(0.2)
        await loop.run_in_executor(None, engine.stop, 30.0)
        return await story

    (frames,) = asyncio.run(asyncio.wait_for(write(), 60))
    assert frames[-1].done


def test_a_stop_does_not_wait_for_a_process_to_tell() -> None:
    """Clients are told when the grace has ended, and the process is then given some time."""
    with Apart(stuck) as engine:

        async def write() -> None:
            loop, story = asyncio.get_running_loop(), asyncio.ensure_future(all_of(engine, [Job("a", HOLES)]))
            await asyncio.sleep(0.3)
            stop = loop.run_in_executor(None, engine.stop, 0.1)
            with pytest.raises(Stopped, match="stopped before the text was finished"):
                await story
            assert engine._process.is_alive()
            engine._process.kill()  # rather than wait until it is
            await stop

        asyncio.run(asyncio.wait_for(write(), 60))


def test_an_engine_that_ends_by_a_fault_ends_its_process() -> None:
    """However many requests come meanwhile."""
    with Apart(faulty) as engine:
        for _ in range(100):
            with pytest.raises(Stopped):
                asyncio.run(all_of(engine, [Job("a", HOLES)]))
            if engine.broken:
                break
            time.sleep(0.05)
        assert engine.broken


def test_what_keeps_it_from_beginning_is_said_here(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="^there is no such model$"):
        Apart(refusing)
    with pytest.raises(UserError, match="^the engine could not be made: ZeroDivisionError: ZeroDivisionError$"):
        Apart(failing)
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises(UserError, match="^out of memory .*; serve a smaller model, or fewer of them$"):
        Apart(hungry)
    assert "Traceback" not in capfd.readouterr().err


def test_the_command_hands_over_what_loads_its_models(tmp_path: Path) -> None:
    """On a GPU `imdm serve` loads them over there; here on a CPU."""
    writer = writers()["a"]
    writer.model.save_pretrained(tmp_path / "tiny")
    writer.tokenizer.save_pretrained(tmp_path / "tiny")
    chosen = named([str(tmp_path / "tiny")])
    with Apart(partial(_loaded, chosen, torch.device("cpu"))) as engine:
        ((*_, last),) = asyncio.run(all_of(engine, [Job("tiny", HOLES, steps=4, seed=1)]))
    assert last.done
    assert last.ids == writer.model.generate(num=1, steps=4, seed=1).tokens[0].tolist()
    chosen["tiny"] = str(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere': no such folder"):
        Apart(partial(_loaded, chosen, torch.device("cpu")))


SCRIPT = """
import sys, threading, time, multiprocessing
from functools import partial
from imdm.serving import Apart
from tests.test_apart import waiting, writers

def tell():
    while not multiprocessing.active_children():
        time.sleep(0.01)
    print(multiprocessing.active_children()[0].pid, flush=True)

if __name__ == "__main__":
    threading.Thread(target=tell, daemon=True).start()
    engine = Apart(waiting if "waiting" in sys.argv else partial(writers, 0.2))
    print("ready", flush=True)
    if "leaving" in sys.argv:
        raise ValueError
    with engine:
        time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    """Starts one, in a session of its own; and the number of its engine's process."""
    (tmp_path / "serve.py").write_text(SCRIPT)
    place = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with ExitStack() as running:

        def start(what: str) -> tuple[subprocess.Popen[str], int]:
            line = [sys.executable, str(tmp_path / "serve.py"), what]
            it = running.enter_context(
                subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=place, start_new_session=True)
            )
            running.callback(it.kill)
            assert it.stdout is not None
            return it, int(it.stdout.readline())

        yield start


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


def test_nothing_is_left_when_the_service_is_killed(script: Any) -> None:
    it, there = script("serving")
    assert it.stdout.readline() == "ready\n"
    os.kill(there, signal.SIGTERM)  # is for the service, and has no effect
    os.kill(there, signal.SIGINT)
    time.sleep(0.5)
    assert not is_gone(there)
    it.kill()
    until(lambda: is_gone(there))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_stopped_while_it_gets_ready(script: Any, number: int) -> None:
    it, there = script("waiting")
    time.sleep(1)
    os.killpg(it.pid, number) if number == signal.SIGINT else it.kill()
    assert it.wait(30) != 0
    until(lambda: is_gone(there))


@pytest.mark.slow
def test_a_program_that_forgets_to_stop_it_ends(script: Any) -> None:
    it, there = script("leaving")
    assert it.wait(60) == 1
    until(lambda: is_gone(there))
