"""Language models of `transformers`: their configurations as plain data, building them, their layers and heads."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from imdm.core.errors import UserError, reason_of, shown, unknown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NOT_KEPT = ["architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "attn_implementation"]
NOT_KEPT += ["experts_implementation"]
"""Fields of a configuration that do not affect the function, or could cause code to be fetched."""
SHAPES = {"view", "_unsafe_view", "reshape", "t", "transpose", "slice", "select", "unsqueeze", "expand", "alias"}
SHAPES |= {"detach", "clone"}
PRODUCTS = {"mm", "addmm", "linear"}


class Facts(NamedTuple):
    """Known without weights. width: of the embeddings; rows: their number; positions: the longest sequence, None: any;
    linear: the head is a single linear layer; about: a short description."""

    width: int
    rows: int
    positions: int | None
    linear: bool
    about: str
    parameters: int


class WholeHead:
    """Everything a language model computes after its trunk: rows (…, D) → logits (…, V)."""

    def __init__(self, lm: PreTrainedModel, columns: int) -> None:
        self.lm, self.out_features = lm, columns

    def __call__(self, rows: Tensor) -> Tensor:
        ended = copy.copy(self.lm)  # the same layers, but for the trunk
        ended._modules = {**self.lm._modules, self.lm.base_model_prefix: Given(rows.reshape(1, -1, rows.shape[-1]))}
        logits = ended(inputs_embeds=rows).logits
        return logits.reshape(*rows.shape[:-1], logits.shape[-1])


class Given(nn.Module):
    """Replaces a trunk: returns these rows whatever the input."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    @property
    def decoder(self) -> Given:
        """OPT calls its trunk as `model.decoder`."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.rows)


class _Output(tuple[Tensor]):
    """Hidden states as a trunk of `transformers` returns them, with None for all its other outputs."""

    def __new__(cls, rows: Tensor) -> _Output:
        return super().__new__(cls, (rows,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def plain_config(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration's fields without those that do not affect the function."""
    return {name: value for name, value in fields.items() if name not in NOT_KEPT and not name.startswith("_")}


def parse_config(fields: dict[str, Any]) -> PreTrainedConfig:
    """`transformers`' configuration from plain data."""
    from transformers import CONFIG_MAPPING

    fields = dict(fields)
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise unknown("model_type of transformers", kind, ("llama", "qwen2", "bert", "gpt2", "…"))
    if strange := [name for name in fields if name in NOT_KEPT or name.startswith("_")]:
        raise UserError(f"backbone.config.{strange[0]}: it does not affect what the model computes; leave it out")
    if "quantization_config" in fields:
        raise UserError("backbone.config: its weights are quantised; use the model they were quantised from")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind](**fields)
    except Exception as error:  # classes may raise anything for wrong fields
        raise UserError(f"backbone.config: not a configuration of {kind!r}: {reason_of(error)}") from None
    kinds = (*(getattr(config, "layer_types", None) or ()), *(getattr(config, "block_types", None) or ()))
    if any("attention" not in one or "linear" in one for one in kinds):
        raise UserError(f"{kind!r} models have layers that are always causal; a denoiser attends to all positions")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind!r} models are encoder-decoders; use an encoder or a decoder")
    if config.get_text_config() is not config:
        raise UserError(f"{kind!r} models read more than text; use a model of text alone, such as their text model")
    return config


