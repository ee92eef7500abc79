"""Models of `transformers` as backbones: the same numbers as their own classes, the sampler's law, training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from imdm.core.errors import UserError
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.diffusion.randomness import Purpose, fold
from imdm.experiments.schema import ModelSettings
from imdm.exporting import export
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import faster
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.models.pretrained import WholeHead, built, facts, parse_config, plain_config
from imdm.models.readout import Chosen, Head, reduced
from imdm.models.variants import to_infinite, with_mask
from imdm.objectives import Step, parse_objective
from imdm.sampling import Sampling, sample
from imdm.training import TrainConfig, Trainer
from tests.models.test_backbone import InFull
from tests.reference.enumeration import all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
GPT2 = {"vocab_size": 12, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
DISTIL = {"vocab_size": 12, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": SIZES | {"num_key_value_heads": 2},
    "qwen3": GROUPED | {"tie_word_embeddings": True},
    "qwen3_moe": GROUPED | EXPERTS,
    "mistral": GROUPED | {"sliding_window": 3},
    "gemma": GROUPED,
    "gemma2": GROUPED | {"sliding_window": 3},
    "gemma3_text": GROUPED | {"sliding_window": 3},
    "smollm3": SIZES | {"num_key_value_heads": 2},
    "olmo2": SIZES | {"num_key_value_heads": 2},
    "gpt2": GPT2,
    "gpt_neox": SIZES,
    "granite": SIZES | {"num_key_value_heads": 2, "logits_scaling": 3.0},
    "cohere": SIZES | {"num_key_value_heads": 2},
    "phi3": SIZES | {"num_key_value_heads": 2},
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "roberta": SIZES | {"pad_token_id": 1},
    "distilbert": DISTIL,
    "modernbert": SIZES | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "electra": SIZES | {"embedding_size": 8},
    "deberta-v2": SIZES,
    "albert": SIZES | {"embedding_size": 8},
    "eurobert": SIZES | {"num_key_value_heads": 2},
}
FAMILIES = {name: {"model_type": name} | fields for name, fields in (CAUSAL | MASKED).items()}
MASK = 11
TOKENS = torch.tensor([[MASK, 3, MASK, 5, 7, MASK], [4, MASK, MASK, MASK, 2, 9]])
HOLES = TOKENS == MASK
LANGUAGE = aligned(length=2, symbols=2)


def made(fields: dict[str, Any], seed: int = 0, shift: bool = False, **changes: Any) -> MaskedDiffusionLM:
    """A model around a backbone whose every weight is random, those that start at zero or one too."""
    torch.manual_seed(seed)
    settings = {"vocab_size": 12, "length": 6, "width": facts(fields).width, "dropout": 0.0}
    backbone = {"kind": "hf", "config": fields, "shift": shift}
    model = MaskedDiffusionLM(MaskedDiffusionConfig(**settings | {"backbone": backbone} | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def theirs(model: MaskedDiffusionLM, fields: dict[str, Any]) -> nn.Module:
    """`transformers`' own model of these weights, by its public classes alone."""
    fields = dict(fields)
    kind = fields.pop("model_type")
    auto = AutoModelForMaskedLM if kind in MASKED else AutoModelForCausalLM
    lm = auto.from_config(AutoConfig.for_model(kind, **fields), attn_implementation="eager")
    weights = {n.removeprefix("lm."): w for n, w in model.state_dict().items() if n.startswith("lm.")}
    lm.load_state_dict(weights)
    return lm.eval()


@torch.no_grad()
def logits_of(lm: nn.Module, causal: bool, tokens: Tensor = TOKENS) -> Tensor:
    """From ids, every position shown to every other by a mask of zeros, added to the scores."""
    length = tokens.shape[1]
    opened = {"attention_mask": torch.zeros(1, 1, length, length), "is_causal": False} if causal else {}
    return lm(input_ids=tokens, **opened).logits


