"""The denoiser: a backbone between embeddings and head, and the interface that samplers and objectives use.

These need torch alone. `imdm.models.denoiser` has the same network as a model of `transformers`, and
`imdm.models.loading` loads one.
"""

from imdm.models.backbones import Backbone, BackboneSettings
from imdm.models.contract import Denoiser
from imdm.models.network import Network, check_tokens
from imdm.models.shape import LARGEST_VOCABULARY, PRESETS, Shape

__all__ = [
    "LARGEST_VOCABULARY",
    "PRESETS",
    "Backbone",
    "BackboneSettings",
    "Denoiser",
    "Network",
    "Shape",
    "check_tokens",
]
