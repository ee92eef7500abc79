"""Perturbed couplings by a teacher of 1,024 steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from imdm.benchmarks import plain
from imdm.benchmarks.measure import Row, Size, Took, benchmarks, device, timed
from imdm.benchmarks.sampling import fresh
from imdm.costing.work import head_flops, network_flops
from imdm.data import CoupleConfig, Coupling, TokenSource, couple
from imdm.sampling import plan, turns

SIZES: dict[Size, dict[str, Any]] = {
    "full": {"preset": "small", "length": 128, "vocab_size": 30_522, "pairs": 4096, "batch": 256, "steps": 1024},
    "tiny": {"preset": "tiny", "length": 32, "vocab_size": 1024, "pairs": 64, "batch": 16, "steps": 128},
}
LOOKED_AT = 8  # steps of the plain loop that are run; its others cost the same
ASKED_FOR = 100_000


@benchmarks.register("couplings")
def couplings(size: Size) -> Iterator[Row]:
    given = dict(SIZES[size])
    pairs, batch, steps = given.pop("pairs"), given.pop("batch"), given.pop("steps")
    V, L, cuda = given["vocab_size"], given["length"], device().type == "cuda"
    teacher = fresh(mask="single", **given).eval()
    generator = torch.Generator().manual_seed(0)
    source = TokenSource(torch.randint(0, V - 1, (pairs, L), generator=generator), V, V - 1)
    fast = {"precision": "bf16", "compile": True} if cuda else {}
    with tempfile.TemporaryDirectory() as folder:

        def make(name: str, number: int) -> Path:
            config = CoupleConfig(pairs=number, steps=steps, batch_size=batch, **fast)
            couple(teacher, source, config, Path(folder) / name)
            return Path(folder) / name

        make("warm", min(pairs, batch))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        made = Coupling(make("pairs", pairs))
        took = (time.perf_counter() - started) * 1e3
        rows = made.rows(torch.arange(pairs))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    masked = rows["noised"] == V - 1
    reveal = plan(teacher.process, rows["seed"], rows["t"], steps, L).reveal
    evaluations, _ = turns(torch.where(masked, reveal, -1))
    tokens, read = int(evaluations.sum()) * L, int(masked.sum())
    if cuda:
        teacher = teacher.to(torch.bfloat16)
    start = torch.full((batch, L), V - 1, device=device())
    few = timed(partial(plain.write, teacher, start, LOOKED_AT, steps), 3, 1)
    yield Row(
        work="couplings",
        ours=Took(took, peak),
        plain=Took(few.ms * steps / LOOKED_AT * pairs / batch, few.gib),
        tokens=pairs * L,
        flops=network_flops(teacher.config, tokens, L, read, 0) + head_flops(teacher.config, read),
        settings={**given, "pairs": pairs, "batch": batch, "steps": steps, "evaluated_tokens": tokens},
        per=f"{pairs:,} pairs",
        note=f"{ASKED_FOR:,} pairs: {took / 6e4 * ASKED_FOR / pairs:.1f} min; plain from {LOOKED_AT} of {steps} steps",
    )
