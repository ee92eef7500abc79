"""Many requests in one batch: each is written as if it were alone, comes and goes between turns, has an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imdm.core.errors import UserError
from imdm.core.streams import Fetched
from imdm.diffusion.masks import NoisePath
from imdm.diffusion.process import NoisePolicy
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import faster
from imdm.sampling import Sampling
from imdm.serving.batch import Batch, visits
from imdm.serving.engine import Engine
from imdm.serving.jobs import Busy, Failed, Frame, Job, Stopped, Ticket, TooLong, tell
from imdm.serving.settings import Settings
from tests.conftest import tiny_model
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of

HOLES = [None] * 6
WHOLE = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # rows are whole texts


def engine_of(settings: Settings | None = None, **models: MaskedDiffusionLM) -> Engine:
    """Ids are enough for it: nothing here needs a tokenizer."""
    return Engine({name: SimpleNamespace(model=model) for name, model in models.items()}, settings)  # type: ignore


def run(engine: Engine, work: Callable[[], Awaitable[Any]]) -> Any:
    with engine:
        return asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


async def story(engine: Engine, job: Job) -> list[Frame]:
    return [frame async for frame in engine.run(job)]


async def last(engine: Engine, job: Job) -> Frame:
    return (await story(engine, job))[-1]


async def end(engine: Engine, job: Job) -> Frame:
    """The same, without the other frames."""
    return (await engine.finish([job]))[0]


def alone(model: MaskedDiffusionLM, job: Job, **options: Any) -> Any:
    """The same by `generate`, which is what `Writer` asks."""
    row = [model.config.mask_token_id if token is None else token for token in job.ids]
    keys = model.sample_keys(job.number + 1, job.seed)[job.number :]
    how = {"steps": job.steps, "noise": job.noise, "temperature": job.temperature, "top_p": job.top_p}
    return model.generate(torch.tensor([row]), keys=keys, **how, **options)


WAYS = ((1.0, 1.0, "posterior"), (0.7, 1.0, "keep"), (0.0, 0.8, "posterior"), (1.3, 0.8, "keep"))


def varied(name: str, many: int, first: int | None = None) -> list[Job]:
    """Jobs of all kinds: lengths, prompts, steps, seeds, ways to draw."""
    jobs = []
    for i in range(many):
        given, (temperature, top_p, noise) = [i % 4 if first is None else first] * (i % 2), WAYS[i // 6 % 4]
        ids = [*given, *[None] * (4 + i % 3 - len(given))]
        how = {"temperature": temperature, "top_p": top_p, "noise": noise}
        jobs.append(Job(name, ids, steps=1 + i % 7, seed=i // 3, number=i % 3, **how))  # type: ignore[arg-type]
    return jobs


def together_and_alone(model: MaskedDiffusionLM, jobs: list[Job]) -> tuple[Engine, list[Frame], list[Any]]:
    """What an engine writes for all of these at once, and what each has by itself."""
    engine = engine_of(Settings(batch=16), a=model)

    async def work() -> list[Frame]:
        return await asyncio.gather(*(last(engine, job) for job in jobs))

    return engine, run(engine, work), [alone(model, job) for job in jobs]


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "single"},
        {"mask": "finite-7"},
        {"mask": "infinite-uniform-8-1.0"},
        {"mask": "infinite-normal-8-2.0", "mixture": True},
        {"mask": "infinite-uniform-8-1.0", **WHOLE},
        {"mask": "infinite-uniform-8-1.0", **WHOLE, "lengths": [0.0, 0.0, 0.1, 0.2, 0.3, 0.3, 0.1]},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_text_does_not_depend_on_its_company(changes: dict[str, Any]) -> None:
    """Same ids as alone, whatever shares the batch, in at least 99.9% of tokens (rounding may flip a draw)."""
    model = tiny_model(**changes)
    jobs = varied("a", 60, first=changes.get("bos_token_id"))
    engine, frames, wanted = together_and_alone(model, jobs)
    pairs = [(a, b) for f, w in zip(frames, wanted, strict=True) for a, b in zip(f.ids, w.tokens[0], strict=True)]
    assert sum(a == int(b) for a, b in pairs) >= 0.999 * len(pairs)
    assert [f.evaluations for f in frames] == [int(w.evaluations[0]) for w in wanted]
    assert engine.counts.turns < engine.counts.evaluated / 1.5  # they did share


def tickets(model: Any, jobs: list[Job]) -> list[Ticket]:
    """Jobs that nobody hears of."""
    return [Ticket(job, job.how(model), None, print, 0.0) for job in jobs]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["posterior", "keep"])
def test_texts_of_all_steps_in_one_batch_have_their_own_laws(policy: NoisePolicy) -> None:
    """Some of 3 steps, some of 2 that join later; enumerated (false alarm 1e-5 each)."""
    N, denoiser = 5000, TableDenoiser(2, 2, 2, seed=4)
    jobs = [Job("a", [None, None], steps=2 + (i < N), seed=8, number=i, noise=policy) for i in range(2 * N)]
    given = [Ticket(job, Sampling(job.steps, policy), None, print, 0.0) for job in jobs]  # type: ignore[arg-type]
    batch = Batch(denoiser, given[0].how)  # type: ignore[arg-type]
    batch.join(given[:N])
    batch.evaluate()
    batch.join(given[N:])
    while not all(batch.done()):
        batch.evaluate()
    assert batch.canvas is not None
    for tokens, steps in ((batch.canvas.tokens[:N], 3), (batch.canvas.tokens[N:], 2)):
        law = sequence_law(chain_law(denoiser, all_masked(2, 2), steps, policy), 2, 2)
        assert_law(counts_of(tokens, 2), law)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_visits_reveal_each_position_once_and_in_order(seed: int, length: int, steps: int) -> None:
    revealed_at = torch.randint(-1, steps, (3, length), generator=torch.Generator().manual_seed(seed))
    for row, found in zip(revealed_at, visits(revealed_at.numpy()), strict=True):
        assert [step for step, _ in found] == sorted(set(row.tolist()) - {-1})
        for step, positions in found:
            assert positions.tolist() == (row == step).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("many", [1, 2])
def test_who_leaves_a_batch_changes_nothing_for_the_others(many: int) -> None:
    """Steps, canvas and draws of those who stay are as without them; who comes later begins at the beginning."""
    model = tiny_model(mask="infinite-uniform-8-1.0", mixture=True)
    jobs = [Job("a", HOLES, steps=5, seed=seed, draws_seed=seed % 3, noise_between=(7, 9, 0.4)) for seed in range(6)]
    with torch.no_grad():
        batch, alone = (Batch(model, job.how(model)) for job in jobs[:2])
        batch.join(tickets(model, jobs[:4]))
        for _ in range(many):
            batch.evaluate()
        batch.keep([3, 1])
        batch.join(tickets(model, jobs[4:]))
        while not all(batch.done()):
            batch.evaluate()
        alone.join(tickets(model, [jobs[i] for i in (3, 1, 4, 5)]))
        while not all(alone.done()):
            alone.evaluate()
    assert [text.evaluations for text in batch.texts] == [text.evaluations for text in alone.texts]
    rows = [one.rows(range(4)).wait() for one in (batch, alone)]
    assert (rows[0][0] == rows[1][0]).double().mean() >= 0.99
    assert torch.equal(rows[0][1], rows[1][1])


def test_frames_tell_the_story_that_a_trace_tells() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    job = Job("a", [3, *HOLES[1:]], steps=5, seed=4, frames=True)
    engine = engine_of(a=model)
    frames = run(engine, lambda: story(engine, job))
    told = alone(model, job, trace=True)
    hole = model.config.mask_token_id
    for frame in frames:
        canvas = told.trace.canvases[0, frame.step].tolist()
        assert frame.ids == [None if token == hole else token for token in canvas]
        assert frame.revealed_at == [
            -1 if token is None else int(step) for token, step in zip(frame.ids, told.revealed_at[0], strict=True)
        ]
    assert [frame.done for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert [frame.step for frame in frames] == sorted({int(step) + 1 for step in told.revealed_at[0]} - {0})
    assert [frame.evaluations for frame in frames] == list(range(1, len(frames) + 1))
    assert frames[-1].probability == pytest.approx(told.trace.log_probs[0].exp().tolist())
    assert len(run(engine, lambda: story(engine, Job("a", HOLES)))) == 1


def counted_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames the engine makes, turn by turn."""
    made, rows = list[int](), Batch.rows

    def counted(batch: Batch, index: list[int]) -> Fetched:
        made.append(len(index))
        return rows(batch, index)

    monkeypatch.setattr(Batch, "rows", counted)
    return made


