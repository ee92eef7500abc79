"""Folders as LLaDA, Dream, A2D, DiffuLLaMA, BERT and causal language models are published, taken in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

import imdm
from imdm.adopting.adopt import adopt_into
from imdm.core.errors import UserError
from imdm.models.loading import load_model
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused
from tests.models.test_hf import CAUSAL, FAMILIES, GPT2, HOLES, MASK, SIZES, TOKENS, expected, logits_of
from tests.reference.published import llada_logits

LLADA = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_type": "llama",
    "d_model": 16,
    "embedding_size": 16,
    "eos_token_id": 8,
    "include_bias": False,
    "include_qkv_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": MASK,
    "max_sequence_length": 6,
    "mlp_hidden_size": 24,
    "mlp_ratio": 4,
    "multi_query_attention": None,
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "vocab_size": 16,
    "weight_tying": False,
}
LLADA_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


def random_lm(kind: str, seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    fields.pop("model_type", None)
    auto = AutoModelForCausalLM if kind in CAUSAL else AutoModelForMaskedLM
    lm = auto.from_config(AutoConfig.for_model(kind, **fields), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return lm


def words(folder: Path, size: int, **special: str) -> None:
    """A tokenizer of the words w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1", pad_token="w0", **special).save_pretrained(folder)


def llada(folder: Path, **changes: Any) -> Any:
    """LLaDA's folder, and a Llama of the same weights."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    fields = SIZES | {"vocab_size": 16, "max_position_embeddings": 6, "rms_norm_eps": 1e-5, "rope_parameters": rope}
    lm = random_lm("llama", **fields)
    tensors = {}
    for name, weight in lm.state_dict().items():
        layer, _, part = name.rpartition(".")
        if layer.startswith("model.layers."):
            _, _, number, inner = layer.split(".", 3)
            tensors[f"model.transformer.blocks.{number}.{LLADA_NAMES[inner]}.{part}"] = weight
        else:
            ends = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
            tensors[f"model.transformer.{ends[layer]}.{part}"] = weight
    folder.mkdir(exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLADA | changes))
    return lm


def retyped(folder: Path, **changes: Any) -> None:
    """Its config.json says something else; None: nothing."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def agree(model: Any, logits: Tensor, shift: bool = False, tokens: Tensor = TOKENS) -> None:
    """The model says what these logits of all positions say."""
    size, mask = model.config.vocab_size, model.config.mask_token_id
    wanted = expected(logits[..., :size], mask)
    if shift:
        wanted = torch.stack([wanted[:, max(0, p - 1)] for p in range(wanted.shape[1])], 1)
    found = model(model.noised(tokens), tokens == mask)
    torch.testing.assert_close(found, wanted[tokens == mask], atol=1e-5, rtol=1e-5)


def test_llada(tmp_path: Path) -> None:
    lm = llada(tmp_path / "llada")
    model = imdm.adopt(tmp_path / "llada")
    agree(model, logits_of(lm, causal=True))
    agree(model, llada_logits(load_file(tmp_path / "llada" / "model.safetensors"), TOKENS, heads=2, theta=5e5))
    assert (model.config.length, model.config.mask_token_id, model.config.vocab_size) == (6, MASK, 16)
    assert (model.config.blocks, model.config.heads, model.config.dropout) == (2, 2, 0.0)
    assert not model.training
    words(tmp_path / "llada", 13)
    model = imdm.adopt(tmp_path / "llada", length=4)
    assert (model.config.vocab_size, model.config.length) == (13, 4)  # the table is padded from 13 to 16
    assert {name.split(".")[0] for name in model.state_dict()} == {"lm"}
    assert {name.removeprefix("lm.") for name in model.state_dict()} == set(lm.state_dict())