def expected(logits: Tensor, mask: int = MASK) -> Tensor:
    logits = logits.clone()
    logits[..., mask] = -torch.inf
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = made(FAMILIES[name])
    found = model(model.noised(TOKENS), HOLES)
    wanted = expected(logits_of(theirs(model, FAMILIES[name]), name in CAUSAL))[HOLES]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, model(model.noised(TOKENS))[HOLES], atol=1e-6, rtol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = MaskedDiffusionLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(loaded.noised(TOKENS), HOLES), found)
    infinite = to_infinite(model, dim=4)
    assert torch.equal(infinite(infinite.noised(TOKENS), HOLES), found)


def test_opt_counts_positions_by_a_mask_of_its_own() -> None:
    fields = {"model_type": "opt", "vocab_size": 12, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 2, "max_position_embeddings": 16, "word_embed_proj_dim": 16}
    model = made(fields)
    lm = theirs(model, fields)
    with torch.no_grad():
        wanted = expected(lm(input_ids=TOKENS, is_causal=False).logits)[HOLES]
    torch.testing.assert_close(model(model.noised(TOKENS), HOLES), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "llama"])
def test_every_layer_sees_all_positions(name: str) -> None:
    """One layer, or windows would hand on to each other what they cannot see themselves."""
    fields = FAMILIES[name] | {"num_hidden_layers": 1}
    fields |= {"layer_types": ["sliding_attention"]} if name.startswith("gemma") else {}
    model, other = made(fields), TOKENS[:1].clone()
    other[0, -1] = 4
    with torch.no_grad():
        before, after = (model.trunk(model.noised(tokens)) for tokens in (TOKENS[:1], other))
    assert ((before - after).abs().amax(-1) > 1e-6).all()


