"""Several runs of one recipe, its variants and seeds, one after another or some at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import torch

from imdm.core.console import Terminal
from imdm.core.devices import processes, working_together
from imdm.core.errors import UserError, check_whole
from imdm.core.files import kept_if_refused, write_json
from imdm.core.memory import cores
from imdm.core.stopping import held_back, let_through
from imdm.experiments.loading import variants
from imdm.experiments.run import Reporter, Run
from imdm.experiments.schema import Recipe

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Job:
    """One variant, one seed; stages: those to run with all they need."""

    name: str
    recipe: Recipe
    out: Path
    results: Path
    stages: tuple[str, ...]

    def opened(self, reporter: Reporter) -> Run:
        return Run(self.recipe, self.out, reporter, self.results, alone=False)

    def run(self, reporter: Reporter) -> None:
        self.opened(reporter).run(list(self.stages))


def plan(recipe: Recipe, out: Path, seeds: int, quick: bool, only: Sequence[str] = ()) -> list[Job]:
    """Every variant on every seed, from the recipe's own on; the first seed of all variants first. only: these stages
    and those they build on; all unless given."""
    if quick and recipe.quick is None:
        raise UserError(f"recipe {recipe.name!r} has no quick part; run it whole")
    check_whole("seeds", seeds, 1, MOST_SEEDS)
    stages = tuple(only) or (recipe.quick.stages if quick and recipe.quick else tuple(recipe.stages))
    names = recipe.quick.variants if quick and recipe.quick else ()
    chosen = {name: r for name, r in variants(recipe).items() if not names or name in names}
    return [
        Job(
            f"{name}, seed {seed}" if name else f"seed {seed}",
            member.model_copy(update={"seed": seed}),
            out / name if name else out,
            out / "results.jsonl",
            stages,
        )
        for seed in range(recipe.seed, recipe.seed + seeds)
        for name, member in chosen.items()
    ]


def workers_for(recipe: Recipe, jobs: int) -> int:
    """How many runs at a time: one a core where a run uses one thread, else one."""
    state = processes()
    if recipe.threads != 1 or state.num_processes > 1 or state.device.type != "cpu":
        return 1
    return min(jobs, cores())


def run_jobs(recipe: Recipe, jobs: list[Job], out: Path, workers: int, reporter: Reporter) -> None:
    """Run these jobs. Everything is checked before any work; finished stages are skipped. A failed run is reported at
    once and does not stop the others."""
    state = processes()
    if workers > 1 and state.num_processes > 1:
        raise UserError(f"workers = {workers}: a run that is itself spread over processes (torchrun) has no workers")
    runs = {job.name: job.opened(reporter) for job in jobs}
    with working_together(out), ExitStack() as stack:
        for job in jobs:
            runs[job.name].check(list(job.stages))
            runs[job.name].inputs.forget()
        folders = {job.out: job for job in jobs}
        for place in {out, *folders} if state.is_main_process else ():
            stack.enter_context(kept_if_refused(place / "recipe.json"))
        for place, job in folders.items():
            runs[job.name].prepare(list(job.stages))
            runs[job.name].inputs.forget()
            if state.is_main_process:
                own_recipe = runs[job.name].recipe.model_copy(update={"seed": recipe.seed})
                write_json(place / "recipe.json", own_recipe.resolved())
        if state.is_main_process and out not in folders:
            write_json(out / "recipe.json", recipe.resolved())
        if workers > 1 and len(jobs) > 1:
            runs.clear()  # each worker has its own
            _share(jobs, workers, reporter)
            return
        for job in jobs:
            reporter.say(job.name)
            run = runs.pop(job.name)
            run.prepare(list(job.stages))  # the text of other seeds is there
            run.make(list(job.stages))


class Running(NamedTuple):
    """A job in a process of its own, which tells at its end what went wrong: an exception, or None."""

    job: Job
    process: SpawnProcess
    end: Connection

    @classmethod
    def begun(cls, job: Job, threads: int) -> Running:
        context = multiprocessing.get_context("spawn")
        end, tell = context.Pipe(duplex=False)
        process = context.Process(target=_run_in_worker, args=(job, threads, tell))
        process.start()
        tell.close()
        return cls(job, process, end)

    def failure(self) -> BaseException | None:
        """Why the job failed: what its process sent, or that it was killed; None if it did not. Waits for its end."""
        try:
            failure: BaseException | None = self.end.recv()
        except EOFError:
            self.process.join()
            return RuntimeError(f"{self.job.name}: its process ended with exit code {self.process.exitcode}")
        self.process.join()
        return failure


def _share(jobs: list[Job], workers: int, reporter: Reporter) -> None:
    """Run each job in a process of its own, some at a time. When stopped, this process stops them and waits until they
    have saved their state."""
    failures: list[BaseException] = []
    threads, waiting, done = max(1, cores() // workers), list(jobs), 0
    running: list[Running] = []
    if os.name == "posix":
        resource_tracker.ensure_running()  # with the first process it would start, and unblock signals
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                with held_back():
                    running.append(Running.begun(waiting.pop(0), threads))
            ready = wait([one.end for one in running])
            for ended in [one for one in running if one.end in ready]:
                failure, done = ended.failure(), done + 1
                running.remove(ended)
                if isinstance(failure, KeyboardInterrupt | SystemExit):
                    raise failure
                how = "finished" if failure is None else f"failed: {failure}"
                reporter.say(f"{ended.job.name}: {how}; {done} of {len(jobs)}")
                failures += [failure] if failure is not None else []
    except BaseException:
        with held_back():  # until all have ended
            for one in running:
                one.process.terminate()
            for one in running:
                one.failure()
        raise
    if failures:
        raise failures[0]


def _run_in_worker(job: Job, threads: int, tell: Connection) -> None:
    """Run a job in a process of its own, whose output is whole lines, and send its failure, or None, by `tell`."""
    import transformers  # takes seconds

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    failure: BaseException | None = None
    try:
        with let_through():
            job.run(Terminal(who=job.name))
    except BaseException as error:
        failure = _picklable(error)
    tell.send(failure)


def _picklable(error: BaseException) -> BaseException:
    """An exception that another process can read. Its traceback, which stays behind, is in a note."""
    if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
        error.add_note(traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.add_note(traceback.format_exc())
        return other
    return error
