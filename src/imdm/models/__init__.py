"""The denoiser: a backbone between embeddings and head, its configuration, and the interface that samplers and
objectives use.

Names are imported when they are first used: `Network` needs torch alone, `MaskedDiffusionLM` waits for `transformers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from imdm.later import later

if TYPE_CHECKING:
    from imdm.devices import check_precision
    from imdm.models.backbones import Backbone, BackboneSettings
    from imdm.models.configuration import LARGEST_VOCABULARY, PRESETS, MaskedDiffusionConfig
    from imdm.models.contract import Denoiser
    from imdm.models.denoiser import MaskedDiffusionLM, fold_conditioning, to_infinite, with_mask
    from imdm.models.fast import faster, in_precision
    from imdm.models.loading import fingerprint, is_ours, load_config, load_model
    from imdm.models.network import Network, check_tokens
    from imdm.models.shape import Shape

__all__ = [
    "LARGEST_VOCABULARY",
    "PRESETS",
    "Backbone",
    "BackboneSettings",
    "Denoiser",
    "MaskedDiffusionConfig",
    "MaskedDiffusionLM",
    "Network",
    "Shape",
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

__getattr__ = later(
    __name__,
    {
        "imdm.models.backbones": ("Backbone", "BackboneSettings"),
        "imdm.models.configuration": ("MaskedDiffusionConfig",),
        "imdm.models.contract": ("Denoiser",),
        "imdm.models.denoiser": ("MaskedDiffusionLM", "fold_conditioning", "to_infinite", "with_mask"),
        "imdm.models.fast": ("faster", "in_precision"),
        "imdm.models.loading": ("fingerprint", "is_ours", "load_config", "load_model"),
        "imdm.models.network": ("Network", "check_tokens"),
        "imdm.models.shape": ("LARGEST_VOCABULARY", "PRESETS", "Shape"),
        "imdm.devices": ("check_precision",),
    },
)