LINEAR = ["llama", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "mistral", "phi3", "olmo2", "eurobert"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_of_one_linear_layer_is_known_as_such(name: str) -> None:
    model = made(FAMILIES[name])
    rows = torch.randn(5, model.trunk(model.noised(TOKENS)).shape[-1])
    head = model.head_of(rows)
    if name in LINEAR:
        assert head.is_linear
    if head.is_linear:
        whole = WholeHead(model.lm, head.layer.out_features)(rows)
        torch.testing.assert_close(whole, head.layer(rows), atol=1e-6, rtol=1e-6)
    else:
        assert name not in LINEAR
        assert not torch.allclose(
            model.lm.get_output_embeddings()(rows[:, : facts(FAMILIES[name]).width]), head.layer(rows)
        )
    targets = torch.arange(5)
    found = reduced(head, Chosen(targets))
    torch.testing.assert_close(found, head.log_probs().gather(-1, targets[:, None])[:, 0])


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_shifted_a_position_is_predicted_by_the_row_before_it(name: str) -> None:
    model = made(FAMILIES[name], shift=True)
    logits = expected(logits_of(theirs(model, FAMILIES[name]), causal=True))
    wanted = torch.stack([logits[:, max(0, p - 1)] for p in range(6)], 1)[HOLES]
    torch.testing.assert_close(model(model.noised(TOKENS), HOLES), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(model.noised(TOKENS))[HOLES], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_rows_beyond_the_vocabulary_are_never_predicted(name: str) -> None:
    """A table padded to a round number: 9 of its 12 ids mean something."""
    model, tokens = made(FAMILIES[name], vocab_size=9, mask_token_id=6), TOKENS.clamp(max=6)
    found = model(model.noised(tokens), tokens == 6)
    wanted = expected(logits_of(theirs(model, FAMILIES[name]), name in CAUSAL, tokens)[..., :9], 6)[tokens == 6]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    written = model.generate(num=50, steps=2).tokens
    assert int(written.max()) < 9
    assert not (written == 6).any()


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_may_have_fewer_outputs_than_there_are_tokens(bias: bool) -> None:
    layer, rows = nn.Linear(4, 6, bias=bias), torch.randn(3, 4)
    narrow = Head(rows, layer, 6, 7)
    assert not narrow.is_linear
    assert narrow.log_probs().shape == (3, 7)
    assert torch.equal(narrow.log_probs()[:, :6], layer(rows).log_softmax(-1))
    assert bool((narrow.log_probs()[:, 6] == -torch.inf).all())
    wide = Head(rows, layer, 2, 5)
    assert wide.is_linear
    _, weight, added = wide.tensors
    assert torch.equal(expected(rows @ weight.T + added, 2).isfinite(), wide.log_probs().isfinite())
    torch.testing.assert_close(wide.log_probs(), expected(layer(rows)[:, :5], 2))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bert", "albert"])
def test_noise_is_added_to_what_the_model_embeds(name: str) -> None:
    """Eq. 15, by their class: E(mask) + MLP(ε) where masked; Gemma's E has its scale in it."""
    model = made(FAMILIES[name], mask="infinite-uniform-4-1.0")
    lm, state = theirs(model, FAMILIES[name]), model.noised(TOKENS, seed=2)
    weights, noise = model.state_dict(), state.noise
    up = nn.functional.gelu(noise @ weights["mask_embedding.input.weight"].T + weights["mask_embedding.input.bias"])
    added = (up @ weights["mask_embedding.output.weight"].T) * HOLES[..., None]
    opened = {"attention_mask": torch.zeros(1, 1, 6, 6), "is_causal": False} if name in CAUSAL else {}
    with torch.no_grad():
        logits = lm(inputs_embeds=lm.get_input_embeddings()(TOKENS) + added, **opened).logits
    found = model(state, HOLES)
    torch.testing.assert_close(found, expected(logits)[HOLES], atol=1e-5, rtol=1e-5)
    assert float((found - model(model.noised(TOKENS, seed=3), HOLES))[:, :MASK].abs().max()) > 1e-3


def tiny(name: str, **changes: Any) -> MaskedDiffusionLM:
    """Two symbols and the mask, sequences of two."""
    return made(FAMILIES[name] | {"vocab_size": 3}, vocab_size=3, length=2, **changes)


@pytest.mark.parametrize(("name", "shift"), [("llama", False), ("llama", True), ("bert", False)])
@pytest.mark.parametrize(("noise", "steps"), [("posterior", 1), ("posterior", 3), ("keep", 3)])
def test_it_samples_by_the_enumerated_law(name: str, shift: bool, noise: str, steps: int) -> None:
    """The whole N-step chain of Eq. 13 enumerated (false alarm 1e-5 each)."""
    model = tiny(name, shift=shift, mask="finite-2")
    law = sequence_law(chain_law(InFull(model), all_masked(2, 2), steps, noise), 2, 2)
    keys = fold(31, Purpose.SAMPLE, torch.arange(20_000))
    made = sample(model, torch.full((20_000, 2), 2), keys=keys, how=Sampling(steps, noise))  # type: ignore[arg-type]
    assert_law(counts_of(made.tokens, 2), law)


@pytest.mark.parametrize("objective", ["nelbo", "redi", {"kind": "sdtt", "rounds": 2, "iterations": 10}])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_it_trains(name: str, objective: Any, tmp_path: Path) -> None:
    """Under each objective the loss of the same batch falls, and what was trained comes back from disk."""
    source: Any = LanguageSource(LANGUAGE)
    if objective == "redi":
        couple(tiny(name, mask="infinite-uniform-4-1.0"), source, CoupleConfig(pairs=64, steps=8), tmp_path / "pairs")
        source = Coupling(tmp_path / "pairs")
    student = tiny(name, mask="infinite-uniform-4-1.0", shift=name == "gpt2")
    start = tiny(name, mask="infinite-uniform-4-1.0", shift=name == "gpt2", seed=1)
    first, batch = copy.deepcopy(student), source.rows(torch.arange(64))

    @torch.no_grad()
    def loss(model: MaskedDiffusionLM) -> float:
        kind = parse_objective(objective)
        teacher = kind.companion(model.eval(), start)
        return float(kind.loss(model, model.process, batch, Step(0, 0, torch.arange(64), 64), teacher))

    config = TrainConfig(steps=20, batch=32, lr=1e-2, warmup=0, ema=0.5, checkpoint_every=20)
    run = Trainer(student, parse_objective(objective), source, config, tmp_path / "run", start=start)
    trained = load_model(run.train())
    assert loss(trained) < loss(first)
    assert not torch.equal(trained.get_input_embeddings().weight, first.get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["qwen3", "bert"])
def test_a_run_in_two_parts_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    """Tied weights, dropout and a mask's noise among them."""

    def train(folder: Path, steps: int) -> dict[str, Tensor]:
        model = tiny(name, mask="infinite-uniform-4-1.0", dropout=0.2)
        config = TrainConfig(steps=steps, batch=8, lr=1e-2, warmup=2, ema=0.9, checkpoint_every=3, log_every=3)
        Trainer(model, parse_objective("nelbo"), LanguageSource(LANGUAGE), config, folder, seed=3).train()
        return load_file(folder / "raw" / "model.safetensors") | load_file(folder / "model" / "model.safetensors")

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 3)
    parts = train(tmp_path / "parts", 6)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_weights_keep_their_names(tmp_path: Path) -> None:
    """A student of a Llama is that Llama, below `lm.`, and what reads its masks."""
    model = made(FAMILIES["llama"], mask="infinite-uniform-4-1.0")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = {name for name in saved if not name.startswith("lm.")}
    assert {name.split(".")[0] for name in ours} == {"mask_embedding"}
    assert "lm.model.layers.0.self_attn.q_proj.weight" in saved
    assert {name.removeprefix("lm.") for name in saved if name not in ours} == set(
        theirs(model, FAMILIES["llama"]).state_dict()
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["backbone"] == {"kind": "hf", "config": FAMILIES["llama"], "shift": False}
    tied = made(FAMILIES["qwen3"])
    assert tied.lm.lm_head.weight is tied.lm.model.embed_tokens.weight
    tied.save_pretrained(tmp_path / "tied")
    loaded = load_model(tmp_path / "tied")
    assert loaded.lm.lm_head.weight is loaded.lm.model.embed_tokens.weight
    assert "lm.lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert fingerprint(loaded) == fingerprint(tied)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma3_text"])
