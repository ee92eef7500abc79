"""Functions that turn one model into another: with another mask, or without adaLN."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from imdm.core.errors import UserError, check_is, check_seed
from imdm.diffusion.masks import Infinite, parse_mask
from imdm.models.network import Network

Model = TypeVar("Model", bound=Network)


def with_mask(model: Model, mask: Any = None, seed: int = 0, *, mixture: bool = False) -> Model:
    """A copy of `model` with another mask (None: the same), whose new layer is initialised from `seed`. A new mask adds
    zero until trained: an MDM's copy has identical log-probabilities. The old mask's noise embedding and noise policy
    are dropped. With `mixture`, the copy also reads a latent λ; its extra token changes the log-probabilities at
    once."""
    check_is("model", model, Network, "one of our models")
    check_seed(seed)
    mask = model.mask if mask is None else parse_mask(mask)
    weights = model.state_dict()
    if mask != model.mask:
        weights = {name: w for name, w in weights.items() if not name.startswith("mask_embedding.")}
    noise = model.config.noise if mask == model.mask else None
    other = model.like(seed, mask=mask.model_dump(), mixture=mixture or model.config.mixture, noise=noise)
    missing, unexpected = other.load_state_dict(weights, strict=False)
    if unexpected or any(not name.startswith(("mask_embedding.", "mixture.")) for name in missing):
        raise UserError(f"the model's weights do not fit its own config: {(missing + unexpected)[0]!r}")
    return other.train(model.training)


def to_infinite(model: Model, dim: int = 768, law: str = "uniform", scale: float = 1.0, seed: int = 0) -> Model:
    """Turn a trained MDM into an IMDM whose log-probabilities are identical until trained (Eq. 15)."""
    return with_mask(model, Infinite.parse({"law": law, "dim": dim, "scale": scale}, "mask"), seed)


@torch.no_grad()
def fold_conditioning(model: Model) -> Model:
    """A copy without adaLN: as time is no input, shift, scale and gate are constants, and move into the norms and the
    output layers. Same function, fewer parameters, fewer operations. A backbone without anything to fold is copied."""
    check_is("model", model, Network, "one of our models")
    fold = model.backbone.folded(model.state_dict())
    if fold is None:
        return with_mask(model, model.mask)
    folded = model.like(0, **fold.changes)
    folded.load_state_dict(fold.weights)
    return folded.train(model.training)
