"""Running a recipe: stage after stage, each skipped when its output is there and was made from the same inputs.

OUT/recipe.json                 the resolved recipe
OUT/data/train, valid           prepared text, where the recipe's data is text
OUT/results.jsonl               result rows of all seeds
OUT/seed-0/teacher/model/ …     one folder a seed, one folder a stage, `done.json` when it is finished
OUT/VARIANT/seed-0/ …           the same below a folder a variant, where the recipe has variants
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch

from imdm.config import digest
from imdm.data import CoupleConfig, Coupling, Data, Source, check_fits, couple
from imdm.data.tokenizers import check_same, copy_tokenizer
from imdm.devices import processes
from imdm.errors import UserError, unknown
from imdm.evaluating import first_of, is_measured, run_evaluation
from imdm.evaluation import ENUMERATED, Subject, measure
from imdm.evaluation.base import COSTS
from imdm.files import check_once, check_writable, kept_if_refused, working_in, write_json, write_recorded
from imdm.masks import Mask
from imdm.models import MaskedDiffusionLM, check_precision, fingerprint, load_model, with_mask
from imdm.objectives import ReDi
from imdm.randomness import Purpose, as_key, fold, seeded
from imdm.recipes import CoupleStage, EvaluateStage, Recipe, TrainStage
from imdm.room import check_room
from imdm.status import DONE, read_done
from imdm.training import Progress, Trainer


class Bar(Protocol):
    """A progress bar: how far, and what to say beside it."""

    def __call__(self, done: int, note: str = "") -> None: ...


class Reporter(Protocol):
    """Who is told what the pipeline does."""

    def say(self, text: str) -> None: ...

    def bar(self, title: str, total: int) -> AbstractContextManager[Bar]: ...


class Quiet:
    """Tells nobody."""

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


def _check_pairs(pairs: Coupling, stage: TrainStage, student: MaskedDiffusionLM, teacher: str) -> None:
    objective = stage.objective if isinstance(stage.objective, ReDi) else ReDi()
    pairs.check(student, teacher, objective.noise == "coupling", objective.policy)


def first_difference(before: Any, now: Any, place: str = "") -> str | None:
    """Where two settings differ first, in words: `training.steps (10, now 20)`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys((*before, *now)):
            inside = name if place in ("", "stage") else f"{place}.{name}"
            if name not in before or name not in now:
                return f"{inside} (a setting that {'is no more' if name in before else 'was not there then'})"
            if (found := first_difference(before[name], now[name], inside)) is not None:
                return found
        return None
    return None if before == now else f"{place} ({before!r}, now {now!r})"


