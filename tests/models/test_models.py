"""The denoiser: sizes, initialisation, saving and loading, folding, attention."""

from __future__ import annotations

import copy
import json
import pickle
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import imdm
from imdm.core.errors import UserError
from imdm.data.corpora import _stream
from imdm.data.tokenizers import load_tokenizer
from imdm.diffusion.state import Rows
from imdm.evaluation import load_embedder, load_judge
from imdm.models.backbones import dit
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import Replay, _Recorded, faster
from imdm.models.identity import fingerprint
from imdm.models.layers import Heads, attend, capped_attention, in_heads, rotary, rotate, soft_cap_score
from imdm.models.loading import load_model
from imdm.objectives import Autoregressive, Nelbo, Objective, Step
from tests.conftest import tiny_config, tiny_model

MASKS = ["single", "finite-7", "infinite-uniform-8-1.0"]
TOKENS = torch.tensor([[4, 1, 4, 4, 0, 2], [4, 4, 4, 4, 4, 4]])


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal up to the last bits: weights read from a file lie elsewhere in memory, and kernels sum in another order."""
    return torch.allclose(first, second, atol=1e-5)


def size(model: MaskedDiffusionLM) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("vocab_size", "mask", "parameters"),
    [
        (30_522, "single", 139_292_986),
        (50_258, "single", 169_627_218),
        (30_522, "infinite-uniform-768-1.0", 144_014_650),
        (50_258, "infinite-uniform-768-1.0", 174_348_882),
    ],
)
def test_small_has_exactly_the_public_models_parameters(vocab_size: int, mask: str, parameters: int) -> None:
    with torch.device("meta"):
        model = MaskedDiffusionLM(MaskedDiffusionConfig.preset("small", vocab_size=vocab_size, mask=mask))
    assert size(model) == parameters


@pytest.mark.parametrize(("name", "low", "high"), [("tiny", 1e6, 3e6), ("mini", 5e6, 10e6), ("large", 840e6, 890e6)])
def test_presets_have_their_size(name: str, low: float, high: float) -> None:
    vocab_size = 50_258 if name == "large" else 4096
    with torch.device("meta"):
        config = MaskedDiffusionConfig.preset(name, vocab_size=vocab_size, mask="infinite-uniform-256-1.0")
        assert low < size(MaskedDiffusionLM(config)) < high


@pytest.mark.parametrize("mask", MASKS)
def test_a_fresh_model_is_uniform_over_data_tokens(mask: str) -> None:
    """Zero head: every data token equally likely, the mask impossible; zero adaLN, zero noise output."""
    model = tiny_model(trained=False, mask=mask)
    law = model(model.noised(TOKENS)).exp()
    masked = TOKENS == 4
    assert torch.allclose(law[masked][:, :4], torch.tensor(0.25))
    assert (law[..., 4] == 0).all()
    zero = [name for name, p in model.named_parameters() if (p == 0).all()]
    expected = {"output.weight", "output.bias", "modulation.weight", "modulation.bias"}
    expected |= {f"blocks.{i}.modulation.{kind}" for i in range(2) for kind in ("weight", "bias")}
    expected |= {"finite-7": {"mask_embedding.weight"}, "single": set()}.get(
        mask, {"mask_embedding.output.weight", "mask_embedding.input.bias"}
    )
    assert set(zero) == expected


def test_revealed_tokens_are_carried_over_and_the_mask_is_never_predicted(model: MaskedDiffusionLM) -> None:
    law = model(model.noised(TOKENS)).exp()
    assert law[0, 1].tolist() == [0, 1, 0, 0, 0]
    assert torch.allclose(law.sum(-1), torch.ones(2, 6))
    assert (law[..., 4] == 0).all()


def test_rows_and_chunks_agree_with_the_whole(model: MaskedDiffusionLM, monkeypatch: pytest.MonkeyPatch) -> None:
    state = model.noised(TOKENS)
    whole = model(state)
    rows = model(state, rows=state.masked)
    assert torch.allclose(rows, whole[state.masked], atol=1e-6)
    targets = torch.arange(len(rows))[:, None] % 4

    def pick(some: torch.Tensor, part: slice) -> torch.Tensor:
        return some.gather(1, targets[part])[:, 0]

    expected = rows.gather(1, targets)[:, 0]
    (wanted,) = torch.autograd.grad(expected.sum(), model.embedding.weight, retain_graph=True)
    for at_once in (10**6, 10, 1):  # all rows, two at a time, one at a time
        monkeypatch.setattr("imdm.models.readout.AT_ONCE", at_once)
        picked = model(state, rows=state.masked, reduce=pick)
        assert torch.allclose(picked, expected, atol=1e-6)
        (found,) = torch.autograd.grad(picked.sum(), model.embedding.weight)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_neither_time_nor_neighbours_in_the_batch_matter(model: MaskedDiffusionLM) -> None:
    state = model.noised(TOKENS)
    assert torch.equal(model(state), model(replace(state, t=state.t * 0.1)))
    assert torch.allclose(model(state)[:1], model(state[0:1]), atol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("condition", [8, 0])
def test_save_and_load_give_equal_outputs(tmp_path: Path, mask: str, condition: int) -> None:
    model = tiny_model(mask=mask, condition=condition)
    model.save_pretrained(tmp_path)
    loaded = MaskedDiffusionLM.from_pretrained(tmp_path)
    assert same(model(model.noised(TOKENS)), loaded(loaded.noised(TOKENS)))
    assert all(torch.equal(w, loaded.state_dict()[name]) for name, w in model.state_dict().items())
    assert loaded.config.mask == model.config.mask
    assert fingerprint(loaded) == fingerprint(model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_tied_embeddings_survive_saving(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    assert model.output.weight is model.embedding.weight
    model.save_pretrained(tmp_path)
    loaded = MaskedDiffusionLM.from_pretrained(tmp_path)
    assert loaded.output.weight is loaded.embedding.weight
    assert same(model(model.noised(TOKENS)), loaded(loaded.noised(TOKENS)))
    assert size(model) < size(tiny_model())


def test_an_mdm_checkpoint_loads_as_an_imdm_with_equal_outputs(tmp_path: Path) -> None:
    teacher = tiny_model()
    teacher.save_pretrained(tmp_path)
    student = MaskedDiffusionLM.from_pretrained(tmp_path, mask="infinite-normal-8-1.0")
    assert student.mask.name == "infinite-normal-8-1.0"
    assert same(teacher(teacher.noised(TOKENS)), student(student.noised(TOKENS, seed=1)))
    student.save_pretrained(tmp_path / "student")
    assert json.loads((tmp_path / "student" / "config.json").read_text())["mask"]["kind"] == "infinite"


def test_fingerprint_follows_the_weights_and_the_law() -> None:
    model = tiny_model()
    assert fingerprint(model) == fingerprint(tiny_model())
    assert fingerprint(model) != fingerprint(tiny_model(seed=1))
    assert fingerprint(model) != fingerprint(imdm.to_infinite(model, dim=4))
    other = tiny_model(schedule={"kind": "log-linear", "floor": 0.01})
    assert fingerprint(model) != fingerprint(other)


@pytest.mark.parametrize("mask", MASKS)
def test_folding_keeps_the_function_and_drops_parameters(tmp_path: Path, mask: str) -> None:
    model = tiny_model(mask=mask)
    folded = imdm.fold_conditioning(model)
    state = model.noised(TOKENS)
    assert torch.allclose(model(state), folded(state), atol=1e-5)
    assert size(folded) < size(model)
    assert folded.config.condition == 0
    assert not [name for name, _ in folded.named_parameters() if "modulation" in name or name.startswith("time")]
    folded.save_pretrained(tmp_path)
    assert same(MaskedDiffusionLM.from_pretrained(tmp_path)(state), folded(state))
    assert torch.equal(imdm.fold_conditioning(folded)(state), folded(state))


def test_soft_cap_paths_agree() -> None:
    """The plain softmax path and FlexAttention's forward give the same attention; gradients exist on CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (3 * torch.randn(2, 2, 16, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    plain = capped_attention(q, k, v, 5.0)
    assert torch.allclose(plain, flex_attention(q, k, v, score_mod=soft_cap_score(5.0)), atol=1e-5)
    assert not torch.allclose(plain, attend(q, k, v, None), atol=1e-2)
    assert torch.allclose(capped_attention(q, k, v, 1e6), attend(q, k, v, None), atol=1e-4)
    capped = tiny_model(softcap=5.0).train()
    capped(capped.noised(TOKENS), rows=TOKENS == 4).exp()[:, 0].sum().backward()
    assert all(p.grad is not None for p in capped.parameters())


