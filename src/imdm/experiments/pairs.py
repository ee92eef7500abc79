"""Making pairs: the one door for the stage of a recipe and for `imdm couple`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from imdm.core.devices import processes, working_together
from imdm.data.coupling import CoupleConfig, Manifest, couple
from imdm.data.source import Source

if TYPE_CHECKING:
    from imdm.experiments.run import Reporter
    from imdm.models.denoiser import MaskedDiffusionLM


def make_pairs(
    teacher: MaskedDiffusionLM,
    source: Source | None,
    config: CoupleConfig,
    out: Path,
    *,
    seed: int,
    reporter: Reporter,
    title: str = "pairs",
) -> Manifest:
    """The pairs of a teacher, of which each process makes its shards; run it again to resume. source: the data to
    perturb; None with `start: prior`."""
    state = processes()
    if config.compile and state.device.type == "cpu":
        reporter.say(f"{title}: nothing is compiled on a CPU")
    with working_together(out):
        pass  # refused here if it cannot be; each makes its shards by itself
    with reporter.bar(f"{title}: {config.steps}-step teacher", config.pairs) as bar:
        manifest = couple(
            teacher.to(state.device),
            source,
            config,
            out,
            seed=seed,
            rank=state.process_index,
            world=state.num_processes,
            on_progress=bar,
        )
    state.wait_for_everyone()
    return manifest
