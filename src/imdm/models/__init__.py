"""The denoiser: a diffusion transformer in two stages, and its configuration."""

from imdm.models.configuration import LARGEST_VOCABULARY, PRESETS, MaskedDiffusionConfig
from imdm.models.denoiser import (
    Denoiser,
    MaskedDiffusionLM,
    check_tokens,
    fold_conditioning,
    to_infinite,
    with_mask,
)
from imdm.models.fast import check_precision, faster, in_precision
from imdm.models.loading import fingerprint, is_ours, load_config, load_model

__all__ = [
    "LARGEST_VOCABULARY",
    "PRESETS",
    "Denoiser",
    "MaskedDiffusionConfig",
    "MaskedDiffusionLM",
    "check_precision",
    "check_tokens",
    "faster",
    "fingerprint",
    "fold_conditioning",
    "in_precision",
    "is_ours",
    "load_config",
    "load_model",
    "to_infinite",
    "with_mask",
]
