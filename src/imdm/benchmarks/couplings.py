"""Perturbed couplings by a teacher of 1,024 steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from imdm.benchmarks import plain
from imdm.benchmarks.measure import Row, Size, Took, device, timed
from imdm.benchmarks.sampling import fresh
from imdm.core.errors import UserError
from imdm.costing.work import head_flops, network_flops
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import TokenSource
from imdm.sampling import plan, turns

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM

SIZES: dict[Size, dict[str, Any]] = {
    "full": {"preset": "small", "length": 128, "vocab_size": 30_522, "pairs": 4096, "batch": 256, "steps": 1024},
    "tiny": {"preset": "tiny", "length": 32, "vocab_size": 1024, "pairs": 64, "batch": 16, "steps": 128},
}
LOOKED_AT = 8  # steps of the plain loop that are run; its others cost the same
ASKED_FOR = 100_000


def couplings(size: Size) -> Iterator[Row]:
    sizes = dict(SIZES[size])
    teacher = fresh(mask="single", **{name: sizes[name] for name in ("preset", "length", "vocab_size")}).eval()
    yield coupled(teacher, sizes, "couplings", beside_plain=True)


def coupled(teacher: MaskedDiffusionLM, sizes: dict[str, Any], work: str, *, beside_plain: bool) -> Row:
    """Couplings by a teacher, which the plain version leaves in bf16 on a GPU."""
    sizes = dict(sizes)
    pairs, batch, steps = sizes.pop("pairs"), sizes.pop("batch"), sizes.pop("steps")
    V, L, cuda = sizes["vocab_size"], sizes["length"], device().type == "cuda"
    generator = torch.Generator().manual_seed(0)
    source = TokenSource(torch.randint(0, V - 1, (pairs, L), generator=generator), V, V - 1)
    fast = {"precision": "bf16", "compile": True} if cuda else {}
    with tempfile.TemporaryDirectory() as folder:

        def make(name: str, number: int) -> float:
            """Make the pairs once; returns the milliseconds it took."""
            config = CoupleConfig(pairs=number, steps=steps, batch_size=batch, **fast)
            started = time.perf_counter()
            couple(teacher, source, config, Path(folder) / name)
            return (time.perf_counter() - started) * 1e3

        make("warm", batch)
        few = make("few", batch)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        more = make("pairs", pairs) - few  # without what does not depend on their number, such as compilation
        if more <= 0:
            raise UserError("couplings: another load on this machine made the figures meaningless; try again")
        took = more * pairs / (pairs - batch)
        rows = Coupling(Path(folder) / "pairs").rows(torch.arange(pairs))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    masked = rows["noised"] == V - 1
    evaluations, _ = turns(plan(teacher.process, rows["seed"], rows["t"], steps, L), masked)
    tokens, read = int(evaluations.sum()) * L, int(masked.sum())
    note, bare = f"{ASKED_FOR:,} pairs: {took / 6e4 * ASKED_FOR / pairs:.1f} min", None
    if beside_plain:
        if cuda:
            nn.Module.to(teacher, torch.bfloat16)
        start = torch.full((batch, L), V - 1, device=device())
        some = timed(partial(plain.write, teacher, start, LOOKED_AT, steps), 3, 1)
        bare = Took(some.ms * steps / LOOKED_AT * pairs / batch, some.gib)
        note += f"; plain from {LOOKED_AT} of {steps} steps"
    return Row(
        work=work,
        ours=Took(took, peak),
        plain=bare,
        tokens=pairs * L,
        flops=network_flops(teacher.config, tokens, L, read, 0) + head_flops(teacher.config, read),
        settings={**sizes, "pairs": pairs, "batch": batch, "steps": steps, "evaluated_tokens": tokens},
        per=f"{pairs:,} pairs",
        note=note,
    )
