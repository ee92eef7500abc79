"""What a masked position looks like to the network: `single` (MDM), `finite(K)`, `infinite(law, dim, scale)`."""

from imdm.masks.base import Mask, masks, parse_mask
from imdm.masks.finite import Finite
from imdm.masks.infinite import Infinite
from imdm.masks.single import Single

__all__ = ["Finite", "Infinite", "Mask", "Single", "masks", "parse_mask"]
