"""Muon, and a rate that falls at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from imdm.core.errors import UserError
from imdm.models.backbones.base import Backbone, backbones
from imdm.training import TrainConfig
from imdm.training.optimizers import MOMENTUM, Muon, make_optimizer, orthogonal
from tests.conftest import tiny_model
from tests.training.test_training import CONFIG, equal, trainer, weights

MUON = CONFIG.model_copy(update={"optimizer": "muon"})


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8), (3, 16, 24)])
def test_singular_values_come_near_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    inside = u.mT @ found @ v.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert (inside - torch.diag_embed(values)).abs().max() < 1e-4


def test_an_update_is_what_the_formula_says() -> None:
    """Two steps of one layer of three matrices, computed one by one; the bias moves as AdamW moves it."""
    torch.manual_seed(0)
    layer, twin = torch.nn.Linear(4, 12), torch.nn.Linear(4, 12)
    twin.load_state_dict(layer.state_dict())
    groups = [{"params": [layer.weight], "matrices": 3}, {"params": [layer.bias], "matrices": 0}]
    muon = Muon(groups, lr=0.1, weight_decay=0.5, fused=True)
    adamw = torch.optim.AdamW([twin.bias], lr=0.1, weight_decay=0.5, fused=True)
    expected, momentum = layer.weight.detach().clone(), torch.zeros(12, 4)
    for _ in range(2):
        gradients = torch.randn(12, 4), torch.randn(12)
        layer.weight.grad, layer.bias.grad = gradients[0].clone(), gradients[1].clone()
        twin.bias.grad = gradients[1].clone()
        muon.step()
        adamw.step()
        assert layer.weight.grad is not None  # as it was
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradients[0]
        ahead = (1 - MOMENTUM) * gradients[0] + MOMENTUM * momentum
        update = torch.cat([orthogonal(part) for part in ahead.chunk(3)])
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * 0.2 * 4**0.5 * update
        assert torch.allclose(layer.weight, expected, atol=1e-6)
        assert torch.equal(layer.bias, twin.bias)


def test_every_weight_is_in_one_group() -> None:
    """Matrices of the blocks by Muon, also those of a backbone of transformers; embeddings, norms, adaLN by AdamW."""
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    for changes, layers in (({"blocks": 1}, 4), ({"backbone": {"kind": "hf", "config": llama}, "width": 16}, 7)):
        model = tiny_model(**changes)
        optimizer = make_optimizer(model, TrainConfig(steps=1, optimizer="muon"), recorded=False)
        seen = [weight for group in optimizer.param_groups for weight in group["params"]]
        assert sorted(map(id, seen)) == sorted(map(id, model.parameters()))
        assert sum(len(group["params"]) for group in optimizer.param_groups if group["matrices"]) == layers


class Plain(Backbone):
    def __init__(self, config: Any, settings: Any) -> None:
        super().__init__(config, settings)
        self.layer = torch.nn.Linear(config.width, config.width)


def test_muon_takes_the_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what is the wrapper's: embedding, the network that reads noise, a latent's, the head."""
    monkeypatch.setitem(backbones._entries, "plain", Plain)
    gpt2 = {"model_type": "gpt2", "vocab_size": 5, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    wanted = {"plain": ["layer"], "gpt2": ["c_attn", "c_fc", "c_proj", "c_proj"]}
    wanted["llama"] = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    theirs = {"gpt2": gpt2, "llama": llama}
    for kind, layers in wanted.items():
        settings = {"width": 16, "mask": "infinite-uniform-4-1.0", "mixture": True, "trained": False}
        model = tiny_model(backbone={"kind": "hf", "config": theirs[kind]} if kind in theirs else kind, **settings)
        names = {weight: name for name, weight in model.named_parameters()}
        assert sorted(names[weight].split(".")[-2] for weight in model.backbone.matrices()) == layers


def test_muon_goes_on_bit_for_bit(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", MUON).train()
    trainer(tmp_path / "parts", MUON.model_copy(update={"steps": 10})).train()
    trainer(tmp_path / "parts", MUON).train()
    for place in ("model", "raw"):
        assert equal(weights(tmp_path / "whole" / place), weights(tmp_path / "parts" / place))
    file = "checkpoints/step-00000020/optimizer.safetensors"
    state = load_file(tmp_path / "whole" / file)
    assert equal(state, load_file(tmp_path / "parts" / file))
    assert any(name.startswith("momentum.") and name.endswith("qkv.weight") for name in state)


def test_muon_learns(tmp_path: Path) -> None:
    config = MUON.model_copy(update={"steps": 60, "log_every": 20})
    trainer(tmp_path, config, dropout=0.0).train()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.7 * losses[0]


def test_the_rate_falls_at_the_end(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"decay": 4, "warmup": 0})
    one = trainer(tmp_path, config)
    rates = []
    for _ in range(config.steps):
        one.train_step()
        rates.append(one.optimizer.param_groups[0]["lr"])
    assert rates[:16] == [config.lr] * 16
    assert rates[16:] == pytest.approx([config.lr * left / 5 for left in (4, 3, 2, 1)])


def test_a_fall_that_is_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training.decay = 20: of training.steps = 20 none would have the full rate"):
        trainer(tmp_path, CONFIG.model_copy(update={"decay": 20}))
    trainer(tmp_path, CONFIG.model_copy(update={"decay": 19}))


def test_a_run_with_a_fall_is_not_made_longer(tmp_path: Path) -> None:
    """Its last steps were taken at a rate that a longer run would not have had."""
    config = CONFIG.model_copy(update={"decay": 4})
    trainer(tmp_path, config).train()
    with pytest.raises(UserError):
        trainer(tmp_path, config.model_copy(update={"steps": 40})).train()


def test_a_network_without_blocks_has_no_muon() -> None:
    with pytest.raises(UserError, match="no matrices"):
        make_optimizer(torch.nn.Linear(2, 2), TrainConfig(steps=1, optimizer="muon"), recorded=False)
