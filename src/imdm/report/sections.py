"""The sections that a page may have, by name, and the results they read. A recipe chooses them in `report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from imdm.core.files import check_holds
from imdm.core.registry import Registry
from imdm.evaluation import Row, read
from imdm.experiments.loading import read_recipe
from imdm.experiments.schema import Recipe
from imdm.report.equal import without_truncated
from imdm.report.page import Section

TEXT = ("quality", "paper", "frontier", "equal-entropy", "steps", "choices", "training", "texts")
"""The sections of a page whose recipe, if it has one, names none."""


@dataclass(frozen=True)
class Results:
    """What a run measured: its folder, its recipe if it has one, and its result rows."""

    folder: Path
    recipe: Recipe | None
    rows: list[Row]

    @classmethod
    def of(cls, run: Path) -> Results:
        """The results of a run folder; one without any is refused."""
        check_holds(run, "results.jsonl")
        return cls(run, read_recipe(run), read(run / "results.jsonl"))

    @cached_property
    def _parted(self) -> tuple[list[Row], list[Row]]:
        if self.recipe is None:
            return self.rows, []
        theirs = {stage.seed for stage in self.recipe.evaluations().values()} - {None}
        methods = {method for stage in self.recipe.reporting() for method in stage.models.values()}
        folders = [*self.folder.glob("seed-*"), *self.folder.glob("*/seed-*")]
        own = {str(self.recipe.seed), *(place.name.removeprefix("seed-") for place in folders)}
        parted: tuple[list[Row], list[Row]] = [], []
        for row in self.rows:
            is_tried = row.sample_seed in theirs and (str(row.sample_seed) not in own or row.method not in methods)
            parted[is_tried].append(row)
        return parted

    @property
    def reported(self) -> list[Row]:
        """Rows without those on which settings were chosen."""
        return self._parted[0]

    @property
    def tried(self) -> list[Row]:
        """Rows on which settings were chosen: those of samples with an evaluation's own seed, which no run in the
        folder has."""
        return self._parted[1]

    @cached_property
    def plain(self) -> list[Row]:
        """The reported rows without those that only the lower envelope over top-p needs."""
        return without_truncated(self.reported)

    @cached_property
    def judges(self) -> list[str | None]:
        """The judges of the results, in order; None stands for no judge at all."""
        return list(dict.fromkeys(row.judge for row in self.plain if row.judge)) or [None]

    @cached_property
    def main(self) -> list[Row]:
        """The plain rows of the first judge, and those that need none."""
        return read_by(self.plain, self.judges[0])

    @property
    def seeds(self) -> list[int]:
        """The students' seeds, where they are known."""
        return sorted({row.seed for row in self.reported if row.seed is not None})


def read_by(rows: list[Row], judge: str | None) -> list[Row]:
    """Rows of one judge, and those without a judge."""
    return [row for row in rows if row.judge in (None, judge)]


sections: Registry[Callable[[Results], list[Section]]] = Registry("report section")
"""Each returns what there is to show, which may be nothing."""


def check_sections(recipe: Recipe) -> None:
    """Refuse a recipe that names a section which no module has registered."""
    for name in recipe.report.sections or ():
        sections[name]
