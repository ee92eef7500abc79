"""Running a recipe: stage after stage, each skipped when its output is there and was made from the same inputs.

OUT/recipe.json                 the resolved recipe
OUT/results.jsonl               result rows of all seeds
OUT/seed-0/teacher/model/ …     one folder a seed, one folder a stage, `done.json` when it is finished
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState

from imdm.config import digest
from imdm.data import CoupleConfig, Coupling, couple
from imdm.errors import UserError, unknown
from imdm.evaluation import Subject, append, measure, to_row
from imdm.files import read_json, write_json
from imdm.models import MaskedDiffusionLM, fingerprint, load_model, with_mask
from imdm.objectives import ReDi
from imdm.randomness import Purpose, as_key, fold
from imdm.recipes import CoupleStage, EvaluateStage, Recipe, TrainStage
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
def keyed_init(seed: int, name: str) -> Iterator[None]:
    """Fresh weights depend on the seed and the stage's name, and leave torch's own generator as it was."""
    key = fold(as_key(seed), Purpose.INIT, int(digest(name)[:8], 16))
    with torch.random.fork_rng():
        torch.manual_seed(int(key) & 0x7FFFFFFFFFFFFFFF)
        yield


@dataclass
class Run:
    """One recipe, one seed, one folder."""

    recipe: Recipe
    out: Path
    reporter: Reporter = field(default_factory=Quiet)
    _ready: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.out / f"seed-{self.recipe.seed}"

    def stage(self, name: str) -> None:
        """Run one stage and, first, the stages it builds on."""
        if name in self._ready:
            return
        if name not in self.recipe.stages:
            raise unknown("stage", name, self.recipe.stages)
        stage = self.recipe.stages[name]
        for needed in stage.inputs():
            if needed in self.recipe.stages:
                self.stage(needed)
        inputs = self._inputs_hash(name)
        marker = self.folder / name / "done.json"
        if marker.exists():
            if read_json(marker, f"stage {name!r}")["inputs"] != inputs:
                raise UserError(
                    f"stage {name!r} in {self.folder / name} was made with other settings or inputs; "
                    "choose another --out, or delete that folder to make it again"
                )
            self.reporter.say(f"{name}: already there")
            self._ready.add(name)
            return
        work: dict[str, Callable[[str, Any], str]] = {
            "train": self._train,
            "couple": self._couple,
            "evaluate": self._evaluate,
        }
        output = work[stage.kind](name, stage)
        state = PartialState()
        if state.is_main_process:
            write_json(marker, {"inputs": inputs, "output": output})
        state.wait_for_everyone()
        self._ready.add(name)

    def all(self) -> None:
        """Every stage in order."""
        self._check_models()
        if PartialState().is_main_process:
            write_json(self.out / "recipe.json", self.recipe.resolved())
        for name in self.recipe.stages:
            self.stage(name)

    def _check_models(self) -> None:
        """Build the fresh model's config before any work, so that bad sizes are refused first."""
        vocab_size, mask_id = self.recipe.data.vocabulary()
        self.recipe.model.build(vocab_size, mask_id, length=1)

    def _inputs_hash(self, name: str) -> str:
        stage = self.recipe.stages[name]
        made = [self._output(needed) for needed in stage.inputs()]
        shared = self.recipe.model_dump(mode="json", include={"seed", "data", "model", "experiment"})
        return digest([stage.model_dump(mode="json"), made, shared])

    def _output(self, name: str) -> str:
        """The hash of what a stage made, or of a model or coupling folder."""
        if name in self.recipe.stages:
            return read_json(self.folder / name / "done.json", f"stage {name!r}")["output"]
        if (Path(name) / "manifest.json").exists():
            return Coupling(name).fingerprint
        return fingerprint(load_model(name))

    def model(self, name: str) -> MaskedDiffusionLM:
        """The finished model of a stage, or of a folder."""
        return load_model(self.folder / name / "model" if name in self.recipe.stages else name)

    def _train(self, name: str, stage: TrainStage) -> str:
        recipe, seed = self.recipe, self.recipe.seed
        if stage.data is None:
            source: Any = recipe.data.source(seed)
        else:
            source = Coupling(self.folder / stage.data if stage.data in recipe.stages else stage.data)
        with keyed_init(seed, name):
            if stage.start is None:
                vocab_size, mask_id = recipe.data.vocabulary()
                model = MaskedDiffusionLM(recipe.model.build(vocab_size, mask_id, source.length))
                teacher = fingerprint(model)
            else:
                model = self.model(stage.start)
                teacher = fingerprint(model)
            if stage.mask is not None and stage.mask != model.mask:
                model = with_mask(model, stage.mask)
        if isinstance(source, Coupling):
            uses_seed = not isinstance(stage.objective, ReDi) or stage.objective.noise == "coupling"
            source.check(model, teacher, uses_seed)
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
                on_progress=progress,
            )
            return fingerprint(load_model(trainer.train()))

    def _watch(self, stage: TrainStage) -> Callable[[MaskedDiffusionLM], Mapping[str, float]]:
        language = self.recipe.data.language()

        def watch(model: MaskedDiffusionLM) -> Mapping[str, float]:
            w = stage.watch
            subject = Subject(
                model, steps=w.steps, samples=w.samples, draws=w.samples, seed=self.recipe.seed, truth=language
            )
            return {name: found.value for name, found in measure(list(w.metrics), subject).items()}

        return watch

    def _couple(self, name: str, stage: CoupleStage) -> str:
        config = CoupleConfig(**stage.model_dump(exclude={"kind", "teacher"}))
        source = self.recipe.data.source(self.recipe.seed) if config.start == "perturbed" else None
        state = PartialState()
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

    def _evaluate(self, name: str, stage: EvaluateStage) -> str:
        recipe, state = self.recipe, PartialState()
        if not state.is_main_process:
            return ""
        language, rows = recipe.data.language(), []
        with self.reporter.bar(f"{name}: {stage.samples:,} samples", len(stage.models) * len(stage.steps)) as bar:
            for model_name, method in stage.models.items():
                model = self.model(model_name).to(state.device)
                for steps in stage.steps:
                    subject = Subject(
                        model,
                        steps=steps,
                        samples=stage.samples,
                        draws=stage.draws,
                        seed=recipe.seed,
                        noise=stage.noise,
                        truth=language,
                        data=recipe.data.source(recipe.seed),
                    )
                    found = measure(list(stage.metrics), subject)
                    rows += [
                        to_row(
                            metric,
                            value,
                            subject,
                            experiment=recipe.experiment,
                            method=method,
                            seed=recipe.seed,
                            recipe_hash=recipe.digest(),
                        )
                        for metric, value in found.items()
                    ]
                    bar(len(rows) // len(stage.metrics), model_name)
        append(self.out / "results.jsonl", rows)
        return digest([row.model_dump(exclude={"time"}) for row in rows])