@dataclass
class Run:
    """One recipe, one seed, one folder. results: where result rows go, OUT/results.jsonl unless given; alone: whether
    it is this run that says in OUT/recipe.json what the folder is."""

    recipe: Recipe
    out: Path
    reporter: Reporter = field(default_factory=Quiet)
    results: Path | None = None
    alone: bool = True
    data: Data = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.recipe.data

    @property
    def folder(self) -> Path:
        return self.out / f"seed-{self.recipe.seed}"

    def all(self) -> None:
        """Every stage in order."""
        self.run(list(self.recipe.stages))

    def run(self, names: list[str]) -> None:
        """The named stages, each after those it builds on. All that can be refused is refused before any work."""
        self.check(names)
        with working_in(self.out) if self.alone and processes().is_main_process else nullcontext():
            self.prepare()
            wanted = self._wanted(names)
            self._check(wanted)
            first = self.alone and processes().is_main_process
            whole = kept_if_refused(self.out / "recipe.json") if first else nullcontext()
            with whole, _threads(self.recipe.threads):
                if first:
                    write_json(self.out / "recipe.json", self.recipe.resolved())
                for name in wanted:
                    if self._is_done(name):
                        self.reporter.say(f"{name}: already there")
                    else:
                        self._make(name)

    def check(self, names: list[str]) -> None:
        """Refuse what can be refused before any work."""
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out}, where the run is to be, is a file; give a folder")
        self.data.check()
        if processes().is_main_process:
            check_writable(self.out)
        if self.data.is_ready:
            self._check(self._wanted(names))
            return
        self._check_size(self.recipe.data.train_bpe or 1000, 3, self.recipe.data.length)  # type: ignore[union-attr]
        for name in self._wanted(names):
            self._check_stage(name, None)

    def prepare(self) -> None:
        """Text is tokenised and packed into OUT/data, once for all seeds."""
        if self.data.is_ready:
            return
        state = processes()
        if state.is_main_process:
            with self.reporter.bar("data: tokenise and pack", 0) as bar:
                self.recipe.data.ready(self.out / "data", bar)
        state.wait_for_everyone()
        self.data = self.recipe.data.ready(self.out / "data")

    def _wanted(self, names: list[str]) -> list[str]:
        closure = self._closure(names)
        return [name for name in self.recipe.stages if name in closure]

    def _closure(self, names: list[str]) -> set[str]:
        """The stages named and all they build on."""
        found: set[str] = set()
        for name in names:
            if name not in self.recipe.stages:
                raise unknown("stage", name, self.recipe.stages)
            needed = [n for n in self.recipe.stages[name].inputs() if n in self.recipe.stages]
            found |= {name} | self._closure(needed)
        return found

    def _check(self, names: list[str]) -> None:
        """Bad sizes, missing data or folders, settings this machine cannot run, other runs in the same place."""
        recipe = self.recipe
        source = self.data.source(recipe.seed)
        self._check_size(*self.data.vocabulary(), source.length)
        for name in names:
            self._check_stage(name, source)
        for name in names:
            above = [needed for needed in recipe.stages[name].inputs() if needed in recipe.stages]
            if all((self.folder / needed / DONE).exists() for needed in above):
                self._is_done(name)

    def _check_size(self, vocab_size: int, mask_token_id: int, length: int) -> None:
        """Refuse a model that is shorter than the data, or that this machine could not hold."""
        config = self.recipe.model.build(vocab_size, mask_token_id, length)
        if length > config.length:
            raise UserError(f"the data has {length} tokens a row, model.length = {config.length} is shorter")
        if any(isinstance(stage, TrainStage) and stage.start is None for stage in self.recipe.stages.values()):
            check_room("the model's parameters", config.parameters, 4)

    def _check_stage(self, name: str, source: Source | None) -> None:
        recipe, stage, state = self.recipe, self.recipe.stages[name], processes()
        for needed in stage.inputs():
            if needed in recipe.stages:
                continue
            if not Path(needed).is_dir():
                known = ", ".join(recipe.stages)
                raise UserError(f"stage {name!r} builds on {needed!r}: neither a stage ({known}) nor a folder")
            if source is not None and not (Path(needed) / "manifest.json").exists():
                check_fits(source, load_model(needed))
                check_same(Path(needed), self.data.tokenizer_folder())
        metrics: tuple[str, ...] = ()
        if isinstance(stage, TrainStage):
            stage.training.check(state.num_processes, state.device)
            if stage.data is None and len(stage.objective.needs) > 1:
                raise UserError(
                    f"stage {name!r}: objective {stage.objective.kind!r} trains on a coupling; "
                    "set 'data' to a couple stage or to a folder of pairs"
                )
            stage.objective.check(self._mask(name).noisy or self._mixture(name))
            self._check_couple(name, stage)
            outside = [needed for needed in stage.inputs() if needed not in recipe.stages]
            if stage.start in outside and stage.data in outside:  # else the pairs' teacher is still to be made
                start = load_model(str(stage.start))
                student = with_mask(start, stage.mask, mixture=stage.mixture)
                _check_pairs(Coupling(str(stage.data)), stage, student, fingerprint(start))
            metrics = stage.watch.metrics
        else:
            check_precision(stage.precision, state.device, f"stages.{name}.precision")
        if isinstance(stage, EvaluateStage):
            metrics = stage.metrics
            length = source.length if source is not None else 1
            check_room(f"stages.{name}.samples", stage.samples, 40 * length + 24 * max(stage.steps))
            self._check_costs(name, stage)
            self._check_methods(name, stage)
        elif isinstance(stage, CoupleStage):
            check_room(f"stages.{name}.pairs", stage.pairs, 8 * (source.length if source is not None else 1) + 12)
        elif source is not None:
            if stage.watch.metrics:
                each = 40 * source.length + 24 * stage.watch.steps
                check_room(f"stages.{name}.watch.samples", stage.watch.samples, each)
            batch = stage.training.micro_batch or stage.training.batch // state.num_processes
            check_room(f"stages.{name}.training.batch", batch, 200 * source.length, state.device)
        endless = [metric for metric in metrics if metric in ("kl", "kl_half")]
        if endless and isinstance(stage, EvaluateStage) and stage.top_p < 1:
            raise UserError(
                f"stage {name!r}: metric {endless[0]!r} is infinite where top_p = {stage.top_p} leaves out text"
            )
        enumerated = [metric for metric in metrics if metric in ENUMERATED]
        if enumerated and self.data.language() is None:
            raise UserError(f"stage {name!r}: metric {enumerated[0]!r} needs an enumerated language as data")

    def _check_costs(self, name: str, stage: EvaluateStage) -> None:
        costs = [metric for metric in stage.metrics if metric in COSTS]
        for model in stage.models if costs else ():
            first = first_of(self.recipe, model)
            if self._mask(first).noisy or self._mixture(first):
                raise UserError(
                    f"stage {name!r}: metric {costs[0]!r} compares {model!r} with the model it goes back to, "
                    f"{first!r}, which must have a single mask"
                )

    def _check_methods(self, name: str, stage: EvaluateStage) -> None:
        """Refuse two models that no row could tell apart: one name, one mask, one seed."""
        every = [pair for other in self.recipe.evaluations().values() for pair in other.models.items()]
        others = [(model, method) for model, method in every if model in (*self.recipe.stages, *stage.models)]
        for (model, method), (other, same) in product(stage.models.items(), others):
            if model == other or method != same or self.recipe.seed_of(model) != self.recipe.seed_of(other):
                continue
            if (self._mask(model), self._mixture(model)) == (self._mask(other), self._mixture(other)):
                raise UserError(
                    f"stage {name!r}: {model!r} and {other!r} are both called {method!r}, with the same mask and seed; "
                    "result rows could not tell them apart: name their methods differently"
                )

    def _check_couple(self, name: str, stage: TrainStage) -> None:
        """Refuse pairs that a stage above will make for another student."""
        couple = self.recipe.stages.get(stage.data or "")
        if not isinstance(couple, CoupleStage):
            return
        if couple.teacher != stage.start:
            raise UserError(
                f"stage {name!r} starts from {stage.start!r}, but its pairs {stage.data!r} are made by "
                f"{couple.teacher!r}; make pairs with the model you start from"
            )
        objective = stage.objective if isinstance(stage.objective, ReDi) else ReDi()
        if objective.policy not in (None, couple.noise):
            raise UserError(
                f"stage {name!r} wants pairs made under noise policy {objective.policy!r}, but {stage.data!r} makes "
                f"them under {couple.noise!r}"
            )
        mask, start = stage.mask, self._mask(str(stage.start))
        if mask is not None and start.noisy and mask != start and objective.noise == "coupling":
            raise UserError(
                f"stage {name!r} has mask {mask.name}, but its pairs {stage.data!r} are made under {start.name}; "
                "they must agree"
            )

    def _mask(self, name: str) -> Mask:
        """The mask of a model that a stage makes, or a folder holds."""
        return self.recipe.mask_of(name) or load_model(first_of(self.recipe, name)).mask

    def _mixture(self, name: str) -> bool:
        stage = self.recipe.stages.get(name)
        if not isinstance(stage, TrainStage):
            return load_model(name).process.mixture
        before = self.recipe.model.mixture if stage.start is None else self._mixture(stage.start)
        return stage.mixture or before

    def _is_done(self, name: str) -> bool:
        """Whether a stage's output is there; refused when it was made from something else."""
        if not (self.folder / name / DONE).exists():
            return False
        done = self._done(name)
        made = self._made(name)
        if done["inputs"] != self._hash(name, made):
            other = first_difference(done["settings"], self._settings(name)) or "settings or inputs"
            again = [needed for needed, output in done["made"].items() if output != made.get(needed)]
            if again:
                other = f"inputs: {', '.join(map(repr, again))} was made again since"
            raise UserError(
                f"stage {name!r} in {self.folder / name} was made with other {other}; "
                "choose another folder for the run, or delete that one to make it again"
            )
        stage = self.recipe.stages[name]
        if isinstance(stage, EvaluateStage):
            return is_measured(self, name, stage)
        self._check_output(name, done["output"])
        return True

    def _done(self, name: str) -> dict[str, Any]:
        """What a finished stage says of itself."""
        return read_done(self.folder / name)

    def _check_output(self, name: str, output: str) -> None:
        """Refuse what a finished stage made if it is not that any more; looked at once a process."""
        folder, model = self.folder / name, isinstance(self.recipe.stages[name], TrainStage)

        def check() -> None:
            try:
                found = fingerprint(self.model(name)) if model else Coupling(folder).fingerprint
            except UserError as error:
                raise UserError(f"{error}; delete {folder} to make it again") from None
            if found != output:
                raise UserError(
                    f"stage {name!r}: what is in {folder} is not what it made: damaged, or changed since; delete that "
                    "folder to make it again"
                )

        files = sorted((folder / "model").glob("*.safetensors")) if model else sorted(folder.glob("pairs-*"))
        check_once([*files, *(folder / "model").glob("config.json")], f"stage {output}", check)

    @property
    def results_file(self) -> Path:
        return self.results or self.out / "results.jsonl"

    def _make(self, name: str) -> None:
        """Make it, and say in `done.json` from what, and in how many seconds (since the last stop, if it was)."""
        stage, made, started = self.recipe.stages[name], self._made(name), time.perf_counter()
        inputs = self._hash(name, made)
        if isinstance(stage, TrainStage):
            output = self._train(name, stage)
        elif isinstance(stage, CoupleStage):
            output = self._couple(name, stage)
        else:
            output = run_evaluation(self, name, stage)
        state = processes()
        if state.is_main_process:
            took = round(time.perf_counter() - started, 1)
            done = {"inputs": inputs, "output": output, "settings": self._settings(name), "made": made, "seconds": took}
            write_recorded(self.folder / name / DONE, done)
        state.wait_for_everyone()

    def _made(self, name: str) -> dict[str, str]:
        """What a stage builds on → the hash of it."""
        return {needed: self._output(needed) for needed in self.recipe.stages[name].inputs()}

    def _hash(self, name: str, made: Mapping[str, str]) -> str:
        settings = self._settings(name)
        outputs = [made[needed] for needed in self.recipe.stages[name].inputs()]
        return digest([settings["stage"], outputs, {k: v for k, v in settings.items() if k != "stage"}])

    def _settings(self, name: str) -> dict[str, Any]:
        """What a stage follows from beside the outputs of others."""
        shared = {k: v for k, v in self.recipe.hashed().items() if k in ("seed", "data", "model", "experiment")}
        return {"stage": self.recipe.stages[name].hashed(), **shared}

    def _output(self, name: str) -> str:
        """The hash of what a stage made, or of a model or coupling folder."""
        if name in self.recipe.stages:
            return self._done(name)["output"]
        if (Path(name) / "manifest.json").exists():
            return Coupling(name).fingerprint
        return fingerprint(load_model(name))

    def model(self, name: str) -> MaskedDiffusionLM:
        """The finished model of a stage, or of a folder."""
        return load_model(self.folder / name / "model" if name in self.recipe.stages else name)

    def _train(self, name: str, stage: TrainStage) -> str:
        recipe, seed = self.recipe, self.recipe.seed_of(name)
        if stage.data is None:
            source: Any = self.data.source(recipe.seed)
        else:
            source = Coupling(self.folder / stage.data if stage.data in recipe.stages else stage.data)
        if stage.start is None:
            with seeded(fold(as_key(seed), Purpose.INIT)):
                causal = stage.objective.causal
                model = MaskedDiffusionLM(recipe.model.build(*self.data.vocabulary(), source.length, causal=causal))
        else:
            model = self.model(stage.start)
        teacher = fingerprint(model)  # of the model as it was loaded: couplings name it
        start = model
        if stage.mask is not None and stage.mask != model.mask:
            model = with_mask(model, stage.mask, seed)
            start = model if start.mask.noisy else start  # who teaches must read the student's noise
        if stage.mixture and not model.config.mixture:
            model = with_mask(model, seed=seed, mixture=True)
        if isinstance(source, Coupling):
            _check_pairs(source, stage, model, teacher)
        with self.reporter.bar(f"{name}: {stage.objective.kind}", stage.training.steps) as bar:

            def progress(p: Progress) -> None:
                bar(p.step, f"loss {p.loss:.4f}  {p.tokens_per_second:,.0f} tok/s")

            trainer = Trainer(
                model,
                stage.objective,
                source,
                stage.training,
                self.folder / name,
                seed=seed,
                watch=self._watch(stage) if stage.watch.metrics else None,
                watch_every=stage.watch.every,
                recipe=recipe.resolved(),
                start=start,
                on_progress=progress,
                on_warning=lambda text: self.reporter.say(f"{name}: warning: {text}"),
            )
            folder = trainer.train()
        self._carry_tokenizer(stage, folder)
        return fingerprint(load_model(folder))

    def _carry_tokenizer(self, stage: TrainStage, folder: Path) -> None:
        """A model that was trained on text, or made from one that was, has its tokenizer beside it."""
        home = self.data.tokenizer_folder()
        if home is None and stage.start is not None and stage.start not in self.recipe.stages:
            home = Path(stage.start)
        if home is not None and processes().is_main_process:
            for target in (folder, folder.parent / "raw"):
                copy_tokenizer(home, target)

    def _watch(self, stage: TrainStage) -> Callable[[MaskedDiffusionLM], Mapping[str, float]]:
        watched = stage.watch

        def watch(model: MaskedDiffusionLM) -> Mapping[str, float]:
            few = {"seed": self.recipe.seed, "samples": watched.samples, "draws": watched.samples}
            subject = Subject.before(model, self.data, **few, steps=watched.steps)
            found = measure(list(watched.metrics), subject, finite=False)
            return {name: one.value for name, one in found.items() if isfinite(one.value)}

        return watch

    def _couple(self, name: str, stage: CoupleStage) -> str:
        config = CoupleConfig(**stage.model_dump(exclude={"kind", "teacher"}))
        source = self.data.source(self.recipe.seed) if config.start == "perturbed" else None
        state = processes()
        with self.reporter.bar(f"{name}: {config.steps}-step teacher", config.pairs) as bar:
            manifest = couple(
                self.model(stage.teacher).to(state.device),
                source,
                config,
                self.folder / name,
                seed=self.recipe.seed,
                rank=state.process_index,
                world=state.num_processes,
                on_progress=bar,
            )
        state.wait_for_everyone()
        return manifest.digest()