def test_frames_are_made_for_those_who_asked_or_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the event loop is woken once a turn that has any, however many sequences it concerns."""
    asked, made, woken = Job("a", HOLES, steps=3, frames=True), counted_frames(monkeypatch), list[int]()
    engine = engine_of(a=tiny_model())
    jobs = [*[replace(asked, seed=i) for i in range(3)], *[replace(asked, seed=i, frames=False) for i in range(40)]]

    async def work() -> list[tuple[int, Frame]]:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def waking(hear: Any, said: Any) -> Any:
            woken.append(len(said))
            return wake(hear, said)

        monkeypatch.setattr(loop, "call_soon_threadsafe", waking)
        return [told async for told in engine.run_all(jobs)]

    told = run(engine, work)
    assert len(told) == sum(made) == sum(woken)
    assert sorted(number for number, frame in told if frame.done) == list(range(43))
    assert all(frame.done for number, frame in told if number >= 3)
    assert len(told) == 40 + sum(frame.evaluations for number, frame in told if number < 3 and frame.done)
    assert len(woken) <= engine.counts.turns <= 3


def test_nothing_is_made_for_those_who_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs up while the network runs gets no frame of it."""
    model, made = tiny_model(), counted_frames(monkeypatch)
    gate, engine = Gate(model), engine_of(a=model)

    async def work() -> None:
        leaving = asyncio.create_task(last(engine, replace(MANY, frames=True)))
        await gate.reached()
        leaving.cancel()
        await asyncio.wait([leaving])
        gate.open()
        while engine.running:
            await asyncio.sleep(0)

    run(engine, work)
    assert sum(made) == 0
    assert (engine.counts.dropped, engine.counts.sequences) == (1, 0)


