"""Our models as `transformers` calls a masked language model: ids in, logits and a loss out.

    model(**tokenizer("It was a <mask> night", return_tensors="pt")).logits

Unlike calls with states of the diffusion (`Noised`): logits (B, L, V) are of all positions, visible or masked; padding
is not attended to; masks draw new noise in each call unless it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from imdm.core.errors import UserError, check_is, check_seed, shown
from imdm.diffusion.state import Noised
from imdm.models.backbones import BackboneRequest

if TYPE_CHECKING:
    from transformers.modeling_outputs import MaskedLMOutput

    from imdm.models.face import MaskedLM


def masked_lm(
    model: MaskedLM,
    input_ids: Tensor | None,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    noise: Tensor | int | None = None,
    states: bool = False,
    attentions: bool = False,
) -> MaskedLMOutput:
    """Run the network on ids: `MaskedDiffusionLM.forward`, which describes the arguments."""
    from transformers.modeling_outputs import MaskedLMOutput

    if (input_ids is None) == (inputs_embeds is None):
        raise UserError("give input_ids or inputs_embeds, one of them")
    if input_ids is not None:
        state = noised(model, input_ids, noise)
        model._check_length(state)
        x = model._embedded(state)
        shape = input_ids.shape
    else:
        assert inputs_embeds is not None
        x, shape = _checked_embeddings(model, inputs_embeds, noise), inputs_embeds.shape[:2]
    request = BackboneRequest(
        seen=_where_text(attention_mask, shape),
        positions=_as_rows("position_ids", position_ids, shape, model.config.length),
        kinds=_as_rows("token_type_ids", token_type_ids, shape),
        states=states,
        attentions=attentions,
    )
    outputs = model.backbone.outputs(x, request.with_latent() if model.mixture is not None else request)
    logits = model.head_of(outputs.hidden[:, : shape[1]]).logits()
    loss = None if labels is None else masked_loss(logits, labels, model.causal)
    hidden = outputs.states
    if hidden is not None and model.mixture is not None:
        hidden = tuple(each[:, : shape[1]] for each in hidden)
    output: Any = MaskedLMOutput  # typed by tensor dtypes
    return output(loss=loss, logits=logits, hidden_states=hidden, attentions=outputs.attentions)


def masked_loss(logits: Tensor, labels: Tensor, causal: bool = False) -> Tensor:
    """−log p of the labels in nats, averaged over those that are not −100: the cross-entropy of masked language models.
    It is no bound on the likelihood; the training objective `nelbo` is. causal: label ℓ is predicted by row ℓ − 1."""
    if causal:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.to(logits.device).flatten().long())


def noised(model: MaskedLM, tokens: Tensor, noise: Tensor | int | None) -> Noised:
    """The state of tokens, masked where they hold the mask id. noise: the noise itself, or a seed; None: drawn from
    torch's generator."""
    from imdm.models.network import check_tokens  # which imports this module

    check_is("input_ids", tokens, Tensor, "a tensor of token ids (sequences, length)")
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise UserError(f"input_ids: expected ids (sequences, length), got {tuple(tokens.shape)} of {tokens.dtype}")
    check_tokens(tokens, model.vocab_size, "input_ids")
    tokens, process = tokens.long(), model.process
    masked = tokens == process.mask_id
    time = torch.ones(len(tokens), device=tokens.device)
    if not process.noisy:
        return Noised(tokens, masked, None, time)
    seed = int(torch.randint(1 << 62, ())) if noise is None or isinstance(noise, Tensor) else noise
    check_seed(seed)
    keys = model.sample_keys(len(tokens), seed).to(tokens.device)
    epsilon = process.mask.draw(keys, torch.zeros_like(tokens), masked)
    if isinstance(noise, Tensor) and epsilon is not None:
        if noise.shape != epsilon.shape or noise.is_floating_point() != epsilon.is_floating_point():
            kind = f"{tuple(epsilon.shape)} of {epsilon.dtype}"
            raise UserError(f"noise: mask {process.mask.name} takes {kind}, got {tuple(noise.shape)} of {noise.dtype}")
        epsilon = noise
    return Noised(tokens, masked, epsilon, time, process.latents(keys))


def padding_to_holes(tokens: Tensor, attention_mask: Tensor, hole: int) -> tuple[Tensor, bool]:
    """Prompts (B, L) with their padding, wherever it is, replaced by holes at the end; and whether there was any
    padding."""
    real = cast("Tensor", _as_rows("attention_mask", attention_mask, tokens.shape)).to(tokens.device) != 0
    order = real.long().argsort(dim=-1, descending=True, stable=True)
    return tokens.gather(1, order).masked_fill(~real.gather(1, order), hole), not bool(real.all())


def _checked_embeddings(model: MaskedLM, x: Tensor, noise: Any) -> Tensor:
    """Check given embeddings, which include masks and their noise; a mixture's latent is drawn."""
    if noise is not None:
        raise UserError("noise: inputs_embeds already contain their masks' noise; leave it out")
    if x.ndim != 3 or x.shape[-1] != model.config.width or x.shape[1] > model.config.length:
        limits = f"(sequences, up to {model.config.length}, {model.config.width})"
        raise UserError(f"inputs_embeds: expected {limits}, got {tuple(x.shape)}")
    if model.mixture is None:
        return x
    latent = torch.rand(len(x), device=x.device)
    return torch.cat((x, model.mixture(latent).to(x.dtype)[:, None]), dim=1)


def _where_text(attention_mask: Tensor | None, shape: Any) -> Tensor | None:
    """Where the text is, not padding, (B, L); None without any padding. A row of padding only attends to itself."""
    rows = _as_rows("attention_mask", attention_mask, shape)
    if rows is None:
        return None
    seen = rows != 0
    return None if bool(seen.all()) else seen | ~seen.any(-1, keepdim=True)


def _as_rows(name: str, values: Any, shape: Any, most: int | None = None) -> Tensor | None:
    """One number a token, (B, L), or (1, L) for all sequences alike; from nested lists too."""
    if values is None:
        return None
    try:
        values = torch.as_tensor(values)
    except (ValueError, TypeError, RuntimeError):
        raise UserError(f"{name}: expected one number a token, {tuple(shape)}, got {shown(values)}") from None
    if values.ndim != 2 or values.shape[1] != shape[1] or values.shape[0] not in (1, shape[0]):
        raise UserError(f"{name}: expected one number a token, {tuple(shape)}, got shape {tuple(values.shape)}")
    if most is not None and values.numel() and not 0 <= int(values.min()) <= int(values.max()) < most:
        raise UserError(f"{name}: the model has positions 0…{most - 1}")
    return values.expand(shape[0], -1)
