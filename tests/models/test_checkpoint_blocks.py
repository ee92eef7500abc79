"""Blocks computed again for their gradients: the same gradients, bit for bit, and less that is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imdm.core.errors import UserError
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.models.backbones import Backbone, backbones
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.loading import load_model
from imdm.objectives import Step, parse_objective
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_model
from tests.models.test_hf import FAMILIES, made

LANGUAGE = aligned(length=6, symbols=4)
MATCH = {"kind": "match", "remembered": 20, "looks": 8, "steps": {1: 1, 2: 1}, "auxiliary": {"ahead": 1, "warmup": 0}}


def model_of(kind: str) -> MaskedDiffusionLM:
    """With dropout, which must drop the same again."""
    if kind == "dit":
        return tiny_model(blocks=3, dropout=0.2, mask="infinite-uniform-4-1.0")
    size = {"vocab_size": LANGUAGE.vocab_size}
    return made(FAMILIES[kind] | size, **size, length=6, dropout=0.2, mask="infinite-uniform-4-1.0")


def gradients(model: MaskedDiffusionLM) -> tuple[dict[str, Tensor], int]:
    """Those of a loss, and how many bytes were kept for them."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = LanguageSource(LANGUAGE).rows(torch.arange(8))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = parse_objective("nelbo").loss(model.train(), model.process, batch, Step(0, 0, torch.arange(8), 8))
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return found, sum(size for place, size in kept.items() if place not in weights)


@pytest.mark.parametrize("kind", ["dit", "llama", "gpt2", "gemma2", "bert", "modernbert"])
def test_the_same_gradients_with_less_kept(kind: str) -> None:
    model = model_of(kind)
    again = copy.deepcopy(model)
    again.backbone.checkpoint_blocks()
    torch.manual_seed(1)
    wanted, bytes_before = gradients(model)
    torch.manual_seed(2)  # what is drawn elsewhere does not matter
    found, bytes_now = gradients(again)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert bytes_now < 0.6 * bytes_before
    once = gradients(copy.deepcopy(again))[0]
    assert all(torch.equal(once[name], gradient) for name, gradient in wanted.items())  # in copies too


@pytest.mark.parametrize("objective", ["nelbo", MATCH])
@pytest.mark.parametrize("kind", ["dit", "llama"])
def test_a_run_is_the_same_run(kind: str, objective: Any, tmp_path: Path) -> None:
    found = []
    for blocks in (False, True):
        config = TrainConfig(steps=4, batch=8, lr=1e-3, warmup=0, ema=0.9, checkpoint_blocks=blocks)
        source = LanguageSource(LANGUAGE)
        start = tiny_model(dropout=0.0) if kind == "dit" else None
        how = {"start": start} if start is not None and objective != "nelbo" else {}
        trainer = Trainer(model_of(kind), parse_objective(objective), source, config, tmp_path / str(blocks), **how)
        found.append((trainer.run, load_model(trainer.train()).state_dict()))
    (one, weights), (two, others) = found
    assert one == two  # so that a run may go on with it, or without
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())


class Plain(Backbone):
    def __init__(self, config: Any, settings: Any) -> None:
        super().__init__(config, settings)
        self.layer = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        return self.layer(x)


def test_a_backbone_that_cannot_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backbones._entries, "plain", Plain)
    model = tiny_model(backbone="plain")
    config = TrainConfig(steps=1, batch=4, checkpoint_blocks=True)
    with pytest.raises(UserError, match="checkpoint_blocks: backbone 'plain' has no such option"):
        Trainer(model, parse_objective("nelbo"), LanguageSource(LANGUAGE), config, tmp_path)