@pytest.mark.parametrize("kept", ["both", "embed_tokens", "lm_head", "untied"])
def test_diffugpt(kept: str, tmp_path: Path) -> None:
    """A GPT-2 whose trunk is called `denoise_model`, its embedding taken out; what is tied may be there once."""
    lm = random_lm("gpt2", **GPT2, tie_word_embeddings=kept != "untied")
    tensors = {}
    for name, weight in lm.state_dict().items():
        tensors[name.replace("transformer.wte", "embed_tokens").replace("transformer.", "denoise_model.")] = weight
    other = {"embed_tokens": "lm_head.weight", "lm_head": "embed_tokens.weight"}.get(kept)
    tensors = {name: weight.clone() for name, weight in tensors.items() if name != other}
    save_file(tensors | {"denoise_model.h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="does not give the mask's id"):
        imdm.adopt(tmp_path, heads=2, length=6)
    model = imdm.adopt(tmp_path, heads=2, length=6, mask_token_id=MASK)
    agree(model, logits_of(lm, causal=True), shift=True)
    assert model.config.backbone["config"]["tie_word_embeddings"] == (kept != "untied")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 2, "mask_token_id": MASK}))
    agree(imdm.adopt(tmp_path), logits_of(lm, causal=True), shift=True)
    assert imdm.adopt(tmp_path).config.length == 16


@pytest.mark.parametrize(("rows", "mask"), [(50_257, 10_541), (50_258, 50_257)])
def test_the_masks_of_diffugpt(rows: int, mask: int) -> None:
    from imdm.adopting.families import diffugpt

    shapes = {"embed_tokens.weight": (rows, 128), "denoise_model.wpe.weight": (1024, 128)}
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()} | {
        "denoise_model.h.0.ln_1.bias": torch.ones(1)
    }
    family = diffugpt(tensors, {}, None, "it")
    assert (family.mask, family.shift, family.fields["n_head"], family.fields["n_layer"]) == (mask, True, 2, 1)


@pytest.mark.parametrize("name", ["block_type", "alibi", "include_qkv_bias"])
def test_a_llada_that_is_no_llama_is_refused(name: str, tmp_path: Path) -> None:
    llada(tmp_path / "llada", **{name: "other"})
    with pytest.raises(UserError, match=f"its {name} is 'other', which Llama does not have"):
        imdm.adopt(tmp_path / "llada")