def test_in_bf16_what_is_computed_and_not_learnt_stays_as_it_is(name: str, tmp_path: Path) -> None:
    model = made(FAMILIES[name])
    tables = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
    half = faster(model, dtype=torch.bfloat16, compile=False)
    half.save_pretrained(tmp_path)
    for other in (half, MaskedDiffusionLM.from_pretrained(tmp_path, dtype=torch.bfloat16), to_infinite(half, dim=4)):
        assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
        for buffer, table in other.named_buffers():
            if buffer in tables and "embed_scale" not in buffer:
                assert torch.equal(table, tables[buffer])
    rounded = load_model(tmp_path)
    assert {p.dtype for p in rounded.parameters()} == {torch.float32}
    difference = rounded(rounded.noised(TOKENS), HOLES) - model(model.noised(TOKENS), HOLES)
    assert float(difference[:, :MASK].abs().max()) < 0.3


def test_another_mask_copies_the_backbone_and_makes_its_own_layers_anew() -> None:
    model = made(FAMILIES["llama"], mask="infinite-uniform-4-1.0").requires_grad_(False)
    first, second, third = (with_mask(model, "infinite-normal-5-1.0", seed, mixture=True) for seed in (0, 0, 1))
    for name, weight in first.named_parameters():
        assert weight.requires_grad
        assert torch.equal(weight, second.get_parameter(name))
        if name.startswith("lm."):
            assert torch.equal(weight, model.get_parameter(name))
            assert weight.data_ptr() != model.get_parameter(name).data_ptr()
    assert not torch.equal(first.mask_embedding.input.weight, third.mask_embedding.input.weight)
    assert not torch.equal(first.mixture.first.weight, third.mixture.first.weight)
    assert bool((first.mask_embedding.output.weight == 0).all())
    assert first.backbone.lm is first.lm


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_layer_put_in_its_place_is_heard(name: str) -> None:
    model, state = made(FAMILIES[name]), made(FAMILIES[name]).noised(TOKENS)
    for get, put in (
        ("get_input_embeddings", "set_input_embeddings"),
        ("get_output_embeddings", "set_output_embeddings"),
    ):
        before, other = model(state, HOLES), copy.deepcopy(getattr(model, get)())
        nn.init.normal_(other.weight)
        getattr(model, put)(other)
        assert getattr(model, get)() is other
        assert not torch.allclose(model(state, HOLES), before)
    assert all(key.startswith("lm.") for key in model.state_dict())


