"""Backbones: what turns embeddings into hidden states. One file each; each registers itself by name."""

from imdm.models.backbones.base import Backbone, BackboneSettings, Folded, backbones, parse_backbone
from imdm.models.backbones.dit import DiT
from imdm.registry import import_all

import_all(__name__, __path__)

__all__ = ["Backbone", "BackboneSettings", "DiT", "Folded", "backbones", "parse_backbone"]
