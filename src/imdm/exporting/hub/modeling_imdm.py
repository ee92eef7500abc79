"""A masked diffusion language model for plain `transformers`: logits of all positions, and text in a few steps.

    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    model(**tokenizer("…", return_tensors="pt")).logits
    model.generate(num=4, steps=8)

Shapes: B sequences, L tokens, D width, H heads, R rows (positions of a batch), V vocabulary.
"""

import copy
import inspect
import math
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_imdm import MaskedDiffusionConfig

AT_ONCE = 1 << 24  # elements of (rows, V) in memory at a time, in sampling
Rope = tuple[Tensor, Tensor]


class Norm(nn.LayerNorm):
    """In float32, whatever the weights' dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def rotations(positions: Tensor, dim: int) -> Rope:
    """cos and sin of the rotary position embedding, base 10,000, of positions (…, L): (…, L, dim) each."""
    frequency = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angle = positions[..., None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.heads, self.softcap = config.heads, config.softcap
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rope: Rope, seen: Tensor | None, kept: list[Tensor] | None) -> Tensor:
        """seen (B, 1, 1, L): positions that are attended to; kept: a list for attention weights (B, H, L, L)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if self.softcap is None and kept is None:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if seen is not None:
                scores = scores.masked_fill(~seen, -torch.inf)
            weights = scores.softmax(-1).to(v.dtype)
            if kept is not None:
                kept.append(weights)
            mixed = weights @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(GradientCheckpointingLayer):
    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(config.width), Norm(config.width)
        self.attention, self.mlp = Attention(config), MLP(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Rope, seen: Tensor | None, kept: list[Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), rope, seen, kept))
        return x + self.dropout(self.mlp(self.norm2(x)))


class NoiseMLP(nn.Module):
    """The noise embedding, which is added to the mask token's."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(dim, 4 * width)
        self.output = nn.Linear(4 * width, width, bias=False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.output(F.gelu(self.input(noise.to(self.input.weight.dtype))))


class MixtureToken(nn.Module):
    """The token of a latent λ (B,) in (0, 1): (B, D)."""

    FREQUENCIES = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(self.FREQUENCIES, width)
        self.second = nn.Linear(width, width)

    def forward(self, latent: Tensor) -> Tensor:
        half = self.FREQUENCIES // 2
        frequency = 1000.0 * 10_000.0 ** (-torch.arange(half, device=latent.device) / half)
        angle = latent.float()[:, None] * frequency
        waves = torch.cat((angle.cos(), angle.sin()), dim=-1).to(self.first.weight.dtype)
        return self.second(F.silu(self.first(waves)))


class Rows(nn.Module):
    """Replaces the trunk of a language model: returns these rows (1, R, D) whatever the input."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    @property
    def decoder(self) -> "Rows":
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output([self.rows])


class _Output(tuple[Tensor]):
    """Hidden states, and None for all other outputs of a trunk."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def set_dropout(network: nn.Module, rate: float) -> None:
    """One rate for all dropout: hidden states, attention."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, rate)


def open_network(config: MaskedDiffusionConfig) -> PreTrainedModel:
    """The model of `transformers` that replaces our transformer, with bidirectional attention."""
    network = config.network()
    masked = type(network) in MODEL_FOR_MASKED_LM_MAPPING
    kind: Any = (MODEL_FOR_MASKED_LM_MAPPING if masked else MODEL_FOR_CAUSAL_LM_MAPPING)[type(network)]
    capped = getattr(network, "attn_logit_softcapping", None) is not None  # which fused attention does not apply
    eager = {"attn_implementation": "eager"} if capped or config._attn_implementation == "eager" else {}
    lm = kind._from_config(network, **eager)
    set_dropout(lm, config.dropout)
    if masked:
        lm.config.is_decoder = False
        return lm
    lm.config.is_causal = False
    for module in lm.modules():
        if isinstance(getattr(module, "is_causal", None), bool):
            module.is_causal = False
    return lm


