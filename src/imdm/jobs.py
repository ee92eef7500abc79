"""Several runs of one recipe, its variants and seeds, one after another or some at a time."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from imdm.devices import processes
from imdm.errors import UserError
from imdm.files import write_json
from imdm.pipeline import Quiet, Reporter, Run
from imdm.recipes import Recipe, variants


@dataclass(frozen=True)
class Job:
    """One variant, one seed; stages: those to run with all they need."""

    name: str
    recipe: Recipe
    out: Path
    results: Path
    stages: tuple[str, ...]

    def run(self, reporter: Reporter) -> None:
        self._run(reporter).run(list(self.stages))

    def check(self) -> None:
        self._run(Quiet()).check(list(self.stages))

    def prepare(self, reporter: Reporter) -> None:
        """Text is made into rows; then what could not be checked without them is."""
        run = self._run(reporter)
        run.prepare()
        run.check(list(self.stages))

    def _run(self, reporter: Reporter) -> Run:
        return Run(self.recipe, self.out, reporter, self.results, alone=False)


def plan(recipe: Recipe, out: Path, seeds: int, quick: bool) -> list[Job]:
    """Every variant on every seed, from the recipe's own on; the first seed of all variants first."""
    if quick and recipe.quick is None:
        raise UserError(f"recipe {recipe.name!r} has no quick part; leave --quick out")
    stages = recipe.quick.stages if quick and recipe.quick else tuple(recipe.stages)
    wanted = recipe.quick.variants if quick and recipe.quick else ()
    chosen = {name: r for name, r in variants(recipe).items() if not wanted or name in wanted}
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
    """All that can be refused is refused before any work; finished stages are skipped. A run that fails is said to at
    once and does not stop the others."""
    state = processes()
    if workers > 1 and state.num_processes > 1:
        raise UserError(f"--workers {workers}: a run that is itself spread over processes (torchrun) has no workers")
    for job in jobs:
        job.check()
    for job in {job.out: job for job in jobs}.values():
        job.prepare(reporter)
        if state.is_main_process:
            write_json(job.out / "recipe.json", job.recipe.model_copy(update={"seed": recipe.seed}).resolved())
    if state.is_main_process:
        write_json(out / "recipe.json", recipe.resolved())
    if workers == 1 or len(jobs) == 1:
        for job in jobs:
            reporter.say(job.name)
            job.run(reporter)
        return
    failures: list[BaseException] = []
    threads, waiting, done = max(1, cores() // workers), list(jobs), 0
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[None], Job] = {}
        while waiting or running:
            while waiting and len(running) < workers:  # no more than can begin: what is queued could not be called back
                job = waiting.pop(0)
                running[pool.submit(_work, job, threads)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, failure, done = running.pop(future), future.exception(), done + 1
                if isinstance(failure, KeyboardInterrupt):
                    raise failure
                how = "finished" if failure is None else f"failed: {failure}"
                reporter.say(f"{job.name}: {how}; {done} of {len(jobs)}")
                failures += [failure] if failure is not None else []
    if failures:
        raise failures[0]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _work(job: Job, threads: int) -> None:
    """In a process of its own, which speaks in whole lines."""
    import torch
    import transformers

    from imdm.console import Terminal

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    job.run(Terminal(who=job.name))