class Late(Fetched):
    """Rows that are there only when they are waited for, as on a GPU that is busy. events: what happened, in order."""

    def __init__(self, rows: Fetched, events: list[str], number: int) -> None:
        self.rows, self.events, self.number = rows, events, number

    ready = False  # type: ignore[assignment]

    def wait(self) -> torch.Tensor:
        self.events.append(f"read {self.number}")
        return self.rows.wait()


def busy_gpu(monkeypatch: pytest.MonkeyPatch, model: MaskedDiffusionLM) -> list[str]:
    """The results of this model's evaluations are late; what happens when."""
    events, run_at, rows = list[str](), model.trunk_at, Batch.rows

    def trunk_at(*given: Any) -> torch.Tensor:
        events.append(f"launch {sum(event.startswith('launch') for event in events) + 1}")
        return run_at(*given)

    def late(batch: Batch, index: list[int]) -> Fetched:
        return Late(rows(batch, index), events, sum(event.startswith("launch") for event in events))

    model.trunk_at = trunk_at  # type: ignore[method-assign]
    monkeypatch.setattr(Batch, "rows", late)
    return events


@pytest.mark.parametrize("frames", [True, False])
def test_a_turn_is_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch, frames: bool) -> None:
    """And never two before it; at the end nothing is left unread."""
    model = tiny_model(mask="infinite-uniform-8-1.0")
    job, wanted = replace(MANY, frames=frames), alone(model, MANY)
    events, engine = busy_gpu(monkeypatch, model), engine_of(a=model)
    found = run(engine, lambda: story(engine, job))
    assert found[-1].ids == wanted.tokens[0].tolist()
    assert [frame.done for frame in found] == [False] * (len(found) - 1) + [True]
    assert len(found) == (6 if frames else 1)
    between = [event for i in range(1, 6) for event in (f"launch {i + 1}", f"read {i}")]
    assert events == ["launch 1", *between, "read 6"]
    assert (engine.counts.sequences, engine.counts.turns, engine.running) == (1, 6, 0)