def test_rotary_positions_are_relative() -> None:
    """⟨rotate(q, i), rotate(k, j)⟩ depends on i − j alone."""
    cos, sin = rotary(12, 8, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    dots = rotate(q.expand(1, 1, 12, 8), cos, sin)[0, 0] @ rotate(k.expand(1, 1, 12, 8), cos, sin)[0, 0].T
    for offset in (-3, 0, 4):
        assert torch.allclose(dots.diagonal(offset), dots.diagonal(offset)[0].expand(12 - abs(offset)), atol=1e-5)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for bad in (-1, 5, 99):
        with pytest.raises(UserError, match=rf"input_ids: token {bad} is outside the vocabulary 0…4"):
            tiny_model()(torch.tensor([[0, bad, 4]]))


def test_dropout_acts_in_training_only() -> None:
    model = tiny_model(dropout=0.5)
    assert torch.equal(model(model.noised(TOKENS)), model(model.noised(TOKENS)))
    model.train()
    assert not torch.equal(model(model.noised(TOKENS)), model(model.noised(TOKENS)))
    model.generate(num=1)
    assert model.training


@pytest.mark.parametrize("changes", [{}, {"mixture": True}])
def test_dropout_follows_a_sequences_own_key(changes: dict[str, bool]) -> None:
    """In another batch, in another order, at some rows alone: the same is dropped."""
    model = tiny_model(dropout=0.5, **changes).train()
    tokens, keys = TOKENS.repeat(3, 1), torch.arange(3 * len(TOKENS))
    state = model.noised(tokens).dropping(keys)
    every = model.trunk(state)
    assert torch.equal(every, model.trunk(state))
    assert not torch.allclose(every[0], model.trunk(state.dropping(keys + 100))[0], atol=1e-3)
    order = torch.tensor([2, 0])
    assert torch.allclose(model.trunk(state[order]), every[order], atol=1e-6)
    rows = Rows.where(state.masked)
    assert torch.allclose(model.trunk_at(state, rows), rows.of(every), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 17}, "width = 17: must be a multiple of 2·heads"),
        ({"vocab_size": 1}, "vocab_size = 1"),
        ({"blocks": "many"}, "blocks = 'many': must be a whole number"),
        ({"mask_token_id": 5}, "mask_token_id = 5"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"softcap": -1.0}, "softcap = -1.0"),
        ({"mask": "double"}, "unknown mask 'double'"),
    ],
)
def test_bad_configs_get_a_sentence(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(**settings)
    with pytest.raises(UserError, match="unknown model preset 'huge'; known: large, mini, small, tiny"):
        MaskedDiffusionConfig.preset("huge")


def test_a_state_without_noise_is_refused_by_an_imdm() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    with pytest.raises(UserError, match="carries no noise"):
        model(model.noised(TOKENS).with_noise(None))


def test_damaged_and_foreign_models_are_refused(tmp_path: Path) -> None:
    tiny_model(mask="infinite-uniform-8-1.0").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()

    weights = load_file(path)
    del weights["blocks.1.mlp.up.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 'blocks.1.mlp.up.weight'; it is damaged or not ours"):
        load_model(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    path.write_bytes(whole)
    (tmp_path / "config.json").write_text(json.dumps(config | {"width": 32}))
    with pytest.raises(UserError, match="weights do not have the shapes of its config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dropout": "x"}))
    with pytest.raises(UserError, match="dropout = 'x'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))

    (tmp_path / "config.json").write_text(json.dumps(config | {"heads": 1}))  # it would load, and write otherwise
    with pytest.raises(UserError, match=r"config.json is not the one that model.safetensors was saved with"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))

    flipped = bytearray(whole)
    flipped[-9] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(UserError, match="is damaged: its contents are not what was written"):
        load_model(tmp_path)
    weights = load_file(path)
    for value in ("nan", "inf"):
        weights["norm.weight"][3] = float(value)
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"'norm.weight' has weights that are NaN or infinite"):
            load_model(tmp_path)

    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_model(tmp_path)

    path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="is of type 'gpt2', not 'imdm'"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="is of type None"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="has no config.json"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="is a file; give the folder"):
        load_model(tmp_path / "pytorch_model.bin")


