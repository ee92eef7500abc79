"""Running a recipe: stage after stage; a stage is skipped if its output exists and was made from the same inputs.

OUT/recipe.json                 the resolved recipe
OUT/data/train, valid           prepared text, where the recipe's data is text
OUT/results.jsonl               result rows of all seeds
OUT/seed-0/teacher/model/ …     one folder a seed, one folder a stage, `done.json` when it is finished
OUT/VARIANT/seed-0/ …           the same below a folder a variant, where the recipe has variants
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from imdm.core.config import digest, first_difference
from imdm.core.devices import processes, together, working_together
from imdm.core.errors import UserError, unknown
from imdm.core.files import check_once, check_writable, kept_if_refused, write_json, write_recorded
from imdm.data.coupling import Coupling
from imdm.experiments.checks import check_size, check_stage, check_state
from imdm.experiments.inputs import Inputs
from imdm.experiments.schema import AdoptStage, EvaluateStage, Recipe, TrainStage
from imdm.experiments.stages import is_measured_in, make_stage
from imdm.experiments.status import DONE, as_made, read_done
from imdm.models.identity import fingerprint


class Bar(Protocol):
    """A progress bar: a count, and a text to show beside it."""

    def __call__(self, done: int, note: str = "") -> None: ...


class Reporter(Protocol):
    """Receives the messages and progress of a run."""

    def say(self, text: str) -> None: ...

    def bar(self, title: str, total: int) -> AbstractContextManager[Bar]: ...


class Quiet:
    """A reporter that ignores messages and progress."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        yield lambda done, note="": None


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Run:
    """One recipe, one seed, one folder. results: the file for result rows, OUT/results.jsonl unless given; alone:
    whether this run writes OUT/recipe.json."""

    recipe: Recipe
    out: Path
    reporter: Reporter = field(default_factory=Quiet)
    results: Path | None = None
    alone: bool = True
    inputs: Inputs = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = Inputs(self.recipe, self.folder, self.recipe.data)

    @property
    def folder(self) -> Path:
        return self.out / f"seed-{self.recipe.seed}"

    @property
    def results_file(self) -> Path:
        return self.results or self.out / "results.jsonl"

    def all(self) -> None:
        """Run every stage in order."""
        self.run(list(self.recipe.stages))

    def run(self, names: list[str]) -> None:
        """Run the named stages, each after those it builds on. Everything is checked before any work, in a folder that
        is locked."""
        first = self.alone and processes().is_main_process
        with working_together(self.out) if self.alone else nullcontext():
            self.check(names)
            self.prepare(names)
            with kept_if_refused(self.out / "recipe.json") if first else nullcontext():
                if first:
                    write_json(self.out / "recipe.json", self.recipe.resolved())
                self.make(names)

    def check(self, names: list[str]) -> None:
        """Refuse wrong settings and inputs before any work."""
        with together():
            if (recipe := as_made(self.recipe, self.folder)) != self.recipe:
                self.recipe, self.inputs = recipe, Inputs(recipe, self.folder, self.inputs.data)
            self.recipe.data.check()
            if processes().is_main_process and not self.alone:  # else it was checked when it was locked
                check_writable(self.out)
            self._check(self._wanted(names))

    def prepare(self, names: list[str]) -> None:
        """Tokenise text and pack it into OUT/data, once for all seeds, and check what depends on its rows."""
        if self.inputs.data.is_ready:
            return
        state = processes()
        if state.is_main_process:
            with self.reporter.bar("data: tokenise and pack", 0) as bar:
                self.recipe.data.ready(self.out / "data", bar)
        state.wait_for_everyone()
        self.inputs = Inputs(self.recipe, self.folder, self.recipe.data.ready(self.out / "data"))
        with together():
            self._check(self._wanted(names))

    def make(self, names: list[str]) -> None:
        """Make these stages, checked and with their data prepared; those that are finished are skipped."""
        with _threads(self.recipe.threads):
            for name in self._wanted(names):
                if self._is_done(name):
                    self.reporter.say(f"{name}: already there")
                else:
                    self._make(name)

    def _wanted(self, names: list[str]) -> list[str]:
        closure = self._closure(names)
        return [name for name in self.recipe.stages if name in closure]

    def _closure(self, names: list[str]) -> set[str]:
        """The stages named and all they build on."""
        closure: set[str] = set()
        for name in names:
            if name not in self.recipe.stages:
                raise unknown("stage", name, self.recipe.stages)
            needed = [n for n in self.recipe.stages[name].inputs() if n in self.recipe.stages]
            closure |= {name} | self._closure(needed)
        return closure

    def _check(self, names: list[str]) -> None:
        """Refuse bad sizes, missing data or folders, settings this machine cannot run, other runs in the same place."""
        check_size(self.inputs)
        finished = {name: self._is_made(name) for name in names}
        for name in names:
            check_stage(self.inputs, name, finished[name])
        for name in names:
            if not finished[name]:
                check_state(self.inputs, name)
        for name in names if self.inputs.data.is_ready else ():
            above = [needed for needed in self.recipe.stages[name].inputs() if needed in self.recipe.stages]
            if all((self.folder / needed / DONE).exists() for needed in above):
                self._is_done(name)

    def _is_made(self, name: str) -> bool:
        """Whether nothing has to be computed for a stage, if it is the same as then (`_is_done`)."""
        stage = self.recipe.stages[name]
        if not (self.folder / name / DONE).exists():
            return False
        return is_measured_in(self, name, stage) if isinstance(stage, EvaluateStage) else True

    def _is_done(self, name: str) -> bool:
        """Whether a stage's output exists; refused if it was made from other settings or inputs."""
        if not (self.folder / name / DONE).exists():
            return False
        done = read_done(self.folder / name)
        hashes = self._input_hashes(name)
        if done["inputs"] != self._hash(name, hashes):
            other = first_difference(done["settings"], self._settings(name)) or "settings or inputs"
            again = [needed for needed, output in done["made"].items() if output != hashes.get(needed, output)]
            if again:
                other = f"inputs: {', '.join(map(repr, again))} was made again since"
            raise UserError(
                f"stage {name!r} in {self.folder / name} was made with other {other}; "
                "choose another folder for the run, or delete that one to make it again"
            )
        stage = self.recipe.stages[name]
        if isinstance(stage, EvaluateStage):
            return is_measured_in(self, name, stage)
        self._check_output(name, done["output"])
        return True

    def _check_output(self, name: str, output: str) -> None:
        """Refuse the output of a finished stage if it has changed; checked once a process."""
        folder, model = self.folder / name, isinstance(self.recipe.stages[name], AdoptStage | TrainStage)

        def check() -> None:
            try:
                current = fingerprint(self.inputs.model(name)) if model else Coupling(folder).fingerprint
            except UserError as error:
                raise UserError(f"{error}; delete {folder} to make it again") from None
            if current != output:
                raise UserError(
                    f"stage {name!r}: its output in {folder} is damaged, or was changed since; delete that "
                    "folder to make it again"
                )

        files = sorted((folder / "model").glob("*.safetensors")) if model else sorted(folder.glob("pairs-*"))
        check_once([*files, *(folder / "model").glob("config.json")], f"stage {output}", check)

    def _make(self, name: str) -> None:
        """Run a stage, and write inputs and seconds (since the last stop, if it was stopped) into `done.json`."""
        hashes, started = self._input_hashes(name), time.perf_counter()
        inputs = self._hash(name, hashes)
        output = make_stage(self, name)
        state = processes()
        if state.is_main_process:
            took = round(time.perf_counter() - started, 1)
            done = {
                "inputs": inputs,
                "output": output,
                "settings": self._settings(name),
                "made": hashes,
                "seconds": took,
            }
            write_recorded(self.folder / name / DONE, done)
        state.wait_for_everyone()

    def _input_hashes(self, name: str) -> dict[str, str]:
        """Hashes of the stages that a stage builds on, by name; for an adopted model, of its files."""
        stage = self.recipe.stages[name]
        if isinstance(stage, AdoptStage):
            return {f"files of {stage.source}": self.inputs.source_hash(stage.source)}
        return {needed: self.inputs.hash(needed) for needed in stage.inputs()}

    def _hash(self, name: str, hashes: Mapping[str, str]) -> str:
        settings = self._settings(name)
        outputs = [hashes[needed] for needed in self.recipe.stages[name].inputs() or hashes]
        return digest([settings["stage"], outputs, {k: v for k, v in settings.items() if k != "stage"}])

    def _settings(self, name: str) -> dict[str, Any]:
        """What a stage depends on beside the outputs of other stages."""
        shared = {k: v for k, v in self.recipe.hashed().items() if k in ("seed", "data", "model", "experiment")}
        return {"stage": self.recipe.stages[name].hashed(), **shared}
