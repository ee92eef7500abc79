"""LoRA: the same law at first, weights that stay, every objective, exact resumption, a plain model at the end."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.models.variants import with_mask
from imdm.objectives import Autoregressive, Objective, parse_objective
from imdm.training import TrainConfig, Trainer
from imdm.training.checkpoint import checkpoint_path
from imdm.training.history import read_history
from imdm.training.lora import Lora, add_adapters, check_lora, merged, targets_in
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused
from tests.conftest import tiny_model
from tests.models.test_hf import FAMILIES, MASK, SIZES, TOKENS, made

pytest.importorskip("peft")

LANGUAGE = aligned(length=3, symbols=3)
LLAMA = {"model_type": "llama"} | SIZES | {"vocab_size": LANGUAGE.vocab_size}
MATCH = {"kind": "match", "remembered": 20, "looks": 8, "steps": {1: 1, 2: 1}, "auxiliary": {"ahead": 1, "warmup": 0}}
OBJECTIVES: dict[str, Any] = {
    "nelbo": "nelbo",
    "sdtt": {"kind": "sdtt", "rounds": 2, "iterations": 4, "first_dt": 0.2},
    "sdtt-ema": {"kind": "sdtt", "rounds": 2, "iterations": 4, "first_dt": 0.2, "promote": "ema"},
    "redi": "redi",
    "match": MATCH,
    "di4c": {"kind": "di4c", "rounds": 2, "iterations": 4, "latents": 2},
    "autoregressive": "autoregressive",
}


def started(seed: int = 0, **changes: Any) -> MaskedDiffusionLM:
    return made(LLAMA, seed, vocab_size=LANGUAGE.vocab_size, length=3, **changes)


def said(model: MaskedDiffusionLM, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model(model.noised(tokens), tokens == MASK)[:, :MASK]


def shaken(model: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """Every weight that is trained is another."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3", "qwen3_moe", "granite", "bert", "modernbert"])
def test_it_starts_with_the_same_law_and_merges_into_a_plain_model(kind: str, tmp_path: Path) -> None:
    model = made(FAMILIES[kind], mask="infinite-uniform-4-1.0")
    before, plain = said(model), set(model.state_dict())
    add_adapters(model, Lora(rank=2), seed=3)
    assert torch.equal(said(model), before)
    after = said(shaken(model))
    assert float((after - before).abs().max()) > 1e-2
    whole = merged(model)
    assert set(whole.state_dict()) == plain
    torch.testing.assert_close(said(whole), after, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(said(model), after, atol=0, rtol=0)  # which merging leaves alone
    whole.save_pretrained(tmp_path / "model")
    torch.testing.assert_close(said(load_model(tmp_path / "model")), after, atol=1e-5, rtol=1e-5)


def test_what_is_trained() -> None:
    model = made(FAMILIES["llama"], mask="infinite-uniform-4-1.0")
    add_adapters(model, Lora(rank=2), seed=0)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if "lora_" not in name and "norm" not in name} == {
        "lm.model.embed_tokens.change",
        *(name for name, _ in model.named_parameters() if name.startswith("mask_embedding.")),
    }
    adapters = [name for name in trained if "lora_A" in name]
    assert len(adapters) == 2 * 7  # of two layers, each with four matrices of attention and three of its MLP
    assert {weight.shape[0] for name, weight in model.named_parameters() if "lora_A" in name} == {2}
    names = targets_in(made(FAMILIES["llama"]).backbone.get_network(), ["v_proj", "mlp.up_proj"])
    assert [name.rpartition(".")[2] for name in names] == ["v_proj", "up_proj"] * 2


def test_norms_are_trained_and_not_what_is_named_after_them() -> None:
    model = made({"model_type": "roberta-prelayernorm"} | SIZES)
    add_adapters(model, Lora(rank=2), seed=0)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name]
    assert "lm.roberta_prelayernorm.encoder.layer.0.attention.LayerNorm.weight" in trained
    assert [name for name in trained if "norm" not in name.rpartition(".")[0].rpartition(".")[2].lower()] == [
        "lm.roberta_prelayernorm.embeddings.word_embeddings.change"
    ]


