"""Shared pieces: tiny models, stub denoisers, one place for the false-alarm rate of statistical tests."""

from __future__ import annotations

import pytest
import torch
import transformers

from imdm.masks import Mask, parse_mask
from imdm.models import MaskedDiffusionConfig, MaskedDiffusionLM

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def tiny_config(**changes: object) -> MaskedDiffusionConfig:
    settings = {"vocab_size": 5, "length": 6, "width": 16, "blocks": 2, "heads": 2, "condition": 8, "dropout": 0.0}
    return MaskedDiffusionConfig(**(settings | changes))


def tiny_model(seed: int = 0, trained: bool = True, **changes: object) -> MaskedDiffusionLM:
    """A tiny model; `trained` fills every weight, zero-initialised ones included, with small random numbers."""
    torch.manual_seed(seed)
    model = MaskedDiffusionLM(tiny_config(**changes))
    if trained:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def model() -> MaskedDiffusionLM:
    return tiny_model()


@pytest.fixture(params=["single", "finite-7", "infinite-uniform-8-1.0", "infinite-normal-8-2.0"])
def mask(request: pytest.FixtureRequest) -> Mask:
    return parse_mask(request.param)
