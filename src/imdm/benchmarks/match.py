"""Steps of on-policy distillation: student, frozen teacher and auxiliary network, with and without CUDA graphs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from imdm.benchmarks import plain
from imdm.benchmarks.measure import Row, Size, Took, device, paced
from imdm.benchmarks.sampling import fresh
from imdm.benchmarks.training import NOISY
from imdm.costing.work import head_flops, network_flops
from imdm.data.source import TokenSource
from imdm.objectives import Match, Step
from imdm.training import TrainConfig, Trainer

if TYPE_CHECKING:
    from imdm.models.denoiser import MaskedDiffusionLM
    from imdm.models.shape import Shape

SIZES: dict[Size, tuple[dict[str, Any], ...]] = {
    "full": (
        {"preset": "mini", "length": 128, "vocab_size": 4096, "batch": 256},
        {"preset": "small", "length": 128, "vocab_size": 30_522, "batch": 512},
    ),
    "tiny": ({"preset": "tiny", "length": 64, "vocab_size": 4096, "batch": 8},),
}
STEPS, WARM, PLAIN_STEPS = 16, 10, 3
OBJECTIVE = Match(auxiliary={"ahead": 0})


def match(size: Size) -> Iterator[Row]:
    for sizes in SIZES[size]:
        yield _match_row(dict(sizes))


def _match_row(sizes: dict[str, Any]) -> Row:
    batch, length, V = sizes.pop("batch"), sizes["length"], sizes["vocab_size"]
    tokens = torch.randint(0, V - 1, (8 * batch, length), generator=torch.Generator().manual_seed(0))
    source = TokenSource(tokens, V, V - 1)
    student, teacher = fresh(mask=NOISY, **sizes), fresh(mask="single", **sizes).eval()
    took = {graphs: _match_took(student, teacher, source, batch, graphs) for graphs in (False, True)}
    cuda = device().type == "cuda"
    bare = plain.Matching(student, teacher, torch.bfloat16 if cuda else None)
    x = tokens[:batch].to(device())
    return Row(
        work=f"match {sizes['preset']}, L={length}, V={V:,}",
        ours=took[True],
        plain=paced(lambda: bare.step(x, OBJECTIVE.auxiliary.updates), PLAIN_STEPS, 2),
        tokens=batch * length,
        flops=_flops(student, teacher.config, batch, length),
        settings={**sizes, "batch": batch, "mask": NOISY, "precision": "bf16" if cuda else "float32"},
        per="step",
        also={"not recorded": took[False]},
        note=f"{OBJECTIVE.auxiliary.updates} updates of the auxiliary a step; CUDA graphs only on a GPU",
    )


def _match_took(
    student: MaskedDiffusionLM, teacher: MaskedDiffusionLM, source: TokenSource, batch: int, graphs: bool
) -> Took:
    """Consecutive training steps; the first ones, with compilation and CUDA-graph capture, are not counted."""
    cuda = device().type == "cuda"
    config = TrainConfig(
        steps=10_000, batch=batch, precision="bf16" if cuda else "float32", compile=cuda, graphs=graphs
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(copy.deepcopy(student), OBJECTIVE, source, config, folder, start=copy.deepcopy(teacher))
        for network in trainer.networks.values():
            network.model.train()
        return paced(trainer.train_step, STEPS, WARM)


def _flops(student: MaskedDiffusionLM, teacher: Shape, batch: int, length: int) -> float:
    """FLOPs of a step, the mean of those that are timed. Each of a step's updates samples from the student and trains
    the auxiliary, at three times a forward pass; the last trains the student too, and evaluates the teacher. Positions
    are those masked in z_t and in z̃."""
    total, tokens, last = 0.0, batch * length, OBJECTIVE.auxiliary.updates - 1
    blank = {"tokens": torch.zeros(batch, length, dtype=torch.int64)}
    for index in range(WARM, WARM + STEPS):
        for update in range(last + 1):
            plan = OBJECTIVE.start(student.process, blank, Step(0, index, torch.arange(batch), batch, update=update))
            first, again = int(plan.masked.sum()), int(plan.again.sum())
            trained = 3 if update == last else 1
            total += trained * network_flops(student.config, tokens, length, first, first)
            total += head_flops(student.config, first)
            total += 3 * (network_flops(teacher, tokens, length, again, 0) + head_flops(teacher, again))
            if update == last:
                total += network_flops(teacher, tokens, length, again, 0)
                total += head_flops(teacher, again) + 3 * head_flops(student.config, again)
    return total / STEPS
