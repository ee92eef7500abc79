"""Backbones: what turns embeddings into hidden states. One file each; each registers itself by name."""

from imdm.core.registry import import_all
from imdm.models.backbones.base import (
    Backbone,
    BackboneOutputs,
    BackboneRequest,
    BackboneSettings,
    Folded,
    backbones,
    parse_backbone,
)
from imdm.models.backbones.dit import DiT

import_all(__name__, __path__)

__all__ = [
    "Backbone",
    "BackboneOutputs",
    "BackboneRequest",
    "BackboneSettings",
    "DiT",
    "Folded",
    "backbones",
    "parse_backbone",
]