def test_where_the_network_draws_the_end_each_turn_depends_on_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions after a drawn end are not evaluated."""
    model = tiny_model(mask="infinite-uniform-8-1.0", **WHOLE)
    jobs = [replace(MANY, ids=[0, *HOLES[1:]], seed=seed) for seed in range(20)]
    wanted = [alone(model, job) for job in jobs]
    busy_gpu(monkeypatch, model)
    engine = engine_of(a=model)

    async def work() -> list[Frame]:
        return await asyncio.gather(*(last(engine, job) for job in jobs))

    found = run(engine, work)
    assert [frame.ids for frame in found] == [one.tokens[0].tolist() for one in wanted]
    assert [frame.evaluations for frame in found] == [int(one.evaluations[0]) for one in wanted]
    assert len({frame.evaluations for frame in found}) > 2


def test_results_that_cannot_be_read_fail_their_texts_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    busy_gpu(monkeypatch, model)
    engine = engine_of(a=model)

    def unreadable(_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    async def work() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Late, "wait", unreadable)
            with pytest.raises(Failed):
                await last(engine, Job("a", HOLES, steps=1))
            with pytest.raises(Failed):
                await last(engine, replace(MANY, frames=True))
            while engine.running:
                await asyncio.sleep(0.001)
        assert (await last(engine, Job("a", HOLES, steps=1))).done

    run(engine, work)
    counts = engine.counts
    assert (counts.failed, counts.dropped, counts.sequences, engine.running) == (1, 1, 1, 0)
    assert counts.turns < 6  # what failed is not computed to its end
    assert "an illegal memory access" in caplog.text


@pytest.mark.parametrize("where", ["ready", "wait", "launch"])
def test_an_error_of_the_gpu_ends_the_engine(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Nothing works after it: the service ends with an error, and whoever watches it starts another."""
    model = tiny_model()
    busy_gpu(monkeypatch, model)
    engine = engine_of(a=model)

    def fail(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if where == "launch":
        model.trunk_at = fail  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(Late, where, property(fail) if where == "ready" else fail)

    async def work() -> None:
        with pytest.raises((Failed, Stopped)):
            await last(engine, MANY)
        while engine.alive:
            await asyncio.sleep(0.001)

    run(engine, work)
    assert engine.broken


def test_a_closed_event_loop_concerns_no_other() -> None:
    """Its jobs are dropped; those of another loop are heard."""
    heard: list[Any] = []
    gone = asyncio.new_event_loop()
    gone.close()

    def ticket(loop: asyncio.AbstractEventLoop) -> Any:
        return Ticket(Job("one", HOLES), Sampling(), loop, heard.append, 0.0)

    async def work() -> list[Any]:
        mine, others = ticket(asyncio.get_running_loop()), [ticket(gone), ticket(gone)]
        said = [(others[0], Stopped("a")), (mine, Stopped("b")), (others[1], Stopped("c"))]
        await asyncio.to_thread(tell, said)
        await asyncio.sleep(0)
        return [mine, *others]

    tickets = asyncio.run(work())
    assert [ticket.dropped for ticket in tickets] == [False, True, True]
    assert [str(one) for one in heard] == ["b"]


def test_draws_and_noise_have_seeds_of_their_own() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    base = Job("a", HOLES, seed=1, steps=2)

    def key(seed: int) -> torch.Tensor:
        return model.sample_keys(1, seed)

    def by_keys(noise: Any) -> list[int]:
        return alone(model, base, noise_keys=noise).tokens[0].tolist()

    jobs = [
        Job("a", HOLES, seed=1, steps=2, noise_seed=7),
        Job("a", HOLES, seed=1, steps=2, noise_between=(7, 9, 0.4)),
        Job("a", HOLES, seed=1, steps=2, noise_between=(7, 9, 0.0)),
        base,
        Job("a", HOLES, seed=1, steps=2, draws_seed=7),
        Job("a", HOLES, seed=7, steps=2, noise_seed=1, draws_seed=1),
    ]
    engine = engine_of(a=model)

    async def work() -> list[Frame]:
        return await asyncio.gather(*(last(engine, job) for job in jobs))

    found = run(engine, work)
    assert found[0].ids == by_keys(key(7))
    assert found[1].ids == by_keys(NoisePath.at(key(7), key(9), 0.4))
    assert found[2].ids == found[0].ids
    assert found[3].ids == by_keys(None)
    assert found[4].revealed_at == found[3].revealed_at != found[5].revealed_at  # the order is the seed's


def test_a_full_row_comes_back_without_any_evaluation() -> None:
    engine = engine_of(a=tiny_model())
    frame = run(engine, lambda: last(engine, Job("a", [0, 1, 2])))
    assert (frame.ids, frame.evaluations, frame.step, frame.done) == ([0, 1, 2], 0, 0, True)


class Gate:
    """A model that waits before each evaluation until it is let go, and remembers how many it was asked for."""

    def __init__(self, model: MaskedDiffusionLM) -> None:
        self.asked, self.go, self.sizes = threading.Semaphore(0), threading.Semaphore(0), list[int]()
        run_at = model.trunk_at

        def trunk_at(state: Any, rows: Any) -> torch.Tensor:
            self.sizes.append(len(state.tokens))
            self.asked.release()
            assert self.go.acquire(timeout=60)
            return run_at(state, rows)

        model.trunk_at = trunk_at  # type: ignore[method-assign]

    async def reached(self) -> None:
        """Until an evaluation waits."""
        assert await asyncio.to_thread(self.asked.acquire, timeout=60)

    def open(self) -> None:
        self.go.release(1000)


MANY = Job("a", HOLES, steps=1000, seed=2)  # six evaluations


def test_a_new_request_joins_at_the_next_turn_and_one_that_hangs_up_leaves() -> None:
    model = tiny_model()
    gate, engine = Gate(model), engine_of(a=model)

    async def hang_up() -> None:
        async with aclosing(engine.run(MANY)) as frames:
            async for _ in frames:
                pass

    async def work() -> None:
        first = asyncio.create_task(last(engine, MANY))
        await gate.reached()
        leaving = asyncio.create_task(hang_up())
        while not engine.waiting:
            await asyncio.sleep(0)
        gate.go.release()
        await gate.reached()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        gate.open()
        assert (await first).ids == alone(tiny_model(), MANY).tokens[0].tolist()

    run(engine, work)
    assert gate.sizes == [1, 2, 1, 1, 1, 1]
    assert (engine.counts.sequences, engine.counts.dropped, engine.running, engine.waiting) == (1, 1, 0, 0)


def test_groups_have_turns_as_they_have_sequences() -> None:
    """Five of one length and one of another: of each six turns the one has one."""
    model = tiny_model(length=40)
    gate, engine = Gate(model), engine_of(a=model)

    async def work() -> None:
        first = asyncio.create_task(last(engine, Job("a", [None] * 3, steps=1)))
        await gate.reached()
        jobs = [Job("a", [None] * 40, steps=1000, seed=seed) for seed in range(5)] + [Job("a", [None] * 6, steps=1000)]
        rest = [asyncio.create_task(last(engine, job)) for job in jobs]
        while engine.waiting < 6:
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(first, *rest)

    run(engine, work)
    assert gate.sizes[1:31].count(1) == 5


def test_more_than_may_wait_are_told_to_come_again() -> None:
    model = tiny_model()
    gate, engine = Gate(model), engine_of(Settings(queue=3, batch=2), a=model)

    async def work() -> None:
        three = [asyncio.create_task(last(engine, Job("a", HOLES, seed=seed, steps=1))) for seed in range(3)]
        await gate.reached()
        with pytest.raises(Busy, match="3 texts are running or waiting, of 3 at most") as told:
            await last(engine, Job("a", HOLES))
        assert told.value.after >= 1
        gate.open()
        assert [(await one).done for one in three] == [True] * 3
        assert (await last(engine, Job("a", HOLES))).done

    run(engine, work)
    assert max(gate.sizes) <= 2


def test_the_last_frames_alone_are_the_same() -> None:
    """Of jobs that take different numbers of steps, of one that wants all its frames, and of none."""
    jobs = [Job("a", HOLES, steps=1 + i % 4, seed=i, frames=i == 2) for i in range(8)]
    engine = engine_of(a=tiny_model())

    async def work() -> None:
        found = await engine.finish(jobs)
        for frame, job in zip(found, jobs, strict=True):
            alone = await last(engine, job)
            assert frame.done
            assert (frame.step, frame.ids, frame.revealed_at) == (alone.step, alone.ids, alone.revealed_at)
        assert await engine.finish([]) == []
        with pytest.raises(UserError, match="unknown model 'b'"):
            await engine.finish([*jobs, Job("b", HOLES)])

    run(engine, work)


@pytest.mark.parametrize("last", [last, end])
def test_a_request_that_takes_too_long_is_dropped(last: Callable[[Engine, Job], Awaitable[Frame]]) -> None:
    model = tiny_model()
    gate, engine = Gate(model), engine_of(Settings(seconds=0.2), a=model)

    async def work() -> None:
        with pytest.raises(TooLong, match=r"longer than 0\.2 seconds"):
            await last(engine, MANY)
        gate.open()
        while engine.running:
            await asyncio.sleep(0.001)

    run(engine, work)
    assert len(gate.sizes) == 1


def test_what_fails_concerns_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    model, broken = tiny_model(), tiny_model()

    def fail(*_: Any) -> None:
        raise RuntimeError("it broke")

    broken.trunk_at = fail  # type: ignore[method-assign, assignment]
    engine = engine_of(a=model, b=broken)

    async def work() -> None:
        good, bad = await asyncio.gather(
            last(engine, Job("a", HOLES)), last(engine, Job("b", HOLES)), return_exceptions=True
        )
        assert isinstance(good, Frame)
        assert isinstance(bad, Failed)
        assert "it broke" not in str(bad)
        assert engine.running == 0
        assert (await last(engine, Job("a", HOLES))).done

    run(engine, work)
    assert "RuntimeError: it broke" in caplog.text


def test_a_fault_while_someone_leaves_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    gate, engine = Gate(model), engine_of(a=model)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async def work() -> None:
        both = [asyncio.create_task(last(engine, MANY)) for _ in range(2)]
        while engine.running != 2:
            await asyncio.sleep(0)
            if engine.running == 1 and engine.waiting:
                gate.go.release()
        both[0].cancel()
        await asyncio.wait(both[:1])
        with monkeypatch.context() as patched:
            patched.setattr(Batch, "keep", full)
            gate.open()
            with pytest.raises(Stopped, match="out of memory"):
                await both[1]
        assert engine.alive
        assert engine.running == 0
        assert (await last(engine, Job("a", HOLES))).done

    run(engine, work)
    assert not engine.broken


def test_an_engine_that_ends_by_a_fault_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(a=tiny_model())

    def fail() -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(engine, "_take_up", fail)

    async def work() -> None:
        with pytest.raises(Stopped, match="stopped before"):
            await last(engine, MANY)

    run(engine, work)
    assert engine.broken
    assert "it broke" in caplog.text


@pytest.mark.parametrize("grace", [60.0, 0.0])
def test_at_the_end_running_work_is_finished_or_told_and_none_is_taken(grace: float) -> None:
    model = tiny_model()
    gate, engine = Gate(model), engine_of(a=model)

    async def work() -> None:
        engine.start()
        running = asyncio.create_task(last(engine, MANY))
        await gate.reached()
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, grace))
        while engine.alive:
            await asyncio.sleep(0)
        with pytest.raises(Stopped, match="is stopping"):
            await last(engine, Job("a", HOLES))
        if grace:
            gate.open()
            assert (await running).done
        else:  # told while the network still runs
            with pytest.raises(Stopped, match="stopped before"):
                await running
            gate.open()
        await stopping

    asyncio.run(asyncio.wait_for(work(), 60))