def test_a_missing_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="model 'nowhere/at-all' cannot be loaded"):
        load_model("nowhere/at-all")
    with pytest.raises(UserError, match="no such folder"):
        load_model(tmp_path / "model")


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`huggingface_hub` would wait and try again, for each file that there may be."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    waited = list[float]()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waited.append)
    for asked, load in {
        "model": load_model,
        "judge": load_judge,
        "embedder": load_embedder,
        "tokenizer": load_tokenizer,
        "dataset": lambda name: _stream(name, None, "train"),
    }.items():
        with pytest.raises(UserError, match=f"{asked} 'nowhere/at-all' .*cannot be loaded"):
            load("nowhere/at-all")
    assert not waited
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_nothing_heavy_is_imported() -> None:
    """A model runs without flash-attn, dataset libraries or plotting; `import imdm` alone does not even load torch."""
    code = (
        "import sys, imdm; light = 'torch' not in sys.modules;"
        "config = imdm.MaskedDiffusionConfig(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8);"
        "imdm.to_infinite(imdm.MaskedDiffusionLM(config), dim=4).generate(num=1);"
        "print(light, [m for m in ('flash_attn', 'datasets', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "True []"


def test_the_public_names_are_there() -> None:
    assert all(getattr(imdm, name) is not None for name in imdm.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = imdm.nothing


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled models run what was traced of them, forward and backward, without a compiler's wait."""
    torch._dynamo.reset()
    made = tuple(torch.compile(f, backend="aot_eager", fullgraph=True) for f in (dit._through, dit._out))
    monkeypatch.setattr(dit, "_compiled", lambda: made)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ({}, Nelbo()),
        ({"mask": "infinite-uniform-4-1.0"}, Nelbo()),
        ({"mixture": True}, Nelbo()),
        ({"causal": True}, Autoregressive()),
    ],
    ids=["single", "infinite", "mixture", "causal"],
)
def test_a_compiled_model_has_the_same_losses_and_gradients(settings: dict[str, Any], objective: Objective) -> None:
    plain = tiny_model(blocks=3, **settings).train()
    compiled = copy.deepcopy(plain)
    compiled.compile_trunk(training=True)
    batch = {"tokens": torch.arange(8 * 6).view(8, 6) % 4}
    for index in range(3):  # other rows each time
        step = Step(0, index, torch.arange(8), 8)
        results = []
        for model in (plain, compiled):
            loss = objective.loss(model, model.process, batch, step)
            results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
        for wanted, found in zip(*results, strict=True):
            assert (wanted is None) == (found is None)
            assert wanted is None or torch.allclose(wanted, found, atol=1e-6)


