"""Any language model of `transformers` as a backbone: Llama, Qwen, Gemma, GPT-2, BERT, RoBERTa, ModernBERT and others.

    backbone: {kind: hf, config: {model_type: llama, hidden_size: 512, num_hidden_layers: 8, …}}

The model is used whole, its embedding and head included, and its weights keep their names below one prefix:
`lm.model.layers.0.self_attn.q_proj.weight`, `lm.bert.encoder.layer.0…`. Our own layers are beside it:
`mask_embedding.…` It is built from its configuration; code that comes with a model is never run.

A causal model is run with bidirectional attention, sliding windows removed; an encoder as it is. With `model.causal` a
causal model stays causal and is trained autoregressively (objective `autoregressive`).
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError, reason_of
from imdm.diffusion.randomness import Purpose, as_key, fold, seeded, uniform
from imdm.models.backbones.base import Backbone, BackboneOutputs, BackboneRequest, BackboneSettings, backbones
from imdm.models.pretrained import (
    WholeHead,
    as_bidirectional,
    built,
    facts,
    first_position,
    is_causal,
    is_masked,
    layers_of,
    linear_layers,
    parse_config,
    plain_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from imdm.models.shape import Shape

PREFIX = "lm"
ROUNDING = 1e-3  # relative; a cache that is ignored, or attention to later positions, changes far more
CAPTURING = RLock()  # held while functions of `transformers` are replaced
IDS = 16  # of the small models that are tried instead of ones in half precision
SMALL = {"num_kv_shared_layers": 0, "num_experts": 8, "num_local_experts": 8}
"""The most that such a model has of something."""


class HFSettings(BackboneSettings):
    """config: the configuration of a `transformers` model as plain data, `model_type` and its fields.
    shift: position p is predicted by the row before it, as causal models do (Dream, DiffuLLaMA)."""

    config: dict[str, Any]
    shift: bool = False


@backbones.register("hf")
class HF(Backbone):
    """A masked or a causal language model of `transformers`, whole. `config.width` is that of its embeddings."""

    Settings: ClassVar[type[BackboneSettings]] = HFSettings
    owns_embedding: ClassVar[bool] = True
    lm: PreTrainedModel

    def __init__(self, config: Shape, settings: BackboneSettings) -> None:
        super().__init__(config, settings)
        options = cast("HFSettings", settings)
        self.shift, self.linear = options.shift and not config.causal, facts(options.config).linear
        self.opening: Opening | None = None
        self._compiled: frozenset[bool] = frozenset()  # whether while it trains, whether while it does not
        self.set_network(built(options.config, eager=getattr(config, "_attn_implementation", None) == "eager"))

    def get_network(self) -> PreTrainedModel:
        return self.lm

    def set_network(self, network: PreTrainedModel) -> None:
        self.lm = network if self.config.causal else as_bidirectional(network)
        self.opens = is_causal(network) and not self.config.causal  # else its attention stays as it is
        self.set_dropout(self.config.dropout)
        self.check_network()

    @classmethod
    def check(cls, config: Shape, settings: BackboneSettings) -> None:
        if config.softcap is not None:
            raise UserError("model.softcap: backbone 'hf' sets this in its own config; leave it out")
        fields = cast("HFSettings", settings).config
        if config.causal and is_masked(parse_config(fields)):
            raise UserError(f"model.causal: {fields['model_type']!r} models are bidirectional; use a causal one")
        backbone = facts(fields)
        if config.tie_word_embeddings:
            raise UserError("model.tie_word_embeddings: backbone 'hf' sets this in its own config; leave it out")
        if config.width != backbone.width:
            raise UserError(f"model.width = {config.width}: the backbone's embeddings have width {backbone.width}")
        if config.vocab_size > backbone.rows:
            raise UserError(f"model.vocab_size = {config.vocab_size}: the backbone embeds {backbone.rows} ids")
        longest = config.length + config.mixture
        if backbone.positions is not None and longest > backbone.positions:
            raise UserError(f"model.length: {longest} positions, the backbone has {backbone.positions}")

    @classmethod
    def size(cls, config: Shape, settings: BackboneSettings) -> int:
        """The number of parameters without the embedding and the head, which are counted elsewhere but lie in it
        here."""
        return facts(cast("HFSettings", settings).config).parameters - 2 * config.vocab_size * config.width

    @property
    def about(self) -> str:
        return facts(cast("HFSettings", self.settings).config).about

    @property
    def weights(self) -> int | None:
        if not self._fixed:
            return None
        return sum(cast("Tensor", layer.weight).numel() for layer in linear_layers(self.lm).values())

    @property
    def _fixed(self) -> bool:
        """Whether the same operations run whatever the values are, so that a CUDA graph can be captured: `transformers`
        says so of the class; experts and a rotary embedding that adapts to the length are exceptions."""
        config = self.lm.config
        rope = str(getattr(config, "rope_parameters", None))
        adapts = "dynamic" in rope or "longrope" in rope
        experts = any("experts" in name and isinstance(value, int) for name, value in vars(config).items())
        return self.lm._can_compile_fullgraph and not adapts and not experts

    @property
    def embedding(self) -> nn.Module:
        return self.lm.get_input_embeddings()

    @property
    def output(self) -> Any:
        linear = self.lm.get_output_embeddings()
        return linear if self.linear else WholeHead(self.lm, linear.weight.shape[0])

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Dropout in training is torch's, seeded with the key of the batch's first sequence: a resumed run draws the
        same masks, one with another number of processes does not."""
        drops = self.training and (self.config.dropout > 0 or self.drops)
        with nullcontext() if keys is None or not drops else seeded(fold(keys[0], Purpose.DROPOUT)):
            hidden = self._hidden(inputs_embeds=x)
        return torch.cat((hidden[:, :1], hidden[:, :-1]), 1) if self.shift else hidden

    def _hidden(self, **inputs: Tensor) -> Tensor:
        self._compile_layers()
        if self.opens or self.config.causal:
            length, like = next(iter(inputs.values())).shape[1], self.lm.get_input_embeddings().weight
            if self.opens:
                inputs |= {"attention_mask": self._open(length, cast("Tensor", like))} if self._windowed(length) else {}
                inputs |= self._opening(next(iter(inputs.values())), cast("Tensor", like))
            with _captured_as_run():
                return self.lm.base_model(**inputs, use_cache=False).last_hidden_state
        with _captured_as_run():
            return self.lm.base_model(**inputs)[0]

    def onward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Continue from the model's own key-value cache. Layers are not compiled here: each has its own part of the
        cache, and would be compiled for itself."""
        self._compile_layers(on=False)
        cache_inputs = self._in_cache(x, past) if past is not None and past.is_compileable else {}
        output = self.lm.base_model(inputs_embeds=x, past_key_values=past, use_cache=True, **cache_inputs)
        return output.last_hidden_state, output.past_key_values

    def fixed_cache(self, length: int) -> Any:
        """A cache of fixed length, only where every layer attends to all positions before."""
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer

        if not self._fixed or "position_ids" not in inspect.signature(self.lm.base_model.forward).parameters:
            return None
        cache = StaticCache(self.lm.config, max_cache_len=length)
        return cache if all(type(layer) is StaticLayer for layer in cache.layers) else None

    def _in_cache(self, x: Tensor, past: Any) -> dict[str, Tensor]:
        """Positions, and the attention mask over a whole fixed cache, (B, 1, T, length): what was not written yet is
        hidden."""
        place = torch.arange(x.shape[1], device=x.device) + past.get_seq_length()
        visible = torch.arange(past.get_max_length(), device=x.device) <= place[:, None]
        return {"position_ids": place[None], "attention_mask": self._mask(visible.expand(x.shape[0], 1, -1, -1), x)}

    def outputs(self, x: Tensor, request: BackboneRequest) -> BackboneOutputs:
        """Answer a request through `transformers`' own arguments. Positions do not count padding."""
        if request.nothing and request.kinds is None:
            return BackboneOutputs(self(x))
        lm = self._showing() if request.attentions else self.lm
        inputs: dict[str, Any] = {"inputs_embeds": x} | ({} if is_masked(self.lm.config) else {"use_cache": False})
        if request.seen is not None or (self.opens and self._windowed(x.shape[1])):
            inputs["attention_mask"] = self._attention_mask(x, request.seen, eager=request.attentions)
        takes = inspect.signature(self.lm.base_model.forward).parameters
        if (places := request.places()) is not None:
            if "position_ids" not in takes:
                raise UserError(f"{self.lm.config.model_type!r} models take no position ids")
            inputs["position_ids"] = places + first_position(self.lm)
        if request.kinds is not None and "token_type_ids" in takes:
            inputs["token_type_ids"] = request.kinds
        output = lm.base_model(**inputs, output_hidden_states=request.states, output_attentions=request.attentions)
        hidden = output.last_hidden_state
        if self.shift:
            before = torch.cat((hidden[:, :1], hidden[:, :-1]), 1)
            seen = None if request.seen is None else nn.functional.pad(request.seen[:, :-1], (1, 0), value=True)
            hidden = before if seen is None else torch.where(seen[..., None], before, hidden)  # absent at first
        return BackboneOutputs(hidden, output.hidden_states, output.attentions)

    def _showing(self) -> PreTrainedModel:
        """A second model of the same weights whose eager attention returns what it attends to, as fused attention
        cannot; so other threads are not affected."""
        if self.lm.config._attn_implementation == "eager":
            return self.lm
        shared = {id(tensor): tensor for tensor in (*self.lm.parameters(), *self.lm.buffers())}
        other = copy.deepcopy(self.lm, shared)
        other.set_attn_implementation("eager")
        return other

    def _attention_mask(self, x: Tensor, seen: Tensor | None, eager: bool) -> Tensor:
        """The attention mask in the form the model expects: (B, T), or a full (additive or boolean) mask where a
        sliding window must be removed."""
        if seen is not None and not (self.opens and self._windowed(x.shape[1])):
            return seen.long()
        mask = self._open(x.shape[1], x, eager)
        return mask if seen is None else self._mask(seen[:, None, None].expand(-1, 1, x.shape[1], -1), x, eager)

    def _windowed(self, length: int) -> bool:
        """Whether some layers have a sliding window shorter than `length`."""
        window = getattr(self.lm.config, "sliding_window", None)
        kinds = {"full_attention"} | ({"sliding_attention"} if window is not None else set())
        other = set(getattr(self.lm.config, "layer_types", None) or ()) - kinds
        return bool(other) or (window is not None and length > window // 2)

    def _open(self, length: int, like: Tensor, eager: bool = False) -> Tensor:
        """A mask that hides nothing: (1, 1, T, T)."""
        return self._mask(torch.ones((1, 1, length, length), dtype=torch.bool, device=like.device), like, eager)

    def _mask(self, visible: Tensor, like: Tensor, eager: bool = False) -> Tensor:
        """The mask `visible` in the form that the model's attention expects: eager attention adds it to the scores."""
        if not eager and self.lm.config._attn_implementation != "eager":
            return visible
        return like.new_zeros(visible.shape).masked_fill(~visible, torch.finfo(like.dtype).min)

    def _opening(self, x: Tensor, like: Tensor) -> dict[str, Tensor]:
        """The attention mask of a step in which attention is not fully open yet, (B, 1, T, T), in the form the model
        needs; else nothing."""
        if not self.training or self.opening is None:
            return {}
        visible = self.opening.visible(x.shape[1], like.device)
        return {"attention_mask": self._mask(visible[None, None], like).expand(len(x), -1, -1, -1)}

    def checkpoint_blocks(self) -> None:
        """Recompute blocks in the backward pass, by `transformers`; dropout masks are the same in the recomputation."""
        how = {"use_reentrant": False, "preserve_rng_state": self.config.dropout > 0 or self.drops}
        try:
            self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"training.checkpoint_blocks: {reason_of(error)}") from None

    def open_attention(self, share: float, key: Tensor) -> None:
        self.opening = None if share >= 1 else Opening(share, key)

    @torch.no_grad()
    def check_opening(self) -> None:
        """Refuse a model that ignores a partly open mask. Checked with two short sequences: while still causal, no
        position may depend on later ones."""
        weight, training = cast("Tensor", self.lm.get_input_embeddings().weight), self.training
        if weight.is_meta:
            return
        x = self.embedding(torch.zeros(2, min(3, self.config.length), dtype=torch.int64, device=weight.device))
        other = torch.cat((x[:, :-1], 1 - x[:, -1:]), 1)
        self.lm.eval()  # no dropout
        self.training = True
        self.open_attention(0.0, as_key(0))
        try:
            hidden, moved = (self._hidden(inputs_embeds=y)[:, :-1] for y in (x, other))
        except Exception as error:  # models may raise anything when given a mask
            raise UserError(
                f"training.opening: {self.lm.config.model_type!r} models cannot open gradually "
                f"({reason_of(error)}); leave it out"
            ) from None
        finally:
            self.opening = None
            self.lm.train(training)
            self.training = training
        if not torch.allclose(hidden, moved, rtol=1e-4, atol=1e-5):
            raise UserError(f"training.opening: {self.lm.config.model_type!r} models ignore its mask; leave it out")

    def matrices(self) -> dict[Tensor, int]:
        """GPT-2 stores its matrices transposed; Muon works on these too."""
        return {cast("Tensor", module.weight): 1 for module in linear_layers(self.lm).values()}

    def compile_trunk(self, *, training: bool) -> None:
        """Layer by layer: all layers of a model share one compiled version."""
        self._compiled |= {training}

    @property
    def is_compiled(self) -> bool:
        return bool(self._compiled)

    def _compile_layers(self, on: bool | None = None) -> None:
        """Compile the repeated layers if `on`, else run them as they are; None: by the modes of `compile_trunk`. torch
        keeps the compiled version in `_compiled_call_impl`, which copies of a module lose; they call this again."""
        on = self.training in self._compiled if on is None else on
        for layer in layers_of(self.lm) if self._compiled else ():
            if on and layer._compiled_call_impl is None:
                torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
                layer.compile()
            elif not on:
                layer._compiled_call_impl = None

    @torch.no_grad()
    def check_network(self) -> None:
        """Refuse a model whose output differs between embeddings and tokens, or whose positions do not depend on later
        ones. Tried where it has weights in a precision that every machine supports; instead of one in half precision,
        two layers of the same kind with random weights are tried."""
        weight = cast("Tensor", self.lm.get_input_embeddings().weight)
        if weight.is_meta:
            return
        if weight.dtype != torch.float32:
            _check_layers(json.dumps(cast("HFSettings", self.settings).config, sort_keys=True), self.config.causal)
            return
        training = self.lm.training
        self.lm.eval()
        try:
            self._try_out(weight)
        finally:
            self.lm.train(training)

    def _try_out(self, weight: Tensor) -> None:
        """`check_network` with the embedding's weight, on one short sequence."""
        mask, kind = self.config.mask_token_id, self.lm.config.model_type
        pad = getattr(self.lm.config, "pad_token_id", None)
        others = [i for i in range(min(len(weight), 9)) if i not in (mask, pad)] or [0]
        ids = torch.tensor([[others[0], mask, others[-1]]], device=weight.device)[:, : self.config.length + 1]
        x = self.embedding(ids)
        changed = [torch.cat((x[:, :-1], last), 1) for last in (1 - x[:, -1:], x[:, :1])]
        try:
            from_ids, from_embeddings, *moved = (
                self._hidden(input_ids=ids),
                *(self._hidden(inputs_embeds=y) for y in (x, *changed)),
            )
        except Exception as error:  # models may raise anything here
            raise UserError(f"{kind!r} models cannot be run from embeddings in one pass: {reason_of(error)}") from None
        if not torch.allclose(from_embeddings, from_ids, rtol=1e-4, atol=1e-5):
            raise UserError(f"{kind!r} models read token ids beside the embeddings; noisy masks need embeddings alone")
        before, there = (
            [(other - from_embeddings)[:, part].norm() for other in moved] for part in (slice(-1), slice(-1, None))
        )
        if not self.config.causal and not any(before) and ids.shape[1] > 1:
            raise UserError(f"{kind!r} models cannot be made bidirectional; a denoiser attends to all positions")
        if self.config.causal:
            if any(early > ROUNDING * late for early, late in zip(before, there, strict=True)):
                raise UserError(
                    f"this {kind!r} model attends to later positions, which an autoregressive one must not; leave out "
                    "causal"
                )
            self._check_onward(x, from_embeddings)

    def _check_onward(self, x: Tensor, hidden: Tensor) -> None:
        """Refuse a causal model that does not continue from its cache."""
        kind, instead = self.lm.config.model_type, "use another kind of model"
        try:
            first, past = self.onward(x[:, :1])
            parts = [first] + ([self.onward(x[:, 1:], past)[0]] if x.shape[1] > 1 else [])
        except Exception as error:  # models may raise anything here
            problem = f"{kind!r} models have no cache of keys and values ({reason_of(error)})"
            raise UserError(f"{problem}, without which none is sampled from; {instead}") from None
        if (torch.cat(parts, 1) - hidden).norm() > ROUNDING * hidden.norm():
            raise UserError(f"{kind!r} models give other results with their cache of keys and values; {instead}")

    def set_dropout(self, rate: float) -> None:
        """Set one rate for all dropout: hidden states, attention."""
        for module in self.lm.modules():
            if isinstance(module, nn.Dropout):
                module.p = rate
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, rate)

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """Buffers that are computed and not learnt, such as rotary frequencies, stay in float32 whatever the weights'
        dtype."""
        tables = [
            (module, name, module._buffers[name])
            for module in self.lm.modules()
            for name in module._non_persistent_buffers_set
        ]
        yield
        for module, name, table in tables:
            now = module._buffers[name]
            if table is not None and now is not None and now.dtype != table.dtype:
                module._buffers[name] = table.to(now.device)


