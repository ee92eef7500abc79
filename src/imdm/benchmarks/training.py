"""Training steps of each kind, with dropout, clipping and average: MDLM, IM-ReDi, IM-SDTT; and with CUDA graphs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from imdm.benchmarks import plain
from imdm.benchmarks.measure import Row, Size, Took, device, paced
from imdm.benchmarks.sampling import fresh
from imdm.costing.work import head_flops, network_flops
from imdm.data.source import TokenSource
from imdm.diffusion.randomness import Purpose, as_key, fold, uniform
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.objectives import SDTT, Nelbo, Objective, ReDi, Step
from imdm.training import TrainConfig, Trainer

SIZES: dict[Size, tuple[dict[str, Any], ...]] = {
    "full": (
        {"preset": "small", "length": 128, "vocab_size": 30_522, "batch": 512},
        {"preset": "small", "length": 1024, "vocab_size": 50_258, "batch": 32},
    ),
    "tiny": ({"preset": "tiny", "length": 64, "vocab_size": 4096, "batch": 8},),
}
RECORDED: dict[Size, dict[str, Any]] = {
    "full": {"preset": "mini", "length": 128, "vocab_size": 4096, "batch": 512},
    "tiny": {"preset": "tiny", "length": 64, "vocab_size": 4096, "batch": 8},
}
NOISY = "infinite-uniform-768-1.0"
STEPS, PLAIN_STEPS = 30, 6


class Pairs(TokenSource):
    """Tokens in the role of completions of masked ones."""

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        x, keys = self.tokens[index], fold(as_key(0), Purpose.PAIR, index)
        t = (0.001 + 0.999 * uniform(keys, Purpose.TIME)).float()
        masked = uniform(keys[:, None], Purpose.CORRUPT, torch.arange(self.length)) < t[:, None]
        return {"tokens": x, "noised": x.masked_fill(masked, self.mask_id), "t": t, "seed": keys}


def training(size: Size) -> Iterator[Row]:
    for sizes in SIZES[size]:
        yield trained(sizes, "train MDLM", "single", Nelbo(), _nelbo)
        yield trained(sizes, "train IM-ReDi", NOISY, ReDi(), _redi)


def sdtt(size: Size) -> Iterator[Row]:
    yield trained(SIZES[size][0], "train IM-SDTT", NOISY, SDTT(), _sdtt)


def graphs(size: Size) -> Iterator[Row]:
    """A small model's step as a CUDA graph (`training.graphs`), beside the same one launched kernel by kernel."""
    sizes = dict(RECORDED[size])
    batch, length, V = sizes.pop("batch"), sizes["length"], sizes["vocab_size"]
    model, source = fresh(mask="single", **sizes), _source(Nelbo(), batch, length, V)
    half = batch * length / 2
    flops = 3 * (network_flops(model.config, batch * length, length, half, half) + head_flops(model.config, int(half)))
    took = {
        graphs: _training_took(copy.deepcopy(model), Nelbo(), source, batch, graphs=graphs) for graphs in (False, True)
    }
    yield Row(
        work=f"train {sizes['preset']} MDLM, recorded, L={length}",
        ours=took[True],
        plain=took[False],
        tokens=batch * length,
        flops=flops,
        settings={**sizes, "batch": batch, "mask": "single", "dropout": 0.1, "precision": _precision()},
        per="step",
        note="plain: the same without CUDA graphs; only on a GPU they differ",
    )


PlainLoss = Callable[[MaskedDiffusionLM, MaskedDiffusionLM, dict[str, Tensor], Step], Tensor]


def _nelbo(model: MaskedDiffusionLM, _: MaskedDiffusionLM, batch: dict[str, Tensor], step: Step) -> Tensor:
    x = batch["tokens"]
    return plain.nelbo(model, model.process, model.process.corrupt(x, step.times(), step.keys()), x)


def _redi(model: MaskedDiffusionLM, _: MaskedDiffusionLM, batch: dict[str, Tensor], step: Step) -> Tensor:
    state = model.process.noised(batch["noised"], batch["t"], batch["seed"])
    return plain.nelbo(model, model.process, state, batch["tokens"])


def _sdtt(model: MaskedDiffusionLM, teacher: MaskedDiffusionLM, batch: dict[str, Tensor], step: Step) -> Tensor:
    return plain.sdtt(model, teacher, batch["tokens"], step, SDTT().dt(0))


def trained(
    sizes: dict[str, Any],
    work: str,
    mask: str,
    objective: Objective,
    loss: PlainLoss | None = None,
    steps: int | None = None,
    checkpoint_blocks: bool = False,
) -> Row:
    """Training steps by an objective. loss: the same in plain code, to compare with. Only necessary FLOPs count: those
    of a block once, even if it is computed twice."""
    sizes = dict(sizes)
    batch, length, V = sizes.pop("batch"), sizes["length"], sizes["vocab_size"]
    source = _source(objective, batch, length, V)
    model = fresh(mask=mask, **sizes)
    half = batch * length / 2  # positions that are masked, and read
    passes, heads = (5, 4) if isinstance(objective, SDTT) else (3, 3)  # forward passes; backward counts twice
    flops = passes * network_flops(model.config, batch * length, length, half, half)
    flops += heads * head_flops(model.config, int(half))
    ours = _training_took(model, objective, source, batch, steps, checkpoint_blocks=checkpoint_blocks)
    del model
    bare = None
    if loss is not None:
        bare = _plain_took(fresh(mask=mask, **sizes), source, batch, loss)
    settings = {**sizes, "batch": batch, "mask": mask, "dropout": 0.1, "precision": _precision()}
    return Row(
        work=f"{work}, L={length}",
        ours=ours,
        plain=bare,
        tokens=batch * length,
        flops=flops,
        settings=settings | ({"checkpoint_blocks": True} if checkpoint_blocks else {}),
        per="step",
    )


def _precision() -> Literal["float32", "bf16"]:
    return "bf16" if device().type == "cuda" else "float32"


def _source(objective: Objective, batch: int, length: int, V: int) -> TokenSource:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V - 1, (8 * batch, length), generator=generator)
    return (Pairs if isinstance(objective, ReDi) else TokenSource)(tokens, V, V - 1)


def _training_took(
    model: MaskedDiffusionLM,
    objective: Objective,
    source: TokenSource,
    batch: int,
    steps: int | None = None,
    **how: bool,
) -> Took:
    """Consecutive training steps; the first ones, with compilation and CUDA-graph capture, are not counted."""
    cuda = device().type == "cuda"
    config = TrainConfig(steps=10_000, batch=batch, dropout=0.1, precision=_precision(), compile=cuda, **how)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, objective, source, config, folder)
        trainer.model.train()
        return paced(trainer.train_step, steps or STEPS, 10 if config.graphs else 5)


def _plain_took(model: MaskedDiffusionLM, source: TokenSource, batch: int, loss: PlainLoss) -> Took:
    teacher = copy.deepcopy(model).eval()
    rows = {name: column.to(device()) for name, column in source.rows(torch.arange(batch)).items()}
    step = Step(0, 0, torch.arange(batch, device=device()), batch)
    bare = plain.Training(model, torch.bfloat16 if _precision() == "bf16" else None)
    return paced(lambda: bare.step(lambda: loss(model, teacher, rows, step)), PLAIN_STEPS, 2)