@pytest.mark.usefixtures("traced")
def test_a_faster_model_writes_the_same_text() -> None:
    """Folded and compiled; with few and with many steps, the last of them for fewer sequences."""
    model = tiny_model(mask="infinite-uniform-4-1.0", length=16, vocab_size=9)
    quick = faster(model, compile=True)
    assert quick.is_compiled
    assert not quick.training
    for steps in (1, 3, 16):
        wanted, found = (each.generate(num=9, steps=steps, seed=2, batch_size=4) for each in (model, quick))
        assert torch.equal(wanted.tokens, found.tokens)
        assert torch.equal(wanted.draws, found.draws)


def test_rows_alone_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block at some rows: with all queries, and where few a sequence are known, with those alone."""
    model = tiny_model(mask="infinite-uniform-4-1.0", length=20)
    state = model.noised(torch.full((2, 20), 4))
    hidden, asked = model.trunk(state), []
    run = model.backbone._run

    def heard(x: torch.Tensor, keys: None, rows: Rows, queries: torch.Tensor | None) -> torch.Tensor:
        asked.append(queries)
        return run(x, keys, rows, queries)

    monkeypatch.setattr(model.backbone, "_run", heard)
    sequence, position, slot = torch.tensor([0, 0, 1]), torch.tensor([0, 13, 5]), torch.tensor([0, 1, 0])
    for rows in (Rows(sequence, position), Rows(sequence, position, slot, 2), Rows(sequence, position, slot, 15)):
        assert torch.allclose(model.trunk_at(state, rows), hidden[sequence, position], atol=1e-6)
    few, known, many = asked
    assert few is many is None
    assert known.tolist() == [[0, 13, 0, 0], [5, 0, 0, 0]]


def test_a_layer_that_is_more_than_its_weights_is_asked_whole() -> None:
    """An adapter in the last block is heard at some rows as at all of them, and so is a hook."""
    model = tiny_model(length=20)
    state, rows = model.noised(torch.full((2, 20), 4)), Rows(*torch.tensor([[0, 1], [3, 5], [0, 0]]), most=1)

    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.sum(-1, keepdim=True)

    attention = model.blocks[-1].attention
    attention.qkv.__class__ = Adapted
    assert torch.allclose(model.trunk_at(state, rows), rows.of(model.trunk(state)), atol=1e-5)
    attention.qkv.__class__ = torch.nn.Linear
    attention.qkv.register_forward_hook(lambda module, given, out: out + 1)
    assert torch.allclose(model.trunk_at(state, rows), rows.of(model.trunk(state)), atol=1e-5)


def test_the_gradient_of_the_projection_is_that_of_its_parts() -> None:
    qkv = torch.randn(2, 5, 24, requires_grad=True)
    rope = rotary(5, 4, torch.device("cpu"))
    slopes = [torch.randn(2, 2, 5, 4) for _ in range(3)]
    q, k, v = (in_heads(part, 2) for part in qkv.chunk(3, dim=-1))
    found = Heads.apply(qkv, *rope, 2)
    wanted = (rotate(q, *rope), rotate(k, *rope), v)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    one, two = (torch.autograd.grad(outputs, qkv, slopes)[0] for outputs in (found, wanted))
    assert torch.allclose(one, two, atol=1e-6)


def test_a_model_is_a_function_of_its_weights() -> None:
    """`torch.func` gives the gradients that autograd gives."""
    model = tiny_model()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    state = model.noised(TOKENS)

    def total(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, given, (state, state.masked)).clamp(min=-50).sum()

    found = torch.func.grad(total)(weights)
    wanted = torch.autograd.grad(model(state, state.masked).clamp(min=-50).sum(), list(model.parameters()))
    assert all(torch.allclose(found[n], w, atol=1e-4) for n, w in zip(weights, wanted, strict=True))


def test_recordings_are_kept_by_how_often_they_are_needed_and_forgotten_when_weights_move() -> None:
    model = tiny_model()
    replay = model.replay = Replay(1)
    for number in range(Replay.SHAPES):
        replay.seen[number], replay.recorded[number] = 3 + number, None
    replay.seen["new"] = 1
    assert not replay._makes_room("new")  # seen once
    replay.seen["new"] = 3
    assert not replay._makes_room("new")  # no more often than the rarest
    replay.seen["new"] = 4
    assert replay._makes_room("new")
    assert 0 not in replay.recorded
    assert not copy.deepcopy(model).replay.recorded
    assert not pickle.loads(pickle.dumps(replay)).recorded
    assert replay.recorded
    model.float()
    assert not replay.recorded
    with torch.no_grad():
        assert replay(model._all, None, model.noised(TOKENS), torch.clone) is None  # no GPU


def test_a_full_batch_of_the_service_is_replayed() -> None:
    """64 rows of 128 tokens of the small preset; but no batch that runs longer than Python takes to launch it."""

    def wanted(rows: int) -> bool:
        tokens = SimpleNamespace(is_cuda=True, numel=lambda: 128 * rows)
        return Replay(85_000_000).wants(SimpleNamespace(tokens=tokens))  # type: ignore[arg-type]

    with torch.no_grad():
        assert [wanted(rows) for rows in (1, 64, 256)] == [True, True, False]


def test_what_cannot_be_captured_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried once for each shape."""
    tried: list[Any] = []

    def record(self: Replay, run: Any, beside: Any, state: Any) -> _Recorded:
        tried.append(state.tokens.shape)
        raise RuntimeError("operation not permitted when stream is capturing")

    model = tiny_model()
    wanted = model.generate(num=3, steps=4, seed=1).tokens
    model.replay = Replay(1)
    monkeypatch.setattr(Replay, "wants", lambda self, state: True)
    monkeypatch.setattr("imdm.models.fast._follow", lambda last, device: None)
    monkeypatch.setattr(Replay, "_record", record)
    for _ in range(3):
        assert torch.equal(model.generate(num=3, steps=4, seed=1).tokens, wanted)
    assert tried
    assert len(tried) == len(set(tried))


