"""Shared pieces: tiny models, stub denoisers, one place for the false-alarm rate of statistical tests."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from imdm.diffusion.masks import Mask, parse_mask
from imdm.experiments import jobs
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from tests.reference.launching import forkserver

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
gc.set_threshold(10_000, 20, 50)  # so much is loaded that to look for garbage takes long


def tiny_config(**changes: object) -> MaskedDiffusionConfig:
    settings = {"vocab_size": 5, "length": 6, "width": 16, "blocks": 2, "heads": 2, "condition": 8, "dropout": 0.0}
    return MaskedDiffusionConfig(**(settings | changes))


def kill_at(process: subprocess.Popen[Any], folder: Path, pattern: str) -> None:
    """SIGKILL a run as soon as it has left a checkpoint of this name in its folder; its model is then not there."""
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob(pattern)):
        assert time.monotonic() < deadline
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "model").exists()


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


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are given processes of their own have forked ones, which need not import torch anew."""
    context = forkserver()
    monkeypatch.setattr(jobs, "multiprocessing", SimpleNamespace(get_context=lambda way: context))


def chromium(playwright: Any) -> Any:
    """A running Chromium: the system's, or the one that playwright has installed. Without one a test is skipped; where
    CI is set, it fails."""
    named = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    path = next(filter(None, named), playwright.chromium.executable_path)
    if not Path(path).exists():
        lacking = pytest.fail if os.environ.get("CI") else pytest.skip
        lacking("no chromium here; on Debian: apt-get install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    return playwright.chromium.launch(executable_path=path, args=flags)
