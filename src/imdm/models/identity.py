"""Which model it is: the hash of its weights and settings, and whether a folder holds one of ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from imdm.core.errors import check_is
from imdm.core.files import read_json
from imdm.models.network import Network
from imdm.models.saving import law_text
from imdm.models.sharding import whole
from imdm.shipped import KIND


def fingerprint(model: Network) -> str:
    """A hash of every weight (by name) and of masks, schedule and vocabulary. It depends on the values, not on layout
    and dtype on disk."""
    check_is("model", model, Network, "one of our models")
    config = model.config
    total = hashlib.sha256()
    total.update(law_text(config).encode())
    for name, weight in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(whole(weight.detach()).to("cpu", torch.float32).contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def is_ours(folder: Path) -> bool:
    """Whether a folder holds one of our models, of whatever kind."""
    file = folder / "config.json"
    config = read_json(file, str(file)) if file.exists() else None
    return isinstance(config, dict) and config.get("model_type") == KIND