def test_it_drops_at_one_rate() -> None:
    for name in ("bert", "llama", "gpt2"):
        model = made(FAMILIES[name], dropout=0.3).train()
        first, second = (model(model.noised(TOKENS), HOLES) for _ in range(2))
        assert not torch.equal(first, second)
        model.set_dropout(0.0)
        assert torch.equal(model(model.noised(TOKENS), HOLES), model.eval()(model.noised(TOKENS), HOLES))


def test_a_mixtures_latent_comes_last() -> None:
    model = made(FAMILIES["qwen2"], mixture=True, shift=True)
    state = model.noised(TOKENS)
    assert model.trunk(state).shape == (2, 6, 16)
    assert not torch.equal(model(state, HOLES), model(model.noised(TOKENS, seed=1), HOLES))
    assert model.generate(num=3, steps=2).tokens.shape == (3, 6)


@pytest.mark.parametrize("training", [False, True])
def test_several_threads_write_what_one_writes(training: bool) -> None:
    """While it trains, without its dropout."""
    model = made(FAMILIES["gemma2"], dropout=0.5).train(training)
    wanted = [model.generate(num=4, steps=3, seed=seed).tokens for seed in range(8)]
    found: dict[int, Tensor] = {}

    def write(number: int) -> None:
        for seed in range(number, 8, 4):
            found[seed] = model.generate(num=4, steps=3, seed=seed).tokens

    threads = [Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], one) for seed, one in enumerate(wanted))


def test_a_recipe_may_ask_for_one() -> None:
    settings = {"width": 16, "backbone": {"kind": "hf", "config": FAMILIES["gpt2"]}, "mask": "infinite-uniform-4-1.0"}
    config = ModelSettings.parse(settings).build(12, MASK, 6)
    model = MaskedDiffusionLM(config)
    assert model.generate(num=2, steps=2).tokens.shape == (2, 6)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(config.parameters - count) < 0.05 * count
    assert "GPT2, 2 layers of width 16" in repr(model)


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_it_is_exported(weights: Any, tmp_path: Path) -> None:
    """Tied weights are."""
    model = made(FAMILIES["qwen3"], mask="infinite-uniform-4-1.0")
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", weights=weights)
    loaded = load_model(tmp_path / "out")
    difference = loaded(loaded.noised(TOKENS), HOLES) - model(model.noised(TOKENS), HOLES)
    assert float(difference[:, :MASK].abs().max()) < 0.3


