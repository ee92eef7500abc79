"""Loading models from disk or hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from imdm.core.devices import check_precision
from imdm.core.errors import UserError, reason_of
from imdm.core.files import no_progress_bars
from imdm.core.hub import hub_for
from imdm.shipped import folder_of

if TYPE_CHECKING:
    from imdm.models.configuration import MaskedDiffusionConfig
    from imdm.models.denoiser import MaskedDiffusionLM


def load_model(path: str | Path, precision: str = "float32") -> MaskedDiffusionLM:
    """A model by folder, by the name of one that ships, or by hub id. In float32, however it is stored: half precision
    is slow on a CPU, and `faster` is for GPUs. precision: `bf16` for a model too large for float32."""
    from imdm.models.denoiser import MaskedDiffusionLM  # takes seconds

    check_precision(precision)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    with no_progress_bars():
        return MaskedDiffusionLM.from_pretrained(_found(path), dtype=kind)


def load_config(path: str | Path) -> MaskedDiffusionConfig:
    """The configuration of a model, found as `load_model` finds it; no weights are read."""
    from imdm.models.configuration import MaskedDiffusionConfig  # takes a second

    where = f"model {str(path)!r}"
    place = _found(path)
    try:
        with hub_for(place):
            return MaskedDiffusionConfig.from_pretrained(place)
    except (OSError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"{where} cannot be loaded: {reason_of(error)}") from None


def _found(path: str | Path) -> str | Path:
    """The folder of one of our models, or a possible hub id."""
    folder = folder_of(path)
    return str(path) if folder is None else folder