def test_who_was_told_of_the_end_hears_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a frame of the evaluation that was running, nor one whose results were still to be read."""
    model = tiny_model()
    gate, engine = Gate(model), engine_of(Settings(batch=2), a=model)
    busy_gpu(monkeypatch, model)

    async def work() -> list[list[Any]]:
        engine.start()
        heard: list[list[Any]] = [[], [], []]
        jobs = [replace(MANY, frames=True), Job("a", HOLES, steps=1), MANY]  # the second ends in the first turn
        loop = asyncio.get_running_loop()
        engine._submit([Ticket(job, engine.check(job), loop, heard[i].append, 0.0) for i, job in enumerate(jobs)])
        await gate.reached()
        gate.go.release()
        await gate.reached()
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 0.0))
        while not all(heard):
            await asyncio.sleep(0)
        gate.open()
        await stopping
        await asyncio.sleep(0)
        return heard

    heard = asyncio.run(asyncio.wait_for(work(), 60))
    assert [[type(one) for one in said] for said in heard] == [[Stopped]] * 3
    assert not engine._open_tickets


def test_an_engine_remembers_nobody_who_was_answered_or_left() -> None:
    engine = engine_of(a=tiny_model())

    async def work() -> None:
        await asyncio.gather(*(last(engine, Job("a", HOLES, seed=seed)) for seed in range(4)))
        leaving = asyncio.create_task(last(engine, MANY))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert not engine._open_tickets

    run(engine, work)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job("c", HOLES), "unknown model 'c'; known: a"),
        (Job("a", HOLES, steps=0), "steps = 0: must be"),
        (Job("a", HOLES, steps=1001), "steps = 1001: must be a whole number from 1 to 1,000"),
        (Job("a", HOLES, seed=1 << 64), "seed = "),
        (Job("a", HOLES, noise="no"), "unknown noise policy 'no'"),  # type: ignore[arg-type]
        (Job("a", HOLES, temperature=-1.0), "temperature = "),
        (Job("a", HOLES, top_p=0.0), "top_p = "),
        (Job("a", HOLES, noise_between=(1, 2, 1.5)), "noise_between = 1.5"),
        (Job("a", [None] * 7), "the row has 7 tokens, the model takes 1 to 6"),
        (Job("a", []), "the row has 0 tokens"),
        (Job("a", [5, None]), "ids = 5: must be a whole number from 0 to 4"),
        (Job("a", [1, None, -1, 7]), "ids = -1: must be a whole number from 0 to 4"),
        (Job("a", [None, 1.0, 7]), r"ids = 1\.0: must be a whole number"),  # type: ignore[list-item]
        (Job("a", [True, None]), "ids = True: must be a whole number"),
    ],
)
def test_bad_jobs_get_a_sentence(job: Job, message: str) -> None:
    engine = engine_of(a=tiny_model())
    with pytest.raises(UserError, match=message):
        run(engine, lambda: last(engine, job))


def test_models_that_cannot_write_are_refused() -> None:
    with pytest.raises(UserError, match="model 'a' is autoregressive"):
        engine_of(a=tiny_model(causal=True))
    with pytest.raises(UserError, match="there is no model to serve"):
        engine_of()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_requests_share_a_batch_on_a_gpu() -> None:
    """Recorded evaluations and all, in float32: as alone but for rounding."""
    model = faster(tiny_model(mask="infinite-uniform-8-1.0").cuda(), dtype=torch.float32, compile=False)
    jobs = varied("a", 60)
    _, frames, wanted = together_and_alone(model, jobs)
    pairs = [(a, b) for f, w in zip(frames, wanted, strict=True) for a, b in zip(f.ids, w.tokens[0], strict=True)]
    assert sum(a == int(b) for a, b in pairs) >= 0.99 * len(pairs)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changes", [{}, {**WHOLE, "lengths": [0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.4]}])
def test_turns_are_launched_without_waiting_for_the_gpu(changes: dict[str, Any]) -> None:
    model = faster(tiny_model(mask="infinite-uniform-8-1.0", **changes).cuda(), dtype=torch.float32, compile=False)
    jobs = [Job("a", [0, *HOLES[1:]], steps=1000, seed=seed) for seed in range(8)]
    with torch.no_grad():
        batch = Batch(model, jobs[0].how(model))
        batch.join(tickets(model, jobs))
        batch.join(tickets(model, [replace(job, steps=500) for job in jobs]))
        try:
            for number in range(4):
                waits = "error" if number == 3 else "default"  # the first ones compile, and are captured
                torch.cuda.set_sync_debug_mode(waits)
                batch.evaluate()
                rows = batch.rows([1, 3])
                batch.keep([i for i, done in enumerate(batch.done()) if not done])
                batch.join(tickets(model, jobs))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert rows.wait().shape == (3, 2, 6)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    """Beside others in the same turn."""
    model = tiny_model()
    jobs = [
        Job("a", HOLES, seed=3, number=np.int32(1)),  # type: ignore[arg-type]
        Job("a", HOLES, seed=3, number=1, steps=4),
        Job("a", np.full(6, 1, dtype=np.int32).tolist(), steps=2),
        Job("a", list(np.full(6, 1, dtype=np.int32)), temperature=0.5),
    ]
    with torch.no_grad():
        batch = Batch(model, jobs[0].how(model))
        batch.join(tickets(model, jobs))
        batch.evaluate()
    assert batch.texts[0].keys == batch.texts[1].keys
    assert batch.canvas is not None
    assert batch.canvas.tokens.dtype == torch.int64