@dataclass(frozen=True)
class Opening:
    """Attention between causal and bidirectional: each later position is visible with probability `share`, drawn anew
    every step and the same for all sequences (attention-mask annealing, as in DiffuLLaMA). 0: causal, 1:
    bidirectional."""

    share: float
    key: Tensor

    def visible(self, length: int, device: torch.device) -> Tensor:
        """Which positions each position attends to: (T, T)."""
        place = torch.arange(length * length, device=device)
        later = uniform(self.key.to(device), Purpose.OPENING, place).view(length, length) < self.share
        return later | torch.ones(length, length, dtype=torch.bool, device=device).tril()


@lru_cache(maxsize=32)
def _check_layers(text: str, causal: bool) -> None:
    """`HF.check_network` of a model with this configuration, but two layers, few ids and random weights in float32."""
    config = parse_config(json.loads(text))
    layers = getattr(config, "num_hidden_layers", 2)
    with suppress(NotImplementedError):  # of a class that counts its layers in another way: then all of them
        config.num_hidden_layers = min(2, layers)
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == layers:  # a kind for each layer
                setattr(config, name, value[:2])
    for name, most in SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(most, getattr(config, name)))
    for name, other in (("pad_token_id", 1), ("mask_token_id", 3)):
        if (token := getattr(config, name, None)) is not None and token >= IDS:
            setattr(config, name, other)
    config.vocab_size = IDS
    mask = getattr(config, "mask_token_id", None)
    fields = plain_config(config.to_dict() | {"model_type": config.model_type})
    shape = SimpleNamespace(causal=causal, dropout=0.0, mask_token_id=3 if mask is None else mask, length=3)
    with seeded(as_key(0)):
        HF(cast("Shape", shape), HFSettings(kind="hf", config=fields))


@contextmanager
def _captured_as_run() -> Iterator[None]:
    """While a CUDA graph is captured, `transformers` builds attention masks that it leaves out otherwise: 5.17 one that
    allows everything, and every version one for several sequences in a row, which we never have. Attention with a mask
    is slower, and layers compiled without one would be compiled again, which no capture allows."""
    from transformers import masking_utils

    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    with CAPTURING:
        before = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices
        masking_utils.is_tracing = lambda tensor=None: tensor is not None
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        try:
            yield
        finally:
            masking_utils.is_tracing, masking_utils.find_packed_sequence_indices = before
