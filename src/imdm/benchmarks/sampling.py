"""Unconditional sampling of `batch` sequences in 1, 8 and 64 steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from imdm.benchmarks import plain
from imdm.benchmarks.measure import Row, Size, benchmarks, device, timed
from imdm.costing.work import writing_flops
from imdm.models import MaskedDiffusionConfig, MaskedDiffusionLM, faster

SIZES: dict[Size, dict[str, Any]] = {
    "full": {"preset": "small", "length": 1024, "vocab_size": 50_258, "batch": 32, "steps": (1, 8, 64)},
    "tiny": {"preset": "tiny", "length": 64, "vocab_size": 4096, "batch": 8, "steps": (1, 8)},
}
REPEATS = 20


def fresh(preset: str, mask: str, **settings: Any) -> MaskedDiffusionLM:
    """A model with random weights, which do not matter for speed."""
    with device():
        return MaskedDiffusionLM(MaskedDiffusionConfig.preset(preset, mask=mask, **settings))


@benchmarks.register("sampling")
def sampling(size: Size) -> Iterator[Row]:
    given = dict(SIZES[size])
    batch, counts, length = given.pop("batch"), given.pop("steps"), given["length"]
    mask = "infinite-uniform-768-1.0"
    model = fresh(mask=mask, **given).eval()
    quick, config = faster(model), model.config
    if device().type == "cuda":
        model = model.to(torch.bfloat16)
    start = torch.full((batch, length), config.mask_token_id, device=device())
    for steps in counts:
        yield Row(
            work=f"sample, {steps} step{'s' if steps > 1 else ''}",
            ours=timed(partial(quick.generate, num=batch, steps=steps, seed=1), REPEATS),
            plain=timed(partial(plain.write, model, start, steps), max(2, REPEATS // steps), 1),
            tokens=batch * length,
            flops=writing_flops(config, batch * length, length, steps),
            settings={**given, "batch": batch, "mask": mask, "steps": steps},
            per=f"{batch} sequences",
        )
