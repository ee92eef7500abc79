"""The denoiser x_θ as a masked language model of `transformers`, but for files (`MaskedDiffusionLM`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from imdm.core.errors import UserError, check_is
from imdm.diffusion.state import Noised, Rows
from imdm.models.backbones import parse_backbone
from imdm.models.backbones.base import WRAPPERS
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.layers import Norm
from imdm.models.masked_lm import masked_lm
from imdm.models.network import Network
from imdm.models.readout import Reduce
from imdm.models.shape import Shape


class MaskedLM(Network, PreTrainedModel):
    """`Network` as a `PreTrainedModel`: what `transformers` calls of a masked language model. It is part of exports:
    it reads and writes no files."""

    config_class = MaskedDiffusionConfig
    config: MaskedDiffusionConfig
    base_model_prefix = ""
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012  (transformers' own convention)

    def __init__(self, config: Shape) -> None:
        check_is("config", config, (Shape, PreTrainedConfig), "a Shape, or a configuration of transformers")
        own = config if isinstance(config, PreTrainedConfig) else MaskedDiffusionConfig(**config.settings())
        PreTrainedModel.__init__(self, own)
        self._build(own)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Each of our layers initialises itself; `transformers` skips what was loaded."""
        if isinstance(module, nn.Linear | nn.Embedding | Norm) and (self.backbone.resets or self._is_own(module)):
            module.reset_parameters()

    def _is_own(self, module: nn.Module) -> bool:
        """Whether a layer is not the backbone's."""
        own = [self._modules.get(name) for name in WRAPPERS]
        return any(module is one for part in own if part is not None for one in part.modules())

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.forget_captured()
        if self.backbone.owns_embedding:
            self.backbone.get_network().set_input_embeddings(value)
        else:
            self.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.backbone.get_network().get_output_embeddings() if self.backbone.owns_embedding else self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        if self.backbone.owns_embedding:
            self.backbone.get_network().set_output_embeddings(new_embeddings)
        else:
            self.output = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Change the number of ids, as in `transformers`. The mask and the special tokens keep their ids, so all ids up
        to these must remain."""
        config = self.config
        special = [config.mask_token_id, config.bos_token_id, config.eos_token_id, config.pad_token_id]
        least = 1 + max(token for token in special if token is not None)
        if new_num_tokens is not None and new_num_tokens < least:
            raise UserError(f"new_num_tokens = {new_num_tokens}: at least {least}, as token {least - 1} is special")
        self.forget_captured()
        if not self.backbone.owns_embedding:
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        embedding = self.backbone.get_network().resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            theirs = config.backbone["config"] | {"vocab_size": embedding.weight.shape[0]}
            config.backbone = config.backbone | {"config": theirs}
            self.backbone.settings, config.vocab_size = parse_backbone(config.backbone), embedding.weight.shape[0]
        return embedding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Positional arguments are those of `forward`, or after a state of the diffusion those of `log_probs`."""
        if args and isinstance(args[0], Noised):
            state, *others = args
            names = ("rows", "reduce", "group")[: len(others)]
            return super().__call__(state, **dict(zip(names, others, strict=True)), **kwargs)
        return super().__call__(*args, **kwargs)

    def forward(  # type: ignore[override]  # the first argument is a state or ids
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
        """Run the network on ids, as `transformers` calls a masked language model: a `MaskedLMOutput`.

        On a state of the diffusion, `model(state, rows, reduce, group)` is what `log_probs` gives.

        input_ids       (B, L), holes are `mask_token_id`
        attention_mask  (B, L): 0 at padding, before or after the text, which is not attended to
        labels          (B, L): the tokens that were there; `.loss` is −log p of them in nats, the mean over those that
                        are not −100
        position_ids    (B, L), from 0: positions of tokens, if not consecutive
        token_type_ids  for backbones that use them, as BERT; ignored by others
        inputs_embeds   (B, L, width), instead of input_ids; they include the masks' embeddings
        noise           for masks with noise: a seed, or the noise itself, (B, L, dim) or, of finite masks, (B, L);
                        None: drawn anew in each call, from torch's generator
        output_hidden_states, output_attentions, return_dict   as in `transformers`

        `.logits` (B, L, V) are the network's at every position, visible or masked; their log_softmax at masked
        positions is what `log_probs` gives. The mask token has the lowest finite value: it is never predicted.
        """
        inputs = {"attention_mask": attention_mask, "labels": labels, "position_ids": position_ids}
        inputs |= {"token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
        if isinstance(input_ids, Noised):
            outputs = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
            why = "a state of the diffusion takes only rows, reduce and group"
            _check_absent(why, **inputs, noise=noise, **outputs, return_dict=return_dict)
            return self.log_probs(input_ids, rows, reduce, group)
        _check_absent("ids are read whole; model.noised(ids) makes a state of them", rows=rows, reduce=reduce)
        config = self.config
        states = bool(config.output_hidden_states if output_hidden_states is None else output_hidden_states)
        attentions = bool(config.output_attentions if output_attentions is None else output_attentions)
        output = masked_lm(self, input_ids, **inputs, noise=noise, states=states, attentions=attentions)
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()


def _check_absent(why: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UserError(f"{name}: {why}; leave it out")