class MaskedDiffusionLM(PreTrainedModel):
    """Tokens, and the noise of masked ones → embeddings → transformer → logits of the tokens that were masked."""

    config_class = MaskedDiffusionConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012  (transformers' own convention)

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__(config)
        D, mask = config.width, config.mask
        self.whole = getattr(config, "backbone", None) is not None  # with an embedding and a head of its own
        if self.whole:
            self.lm = open_network(config)
            self.opened = type(self.lm.config) not in MODEL_FOR_MASKED_LM_MAPPING
        else:
            self.embedding = nn.Embedding(config.vocab_size, D)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
            self.norm = Norm(D)
            self.output = nn.Linear(D, config.vocab_size)
        if mask["kind"] == "infinite":
            self.mask_embedding: nn.Module = NoiseMLP(mask["dim"], D)
        elif mask["kind"] == "finite":
            self.mask_embedding = nn.Embedding(mask["count"], D)
        self.mixture = MixtureToken(D) if config.mixture else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.lm.get_input_embeddings() if self.whole else self.embedding

    def set_input_embeddings(self, value: Any) -> None:
        if self.whole:
            self.lm.set_input_embeddings(value)
        else:
            self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.get_output_embeddings() if self.whole else self.output

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        if self.whole:
            self.lm.set_output_embeddings(new_embeddings)
        else:
            self.output = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """As in `transformers`; special tokens, such as the mask, keep their ids."""
        config = self.config
        special = [config.mask_token_id, config.bos_token_id, config.eos_token_id, config.pad_token_id]
        least = 1 + max(token for token in special if token is not None)
        if new_num_tokens is not None and new_num_tokens < least:
            raise ValueError(f"new_num_tokens = {new_num_tokens}: at least {least}, as token {least - 1} is special")
        if not self.whole:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        found = self.lm.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            config.vocab_size = len(found.weight)
            theirs = config.backbone["config"] | {"vocab_size": len(found.weight)}
            config.backbone = config.backbone | {"config": theirs}
        return found

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        noise: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, L, V) of all positions; the mask token is never predicted.

        attention_mask  (B, L): 0 at padding, before or after the text
        labels          (B, L): `loss` is the cross-entropy in nats, averaged over labels that are not −100
        noise           for masks with noise: a seed, or the noise itself, (B, L, dim) or, of finite masks, (B, L);
                        None: drawn anew in each call
        """
        config = self.config
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None:
            raise ValueError("give input_ids or inputs_embeds")
        generator = torch.Generator(given.device).manual_seed(noise) if isinstance(noise, int) else None
        if inputs_embeds is None:
            drawn = noise if isinstance(noise, Tensor) else self._drawn(given.shape, given.device, generator)
            inputs_embeds = self.embed(given, None if config.mask["kind"] == "single" else drawn)
        latent = torch.rand(len(given), generator=generator, device=given.device) if self.mixture else None
        L = inputs_embeds.shape[1]
        states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        attentions = config.output_attentions if output_attentions is None else output_attentions
        hidden, all_hidden, weights = self._trunk(
            inputs_embeds, latent, attention_mask, position_ids, token_type_ids, bool(states), bool(attentions)
        )
        logits = self._logits(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.to(logits.device).flatten().long())
        if all_hidden is not None:
            all_hidden = tuple(each[:, :L] for each in all_hidden) if config.mixture else all_hidden
        output: Any = MaskedLMOutput
        found = output(loss=loss, logits=logits, hidden_states=all_hidden, attentions=weights)
        return found if (config.return_dict if return_dict is None else return_dict) else found.to_tuple()

    def embed(self, tokens: Tensor, noise: Tensor | None) -> Tensor:
        """E(token), and E(mask) + noise embedding where a token is masked: (B, L, D)."""
        x = self.get_input_embeddings()(tokens)
        if noise is None:
            return x
        return x + self.mask_embedding(noise).to(x.dtype) * (tokens == self.config.mask_token_id)[..., None]

    def _drawn(self, shape: Any, device: torch.device, generator: torch.Generator | None) -> Tensor | None:
        """Fresh noise for each position: (B, L, dim), of finite masks (B, L), of a single one None."""
        mask = self.config.mask
        how: dict[str, Any] = {"device": device, "generator": generator}
        if mask["kind"] == "single":
            return None
        if mask["kind"] == "finite":
            return torch.randint(mask["count"], shape, **how)
        size = (*shape, mask["dim"])
        values = torch.randn(size, **how) if mask["law"] == "normal" else 2 * torch.rand(size, **how) - 1
        return mask["scale"] * values

    def _trunk(
        self,
        x: Tensor,
        latent: Tensor | None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        kinds: Tensor | None = None,
        states: bool = False,
        attentions: bool = False,
    ) -> tuple[Tensor, Any, Any]:
        """Embeddings (B, L, D) → hidden states (B, L, ·); on request those of all layers, and their attention
        weights."""
        L, seen = x.shape[1], None
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            seen = attention_mask.bool()
            seen = seen | ~seen.any(-1, keepdim=True)
            if positions is None:  # padding is not counted
                positions = (seen.long().cumsum(-1) - 1).clamp(min=0)
        if latent is not None and self.mixture is not None:
            x = torch.cat((x, self.mixture(latent).to(x.dtype)[:, None]), dim=1)
            if positions is not None:
                counted = positions if seen is None else positions.masked_fill(~seen, -1)
                positions = torch.cat((positions, counted.amax(-1, True) + 1), -1)
            seen = None if seen is None else F.pad(seen, (0, 1), value=True)
            kinds = None if kinds is None else F.pad(kinds, (0, 1))
        if self.whole:
            hidden, every, weights = self._network(x, seen, positions, kinds, states, attentions)
            return hidden[:, :L], every, weights
        positions = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
        rope = tuple(turn[:, None] for turn in rotations(positions, self.config.width // self.config.heads))
        kept: list[Tensor] | None = [] if attentions else None
        every, mask = [x], None if seen is None else seen[:, None, None]
        for block in self.blocks:
            x = block(x, rope, mask, kept)
            every.append(x)
        x = every[-1] = self.norm(x)
        return x[:, :L], tuple(every) if states else None, None if kept is None else tuple(kept)

    def _network(
        self,
        x: Tensor,
        seen: Tensor | None,
        positions: Tensor | None,
        kinds: Tensor | None,
        states: bool,
        weights: bool,
    ) -> tuple[Tensor, Any, Any]:
        """The trunk of a model of `transformers`, without sliding windows."""
        lm, T = self.lm, x.shape[1]
        if weights and lm.config._attn_implementation != "eager":  # fused attention returns none
            lm = copy.deepcopy(lm, {id(tensor): tensor for tensor in (*lm.parameters(), *lm.buffers())})
            lm.set_attn_implementation("eager")
        given: dict[str, Any] = {"inputs_embeds": x}
        if seen is not None:
            given["attention_mask"] = seen.long()
        if self.opened:
            given["use_cache"] = False
            if self._windowed(T):
                open_ = torch.ones(len(x) if seen is not None else 1, 1, T, T, dtype=torch.bool, device=x.device)
                open_ = open_ if seen is None else open_ & seen[:, None, None]
                if lm.config._attn_implementation == "eager":  # there it is added to the scores
                    open_ = torch.zeros_like(open_, dtype=x.dtype).masked_fill(~open_, torch.finfo(x.dtype).min)
                given["attention_mask"] = open_
        if positions is not None:
            tables = [m for n, m in lm.named_modules() if n.endswith("position_embeddings")]
            skipped = [m.padding_idx for m in tables if isinstance(m, nn.Embedding) and m.padding_idx is not None]
            given["position_ids"] = positions + (skipped[0] + 1 if skipped else 0)
        if kinds is not None and "token_type_ids" in inspect.signature(lm.base_model.forward).parameters:
            given["token_type_ids"] = kinds
        found = lm.base_model(**given, output_hidden_states=states, output_attentions=weights)
        hidden = found[0]
        if self.config.backbone.get("shift"):
            before = torch.cat((hidden[:, :1], hidden[:, :-1]), 1)
            known = None if seen is None else F.pad(seen[:, :-1], (1, 0), value=True)
            hidden = before if known is None else torch.where(known[..., None], before, hidden)
        return hidden, getattr(found, "hidden_states", None), getattr(found, "attentions", None)

    def _windowed(self, length: int) -> bool:
        config = self.lm.config
        window = getattr(config, "sliding_window", None)
        known = {"full_attention"} | ({"sliding_attention"} if window is not None else set())
        other = set(getattr(config, "layer_types", None) or ()) - known
        return bool(other) or (window is not None and length > window // 2)

    def _logits(self, rows: Tensor) -> Tensor:
        """(…, ·) → (…, V); the lowest finite value for the mask, and for tokens that the head does not have."""
        if self.whole:
            ended = copy.copy(self.lm)  # the same layers, but for the trunk
            trunk = Rows(rows.reshape(1, -1, rows.shape[-1]))
            ended._modules = {**self.lm._modules, self.lm.base_model_prefix: trunk}
            logits = ended(inputs_embeds=rows).logits
            logits = logits.reshape(*rows.shape[:-1], logits.shape[-1])[..., : self.config.vocab_size]
            logits = F.pad(logits, (0, self.config.vocab_size - logits.shape[-1]), value=-torch.inf)
        else:
            logits = self.output(rows)
        never = torch.arange(logits.shape[-1], device=logits.device) == self.config.mask_token_id
        return logits.masked_fill(never, -torch.inf).clamp(min=torch.finfo(logits.dtype).min)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        length: int | None = None,
        max_new_tokens: int | None = None,
        num: int = 1,
        steps: int = 8,
        temperature: float = 1.0,
        top_p: float = 1.0,
        noise: Literal["posterior", "keep"] | None = None,
        order: Literal["random", "spread"] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Write token ids (B·num, length) in at most `steps` network evaluations.

        input_ids       (B, L): a canvas whose holes are `mask_token_id`, which are filled; without holes, a prompt,
                        which is continued. Without it: `num` sequences from nothing
        attention_mask  (B, L): 0 at padding beside prompts, which is left out
        length          of the result; the model's own unless given. max_new_tokens: so many after the longest prompt
        num             how often each row is completed, one row after another
        temperature     0 takes the likeliest token; top_p: draw only from the likeliest whose probabilities sum to this
        noise           noise of positions that stay masked: `posterior` redraws it, `keep` keeps it; the
                        configuration's unless given
        order           positions that a step fills: each independently of the others (`random`), or far from one
                        another (`spread`); the configuration's unless given
        seed            None: from torch's generator

        A model of whole texts begins and ends them itself: after the end comes padding.
        """
        noise, order = noise or self.config.noise or "posterior", order or self.config.order or "random"
        if min(steps, num) < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError("steps ≥ 1, num ≥ 1, temperature ≥ 0, 0 < top_p ≤ 1")
        if noise not in ("posterior", "keep") or order not in ("random", "spread"):
            raise ValueError("noise 'posterior' or 'keep', order 'random' or 'spread'")
        canvas = self._canvas(input_ids, attention_mask, length, max_new_tokens, num)
        generator = None if seed is None else torch.Generator(canvas.device).manual_seed(seed)
        training = self.training
        self.eval()
        try:
            return self._written(canvas, steps, temperature, top_p, noise == "keep", order == "spread", generator)
        finally:
            self.train(training)

    def _canvas(
        self, ids: Tensor | None, attention_mask: Tensor | None, length: int | None, more: int | None, num: int
    ) -> Tensor:
        """Rows with holes, each `num` times: (B·num, L)."""
        hole, most = self.config.mask_token_id, self.config.length
        for name, value in (("length", length), ("max_new_tokens", more)):
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} = {value}: at least 1 token, and at most {most}, which is the model's length")
        if ids is None:
            return torch.full((num, length or more or most), hole, device=self.device)
        ids = ids.to(self.device)
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            real = attention_mask.to(self.device).bool()
            first = real.long().argsort(dim=-1, descending=True, stable=True)  # padding last, then holes
            ids = ids.gather(1, first).masked_fill(~real.gather(1, first), hole)
            length = most if length is None and more is None else length
        if length is None:
            length = ids.shape[1] + more if more is not None else ids.shape[1] if bool((ids == hole).any()) else most
        if not ids.shape[1] <= length <= most:
            raise ValueError(f"a row of {ids.shape[1]} tokens, {length} wanted; the model takes at most {most}")
        return F.pad(ids, (0, length - ids.shape[1]), value=hole).repeat_interleave(num, dim=0)

    def _written(
        self,
        tokens: Tensor,
        steps: int,
        temperature: float,
        top_p: float,
        keep: bool,
        apart: bool,
        generator: torch.Generator | None,
    ) -> Tensor:
        """The reverse process from all holes to none. When a hole is filled does not depend on the network: that is
        drawn first, and a sequence is evaluated only at steps that fill one of its holes."""
        how: dict[str, Any] = {"device": tokens.device, "generator": generator}
        tokens = self._closed(tokens, tokens == self.config.mask_token_id)
        if self.config.lengths is not None:
            tokens = self._ended(tokens, torch.rand(len(tokens), 1, dtype=torch.float64, **how))
        holes = tokens == self.config.mask_token_id
        grid = torch.linspace(1.0, 1e-5, steps + 1, dtype=torch.float64, device=tokens.device)
        grid[-1] = 0.0
        alpha = self._alpha(grid)  # the probability that a token is not masked at each time
        stay = (1 - alpha) / (1 - alpha[0])
        u = torch.rand(tokens.shape, dtype=torch.float64, **how)
        if apart:  # the positions of a step are as far apart as there are steps
            bits = max(1, (steps - 1).bit_length())
            turn = sorted(range(steps), key=lambda remainder: f"{remainder:0{bits}b}"[::-1])
            part = torch.tensor(turn, device=tokens.device).argsort()
            first = (torch.rand(len(tokens), 1, dtype=torch.float64, **how) * steps).long()
            u = (part[(torch.arange(tokens.shape[1], device=tokens.device) + first) % steps] + u) / steps
        filled_at = torch.searchsorted(-stay[1:], -u)
        carried = self._drawn(tokens.shape, tokens.device, generator)
        latent = torch.rand(len(tokens), **how)
        before = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)  # step of the last evaluation
        for step in range(steps):
            now = holes & (filled_at == step)
            active = now.any(-1).nonzero()[:, 0]
            if not len(active):
                continue
            open_, now = holes[active], now[active]
            if not keep:
                latent[active] = torch.rand(len(active), **how)
                if carried is not None:
                    same = (alpha[before[active]] / alpha[step])[:, None]  # the probability that noise was not redrawn
                    redrawn = open_ & (torch.rand(open_.shape, dtype=torch.float64, **how) >= same)
                    fresh = cast("Tensor", self._drawn(open_.shape, tokens.device, generator))
                    redrawn = redrawn if carried.ndim == 2 else redrawn[..., None]
                    carried[active] = torch.where(redrawn, fresh, carried[active])
            before[active] = step
            x = self.embed(tokens[active], None if carried is None else carried[active])
            rows = self._trunk(x, latent[active] if self.mixture is not None else None)[0][now]
            u = torch.rand(len(rows), dtype=torch.float64, **how)
            barred = self._barred(tokens[active], open_)[now]
            v = torch.rand(len(active), 1, dtype=torch.float64, **how).expand(now.shape)[now]
            written = tokens[active]
            written[now] = self._draw(rows, u, v, barred, temperature, top_p)
            tokens[active] = self._closed(written, open_)
            holes[active] = open_ & (tokens[active] == self.config.mask_token_id)
        return tokens

    def _alpha(self, t: Tensor) -> Tensor:
        schedule = self.config.schedule
        if schedule["kind"] == "cosine":
            return 1 - (1 - schedule["floor"]) * (1 - (t * (math.pi / 2)).cos())
        return 1 - (1 - schedule["floor"]) * t

    def _draw(self, rows: Tensor, u: Tensor, v: Tensor, barred: Tensor, temperature: float, top_p: float) -> Tensor:
        """A token for each row (R, ·) by inversion in float64; no end and no padding where `barred` (R,). Of whole
        texts, v (R,) decides on end and padding: one uniform number for all positions that a text reveals at a step, so
        that they agree on its end."""
        config, size = self.config, max(1, AT_ONCE // self.config.vocab_size)
        found = []
        for part in range(0, len(rows), size):
            some = slice(part, part + size)
            logits = self._logits(rows[some]).double()
            ends = None
            if config.eos_token_id is not None:
                ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
                ends[[config.eos_token_id, config.pad_token_id]] = True
                logits = logits.masked_fill(barred[some, None] & ends, -torch.inf)
            if temperature == 0:
                found.append(logits.argmax(-1))
                continue
            p = torch.softmax(logits / temperature, dim=-1)
            if top_p < 1:
                ranked, order = p.sort(dim=-1, descending=True, stable=True)
                outside = ranked.cumsum(-1) - ranked >= top_p
                p = torch.zeros_like(p).scatter(-1, order, ranked.masked_fill(outside, 0.0))
            p = p / p.sum(-1, keepdim=True)
            text = p if ends is None else p.masked_fill(ends, 0.0)
            edge = text.cumsum(-1)
            token = torch.searchsorted(edge, u[some, None] * edge[:, -1:], right=True)
            last = text.shape[-1] - 1 - (text > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
            token = torch.minimum(token, last)[:, 0]
            if ends is not None:
                end, pad = config.eos_token_id, config.pad_token_id
                padding = p[:, pad] if pad != end else torch.zeros_like(p[:, pad])
                token = torch.where(v[some] < padding + p[:, end], end, token)
                token = torch.where(v[some] < padding, pad, token)
            found.append(token)
        return torch.cat(found)

    def _closed(self, tokens: Tensor, fresh: Tensor) -> Tensor:
        """Of whole texts: the begin token first, and padding after the first end, where tokens are `fresh`."""
        config = self.config
        if config.eos_token_id is None:
            return tokens
        place = torch.arange(tokens.shape[-1], device=tokens.device)
        tokens = torch.where(fresh & (place == 0), config.bos_token_id, tokens)
        ends = ((tokens == config.eos_token_id) | (tokens == config.pad_token_id)) & (place > 0)
        return torch.where(fresh & (ends.cumsum(-1) - ends.long() > 0), config.pad_token_id, tokens)

    def _ended(self, tokens: Tensor, v: Tensor) -> Tensor:
        """Of whole texts with `lengths`: rows with an end, drawn by v (B, 1) among the holes after all given text; at
        the last of them if no length fits; nowhere as often as a text is longer than the row."""
        config, L = self.config, tokens.shape[1]
        holes, place = tokens == config.mask_token_id, torch.arange(L, device=tokens.device)
        ends = (tokens == config.eos_token_id) & (place > 0)
        text = ~holes & ~ends & ((tokens != config.pad_token_id) | (place == 0))
        open_ = holes & (text.flip(1).cumsum(1).flip(1) == 0) & ~ends.any(1, keepdim=True)
        share = torch.tensor(config.lengths[1 : L + 1], dtype=torch.float64, device=tokens.device)
        beyond = open_[:, -1:].double() * sum(config.lengths[L + 1 :])
        chance = torch.cat((torch.where(open_, F.pad(share, (0, L - len(share))), 0.0), beyond), 1)
        last = F.pad(open_ & (open_.flip(1).cumsum(1).flip(1) == 1), (0, 1))
        edge = torch.where(chance.sum(1, keepdim=True) > 0, chance, last.double()).cumsum(-1)
        at = torch.searchsorted(edge, v * edge[:, -1:], right=True)
        return self._closed(torch.where(place == at, config.eos_token_id, tokens), holes)

    def _barred(self, tokens: Tensor, holes: Tensor) -> Tensor:
        """Of whole texts: the holes before a visible token, where the text cannot end; all of them if the end is drawn
        first."""
        if self.config.eos_token_id is None:
            return torch.zeros_like(holes)
        if self.config.lengths is not None:
            return holes
        there = (~holes & (tokens != self.config.pad_token_id)).long()
        return holes & (there.flip(-1).cumsum(-1).flip(-1) - there > 0)