def test_blocks_in_several_lists_are_all_changed() -> None:
    from transformers import XLMConfig, XLMWithLMHeadModel

    lm = XLMWithLMHeadModel(XLMConfig(vocab_size=12, emb_dim=16, n_layers=2, n_heads=2))
    names = targets_in(lm, None)
    assert {name.rpartition(".")[2] for name in names} == {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"}
    assert len(names) == 2 * 6


def pairs_of(teacher: MaskedDiffusionLM, folder: Path) -> Coupling:
    if not folder.exists():
        couple(teacher, LanguageSource(LANGUAGE), CoupleConfig(pairs=64, steps=4), folder)
    return Coupling(folder)


def trainer(kind: str, folder: Path, steps: int = 8, **settings: Any) -> Trainer:
    objective: Objective = parse_objective(OBJECTIVES[kind])
    causal = isinstance(objective, Autoregressive)
    start = started(causal=causal)
    mask = None if causal or kind == "di4c" else "infinite-uniform-4-1.0"
    model = start if mask is None else with_mask(start, mask)
    model = with_mask(model, mixture=True) if kind == "di4c" else model
    source = pairs_of(start, folder.parent / "pairs") if kind == "redi" else LanguageSource(LANGUAGE)
    given: dict[str, Any] = {"batch": 8, "lr": 1e-2, "warmup": 0, "ema": 0.8, "checkpoint_every": 3}
    given |= {"lora": {"rank": 2, "dropout": 0.1}, "log_every": 1}
    config = TrainConfig.parse(given | {"steps": steps} | settings)
    return Trainer(model, objective, source, config, folder, start=start, watch_every=4)


@pytest.mark.parametrize("kind", list(OBJECTIVES))
def test_every_objective_trains_goes_on_exactly_and_leaves_the_rest_alone(kind: str, tmp_path: Path) -> None:
    first = trainer(kind, tmp_path / "whole")
    frozen = {n: w.detach().clone() for n, w in first.bare.named_parameters() if not w.requires_grad}
    moving = {n: w.detach().clone() for n, w in first.bare.named_parameters() if w.requires_grad}
    whole = load_model(first.train())
    now = dict(first.bare.named_parameters())
    assert len(frozen) > 10
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
    assert all(not torch.equal(now[name], weight) for name, weight in moving.items() if "lora_B" in name)
    trainer(kind, tmp_path / "parts", steps=5).train()
    found = load_model(trainer(kind, tmp_path / "parts").train())
    for name, weight in whole.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    assert {name.split(".")[0] for name in whole.state_dict()} <= {"lm", "mask_embedding", "mixture"}
    losses = [row["loss"] for row in read_history(tmp_path / "whole") if "loss" in row]
    assert losses == [row["loss"] for row in read_history(tmp_path / "parts") if "loss" in row]


def test_checkpoints_hold_what_is_trained_and_only_for_their_own_start(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = trainer("sdtt", tmp_path / "run", steps=6)
    run.train()
    point = checkpoint_path(tmp_path / "run" / "checkpoints", 6)
    trained = {name for name, weight in run.bare.named_parameters() if weight.requires_grad}
    for file in ("model", "ema", "companion"):  # the second round's teacher is the student as it was
        assert set(load_file(point / f"{file}.safetensors")) == trained
    assert not (point / "config.json").exists()
    teacher = run.companion.model
    shared = dict(run.bare.named_parameters())
    assert all((weight is shared[name]) == (name not in trained) for name, weight in teacher.named_parameters())
    other = started(seed=5)
    config = run.config
    with pytest.raises(UserError, match="belongs to run"):
        Trainer(other, run.objective, LanguageSource(LANGUAGE), config, tmp_path / "run").train()


@pytest.mark.parametrize("promote", ["raw", "ema"])
def test_the_teacher_of_a_round_is_the_student_as_it_was(promote: str, tmp_path: Path) -> None:
    run = trainer("sdtt-ema" if promote == "ema" else "sdtt", tmp_path / "run")
    for _ in range(4):
        run.train_step()
    wanted = copy.deepcopy(run.bare).eval()
    with torch.no_grad():
        for name, weight in wanted.named_parameters():
            weight.copy_(run.ema.weights.get(name, weight) if promote == "ema" else weight)
    run.train_step()
    assert run.companion.round == 1
    assert fingerprint(run.companion.model) == fingerprint(wanted)


@pytest.mark.parametrize("weights", ["float32", "bf16"])
def test_what_is_handed_over_is_copied_once(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer("nelbo", tmp_path / "run", steps=1, weights=weights)
    copied, of = [], copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda x, memo=None: copied.append(type(x)) or of(x, memo))
    run.export()
    assert copied.count(MaskedDiffusionLM) == 2  # of raw/ and of model/
    assert {weight.dtype for weight in run.bare.parameters()} == {torch.float32}
    assert load_model(tmp_path / "run" / "raw").config.vocab_size == LANGUAGE.vocab_size


def test_muon_moves_adapters_too(tmp_path: Path) -> None:
    run = trainer("nelbo", tmp_path / "run", steps=3, optimizer="muon", decay=2)
    before = {n: w.detach().clone() for n, w in run.bare.named_parameters()}
    run.train()
    for name, weight in run.bare.named_parameters():
        assert weight.requires_grad or torch.equal(weight, before[name])
    assert any("lora_A" in name and not torch.equal(w, before[name]) for name, w in run.bare.named_parameters())


def test_the_loss_goes_down_and_the_average_is_what_is_handed_over(tmp_path: Path) -> None:
    run = trainer("nelbo", tmp_path / "run", steps=120, ema=0.9, batch=32, lora={"rank": 4}, checkpoint_every=99)
    folder = run.train()
    losses = [row["loss"] for row in read_history(tmp_path / "run")]
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    with run.averaged():
        state = run.bare.noised(torch.full((1, 3), LANGUAGE.mask_id))
        found = run.bare(state, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(
        load_model(folder)(state, torch.ones(1, 3, dtype=torch.bool)), found, atol=1e-5, rtol=1e-5
    )
    assert trainer("nelbo", tmp_path / "other", lora={"rank": 3}).run != trainer("nelbo", tmp_path / "a").run
    assert "lora" not in TrainConfig(steps=1).hashed()


def test_frozen_weights_in_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: weights that stay are in bf16, those that move and their moments in float32."""
    monkeypatch.setattr("imdm.training.config.check_precision", lambda *_: None)
    more = {"precision": "bf16", "batch": 32, "lora": {"rank": 4, "base": "bf16"}, "checkpoint_every": 99}
    run = trainer("nelbo", tmp_path / "run", steps=40, **more)
    for weight in run.bare.parameters():
        assert weight.dtype == (torch.float32 if weight.requires_grad else torch.bfloat16)
    frozen = started().state_dict()["lm.model.layers.0.self_attn.q_proj.weight"]
    folder = run.train()
    assert {moment.dtype for state in run.optimizer.state.values() for moment in state.values()} == {torch.float32}
    losses = [row["loss"] for row in read_history(tmp_path / "run")]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert load_model(folder).dtype == torch.float32
    lm = merged(trainer("nelbo", tmp_path / "new", **more).bare).state_dict()
    rounded = lm["lm.model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(rounded, frozen.bfloat16().float())
    assert not torch.equal(rounded, frozen)


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"vocab_size": LANGUAGE.vocab_size, "length": 3}

    def start(model: MaskedDiffusionLM, **lora: Any) -> None:
        config = TrainConfig.parse({"steps": 1, "batch": 4, "lora": {"rank": 2} | lora}, "training")
        Trainer(model, parse_objective("nelbo"), LanguageSource(LANGUAGE), config, tmp_path)

    with pytest.raises(UserError, match="backbone 'dit' is small and trained in full"):
        start(tiny_model(**size))
    with pytest.raises(UserError, match=r"training.lora.rank' = 0"):
        start(started(), rank=0)
    with pytest.raises(UserError, match="no linear layer of 'llama' is called 'query'; it has q_proj, k_proj"):
        start(started(), targets=["q_proj", "query"])
    convolved = {"model_type": "squeezebert", "embedding_size": 16} | SIZES | {"vocab_size": LANGUAGE.vocab_size}
    with pytest.raises(UserError, match="the blocks of 'squeezebert' have no linear layer"):
        start(made(convolved, **size))
    with pytest.raises(UserError, match="training.lora.base = bf16 needs a GPU; use float32 on a CPU"):
        start(started(), base="bf16")
    with pytest.raises(UserError, match="training.precision = float32; set both to bf16, or both to float32"):
        check_lora(Lora(rank=2, base="bf16"), "float32")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"training.lora needs the extra: pip install 'imdm\[lora\]'"):
        start(started())


def test_a_recipe_says_so_before_any_work(tmp_path: Path) -> None:
    done = command("train", "synthetic", "stages.teacher.training.lora.rank=2", "--out", tmp_path / "run")
    assert "backbone 'dit' is small and trained in full" in refused(done)
    assert not (tmp_path / "run").exists()


def test_the_command_takes_it(tmp_path: Path) -> None:
    teacher = started()
    teacher.save_pretrained(tmp_path / "teacher")
    training = "stages.student.training"
    done = command(
        *("distill", "sdtt", tmp_path / "teacher", "--data", "aligned:length=3,symbols=3", "--out", tmp_path / "run"),
        *("--mask", "infinite-uniform-4-1.0", "--rounds", "1", "--iterations", "4", "--batch", "8"),
        *(
            f"{training}.lora.rank=2",
            f"{training}.lora.targets=[q_proj, v_proj]",
            "stages.student.objective.first_dt=0.2",
        ),
    )
    assert done.returncode == 0, done.stderr
    student = load_model(tmp_path / "run" / "seed-0" / "student" / "model")
    for name, weight in teacher.state_dict().items():
        moved = not torch.equal(student.state_dict()[name], weight)
        free = "norm" in name or name.endswith(("q_proj.weight", "v_proj.weight", "embed_tokens.weight"))
        assert moved == free, name
    change = student.state_dict()["lm.model.embed_tokens.weight"] - teacher.state_dict()["lm.model.embed_tokens.weight"]
    assert change.abs().sum(1).nonzero()[:, 0].tolist() == [LANGUAGE.mask_id]
