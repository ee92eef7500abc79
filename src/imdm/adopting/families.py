"""Folders of `transformers` models, and of published models that are such a model under another name.

LLaDA                          Llama, its layers renamed
Dream                          Qwen2; each position predicted by the row before it
DiffuGPT                       GPT-2, its parts renamed; shifted too
A2D (`a2d-llama`, …)           the model after `a2d-`
BERT, RoBERTa, ModernBERT, …   themselves, with the head for masked tokens
Llama, Qwen, Gemma, GPT-2, …   themselves, with bidirectional attention: a causal model to be adapted, or one that was
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imdm.adopting.checkpoints import Weights
from imdm.adopting.configuration import check_agrees
from imdm.core.errors import UserError, check_whole, reason_of
from imdm.data.tokenizers import special_ids
from imdm.diffusion.masks import parse_mask
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.pretrained import attention_of, class_of, facts, is_masked, parse_config, plain_config
from imdm.models.shape import Shape
from imdm.models.variants import with_mask

DIFFUGPT = "denoise_model."
DIFFUGPT_MASKS = {50_257: 10_541, 50_258: 50_257}  # by how many ids it embeds
BERT = 30_522, 103  # ids of its vocabulary, the mask's among them
LLADA_LAYERS = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
LLADA_ENDS = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
LLADA_SWITCHES = {"block_type": "llama", "activation_type": "silu", "layer_norm_type": "rms", "rope": True}
LLADA_OFF = ["alibi", "include_bias", "include_qkv_bias", "attention_layer_norm", "multi_query_attention", "clip_qkv"]
LLADA_OFF += ["scale_logits", "input_emb_norm"]
NOT_NEEDED = re.compile(r"(^|\.)(pooler|seq_relationship)\.|(^|\.)(position_ids|inv_freq|masked_bias|attn\.bias)$")
"""Tensors that do not affect what a language model predicts."""


@dataclass(frozen=True)
class Family:
    """A model's family, from its configuration. fields: of `transformers`' configuration; shift: None if unknown, as
    for causal models; mask: its id, None if unknown."""

    name: str
    fields: dict[str, Any]
    shift: bool | None
    mask: int | None


def family_of(raw: Mapping[str, Any], where: str) -> Family | None:
    """The family that a configuration is of; None: none of these."""
    from transformers import CONFIG_MAPPING

    kind = str(raw.get("model_type", "")).lower()
    fields, mask = plain_config(dict(raw)), raw.get("mask_token_id")
    fields.pop("mask_token_id", None)
    if kind.startswith("llada") and (raw.get("num_experts") or "moe" in str(raw.get("architectures", "")).lower()):
        raise UserError(f"{where}: it is a mixture of experts, which is not supported; LLaDA's dense models are")
    if kind == "llada":
        return Family(kind, _llada(raw, where), False, mask)
    if kind == "dream":
        return Family(kind, fields | {"model_type": "qwen2"}, True, mask)
    stock = kind.removeprefix("a2d-")
    if stock not in CONFIG_MAPPING:
        return None
    fields["model_type"] = stock
    encoder = is_masked(parse_config(fields))
    return Family(kind, fields, False if encoder or stock != kind else None, mask)


def is_diffugpt(tensors: Mapping[str, Any]) -> bool:
    """Whether these are laid out as DiffuGPT's: a GPT-2 under `denoise_model`, its embedding beside it."""
    return any(name.startswith(f"{DIFFUGPT}h.") for name in tensors)


