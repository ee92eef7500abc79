"""The denoiser: a backbone between embeddings and head, its configuration, and what others may ask of it."""

from imdm.auto import register
from imdm.models.backbones import Backbone, BackboneSettings
from imdm.models.configuration import LARGEST_VOCABULARY, PRESETS, MaskedDiffusionConfig
from imdm.models.contract import Denoiser
from imdm.models.denoiser import (
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
    "Backbone",
    "BackboneSettings",
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

register()
