"""Unconditional sampling of `batch` sequences in 1, 8 and 64 steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from imdm.benchmarks import plain
from imdm.benchmarks.measure import Row, Size, Took, device, timed
from imdm.costing.work import writing_flops
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import faster
from imdm.models.shape import Shape

SIZES: dict[Size, dict[str, Any]] = {
    "full": {"preset": "small", "length": 1024, "vocab_size": 50_258, "batch": 32, "steps": (1, 8, 64)},
    "tiny": {"preset": "tiny", "length": 64, "vocab_size": 4096, "batch": 8, "steps": (1, 8)},
}
REPEATS = 20


def fresh(preset: str, mask: str, **settings: Any) -> MaskedDiffusionLM:
    """A model with random weights, which do not matter for speed."""
    with device():
        return MaskedDiffusionLM(Shape.preset(preset, mask=mask, **settings))


def sampling(size: Size) -> Iterator[Row]:
    sizes = dict(SIZES[size])
    batch, counts, length = sizes.pop("batch"), sizes.pop("steps"), sizes["length"]
    model = fresh(mask="infinite-uniform-768-1.0", **sizes).eval()
    quick = faster(model)
    if device().type == "cuda":
        model = model.to(torch.bfloat16)
    start = torch.full((batch, length), model.config.mask_token_id, device=device())
    for steps in counts:
        ours = timed(partial(quick.generate, num=batch, steps=steps, seed=1), REPEATS)
        bare = timed(partial(plain.write, model, start, steps), max(2, REPEATS // steps), 1)
        yield sampled("sample", model, sizes, batch, steps, ours, bare)


def sampled(
    work: str,
    model: MaskedDiffusionLM,
    sizes: Mapping[str, Any],
    batch: int,
    steps: int,
    ours: Took,
    bare: Took | None = None,
) -> Row:
    """The row of a measurement: `batch` sequences in so many steps."""
    config = model.config
    return Row(
        work=f"{work}, {steps} step{'s' if steps > 1 else ''}",
        ours=ours,
        plain=bare,
        tokens=batch * config.length,
        flops=writing_flops(config, batch * config.length, config.length, steps),
        settings={**sizes, "batch": batch, "mask": model.mask.name, "steps": steps},
        per=f"{batch} sequences",
    )