def test_dream(tmp_path: Path) -> None:
    lm = random_lm("qwen2", **FAMILIES["qwen2"] | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    lm.save_pretrained(tmp_path)
    retyped(tmp_path, model_type="Dream", architectures=["DreamModel"], mask_token_id=MASK)
    retyped(tmp_path, auto_map={"AutoModel": "m.DreamModel"}, rope_parameters=None, rope_theta=1e6, layer_types=None)
    model = imdm.adopt(tmp_path, length=6)
    agree(model, logits_of(lm, causal=True), shift=True)
    assert imdm.adopt(tmp_path).config.length == 16


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a2d_is_its_stock_model_and_its_tokenizer_says_the_mask(kind: str, tmp_path: Path) -> None:
    lm = random_lm(kind, **FAMILIES[kind])
    lm.save_pretrained(tmp_path)
    retyped(tmp_path, model_type=f"a2d-{kind}", architectures=["A2DLMHeadModel"])
    with pytest.raises(UserError, match="its config.json does not give the mask's id, and there is no tokenizer"):
        imdm.adopt(tmp_path)
    words(tmp_path, 12, mask_token=f"w{MASK}")
    model = imdm.adopt(tmp_path, length=6)
    assert model.config.mask_token_id == MASK
    agree(model, logits_of(lm, causal=True))


@pytest.mark.parametrize("shift", [True, False])
def test_a_causal_model_that_was_trained_as_a_diffusion_model(shift: bool, tmp_path: Path) -> None:
    """DiffuLLaMA's folder is a plain Llama's: shift and mask have to be said."""
    lm = random_lm("llama", **FAMILIES["llama"])
    lm.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its config.json does not give the mask's id"):
        imdm.adopt(tmp_path, shift=shift)
    with pytest.raises(UserError, match=r"is a causal language model \(llama\): adapt it"):
        imdm.adopt(tmp_path, mask_token_id=7)
    tokens = TOKENS.clamp(max=7)
    model = imdm.adopt(tmp_path, mask_token_id=7, shift=shift, length=6)
    agree(model, logits_of(lm, causal=True, tokens=tokens), shift, tokens)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert", "electra", "albert", "deberta-v2"])
def test_masked_language_models(kind: str, tmp_path: Path) -> None:
    lm = random_lm(kind, **FAMILIES[kind])
    lm.save_pretrained(tmp_path)
    model = imdm.adopt(tmp_path, mask_token_id=MASK, length=6)
    agree(model, logits_of(lm, causal=False))
    with pytest.raises(UserError, match="there is nothing to adapt"):
        imdm.adopt(tmp_path, mask_token_id=MASK, adapt=True)


def test_berts_folder_has_more_than_its_language_model(tmp_path: Path) -> None:
    lm = random_lm("bert", **FAMILIES["bert"])
    lm.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    more = {"bert.pooler.dense.weight": torch.ones(16, 16), "cls.seq_relationship.bias": torch.ones(2)}
    save_file(weights | more | {"bert.embeddings.position_ids": torch.arange(16)[None]}, tmp_path / "model.safetensors")
    agree(imdm.adopt(tmp_path, mask_token_id=MASK, length=6), logits_of(lm, causal=False))
    save_file(weights | {"bert.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="the tensor 'bert.extra' is too much for a BertForMaskedLM"):
        imdm.adopt(tmp_path, mask_token_id=MASK)
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'bert.encoder.layer.1.output.dense.weight' is missing"):
        imdm.adopt(tmp_path, mask_token_id=MASK)
    save_file(weights | {"bert.encoder.layer.1.output.dense.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="do not have the shapes"):
        imdm.adopt(tmp_path, mask_token_id=MASK)


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", False), ("gemma2", True)])
def test_a_causal_model_to_be_adapted_gets_a_row_for_the_mask(kind: str, tied: bool, tmp_path: Path) -> None:
    lm = random_lm(kind, **FAMILIES[kind])
    lm.save_pretrained(tmp_path / "lm")
    model = imdm.adopt(tmp_path / "lm", adapt=True, length=6)
    assert (model.config.vocab_size, model.config.mask_token_id) == (13, 12)
    assert model.config.backbone["shift"]
    old, new = lm.get_input_embeddings().weight.detach().clone(), model.get_input_embeddings().weight
    assert torch.equal(new[:12], old)
    torch.testing.assert_close(new[12], old.mean(0))
    assert (model.lm.get_output_embeddings().weight is new) == tied
    lm.resize_token_embeddings(13, mean_resizing=False)
    with torch.no_grad():
        lm.get_input_embeddings().weight[12] = old.mean(0)
    tokens = torch.where(HOLES, 12, TOKENS)
    agree(model, logits_of(lm, causal=True, tokens=tokens), True, tokens)
    model.save_pretrained(tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    assert torch.equal(loaded(loaded.noised(tokens), HOLES), model(model.noised(tokens), HOLES))


def test_the_mask_is_the_tokenizers_or_a_row_of_the_padding(tmp_path: Path) -> None:
    lm = random_lm("gpt2", **GPT2)
    lm.save_pretrained(tmp_path)
    words(tmp_path, 10)
    model = imdm.adopt(tmp_path, adapt=True)
    assert (model.config.vocab_size, model.config.mask_token_id) == (11, 10)
    assert model.get_input_embeddings().weight.shape[0] == 12
    torch.testing.assert_close(model.get_input_embeddings().weight[10], lm.transformer.wte.weight[:10].mean(0))
    words(tmp_path, 10, mask_token="w4")
    model = imdm.adopt(tmp_path, adapt=True)
    assert (model.config.vocab_size, model.config.mask_token_id) == (10, 4)
    assert torch.equal(model.get_input_embeddings().weight, lm.transformer.wte.weight)
    words(tmp_path, 14, mask_token="w4")
    with pytest.raises(UserError, match="embeds 12 ids, but its tokenizer and mask need 14"):
        imdm.adopt(tmp_path, adapt=True)


def test_weights_keep_their_precision_and_may_come_in_parts(tmp_path: Path) -> None:
    lm = random_lm("llama", **FAMILIES["llama"]).to(torch.bfloat16)
    lm.save_pretrained(tmp_path / "parts", max_shard_size="3KB")
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    half = imdm.adopt(tmp_path / "parts", mask_token_id=MASK, shift=False)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.lm.model.rotary_emb.inv_freq.dtype == torch.float32
    whole = imdm.adopt(tmp_path / "parts", mask_token_id=MASK, shift=False, length=6, dtype=torch.float32)
    rounded, lm = lm.state_dict(), random_lm("llama", **FAMILIES["llama"])
    lm.load_state_dict(rounded)
    agree(whole, logits_of(lm, causal=True))
    (tmp_path / "old").mkdir()
    torch.save(lm.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    lm.config.save_pretrained(tmp_path / "old")
    agree(imdm.adopt(tmp_path / "old", mask_token_id=MASK, shift=False, length=6), logits_of(lm, causal=True))


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    lm = random_lm("llama", **FAMILIES["llama"])
    lm.save_pretrained(tmp_path / "lm")
    (tmp_path / "lm" / "modeling_trap.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')")
    (tmp_path / "lm" / "configuration_trap.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')")
    auto = {
        "AutoConfig": "configuration_trap.C",
        "AutoModelForCausalLM": "modeling_trap.M",
        "AutoModel": "modeling_trap.M",
    }
    retyped(tmp_path / "lm", auto_map=auto, mask_token_id=MASK)
    agree(imdm.adopt(tmp_path / "lm", shift=False, length=6), logits_of(lm, causal=True))
    assert not (tmp_path / "trap").exists()


def test_with_another_mask_it_says_the_same_until_trained(tmp_path: Path) -> None:
    llada(tmp_path / "llada")
    plain, infinite = (imdm.adopt(tmp_path / "llada", mask=mask) for mask in (None, "infinite-uniform-4-1.0"))
    assert infinite.mask.name == "infinite-uniform-4-1.0"
    assert torch.equal(infinite(infinite.noised(TOKENS), HOLES), plain(plain.noised(TOKENS), HOLES))


def test_with_its_tokenizer_it_writes_text(tmp_path: Path) -> None:
    """LLaDA's tokenizer has a token for the mask, and does not say so."""
    llada(tmp_path / "llada")
    words(tmp_path / "llada", 13)
    adopt_into(tmp_path / "llada", tmp_path / "ours")
    writer = imdm.load(tmp_path / "ours")
    assert writer.tokenizer.mask_token == f"w{MASK}"
    assert len(writer.write("w3 w4", num=2, steps=2)) == 2
    words(tmp_path / "other", 9, mask_token="w2")
    with pytest.raises(
        UserError, match="has a tokenizer of its own, of 13 ids; the one given, of 9, does not agree with it"
    ):
        adopt_into(tmp_path / "llada", tmp_path / "no", tokenizer=str(tmp_path / "other"))


def test_a_larger_tokenizer_of_the_same_ids_may_be_given(tmp_path: Path) -> None:
    random_lm("gpt2", **GPT2).save_pretrained(tmp_path / "it")
    words(tmp_path / "it", 10)
    words(tmp_path / "more", 11, mask_token="w10")
    adopt_into(tmp_path / "it", tmp_path / "ours", adapt=True, tokenizer=str(tmp_path / "more"))
    assert imdm.load(tmp_path / "ours").model.config.mask_token_id == 10


def test_a_tokenizer_may_name_a_special_token_anew_or_replace_a_damaged_one(tmp_path: Path) -> None:
    random_lm("gpt2", **GPT2).save_pretrained(tmp_path / "it")
    words(tmp_path / "it", 12)
    words(tmp_path / "named", 12)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / "named" / name
        file.write_text(file.read_text().replace('"w11"', '"<|mask|>"'))
    settings = tmp_path / "named" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"mask_token": "<|mask|>"}))
    adopt_into(tmp_path / "it", tmp_path / "ours", adapt=True, tokenizer=str(tmp_path / "named"))
    assert imdm.load(tmp_path / "ours").model.config.mask_token_id == 11
    (tmp_path / "it" / "tokenizer.json").write_text("{")
    adopt_into(tmp_path / "it", tmp_path / "again", adapt=True, tokenizer=str(tmp_path / "named"))


def test_the_mask_is_asked_for_by_what_is_missing(tmp_path: Path) -> None:
    random_lm("bert", **FAMILIES["bert"]).save_pretrained(tmp_path / "it")
    with pytest.raises(UserError, match="there is no tokenizer beside it; give one"):
        imdm.adopt(tmp_path / "it")
    words(tmp_path / "it", 12)
    with pytest.raises(UserError, match="nor the tokenizer, of 12 ids, gives the mask's id"):
        imdm.adopt(tmp_path / "it")


def test_a_model_without_a_head_is_named_so(tmp_path: Path) -> None:
    random_lm("bert", **FAMILIES["bert"]).bert.save_pretrained(tmp_path / "it")
    with pytest.raises(UserError, match="saved without the head of a language model: a BertForMaskedLM has 'cls."):
        imdm.adopt(tmp_path / "it", mask_token_id=MASK)


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("gpt2", "did you mean openai-community/gpt2\\?"),
        ("bert-base-uncased", "did you mean google-bert/bert-base-uncased\\?"),
        ("distilbert-base-cased", "did you mean distilbert/distilbert-base-cased\\?"),
        ("mybret", "did you mean mybert\\?"),
        ("bert-mien", "did you mean bert-mine\\?"),
        ("nothing-like-it", "nor a hub id \\(owner/name\\)$"),
    ],
)
def test_what_a_wrong_name_may_have_meant(
    source: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mybert", "bert-mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=meant):
        imdm.adopt(source)


def test_a_model_in_the_place_of_its_folder() -> None:
    with pytest.raises(UserError, match="give the folder of a model, not the model: save it first"):
        imdm.adopt(random_lm("gpt2", **GPT2))


def test_no_token_is_without_a_word(tmp_path: Path) -> None:
    """A mask behind unused rows of the embedding, or behind its end, would leave such tokens between."""
    llada(tmp_path / "padded", mask_token_id=MASK + 3)
    words(tmp_path / "padded", MASK)
    with pytest.raises(UserError, match=f"mask_token_id = {MASK + 3}, but the tokenizer has {MASK} ids"):
        imdm.adopt(tmp_path / "padded")
    random_lm("gpt2", **GPT2).save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="mask_token_id = 30, but the embedding has 12 ids"):
        imdm.adopt(tmp_path / "plain", adapt=True, mask_token_id=30)
    assert imdm.adopt(tmp_path / "plain", adapt=True, mask_token_id=12).config.vocab_size == 13


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"shift": "no"}, "shift = 'no': expected True or False"),
        ({"adapt": "no"}, "adapt = 'no': expected True or False"),
        ({"causal": 1}, "causal = 1: expected True or False"),
        ({"averaged": "no"}, "averaged = 'no': expected True or False"),
        ({"whole": None}, "whole = None: expected True or False"),
        ({"dtype": torch.int8}, "dtype = torch.int8: expected one of torch.float32, torch.bfloat16, torch.float16"),
        ({"adapt": True, "mask_token_id": "x"}, "mask_token_id = 'x'"),
    ],
)
def test_arguments_of_another_kind_are_refused(how: dict[str, Any], why: str, tmp_path: Path) -> None:
    random_lm("gpt2", **GPT2).save_pretrained(tmp_path / "it")
    with pytest.raises(UserError, match=why):
        imdm.adopt(tmp_path / "it", **how)
    with pytest.raises(UserError, match=why):
        imdm.adopt_into(tmp_path / "it", tmp_path / "out", **how)
    with pytest.raises(UserError, match="adopt_into has no argument 'lenght'"):
        imdm.adopt_into(tmp_path / "it", tmp_path / "out", lenght=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mask_token_id": "x"}, "mask_token_id = 'x'"),
        ({"num_attention_heads": 3}, "hidden size .* not a multiple of .* attention heads"),
        ({"hidden_act": "bogus"}, "backbone.config of 'llama': no model can be built from it: no entry 'bogus'"),
    ],
)
def test_a_wrong_configuration_is_named(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    random_lm("llama", **FAMILIES["llama"]).save_pretrained(tmp_path)
    retyped(tmp_path, **changes)
    with pytest.raises(UserError, match=why):
        imdm.adopt(tmp_path, adapt=True)


@pytest.mark.parametrize(
    ("changes", "how", "words"),
    [
        ({"model_type": "llada2_moe"}, {}, "a block diffusion model"),
        ({"model_type": "sdar"}, {}, "a block diffusion model"),
        ({"model_type": "unheard-of"}, {}, "nor does a config.json beside them name a model"),
        ({"model_type": "t5"}, {}, "models are encoder-decoders"),
        ({"quantization_config": {"bits": 4}}, {}, "quantised"),
        ({"max_position_embeddings": None}, {"heads": 2}, "heads: .* has it in its own config.json"),
        ({"sliding_window": None}, {"softcap": 2.0}, "softcap: .* has it in its own config.json"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], how: dict[str, Any], words: str, tmp_path: Path) -> None:
    random_lm("llama", **FAMILIES["llama"]).save_pretrained(tmp_path)
    retyped(tmp_path, **changes)
    with pytest.raises(UserError, match=words):
        imdm.adopt(tmp_path, adapt=True, **how)


def test_the_command(tmp_path: Path) -> None:
    random_lm("gpt2", **GPT2).save_pretrained(tmp_path / "gpt2")
    assert "adapt it" in refused(command("adopt", tmp_path / "gpt2", "--out", tmp_path / "no"))
    said = command("adopt", tmp_path / "gpt2", "--adapt", "--length", "6", "--out", tmp_path / "ours").stdout
    assert "GPT2, 2 layers of width 16" in said
    assert "13 ids, the mask is 12" in said
    assert "before it is trained" in said
    assert command("generate", tmp_path / "ours", "--steps", "2").stdout.strip()
    how = ("--no-shift", "--mask-token-id", "3", "--length", "6", "--mask", "infinite-uniform-4-1.0")
    said = command("adopt", tmp_path / "gpt2", *how, "--out", tmp_path / "second").stdout
    assert "mask infinite-uniform-4-1.0" in said
    assert not load_model(tmp_path / "second").config.backbone["shift"]


def test_heads_that_a_rotary_buffer_contradicts_are_refused(tmp_path: Path) -> None:
    """The shapes of a Llama's matrices do not depend on the number of heads; older files hold half a head's width."""
    kind = AutoConfig.for_model("llama", vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                num_attention_heads=2, max_position_embeddings=6)  # fmt: skip
    AutoModelForCausalLM.from_config(kind).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(weights | {buffer: torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert imdm.adopt(tmp_path, adapt=True, mask_token_id=10).config.heads == 2
    save_file(weights | {buffer: torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="half of another head's width"):
        imdm.adopt(tmp_path, adapt=True, mask_token_id=10)
