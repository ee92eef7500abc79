"""Small trainings, one after another, on however many processes there are.

`torchrun … -m tests.reference.sharded JOBS.json`; each job leaves what it saw in `OUT/seen-RANK.json`: the number of
processes, the share of each kind of tensor that this process held, or what it was refused with and whether all agreed.
With `apart` each process has a folder of its own, as on machines that share none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from imdm.core import devices
from imdm.core.errors import AgreedError, UserError
from imdm.data.coupling import Coupling
from imdm.data.source import LanguageSource, TokenSource
from imdm.data.synthetic import aligned
from imdm.diffusion.randomness import as_key, seeded
from imdm.models import sharding
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.sharding import whole_on_first
from imdm.objectives import parse_objective
from imdm.training import TrainConfig, TrainedNetwork, Trainer
from imdm.training import config as training_config

OBJECTIVES: dict[str, Any] = {
    "nelbo": "nelbo",
    "redi": "redi",
    "sdtt": {"kind": "sdtt", "rounds": 2, "iterations": 3, "first_dt": 0.2, "promote": "ema", "keep_optimizer": False},
    "di4c": {"kind": "di4c", "rounds": 2, "iterations": 3, "latents": 2, "teacher_steps": 4, "threshold": 0.3},
    "match": {
        "kind": "match",
        "auxiliary": {"ahead": 1, "warmup": 2},
        "looks": 8,
        "remembered": 32,
        "steps": {1: 1, 2: 1},
        "phases": [{"gradient": "fkl", "steps": 4}, {"gradient": "kl"}],
    },
}
NOISY = "infinite-uniform-4-1.0"
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 8}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}


def model(seed: int = 0, **changes: Any) -> MaskedDiffusionLM:
    """No layer at zero, so that every one matters."""
    how: dict[str, Any] = {"vocab_size": 3, "length": 3, "width": 16, "blocks": 2, "heads": 2, "condition": 8}
    how |= {"mask": "infinite-uniform-4-1.0", "dropout": 0.1}
    with seeded(as_key(seed)), torch.no_grad():
        made = MaskedDiffusionLM(MaskedDiffusionConfig(**how | changes))
        for weight in made.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return made


def allow_bf16() -> None:
    """Train in bf16 on a CPU too, which is slow."""
    vars(training_config)["check_precision"] = lambda *_: None


def trainer(job: Mapping[str, Any]) -> Trainer:
    settings = {
        "steps": 20,
        "batch": 16,
        "micro_batch": 4,
        "lr": 3e-3,
        "warmup": 2,
        "clip": 0.1,
        "log_every": 1,
        "ema": 0.9,
    }
    settings |= {"checkpoint_every": 4} | job.get("training", {})
    if settings.get("precision") == "bf16":
        allow_bf16()
    source = Coupling(Path(job["pairs"])) if job["kind"] == "redi" else LanguageSource(aligned(length=3, symbols=2))

    def watch(student: MaskedDiffusionLM) -> dict[str, float]:
        """Processes need not do the same."""
        for _ in range(1 + made.accelerator.process_index):
            tokens = student.generate(num=8, steps=2, seed=1).tokens
        return {"ones": float(tokens.double().mean())}

    start = model(1, mask="single") if job["kind"] == "sdtt" else None
    made = Trainer(
        model(job.get("model", 0), **job.get("changes", {})),
        parse_objective(OBJECTIVES[job["kind"]]),
        source,
        TrainConfig(**settings),
        Path(job["out"]) / (f"machine-{devices.processes().process_index}" if job.get("apart") else ""),
        seed=5,
        watch=watch,
        watch_every=4,
        start=start,
    )
    return made


def share(tensors: Iterable[Tensor]) -> float:
    """How much of them this process holds; all of it, unless each of them is shared out."""
    known = list(tensors)
    if not known or not all(isinstance(tensor, DTensor) for tensor in known):
        return 1.0
    mine = sum(tensor.to_local().numel() for tensor in known if isinstance(tensor, DTensor))
    return mine / sum(tensor.numel() for tensor in known)


def seen(made: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {"world": made.accelerator.num_processes}
    for name, network in made.networks.items():
        moments = [one.get("exp_avg_sq", one.get("momentum")) for one in network.optimizer.state.values()]
        found[name] = [share(network.bare.parameters()), share(network.ema.weights.values()), share(moments)]
        if network.sharding is not None:
            found["gathered"] = gathered(network)
    if made.companion is not None:
        found["companion"] = [share(made.companion.model.parameters())]
        best = getattr(made.companion, "best", {})
        found["companion"] += [share(best.values())] if best else []
    return found


def gathered(network: TrainedNetwork) -> dict[str, Any]:
    """How many tensors this process gets of a checkpoint, and of a plain model that is made of the network; copies: how
    many weights of that model are not the gathered tensors themselves."""
    state, given = network.state(), []
    found = {"model": len(state.model), "ema": len(state.ema), "optimizer": len(state.optimizer)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "whole_on_first", lambda tensors: given.append(whole_on_first(tensors)) or given[0])
        plain = sharding.whole_model(network.bare)
    weights = {} if plain is None else dict(plain.named_parameters())
    found["plain"] = len(weights)
    found["copies"] = sum(weight.data_ptr() != given[0][name].data_ptr() for name, weight in weights.items())
    return found


class Products(nn.Module):
    """A list of blocks that multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Product(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Product(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.arange(width) / 512)  # not all of them are numbers in bf16
        self.seen = self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.dtype
        return x * self.weight


def in_half() -> dict[str, Any]:
    """Blocks gathered in bf16, first while they are held still: in what precision they run and have gradients, and how
    far these are from those of a whole model."""
    alone, state = Products(), devices.processes()
    model = sharding.shard(Products(), sharding.Sharding(init_device_mesh("cpu", (state.num_processes,)), half=True))
    x = torch.full((3, 4), 1.0 + state.process_index)
    model.requires_grad_(False)
    model(x)
    sharding.reshard(model)
    model.requires_grad_(True)
    model(x).sum().backward()
    alone(torch.full((3, 4), 1.5)).sum().backward()
    found = [weight.grad for weight in sharding.weights_of(model).values()]
    wanted = [weight.grad for weight in alone.parameters()]
    astray = [float((sharding.whole(a) - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
    return {
        "block": str(model.blocks[0].seen),
        "gradient": str(found[0].dtype),
        "weight": str(sharding.weights_of(model)["blocks.0.weight"].dtype),
        "astray": max(astray),
    }


def count_again(model: MaskedDiffusionLM) -> list[int]:
    """From now on, how often its first block runs within a backward pass, which computes it again."""
    many = [0]

    def count(*_: Any) -> None:
        many[0] += torch._C._current_graph_task_id() != -1

    next(sharding.blocks_of(model)).register_forward_pre_hook(count)  # it need not come to the end
    return many


EVEN: dict[str, Any] = {
    "vocab_size": 8,
    "length": 4,
    "width": 16,
    "blocks": 3,
    "heads": 2,
    "condition": 8,
    "mask": NOISY,
}
"""A model whose tensors have even first dimensions, so that two processes have halves of them."""


def counted(job: Mapping[str, Any]) -> dict[str, Any]:
    """The bytes of one training step on this process: `weights`, `averages`, `gradients` and `moments` of all networks,
    and `frozen`, the companion's weights, as they are held; `blocks`, the weights of blocks that are whole when the
    backward pass begins; `gathers` and `reduces`, what a ring of these processes sends of weights and gradients;
    `looked`, the weights that are whole in an evaluation."""
    source = TokenSource(torch.randint(0, 7, (64, 4), generator=torch.Generator().manual_seed(0)), 8, 7)
    config, objective = TrainConfig(steps=4, batch=8, **job["training"]), parse_objective(OBJECTIVES[job["of"]])
    looked = []

    def watch(_: MaskedDiffusionLM) -> dict[str, float]:
        weights = [weight for one in made._models() for weight in one.parameters()]
        looked.append(sum(weight.nbytes for weight in weights if not isinstance(weight, DTensor)))
        return {"seen": 1.0}

    made = Trainer(model(**EVEN), objective, source, config, job["out"], watch=watch)
    made.model.train()
    made.train_step()
    networks, others = list(made.networks.values()), made.accelerator.num_processes - 1
    found = dict.fromkeys(("blocks", "gradients", "gathers", "reduces"), 0)
    gathers, reduces, backward = DefaultAllGather.__call__, DefaultReduceScatter.__call__, made.accelerator.backward

    def gather(self: Any, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **how: Any) -> Any:
        found["gathers"] += others * input_tensor.nbytes
        return gathers(self, output_tensor, input_tensor, *more, **how)

    def reduce(self: Any, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **how: Any) -> Any:
        found["reduces"] += others * output_tensor.nbytes
        return reduces(self, output_tensor, input_tensor, *more, **how)

    def back(loss: Tensor) -> None:
        weights = [w for block in sharding.blocks_of(made.bare) for w in block.parameters()]
        found["blocks"] = sum(weight.nbytes for weight in weights if not isinstance(weight, DTensor))
        backward(loss)
        grown = [w.grad for network in networks for w in network.bare.parameters() if w.grad is not None]
        found["gradients"] = max(found["gradients"], bytes_of(grown))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultAllGather, "__call__", gather)
        patch.setattr(DefaultReduceScatter, "__call__", reduce)
        patch.setattr(made.accelerator, "backward", back)
        made.train_step()
    made._evaluate_now(None)
    states = [state for network in networks for state in network.optimizer.state.values()]
    return found | {
        "looked": looked[0],
        "weights": bytes_of(weight for network in networks for weight in network.bare.parameters()),
        "averages": bytes_of(weight for network in networks for weight in network.ema.weights.values()),
        "moments": bytes_of(value for state in states for name, value in state.items() if name != "step"),
        "frozen": 0 if made.companion is None else bytes_of(made.companion.model.parameters()),
    }


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What this process holds of them."""
    return sum(sharding.own(tensor).nbytes for tensor in tensors)


def compile_all(made: Trainer) -> None:
    """As on a GPU with `training.compile`: networks as they train, and the companion as it is evaluated."""
    for network in made.networks.values():
        network.bare.compile_trunk(training=True)
    if made.companion is not None:
        made.companion.model.compile_trunk(training=False)


def run(job: Mapping[str, Any]) -> None:
    told: dict[str, Any]
    try:
        if job["kind"] == "half":
            told, rank = in_half(), devices.processes().process_index
        elif job["kind"] == "counted":
            told, rank = counted(job), devices.processes().process_index
        else:
            made = trainer(job)
            again = count_again(made.networks["student"].bare)
            if job.get("compiled"):
                compile_all(made)
            made.train()
            told, rank = {**seen(made), "again": again[0]}, made.accelerator.process_index
            if job.get("compiled"):
                told["compiled"] = counters["stats"]["unique_graphs"]
    except UserError as error:
        told = {"refused": str(error), "agreed": isinstance(error, AgreedError)}
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    folder = Path(job["out"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seen-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        run(each)
    devices.leave()
