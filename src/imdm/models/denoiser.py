"""The denoiser x_θ: a trunk (tokens and noise → hidden) and a head (chosen rows → log-probabilities of data tokens).

Nothing that runs often builds (B, L, V): the sampler asks the head where a token is revealed, losses ask where a
position is masked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from imdm.errors import UserError, check_is, check_seed, check_whole, is_out_of_memory, shown
from imdm.hub import hub_for
from imdm.masks import Infinite, Mask, NoisePath, parse_mask
from imdm.models.backbones import Backbone, backbones, parse_backbone
from imdm.models.backbones.base import WRAPPERS, size_filled
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.layers import MixtureToken, Norm, TokenEmbedding, ZeroLinear
from imdm.models.masked_lm import masked_lm, unpadded
from imdm.models.quantized import opened
from imdm.models.readout import Head, Reduce, reduced
from imdm.models.saving import check_saved, save_whole
from imdm.process import Process
from imdm.randomness import Purpose, as_key, fold, seeded
from imdm.room import check_room
from imdm.sampling import Generation, Revealed, Sampling, sample
from imdm.schedule import parse_schedule
from imdm.state import Noised, Rows

AS_SAVED = {"dtype", "torch_dtype", "device_map", "low_cpu_mem_usage", "attn_implementation"}
"""What may be asked of `from_pretrained` without asking for another configuration than the one that was saved."""


class MaskedDiffusionLM(PreTrainedModel):
    """A masked diffusion language model with any kind of mask and any backbone: tokens, noise and latent → embeddings →
    `backbone` → hidden states → head. `Denoiser` says what others use of it.

    >>> config = MaskedDiffusionConfig(vocab_size=3, length=2, width=16, blocks=1, heads=2, condition=8)
    >>> model = MaskedDiffusionLM(config)
    >>> model.generate(num=5, steps=1).tokens.shape
    torch.Size([5, 2])
    """

    config_class = MaskedDiffusionConfig
    config: MaskedDiffusionConfig
    base_model_prefix = ""
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012  (transformers' own convention)
    backbone: Backbone
    replay: Any = None  # recorded evaluations (`faster`)

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__(config)
        self.mask: Mask = parse_mask(config.mask)
        schedule = parse_schedule(config.schedule)
        self.process = Process(schedule, self.mask, config.mask_token_id, config.mixture, config.ending)
        D, settings = config.width, parse_backbone(config.backbone)
        kind = backbones[settings.kind]
        if not kind.whole:
            self.embedding = TokenEmbedding(config.vocab_size, D)
        self.mask_embedding = self.mask.embedding(D)
        self.mixture = MixtureToken(D) if config.mixture else None
        self._take_in(kind(config, settings))
        if not kind.whole:
            self.output = ZeroLinear(D, config.vocab_size)
        self.post_init()

    def _take_in(self, backbone: Backbone) -> None:
        """The backbone's layers under their own names, so that weights are called what they always were: it shares one
        table of layers with this model, and is itself no layer of it. What replaces a layer here replaces it there."""
        mine = set(WRAPPERS)
        names = [name for table in (backbone._modules, backbone._parameters, backbone._buffers) for name in table]
        for name in names:
            if name in mine or hasattr(self, name):
                raise ValueError(f"backbone {backbone.settings.kind!r}: a layer cannot be called {name!r} here")
        for table in ("_modules", "_parameters", "_buffers"):
            self.__dict__[table].update(backbone.__dict__[table])
            backbone.__dict__[table] = self.__dict__[table]
        self._non_persistent_buffers_set |= backbone._non_persistent_buffers_set
        self.__dict__["backbone"] = backbone

    def train(self, mode: bool = True) -> MaskedDiffusionLM:
        super().train(mode)
        self.backbone.training = mode
        return self

    def __repr__(self) -> str:
        config, count = self.config, sum(parameter.numel() for parameter in self.parameters())
        sizes = f"{count / 1e6:.1f}M parameters, {self.backbone.about}, mask {self.mask.name}"
        return f"{type(self).__name__}({sizes}, {config.vocab_size:,} ids, up to {config.length} tokens)"

    def _init_weights(self, module: nn.Module) -> None:
        """Every layer of ours knows its own start; `transformers` skips what was loaded."""
        if isinstance(module, nn.Linear | nn.Embedding | Norm) and (self.backbone.resets or self._is_own(module)):
            module.reset_parameters()

    def _is_own(self, module: nn.Module) -> bool:
        """Whether a layer is not the backbone's."""
        own = [self._modules.get(name) for name in WRAPPERS]
        return any(module is one for part in own if part is not None for one in part.modules())

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.config.vocab_size = value

    @property
    def length(self) -> int:
        return self.config.length

    @property
    def causal(self) -> bool:
        return self.config.causal

    def set_dropout(self, rate: float) -> None:
        """Another dropout rate for further training."""
        self.config.dropout = rate
        self.backbone.set_dropout(rate)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `transformers`, from safetensors only, and refusing weights that do not fit: there, a missing layer
        would come back random; with `output_loading_info` they are told instead. `mask=...` loads an MDM as an IMDM
        with identical log-probabilities."""
        where, folder = f"model {str(pretrained_model_name_or_path)!r}", Path(str(pretrained_model_name_or_path))
        new_mask, tells = "mask" in kwargs, kwargs.pop("output_loading_info", False)
        as_saved = folder.is_dir() and not kwargs.keys() - AS_SAVED
        kwargs |= {"use_safetensors": True, "output_loading_info": True}
        try:
            with hub_for(folder):
                source, kwargs = opened(cls.config_class, pretrained_model_name_or_path, kwargs)
                loaded: Any = super().from_pretrained(source, *args, **kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) or "meta device" in str(error):
                raise
            raise UserError(f"{where}: its weights do not have the shapes its config.json says") from error
        except (OSError, SafetensorError, TypeError, KeyError, AttributeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"{where} cannot be loaded: {reason}") from error
        model, info = loaded
        missing = {name for name in info["missing_keys"] if not (new_mask and name.startswith("mask_embedding."))}
        ignored = {name for name in info["unexpected_keys"] if not (new_mask and name.startswith("mask_embedding."))}
        if (missing or ignored) and not tells:
            problem = f"lacks {sorted(missing)[0]!r}" if missing else f"has the unknown {sorted(ignored)[0]!r}"
            raise UserError(f"{where} does not fit its config.json: it {problem}; it is damaged or not ours")
        if as_saved:
            check_saved(folder, model.config, where)
        for name, weight in model.named_parameters():
            if not bool(torch.isfinite(weight).all()):
                raise UserError(
                    f"{where}: {name!r} has weights that are no numbers; it is damaged, or its training failed"
                )
        return (model, info) if tells else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in `transformers`, each file whole or not there, and the weights with a digest of themselves."""
        if kwargs.get("push_to_hub"):
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        save = super().save_pretrained
        save_whole(lambda place: save(place, *args, **kwargs), Path(save_directory), self.config)

    @property
    def _ends(self) -> Any:
        """What has the embedding and the head: a backbone with its own, or this."""
        return self.backbone if self.backbone.whole else self

    def get_input_embeddings(self) -> nn.Module:
        return self._ends.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        if self.backbone.whole:
            self.backbone.get_network().set_input_embeddings(value)
        else:
            self.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.backbone.get_network().get_output_embeddings() if self.backbone.whole else self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        if self.backbone.whole:
            self.backbone.get_network().set_output_embeddings(new_embeddings)
        else:
            self.output = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """As in `transformers`. The mask keeps its id, and with it all ids that mean something must remain."""
        config = self.config
        special = [config.mask_token_id, config.bos_token_id, config.eos_token_id, config.pad_token_id]
        least = 1 + max(token for token in special if token is not None)
        if new_num_tokens is not None and new_num_tokens < least:
            raise UserError(f"new_num_tokens = {new_num_tokens}: at least {least}, as token {least - 1} has a meaning")
        if not self.backbone.whole:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        found = self.backbone.get_network().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            theirs = config.backbone["config"] | {"vocab_size": found.weight.shape[0]}
            config.backbone = config.backbone | {"config": theirs}
            self.backbone.settings, config.vocab_size = parse_backbone(config.backbone), found.weight.shape[0]
        return found

    def embed(self, state: Noised) -> Tensor:
        """Eq. 15: E(z) for data tokens, E(mask) + MLP(ε) for masked positions: (B, L, D). A single mask reads none."""
        x = self._ends.embedding(state.tokens)
        if state.noise is None or not self.mask.noisy:
            return x
        return x + self.mask_embedding(state.noise).to(x.dtype) * state.masked[..., None]

    def trunk(self, state: Noised) -> Tensor:
        """Hidden states (B, L, D)."""
        self._check_length(state)
        many = len(state.tokens)
        hidden = self._replayed(state, lambda all_of_them: all_of_them[:many].clone())
        return self._all(state) if hidden is None else hidden

    def trunk_at(self, state: Noised, rows: Rows) -> Tensor:
        """Hidden states of some rows alone, (R, D)."""
        self._check_length(state)
        hidden = self._replayed(state, rows.of)
        return self.backbone.at(self._embedded(state), rows, state.keys) if hidden is None else hidden

    def _all(self, state: Noised) -> Tensor:
        return self.backbone(self._embedded(state), state.keys)[:, : state.tokens.shape[1]]

    def _replayed(self, state: Noised, read: Callable[[Tensor], Tensor]) -> Tensor | None:
        """What `read` makes of the hidden states of a recorded evaluation, the batch filled up; None without one."""
        if self.replay is None or self.training or not self.replay.wants(state):
            return None
        full = state.filled(size_filled(len(state.tokens)), self.config.mask_token_id)
        beside = self.backbone.beside(full.tokens.shape[1] + (self.mixture is not None), full.tokens.device)
        return self.replay(self._all, beside, full, read)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MaskedDiffusionLM:
        """Weights that move leave their recordings behind."""
        if self.replay is not None:
            self.replay.forget()
        with self.backbone.unrounded():
            return super()._apply(fn, recurse)

    def _check_length(self, state: Noised) -> None:
        if state.tokens.shape[1] > self.config.length:
            raise UserError(
                f"the state has rows of {state.tokens.shape[1]} tokens, the model takes at most {self.config.length}"
            )

    def _embedded(self, state: Noised) -> Tensor:
        """What the backbone reads: the tokens and the masks' noise, and last the latent of a mixture."""
        if state.noise is None and self.mask.noisy:
            raise UserError(f"the state carries no noise, but the model's mask is {self.mask.name}; use model.noised()")
        x = self.embed(state)
        if self.mixture is not None:
            if state.latent is None:
                raise UserError("the state carries no latent, but the model is a mixture; use model.noised()")
            x = torch.cat((x, self.mixture(state.latent).to(x.dtype)[:, None]), dim=1)  # (B, L + 1, D)
        return x

    def compile_trunk(self, *, training: bool) -> None:
        """Fuse the backbone's small operations, from the next batch on, while the model trains or while it does not:
        the same law, other rounding, other draws of dropout. Needs what `torch.compile` needs; takes some seconds. A
        backbone that does not know how stays as it is."""
        self.backbone.compile_trunk(training=training)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile_trunk` was asked for, in either mode."""
        return self.backbone.is_compiled

    def head(self, rows: Tensor) -> Tensor:
        """SUBS: the mask is never predicted. Log-probabilities in float32."""
        return self.head_of(rows).log_probs()

    def head_of(self, rows: Tensor) -> Head:
        return Head(rows, self._ends.output, self.config.mask_token_id, self.vocab_size)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments by position: those of `forward`, or beside a state of the diffusion those of `log_probs`."""
        if args and isinstance(args[0], Noised):
            state, *others = args
            names = ("rows", "reduce", "group")[: len(others)]
            return super().__call__(state, **dict(zip(names, others, strict=True)), **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(
        self,
        input_ids: Noised | Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        noise: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        *,
        rows: Rows | Tensor | None = None,
        reduce: Reduce | None = None,
        group: int = 1,
    ) -> Any:
        """Of a state of the diffusion, `model(state, rows, reduce, group)`: what `log_probs` gives.

        Of ids, as `transformers` calls a masked language model: a `MaskedLMOutput`.

        input_ids       (B, L), holes are `mask_token_id`
        attention_mask  (B, L): 0 at padding, before or after the text, which no position reads
        labels          (B, L): the tokens that were there; `.loss` is −log p of them in nats, the mean over those that
                        are not −100
        position_ids    (B, L) from 0 on: where tokens stand, unless one after another
        token_type_ids  for backbones that read them, as BERT; others do without
        inputs_embeds   (B, L, width), in the place of input_ids; masks then look as they are given
        noise           of masks that carry some: a seed, or the noise itself, (B, L, dim) or, of finite masks, (B, L);
                        None: drawn anew in each call, from torch's generator
        output_hidden_states, output_attentions, return_dict   as in `transformers`

        `.logits` (B, L, V) are the network's at every position, of visible tokens too; log_softmax of them is what
        `log_probs` gives at masked ones. The mask's own is the least number there is: it is never predicted.
        """
        if isinstance(input_ids, Noised):
            _check_absent(
                "a state of the diffusion takes rows, reduce and group beside it",
                attention_mask=attention_mask,
                labels=labels,
                position_ids=position_ids,
                token_type_ids=token_type_ids,
                inputs_embeds=inputs_embeds,
                noise=noise,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
                return_dict=return_dict,
            )
            return self.log_probs(input_ids, rows, reduce, group)
        _check_absent("ids are read whole; model.noised(ids) makes a state of them", rows=rows, reduce=reduce)
        config = self.config
        found = masked_lm(
            self,
            input_ids,
            attention_mask,
            labels,
            position_ids,
            token_type_ids,
            inputs_embeds,
            noise,
            states=bool(config.output_hidden_states if output_hidden_states is None else output_hidden_states),
            attentions=bool(config.output_attentions if output_attentions is None else output_attentions),
        )
        return found if (config.return_dict if return_dict is None else return_dict) else found.to_tuple()

    def log_probs(
        self, state: Noised, rows: Rows | Tensor | None = None, reduce: Reduce | None = None, group: int = 1
    ) -> Tensor:
        """Log-probabilities of data tokens.

        rows, or (B, L) bool: only there, (R, V). With reduce, a function of the log-probabilities of some rows (r, V)
        and the slice of 0…R they are: what it makes of them, one after another, without ever holding (R, V); each
        `group` rows that follow one another come together.
        Without rows: all of (B, L, V), revealed tokens carried over.
        """
        if rows is not None:
            rows = rows if isinstance(rows, Rows) else Rows.where(rows)
            head = self.head_of(self.trunk_at(state, rows))
            return head.log_probs() if reduce is None else reduced(head, reduce, group)
        hidden = self.trunk(state)
        carried = torch.full((*state.tokens.shape, self.vocab_size), -torch.inf, device=hidden.device)
        carried.scatter_(-1, state.tokens[..., None], 0.0)
        return torch.where(state.masked[..., None], self.head(hidden), carried)

    def noised(self, tokens: Tensor, seed: int = 0) -> Noised:
        """The state of `tokens` (B, L) at t = 1, masked where they hold the mask id, with noise drawn under `seed`."""
        start = torch.ones(len(tokens), device=tokens.device)
        return self.process.noised(tokens, start, self.sample_keys(len(tokens), seed).to(tokens.device))

    def sample_keys(self, num: int, seed: int) -> Tensor:
        """The keys of the first `num` sequences that `generate` writes under `seed`: (num,)."""
        return fold(as_key(seed, self.device), Purpose.SAMPLE, torch.arange(num, device=self.device))

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        length: int | None = None,
        num: int = 1,
        seed: int = 0,
        keys: Tensor | None = None,
        noise_keys: Tensor | NoisePath | None = None,
        trace: bool = False,
        batch_size: int | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_step: Callable[[Revealed], None] | None = None,
        **how: Any,
    ) -> Generation:
        """Write `num` sequences in at most `steps` network evaluations each (8 unless given).

        input_ids    a canvas (B, L) whose holes are `mask_token_id`; each row is completed `num` times, rows in order.
                     Without holes and `length` it is continued to the model's length. Without a canvas: `num` sequences
                     of `length` from nothing. A model of text expects its begin token first, which `Writer` puts there.
        attention_mask   of a tokenizer: padding beside prompts of unequal length is left out. Its token_type_ids too
        seed, keys   sequence i depends on the i-th key of `seed`, or on keys[i] where keys (sequences,) are given
        noise_keys   others of them, or a path between two, for what masks carry: the same draws then meet other noise
        how          the options of `Sampling`: steps, noise, temperature, top_p; a causal model writes one token each
                     evaluation, whatever the steps
        on_progress, on_step    as in `sample`

        Safe from several threads at once, also of a model that trains: dropout is off here and nowhere else. A thread
        that changes weights, or calls `train()`, while another writes changes what that one writes.
        """
        options = Sampling.of(how)
        check_seed(seed)
        if input_ids is not None and attention_mask is not None:
            input_ids, padded = unpadded(as_ids(input_ids), attention_mask, self.config.mask_token_id)
            length = self.config.length if length is None and padded else length
        canvas = self._canvas(input_ids, length, num, options.steps, batch_size)
        keys = self.sample_keys(len(canvas), seed) if keys is None else self.checked_keys(keys, len(canvas))
        return sample(
            self._still(),
            canvas,
            keys=keys,
            noise_keys=None if noise_keys is None else self.checked_noise_keys(noise_keys, len(canvas)),
            how=options,
            trace=trace,
            batch_size=batch_size,
            on_progress=on_progress,
            on_step=on_step,
        )

    def _still(self) -> MaskedDiffusionLM:
        """This model without dropout: while it trains, a second one of the same weights, so that no thread finds the
        mode of another changed."""
        if not self.training:
            return self
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        return copy.deepcopy(self, shared).eval()

    def checked_keys(self, keys: Tensor, many: int) -> Tensor:
        """So many keys, where the model is."""
        check_is("keys", keys, Tensor, "a tensor of whole numbers")
        if keys.shape != (many,) or keys.dtype != torch.int64:
            raise UserError(f"keys: expected {many} numbers of 64 bits, got {tuple(keys.shape)} of type {keys.dtype}")
        return keys.to(self.device)

    def checked_noise_keys(self, keys: Tensor | NoisePath, many: int) -> Tensor | NoisePath:
        """So many keys of noise, or places between two, where the model is."""
        if not isinstance(keys, NoisePath):
            return self.checked_keys(keys, many)
        if keys.s.shape != (many,) or not bool(((keys.s >= 0) & (keys.s <= 1)).all()):
            raise UserError(f"noise_keys: expected {many} places s in [0, 1], got {shown(keys.s.tolist())}")
        one, other = (self.checked_keys(each, many) for each in (keys.first, keys.second))
        return NoisePath(one, other, keys.s.to(self.device, torch.float64))

    def _check_room(self, what: str, many: int, tokens: int, steps: int, batch_size: int | None) -> None:
        """Refuse more texts of so many tokens than there is memory for; what the network itself takes counts only where
        all are evaluated at once."""
        each = self.dtype.itemsize * (3 * self.config.width + self.config.mask.get("dim", 0))
        at_once = each if batch_size is None else 0
        check_room(what, many, tokens * (40 + at_once) + 24 * (steps + 1), self.device)

    def _canvas(
        self, input_ids: Tensor | None, length: int | None, num: int, steps: int = 1, batch_size: int | None = None
    ) -> Tensor:
        check_whole("num", num)
        if length is not None:
            check_whole("length", length, 1, self.config.length)
        if input_ids is None:
            self._check_room("num", num, length or self.config.length, steps, batch_size)
            shape = num, self.config.length if length is None else length
            return torch.full(shape, self.config.mask_token_id, device=self.device)
        input_ids = as_ids(input_ids).to(self.device)
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            hint = "; one prompt is [ids]" if input_ids.ndim == 1 else ""
            given = tuple(input_ids.shape)
            raise UserError(f"input_ids: expected a canvas (sequences, length), got shape {given}{hint}")
        if length is not None and input_ids.shape[1] > length:
            raise UserError(f"input_ids: the prompt has {input_ids.shape[1]} tokens, more than length = {length}")
        if input_ids.shape[1] > self.config.length:
            raise UserError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, the model takes at most {self.config.length}"
            )
        check_tokens(input_ids, self.vocab_size, "input_ids")
        if length is None and not bool((input_ids == self.config.mask_token_id).any()):
            length = self.config.length
        self._check_room("num", num, len(input_ids) * (length or input_ids.shape[1]), steps, batch_size)
        if length is not None:
            holes = self.config.mask_token_id
            input_ids = nn.functional.pad(input_ids, (0, length - input_ids.shape[1]), value=holes)
        return input_ids.repeat_interleave(num, dim=0)


def _check_absent(why: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UserError(f"{name}: {why}; leave it out")


def as_ids(values: Any) -> Tensor:
    """Token ids as a tensor of whole numbers, from nested lists too."""
    try:
        ids = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise UserError(f"input_ids = {shown(values)}: expected rows of token ids, all of one length") from None
    if ids.is_meta:
        raise UserError("input_ids: these are on the device 'meta', which holds no ids")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"input_ids: token ids are whole numbers, these are of type {ids.dtype}")
    return ids.long()


def check_tokens(tokens: Tensor, vocab_size: int, where: str) -> None:
    """Every id names a token."""
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise UserError(f"{where}: token {int(bad)} is outside the vocabulary 0…{vocab_size - 1}")


def with_mask(model: MaskedDiffusionLM, mask: Any = None, seed: int = 0, *, mixture: bool = False) -> MaskedDiffusionLM:
    """A copy of `model` with another mask (None: the same), whose fresh layer follows from `seed`. A new mask adds zero
    until trained: an MDM's copy has identical log-probabilities. What the old mask had learned of its own noise is left
    behind. With `mixture`, the copy also reads a latent λ; its extra token changes what the model says at once."""
    check_is("model", model, MaskedDiffusionLM, "one of our models")
    check_seed(seed)
    mask = model.mask if mask is None else parse_mask(mask)
    weights = model.state_dict()
    if mask != model.mask:
        weights = {name: w for name, w in weights.items() if not name.startswith("mask_embedding.")}
    other = _like(model, seed, mask=mask.model_dump(), mixture=mixture or model.config.mixture)
    missing, unexpected = other.load_state_dict(weights, strict=False)
    if unexpected or any(not name.startswith(("mask_embedding.", "mixture.")) for name in missing):
        raise UserError(f"the model's weights do not fit its own config: {(missing + unexpected)[0]!r}")
    return other.train(model.training)


def to_infinite(
    model: MaskedDiffusionLM, dim: int = 768, law: str = "uniform", scale: float = 1.0, seed: int = 0
) -> MaskedDiffusionLM:
    """Turn a trained MDM into an IMDM whose log-probabilities are identical until trained (Eq. 15)."""
    return with_mask(model, Infinite.parse({"law": law, "dim": dim, "scale": scale}, "mask"), seed)


@torch.no_grad()
def fold_conditioning(model: MaskedDiffusionLM) -> MaskedDiffusionLM:
    """A copy without adaLN: as the model does not see time, shift, scale and gate are constants, and they move into
    the norms and the output layers. Same function, fewer parameters, less work. Of a backbone that has nothing to fold:
    a copy."""
    check_is("model", model, MaskedDiffusionLM, "one of our models")
    found = model.backbone.folded(model.state_dict())
    if found is None:
        return with_mask(model, model.mask)
    folded = _like(model, 0, **found.changes)
    folded.load_state_dict(found.weights)
    return folded.train(model.training)


def _like(model: MaskedDiffusionLM, seed: int, **changes: Any) -> MaskedDiffusionLM:
    """A fresh model with another config, where and as the old one is."""
    config = MaskedDiffusionConfig.from_dict(model.config.to_dict() | changes)
    if model.backbone.whole:
        fresh = around(config, copy.deepcopy(model.backbone.get_network()).requires_grad_(True), seed)
    else:
        with seeded(fold(as_key(seed), Purpose.INIT)):
            fresh = MaskedDiffusionLM(config)
    nn.Module.to(fresh, device=model.device, dtype=model.dtype)
    return fresh


def around(config: MaskedDiffusionConfig, network: nn.Module, seed: int = 0) -> MaskedDiffusionLM:
    """A model whose backbone is a network that is there already, so that a large one is not made twice. Its other
    layers are fresh, from `seed`."""
    with torch.device("meta"):
        model = MaskedDiffusionLM(config)
    with seeded(fold(as_key(seed), Purpose.INIT)):
        model.mask_embedding = model.mask.embedding(config.width)
        model.mixture = MixtureToken(config.width) if config.mixture else None
        for part in (model.mask_embedding, model.mixture):
            for module in () if part is None else part.modules():
                model._init_weights(module)
    model.backbone.set_network(network)
    return model
