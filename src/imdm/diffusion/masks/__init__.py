"""Masks, the network's input at masked positions: `single` (MDM), `finite(K)`, `infinite(law, dim, scale)`."""

from imdm.core.registry import import_all
from imdm.diffusion.masks.base import Mask, masks, parse_mask
from imdm.diffusion.masks.finite import Finite
from imdm.diffusion.masks.infinite import Infinite
from imdm.diffusion.masks.path import NoisePath
from imdm.diffusion.masks.single import Single

import_all(__name__, __path__)

__all__ = ["Finite", "Infinite", "Mask", "NoisePath", "Single", "masks", "parse_mask"]