def is_masked(config: PreTrainedConfig) -> bool:
    """Whether it is an encoder that predicts masked tokens; else a causal model."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    return type(config) in MODEL_FOR_MASKED_LM_MAPPING


def layers_of(lm: PreTrainedModel) -> list[nn.Module]:
    """The layers that repeat, first to last: the outermost list of layers of one kind."""
    lists = (list(one) for one in lm.modules() if isinstance(one, nn.ModuleList))
    return next((one for one in lists if one and len({type(layer) for layer in one}) == 1), [])


def linear_layers(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of the blocks by name: all in module lists of the trunk (XLM, for one, has a list of attentions
    and another of MLPs). GPT-2's transposed ones are included."""
    inside = {id(one) for each in lm.base_model.modules() if isinstance(each, nn.ModuleList) for one in each.modules()}
    modules = ((name, module) for name, module in lm.named_modules() if id(module) in inside)
    return {n: module for n, module in modules if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"}


def is_causal(lm: PreTrainedModel) -> bool:
    return not is_masked(lm.config)


def class_of(config: PreTrainedConfig) -> Any:
    """`transformers`' class with a language model's head."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    table = MODEL_FOR_MASKED_LM_MAPPING if is_masked(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in table:
        raise UserError(f"{config.model_type!r} models have no language model's head in transformers")
    return table[type(config)]


def attention_of(config: PreTrainedConfig) -> dict[str, str]:
    """Arguments that select an exact attention: the fused one does not apply a soft cap."""
    return {} if getattr(config, "attn_logit_softcapping", None) is None else {"attn_implementation": "eager"}


def built(fields: dict[str, Any], eager: bool = False) -> PreTrainedModel:
    """The model with random weights; eager: with attention that returns its weights."""
    config = parse_config(fields)
    kind = class_of(config)
    try:
        return kind._from_config(config, **({"attn_implementation": "eager"} if eager else attention_of(config)))
    except Exception as error:  # classes may raise anything for wrong fields
        about = f"backbone.config of {config.model_type!r}"
        raise UserError(f"{about}: no model can be built from it: {reason_of(error)}") from None


def as_bidirectional(lm: PreTrainedModel) -> PreTrainedModel:
    """Make attention bidirectional. Set in the configuration and not by each call, which would affect other threads."""
    if is_causal(lm):
        lm.config.is_causal = False
        for module in lm.modules():
            if isinstance(getattr(module, "is_causal", None), bool):
                module.is_causal = False  # type: ignore[assignment]
    else:
        lm.config.is_decoder = False
    return lm


def facts(fields: dict[str, Any]) -> Facts:
    try:
        text = json.dumps(fields, sort_keys=True)
    except (TypeError, ValueError):
        raise UserError(f"backbone.config = {shown(fields)}: expected plain data") from None
    return _facts_of_json(text)


@lru_cache(maxsize=32)
def _facts_of_json(text: str) -> Facts:
    with torch.device("meta"):
        lm = built(json.loads(text))
    config, embedding = lm.config, lm.get_input_embeddings()
    output = lm.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or output is None:
        raise UserError(f"{config.model_type!r} models have no token embedding, or no head, that could be found")
    if lm.base_model is lm:  # as llama4_text has it
        raise UserError(
            f"{config.model_type!r} models do not name the part before their head; use another of transformers' models"
        )
    rows, width = embedding.weight.shape
    layers = getattr(config, "num_hidden_layers", None)
    name = type(lm).__name__.removesuffix("ForCausalLM").removesuffix("ForMaskedLM").removesuffix("LMHeadModel")
    about = f"{name}, {layers} layers of width {getattr(config, 'hidden_size', width)}"
    count = sum(parameter.numel() for parameter in lm.parameters())
    return Facts(width, rows, _positions(lm), _is_linear(lm, output), about, count)


def _positions(lm: PreTrainedModel) -> int | None:
    """RoBERTa and its variants number positions from their padding id + 1."""
    most = getattr(lm.config, "max_position_embeddings", None)
    return most if not isinstance(most, int) or most <= 0 else most - first_position(lm)


def first_position(lm: PreTrainedModel) -> int:
    """The row of a learnt position embedding that the first position uses."""
    learnt = [m for n, m in lm.named_modules() if n.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    skipped = learnt[0].padding_idx if learnt else None
    return 0 if skipped is None else skipped + 1


def _is_linear(lm: PreTrainedModel, output: nn.Module) -> bool:
    """Whether the head is a single matmul, found by tracing it on one row."""
    if not isinstance(output, nn.Linear) or output.in_features != getattr(lm.config, "hidden_size", None):
        return False
    seen, row = _Seen(), torch.empty(1, output.in_features, device="meta")
    with torch.no_grad(), seen:
        WholeHead(lm, output.out_features)(row)
    products = [name for name in seen.names if name in PRODUCTS]
    return len(products) == 1 and not set(seen.names) - PRODUCTS - SHAPES


class _Seen(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