def diffugpt(tensors: Mapping[str, Tensor], raw: Mapping[str, Any], heads: int | None, where: str) -> Family:
    """DiffuGPT's family, from its tensors: the configuration beside them, if any, is the base model's. Its mask is an
    ordinary word in the small model and a row of its own in the medium one."""
    bare = _renamed_diffugpt(tensors)
    try:
        rows, width = bare["transformer.wte.weight"].shape
        positions = len(bare["transformer.wpe.weight"])
    except (KeyError, ValueError):
        raise UserError(f"{where}: a DiffuGPT lacks its embedding of tokens or of positions") from None
    layers = {int(match[1]) for name in bare if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    head, published_heads = bare.get("lm_head.weight"), raw.get("n_head") if raw.get("model_type") == "gpt2" else None
    tied = head is None or (head.shape == (rows, width) and torch.equal(head, bare["transformer.wte.weight"]))
    fields = {"model_type": "gpt2", "vocab_size": rows, "n_embd": width, "n_layer": len(layers)}
    base = raw if raw.get("model_type") == "gpt2" else {}
    base_sizes = {name: base[name] for name in ("n_embd", "n_layer", "n_positions") if base.get(name) is not None}
    check_agrees(base_sizes, fields | {"n_positions": positions}, where)
    fields |= {
        "n_head": heads or published_heads or max(1, width // 64),
        "n_positions": positions,
        "tie_word_embeddings": tied,
    }
    return Family("diffugpt", fields, True, raw.get("mask_token_id", DIFFUGPT_MASKS.get(rows)))


def _renamed_diffugpt(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DiffuGPT's tensors under GPT-2's names. Embedding and head may be tied."""
    trunk = {n: t for n, t in tensors.items() if n.startswith(DIFFUGPT)}
    renamed = {f"transformer.{name.removeprefix(DIFFUGPT)}": tensor for name, tensor in trunk.items()}
    renamed |= {n: t for n, t in tensors.items() if n not in trunk and n != "embed_tokens.weight"}
    embedding = tensors.get("embed_tokens.weight", tensors.get("lm_head.weight"))
    return renamed if embedding is None else renamed | {"transformer.wte.weight": embedding}


def _llada(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """LLaDA's configuration as a Llama's."""
    strange = [name for name, value in LLADA_SWITCHES.items() if raw.get(name, value) != value]
    strange += [name for name in LLADA_OFF if raw.get(name)]
    if strange:
        raise UserError(f"{where}: its {strange[0]} is {raw.get(strange[0])!r}, which Llama does not have")
    names = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    names |= {"max_sequence_length": "max_position_embeddings"}
    if lacking := [name for name in (*names, "vocab_size") if raw.get(name) is None]:
        raise UserError(f"{where}: its config.json lacks {lacking[0]!r}")
    fields: dict[str, Any] = {"model_type": "llama"} | {ours: raw[name] for name, ours in names.items()}
    fields["num_key_value_heads"] = raw.get("n_kv_heads") or raw["n_heads"]
    fields["intermediate_size"] = raw.get("mlp_hidden_size") or int(raw.get("mlp_ratio", 4) * raw["d_model"])
    fields["vocab_size"] = raw.get("embedding_size") or raw["vocab_size"]
    fields["rms_norm_eps"] = raw.get("rms_norm_eps", 1e-5)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10_000.0)}
    fields["tie_word_embeddings"] = bool(raw.get("weight_tying", False))
    return fields | {name: raw[name] for name in ("eos_token_id", "pad_token_id") if raw.get(name) is not None}


def _renamed(tensors: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """LLaDA's tensors under Llama's names, DiffuGPT's under GPT-2's, all others as they are."""
    if family.name == "diffugpt":
        return _renamed_diffugpt(tensors)
    if family.name != "llada":
        return dict(tensors)

    def name_of(name: str) -> str:
        bare = name.removeprefix("model.").removeprefix("transformer.")
        layer, _, part = bare.rpartition(".")
        if match := re.fullmatch(r"blocks\.(\d+)\.(\w+)", layer):
            return f"model.layers.{match[1]}.{LLADA_LAYERS.get(match[2], match[2])}.{part}"
        return f"{LLADA_ENDS.get(layer, layer)}.{part}"

    return {name_of(name): tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a converted model. size: V, the mask included; mask: its id; fresh: whether the mask is an id that the
    model has never seen."""

    size: int
    mask: int
    fresh: bool


def vocabulary_of(family: Family, mask_token_id: int | None, words: Any, adapt: bool, where: str) -> Vocabulary:
    """The ids in use: those of the tokenizer, if there is one; the embedding may be padded beyond them."""
    rows = facts(family.fields).rows
    ids = rows if words is None else len(words)
    candidates = [mask_token_id, family.mask, None if words is None else words.mask_token_id]
    candidates += [BERT[1]] if (family.fields["model_type"], rows) == ("bert", BERT[0]) else []
    mask = next((one for one in candidates if one is not None), None)
    if mask is None and not adapt:
        if words is None:
            raise UserError(
                f"{where}: its config.json does not give the mask's id, and there is no tokenizer beside it; give one "
                "(tokenizer), or the id (mask_token_id)"
            )
        raise UserError(
            f"{where}: neither its config.json nor the tokenizer, of {ids} ids, gives the mask's id; give it "
            "(mask_token_id)"
        )
    missing, mask = mask is None, ids if mask is None else mask
    check_whole("mask_token_id", mask, 0)
    fresh = missing or (adapt and mask >= rows)
    if mask > ids:
        whose = "embedding" if words is None else "tokenizer"
        raise UserError(
            f"{where}: mask_token_id = {mask}, but the {whose} has {ids} ids; those between would be tokens "
            f"without a word. Give one of its ids{f', or {ids}' if adapt or ids < rows else ''}"
        )
    size = max(ids, mask + 1)
    if size > rows and not fresh:
        raise UserError(f"{where}: it embeds {rows} ids, but its tokenizer and mask need {size}; they do not fit")
    return Vocabulary(size, mask, fresh)


@dataclass(frozen=True)
class How:
    """Options of the conversion: see `imdm.adopt`."""

    adapt: bool = False
    causal: bool = False
    whole: bool = False
    dtype: torch.dtype | None = None

    @property
    def extends(self) -> bool:
        """Whether a row for a missing mask token may be added."""
        return self.adapt or self.causal


def adopted(
    family: Family, weights: Weights, words: Any, overrides: dict[str, Any], how: How, where: str
) -> MaskedDiffusionLM:
    """Convert a model of `transformers`, or one that is published as such under another name."""
    config = config_of(family, words, overrides, how, where)
    lm = _load_transformers(family, _renamed(weights.tensors, family), how.dtype, where)
    if vocabulary_of(family, overrides.get("mask_token_id"), words, how.extends, where).fresh:
        _add_row(lm, config)
    model = MaskedDiffusionLM.around(config, lm)
    return (
        with_mask(model, overrides["mask"])
        if "mask" in overrides and parse_mask(overrides["mask"]) != model.mask
        else model
    )


def config_of(family: Family, words: Any, overrides: dict[str, Any], how: How, where: str) -> Shape:
    """The configuration of the converted model, with a single mask."""
    for name in ("softcap", "heads"):
        if name in overrides:
            raise UserError(f"{name}: {where} has it in its own config.json; leave it out")
    shift = _shift(family, overrides.get("shift"), how, where)
    vocabulary = vocabulary_of(family, overrides.get("mask_token_id"), words, how.extends, where)
    base = facts(family.fields)
    length = overrides.get("length", base.positions)
    if length is None:
        raise UserError(f"{where}: its config.json does not give the length of its sequences; give it (length)")
    theirs, fields = parse_config(family.fields), dict(family.fields)
    if vocabulary.fresh:
        fields["vocab_size"] = max(base.rows, vocabulary.size)
    return Shape(
        vocab_size=vocabulary.size,
        mask_token_id=vocabulary.mask,
        length=length,
        width=facts(fields).width,
        blocks=getattr(theirs, "num_hidden_layers", 1),
        heads=getattr(theirs, "num_attention_heads", 1),
        dropout=_dropout(theirs),
        causal=how.causal,
        **(_ending(words, where) if how.whole else {}),
        backbone={"kind": "hf", "config": fields, "shift": shift},
    )


def _ending(words: Any, where: str) -> dict[str, Any]:
    """How whole texts begin and end, as text is prepared with this tokenizer (`packing: whole`)."""
    if words is None:
        raise UserError(f"{where}: there is no tokenizer beside it with the begin and end of whole texts; give one")
    special = special_ids(words)
    return {"bos_token_id": special.begin, "eos_token_id": special.end, "pad_token_id": special.pad}


def _shift(family: Family, shift: bool | None, how: How, where: str) -> bool:
    if how.adapt and how.causal:
        raise UserError(f"{where}: adapt makes its attention bidirectional, causal keeps it causal; give one of them")
    if (how.adapt or how.causal) and family.shift is not None:
        raise UserError(f"{where} is no causal language model ({family.name}): there is nothing to adapt")
    if how.causal and shift is not None:
        raise UserError(f"{where}: a causal model always predicts the next token; leave out shift")
    if shift is not None or how.causal:
        return bool(shift)
    if family.shift is None and not how.adapt:
        raise UserError(
            f"{where} is a causal language model ({family.name}): adapt it, to be trained into a diffusion model "
            "(adapt); or, if it was trained as one, say whether each position is predicted by the row "
            "before it (shift)"
        )
    return True if family.shift is None else family.shift


def _dropout(config: Any) -> float:
    names = ("hidden_dropout_prob", "resid_pdrop", "hidden_dropout", "dropout", "attention_dropout")
    return next((float(rate) for name in names if isinstance(rate := getattr(config, name, None), float)), 0.0)


def _load_transformers(family: Family, tensors: dict[str, Tensor], dtype: torch.dtype | None, where: str) -> Any:
    """`transformers`' own model with these weights, exactly these, in the dtype of the file."""
    config = parse_config(family.fields)
    kinds = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.ndim > 1]
    how: dict[str, Any] = {"dtype": dtype or max(set(kinds), key=kinds.count, default=torch.float32)}
    try:
        lm, info = class_of(config).from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, **attention_of(config), **how
        )
    except RuntimeError as error:
        raise UserError(f"{where}: its weights do not have the shapes of its config.json") from error
    except (OSError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(f"{where} cannot be loaded: {reason_of(error)}") from error
    rotary = {len(one) for name, one in lm.named_buffers() if name.endswith("inv_freq")}
    for name, tensor in tensors.items():
        if rotary and name.endswith("inv_freq") and (tensor.ndim != 1 or len(tensor) not in rotary):
            raise UserError(
                f"{where}: {name!r} has shape {tuple(tensor.shape)}, which is half of another head's width than its "
                f"config.json gives ({2 * min(rotary)})"
            )
    missing = sorted(info["missing_keys"])
    strange = sorted(name for name in info["unexpected_keys"] if not NOT_NEEDED.search(name))
    if missing or strange:
        kind = type(lm).__name__
        if missing and not any(name.startswith(f"{lm.base_model_prefix}.") for name in missing):
            raise UserError(
                f"{where} was saved without the head of a language model: a {kind} has {missing[0]!r} too; save it as "
                "one"
            )
        problem = f"{missing[0]!r} is missing" if missing else f"{strange[0]!r} is too much"
        raise UserError(f"{where}: the tensor {problem} for a {kind}")
    return lm.eval()


@torch.no_grad()
def _add_row(lm: Any, config: Shape) -> None:
    """Add a row for the mask to the embedding, the mean of all others, after the last or in the padding."""
    mask, embedded = config.mask_token_id, lm.get_input_embeddings().weight
    mean = embedded[: min(len(embedded), mask)].float().mean(0)
    if config.vocab_size > len(embedded):
        lm.resize_token_embeddings(config.vocab_size, mean_resizing=False)
    lm.get_input_embeddings().weight[mask] = mean.to(lm.dtype)
