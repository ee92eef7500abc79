"""The paper's 860M model at length 1,024: training steps, with and without recomputed blocks, sampling, couplings. In
tiny sizes another model, called so.

There is no plain version beside it: the benchmarks of the small model have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from imdm.benchmarks.couplings import coupled
from imdm.benchmarks.measure import Row, Size, timed
from imdm.benchmarks.sampling import fresh, sampled
from imdm.benchmarks.training import trained
from imdm.models.fast import faster
from imdm.objectives import SDTT, Nelbo, ReDi

SIZES: dict[Size, dict[str, Any]] = {
    "full": {"preset": "large", "length": 1024, "vocab_size": 50_258},
    "tiny": {"preset": "tiny", "length": 32, "vocab_size": 1024},
}
BATCH: dict[Size, int] = {"full": 32, "tiny": 4}
SAMPLING: dict[Size, tuple[int, ...]] = {"full": (1, 8, 64), "tiny": (1, 8)}
COUPLING: dict[Size, dict[str, int]] = {
    "full": {"pairs": 128, "batch": 32, "steps": 64},
    "tiny": {"pairs": 16, "batch": 4, "steps": 16},
}
MASK = "infinite-uniform-2048-1.0"
STEPS = 8


def large(size: Size) -> Iterator[Row]:
    sizes, called = SIZES[size], "large" if size == "full" else "tiny"
    train = partial(trained, sizes | {"batch": BATCH[size]}, steps=STEPS)
    kinds = (("MDLM", "single", Nelbo()), ("IM-SDTT", MASK, SDTT()), ("IM-ReDi", MASK, ReDi()))
    for name, mask, objective in kinds:
        yield train(f"train {called} {name}", mask, objective)
    model = fresh(mask=MASK, **sizes).eval()
    quick = faster(model)
    for steps in SAMPLING[size]:
        took = timed(partial(quick.generate, num=BATCH[size], steps=steps, seed=1), max(2, 8 // steps), 1)
        yield sampled(f"sample {called}", model, sizes, BATCH[size], steps, took)
    del model, quick
    teacher, how = fresh(mask="single", **sizes).eval(), COUPLING[size]
    yield coupled(teacher, sizes | how, f"couplings {called}, {how['steps']} steps", beside_plain=False)
    del teacher
    for name, mask, objective in kinds:
        yield train(f"train {called} {name}, blocks recomputed", mask, objective, checkpoint_blocks=True)