def test_threads_take_turns_at_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording has one place for what it reads and one for what it writes; each thread still gets its own."""
    model = tiny_model(mask="infinite-uniform-8-1.0")
    model.replay = Replay(1)

    class Slow:
        """In the place of a CUDA graph: it takes its time between reading and writing."""

        def __init__(self, run: Any, state: Any) -> None:
            self.run, self.state, self.hidden = run, state, run(state)

        def replay(self) -> None:
            found = self.run(self.state)
            time.sleep(0.002)
            self.hidden.copy_(found)

    def record(self: Replay, run: Any, beside: Any, state: Any) -> _Recorded:
        graph = Slow(run, copy.deepcopy(state))
        return _Recorded(graph, graph.hidden, graph.state, beside)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "wants", lambda self, state: True)
    monkeypatch.setattr("imdm.models.fast._follow", lambda last, device: None)
    monkeypatch.setattr(Replay, "_record", record)
    asked = [{"num": 3, "steps": 4, "seed": seed, "trace": True} for seed in range(8)]
    for one in asked:  # each shape twice, so that it is recorded
        model.generate(**one)
    wanted = [model.generate(**one) for one in asked]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: model.generate(**one), asked))
    assert model.replay.recorded
    for here, there in zip(wanted, found, strict=True):
        assert torch.equal(here.tokens, there.tokens)
        assert torch.equal(here.trace.log_probs, there.trace.log_probs)


@pytest.mark.parametrize("mask", [*MASKS, "mixture"])
def test_a_batch_is_filled_up_with_masks(mask: str) -> None:
    kind = {"mixture": True} if mask == "mixture" else {"mask": mask}
    model = tiny_model(**kind)
    state = model.noised(TOKENS)
    full = state.filled(5, 4)
    assert full.tokens.shape == (5, 6)
    assert full.masked[2:].all()
    assert len(full.tensors()) == len(state.tensors())
    assert torch.allclose(model.trunk(full)[:2], model.trunk(state), atol=1e-6)
    assert state.filled(2, 4) is state


def test_faster_wants_a_model() -> None:
    with pytest.raises(UserError, match="takes a model"):
        faster("somewhere")  # type: ignore[arg-type]


def test_ids_without_a_device_of_their_own_are_refused() -> None:
    with pytest.raises(UserError, match="on the device 'meta', which holds no values"):
        tiny_model().generate(torch.zeros(1, 2, dtype=torch.int64, device="meta"))