LLAMA = FAMILIES["llama"]
ESM = {"model_type": "esm", "token_dropout": True, "mask_token_id": 11, "position_embedding_type": "rotary"} | SIZES
NEO: dict[str, Any] = {"model_type": "gpt_neo", "vocab_size": 12, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
NEO |= {"attention_types": [[["global"], 1]]}
LLAMA4 = {"model_type": "llama4_text", "intermediate_size_mlp": 16, "head_dim": 8, "num_local_experts": 2} | SIZES
RWKV = {"model_type": "rwkv", "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2}
MAMBA = {"model_type": "mamba", "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        (ESM, {}, "read token ids beside the embeddings"),
        (NEO, {}, "cannot be made bidirectional"),
        (RWKV, {}, "cannot be made bidirectional"),
        ({"model_type": "gemma3"}, {"width": 16}, "'gemma3' models read more than text"),
        (MAMBA, {}, "layers that are always causal"),
        ({"model_type": "recurrent_gemma"}, {"width": 16}, "layers that are always causal"),
        (LLAMA4, {}, "'llama4_text' models do not name the part before their head"),
        ({"model_type": "t5"}, {"width": 512}, "are encoder-decoders"),
        ({"model_type": "qwen3_next"}, {"width": 16}, "layers that are always causal"),
        ({"model_type": "vit"}, {"width": 16}, "no language model's head"),
        ({"model_type": "llada2_moe"}, {"width": 16}, "unknown model_type"),
        (LLAMA | {"hidden_size": "wide"}, {"width": 16}, "not a configuration of 'llama'"),
        (LLAMA | {"hidden_act": "none"}, {"width": 16}, "no model can be built from it"),
        (LLAMA | {"auto_map": {}}, {"width": 16}, "leave it out"),
        (LLAMA | {"quantization_config": {}}, {"width": 16}, "quantised"),
        (LLAMA, {"width": 8}, "the backbone's embeddings have width 16"),
        (LLAMA, {"vocab_size": 13}, "embeds 12 ids"),
        (LLAMA, {"length": 17}, "the backbone has 16"),
        (FAMILIES["roberta"], {"length": 15}, "15 positions, the backbone has 14"),
        (FAMILIES["bert"], {"length": 16, "mixture": True}, "17 positions"),
        (LLAMA, {"tie_word_embeddings": True}, "in its own config"),
        (LLAMA, {"softcap": 5.0}, "sets this in its own config"),
        (FAMILIES["bert"], {"causal": True}, "'bert' models are bidirectional; use a causal one"),
    ],
)
def test_what_cannot_be_gets_a_sentence(fields: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        made(fields, **changes)


def in_half(fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Such weights around which a model is made."""
    backbone = {"kind": "hf", "config": fields}
    config = MaskedDiffusionConfig(vocab_size=12, length=6, width=facts(fields).width, dropout=0.0, backbone=backbone)
    MaskedDiffusionLM.around(config, built(fields).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (ESM, "read token ids beside the embeddings"),
        (NEO | {"num_layers": 3, "attention_types": [[["global"], 3]]}, "cannot be made bidirectional"),
        (RWKV, "cannot be made bidirectional"),
    ],
    ids=["esm", "gpt_neo", "rwkv"],
)
def test_half_precision_hides_nothing(fields: dict[str, Any], words: str, dtype: torch.dtype) -> None:
    """Such weights cannot be tried on every machine; two layers of the same kind are, in float32."""
    with pytest.raises(UserError, match=words):
        in_half(fields, dtype)


MPNET = SIZES | {"model_type": "mpnet", "vocab_size": 12, "pad_token_id": 1}
FUNNEL = {"model_type": "funnel", "vocab_size": 12, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8}
FUNNEL |= {"d_inner": 16, "num_decoder_layers": 1}


def deeper(fields: dict[str, Any]) -> dict[str, Any]:
    """The same with four layers."""
    config = parse_config(fields)
    layers = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, (4 * value)[:4])
    config.num_hidden_layers = 4
    return plain_config(config.to_dict() | {"model_type": config.model_type})


@pytest.mark.parametrize("kind", [*FAMILIES, "mpnet", "funnel"])
def test_what_works_is_not_refused_in_half_precision(kind: str) -> None:
    """Of four layers two are tried."""
    in_half({"funnel": FUNNEL, "mpnet": MPNET}[kind] if kind in ("funnel", "mpnet") else deeper(FAMILIES[kind]))


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_what_can_be_captured_says_how_many_weights_a_position_costs(kind: str) -> None:
    """Not experts, nor encoders, of which `transformers` does not say that their operations are always the same."""
    model = made(FAMILIES[kind])
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and name.startswith("lm.")]
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    outside |= {id(weight) for name, weight in model.named_parameters() if "wpe" in name}
    if kind == "qwen3_moe" or (kind in MASKED and kind != "eurobert"):
        assert model.backbone.weights is None
    else:
        assert model.backbone.weights == sum(weight.numel() for weight in matrices if id(weight) not in outside)
