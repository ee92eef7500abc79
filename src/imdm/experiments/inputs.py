"""Inputs of the stages of a run: data, models and couplings, each found, read and hashed once a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from imdm.core.config import digest
from imdm.core.files import digest_file
from imdm.data.coupling import Coupling
from imdm.data.source import Data, Source
from imdm.data.text import TextData
from imdm.diffusion.masks import Mask, parse_mask
from imdm.evaluation import about
from imdm.experiments.networks import Networks
from imdm.experiments.schema import AdoptStage, Recipe, TrainStage
from imdm.experiments.status import read_done
from imdm.models.identity import fingerprint
from imdm.models.loading import load_config, load_model
from imdm.shipped import find

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM
    from imdm.models.shape import Shape

T = TypeVar("T")
Files = tuple[tuple[str, int, int, int], ...]
"""Names, inodes, sizes and times of files."""


@dataclass
class Inputs:
    """What the stages of a run read: data, models, pairs. folder: where its stages are. Names are those of stages, or
    folders elsewhere."""

    recipe: Recipe
    folder: Path
    data: Data
    _kept: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    """What was read or computed, by kind, name and the state of the files it is of."""

    def is_stage(self, name: str) -> bool:
        return name in self.recipe.stages

    def about(self, seed: int) -> dict[str, Any]:
        """The fields of a `Subject` that come from the data."""
        train = self.source if seed == self.recipe.seed else None
        return self._once(("about", seed), lambda: about(self.data, seed, train))

    @cached_property
    def source(self) -> Source:
        """The rows to train on."""
        return self.data.source(self.recipe.seed)

    @property
    def vocabulary(self) -> tuple[int, int]:
        """(vocab_size, mask_token_id); if the tokenizer is still to be trained, an upper bound."""
        ready = self.data.is_ready
        return (self.source.vocab_size, self.source.mask_id) if ready else self.data.vocabulary()

    @property
    def length(self) -> int:
        """Tokens a row; known before text is prepared."""
        return self.data.length if isinstance(self.data, TextData) else self.source.length

    def coupling(self, name: str) -> Coupling:
        """The pairs of a stage or folder; only the last are kept in memory."""
        key = ("pairs", name, self._files(name))
        if key not in self._kept:
            self._drop("pairs")
        return self._once(key, lambda: Coupling(self.folder / name if self.is_stage(name) else name))

    def is_coupling(self, name: str) -> bool:
        return (Path(name) / "manifest.json").exists()

    def model(self, name: str) -> MaskedDiffusionLM:
        """The model of a stage or folder. The caller may train or move it."""
        return self._kept.pop(("model", name, self._files(name)), None) or self._load(name)

    def _load(self, name: str) -> MaskedDiffusionLM:
        return load_model(self.folder / name / "model" if self.is_stage(name) else name)

    def hash(self, name: str) -> str:
        """The hash of a stage's output, or of a model or coupling elsewhere."""
        if self.is_stage(name):
            return read_done(self.folder / name)["output"]
        files = self._files(name)  # a folder elsewhere may be replaced while this runs

        def compute() -> str:
            if self.is_coupling(name):
                return self.coupling(name).fingerprint
            self._drop("model")
            return fingerprint(self._once(("model", name, files), lambda: self._load(name)))  # kept for the next call

        return self._once(("hash", name, files), compute)

    def source_hash(self, source: str) -> str:
        """The hash of the files of a model that a stage adopts."""
        from imdm.adopting.adopt import source_files  # takes seconds

        files = source_files(source)
        return self._once(
            ("hash", source, _states(files)), lambda: digest([[file.name, digest_file(file)] for file in files])
        )

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _drop(self, *kinds: str) -> None:
        self._kept = {key: value for key, value in self._kept.items() if key[0] not in kinds}

    def _files(self, name: str) -> Files:
        """Metadata that changes if the folder changes."""
        place = self.folder / name if self.is_stage(name) else Path(find(name))
        return _states(sorted([*place.glob("*"), *place.glob("model/*")]))

    def forget(self) -> None:
        """Free models and couplings, which are large; their hashes are kept."""
        self._drop("model", "pairs")

    def config(self, name: str) -> Shape:
        """The configuration of a model elsewhere; its weights are not read."""
        return self._once(("config", name, self._files(name)), lambda: load_config(name))

    def origin(self, name: str) -> Shape:
        """The configuration of the first ancestor of a stage's model: vocabulary, length and schedule are the same."""
        first = self.first(name)
        stage = self.recipe.stages.get(first)
        if isinstance(stage, AdoptStage):
            return self.adopted(stage)
        if not isinstance(stage, TrainStage):
            return self.config(first)
        ending = self.data.ending() if self.data.is_ready else None
        return self.recipe.model.build(*self.vocabulary, self.length, causal=stage.objective.causal, ending=ending)

    def adopted(self, stage: AdoptStage) -> Shape:
        """The configuration that a stage's model will have; no weights are read."""
        from imdm.adopting.adopt import adopted_config  # takes seconds

        return adopted_config(stage.source, length=self.length, whole=self.whole, **stage.how())

    @cached_property
    def networks(self) -> Networks:
        """The sizes of the recipe's networks, without weights."""
        return Networks(self.recipe, self.vocabulary[0], self.length, self.adopted)

    @property
    def whole(self) -> bool:
        """Whether the rows of the data are whole texts; known before they are prepared."""
        return self.data.packing == "whole" if isinstance(self.data, TextData) else self.data.ending() is not None

    def mask(self, name: str) -> Mask:
        """The mask of the model of a stage or folder."""
        mask = self.recipe.mask_of(name)
        return parse_mask(self.config(self.first(name)).mask) if mask is None else mask

    def mixture(self, name: str) -> bool:
        """Whether a model reads a latent λ."""
        stage = self.recipe.stages.get(name)
        if isinstance(stage, AdoptStage):
            return False
        if not isinstance(stage, TrainStage):
            return self.config(name).mixture
        before = self.recipe.model.mixture if stage.start is None else self.mixture(stage.start)
        return stage.mixture or before

    def noisy(self, name: str) -> bool:
        """Whether the states that a model reads carry noise or a latent."""
        return self.mask(name).noisy or self.mixture(name)

    def first(self, name: str) -> str:
        """The first ancestor of a stage's model: its teacher's teacher, and so on."""
        stage = self.recipe.stages.get(name)
        return self.first(stage.start) if isinstance(stage, TrainStage) and stage.start is not None else name


def _states(files: list[Path]) -> Files:
    """Metadata that changes if the files change."""
    states = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
