"""MAUVE: how close the generated texts are, as a set, to real ones, through `mauve-text`.

Texts are compared by features: the judge's last hidden state, or the vectors of a sentence embedder.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from imdm.core.errors import UserError, is_out_of_memory, reason_of
from imdm.core.files import check_folder
from imdm.core.hub import hub_for
from imdm.data.statistics import Measurement
from imdm.evaluation.base import Evaluation, metric
from imdm.evaluation.judge import SAFE, weight_sum

SEEDS = 5
SCALING = 5.0
NO_LIBRARY = "MAUVE needs the extra: pip install 'imdm[mauve]' (mauve-text, GPL)"


class Reader(Protocol):
    """Turns texts into feature vectors."""

    @property
    def label(self) -> str:
        """Its name in result rows."""

    @property
    def identity(self) -> list[Any]:
        """All that its features depend on."""

    def features(self, texts: list[str]) -> Tensor:
        """A feature vector of each text: (n, D)."""


@dataclass
class Embedder:
    """A sentence embedder: the mean of an encoder's last hidden states over a text's tokens, normalised. special: as
    for a `Judge`."""

    name: str
    model: Any
    tokenizer: Any
    batch_size: int = 32
    special: bool = False

    @property
    def label(self) -> str:
        return self.name

    @cached_property
    def identity(self) -> list[Any]:
        return ["embedder", self.name, weight_sum(self.model)]

    @torch.no_grad()
    def features(self, texts: list[str]) -> Tensor:
        device, out = next(self.model.parameters()).device, []
        for first in range(0, len(texts), self.batch_size):
            some = texts[first : first + self.batch_size]
            how = {"padding": True, "truncation": True, "split_special_tokens": not self.special}
            batch = self.tokenizer(some, **how, return_tensors="pt").to(device)
            hidden = self.model(**batch).last_hidden_state  # (b, T, D)
            real = batch["attention_mask"][..., None]
            average = (hidden * real).sum(1) / real.sum(1).clamp(min=1)
            out.append(torch.nn.functional.normalize(average.float()).cpu())
        return torch.cat(out)


def load_embedder(name: str, device: str | torch.device = "cpu") -> Embedder:
    """A sentence embedder by its folder or hub id."""
    from transformers import AutoModel, AutoTokenizer

    from imdm.models.denoiser import register  # takes seconds, as `transformers` does

    register()
    check_folder(Path(name), f"embedder {name!r}")
    try:
        with hub_for(name):
            tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model: Any = AutoModel.from_pretrained(name, **SAFE)
    except Exception as error:  # missing, damaged, no network and others
        if is_out_of_memory(error):
            raise
        raise UserError(f"embedder {name!r} cannot be loaded: {reason_of(error)}") from None
    if tokenizer.pad_token_id is None:
        raise UserError(f"embedder {name!r} has no padding token; give a causal model as judge")
    return Embedder(name, model.to(device).eval(), tokenizer)


def features(evaluation: Evaluation, texts: list[str]) -> Tensor:
    """Feature vectors of texts, computed in parts."""
    reader = _reader(evaluation)

    def make(part: Tensor) -> dict[str, Tensor]:
        return {"features": reader.features([texts[i] for i in part])}

    return evaluation.subject.parts.collect(len(texts), lambda: ["features", reader.identity, texts], make)["features"]


def mauve_of(evaluation: Evaluation, real: list[str], written: list[str]) -> Measurement:
    """MAUVE of two sets of texts: the mean over five clustering seeds and their spread."""
    compute = _library()
    p, q = features(evaluation, real), features(evaluation, written)
    scores = []
    for seed in range(1, SEEDS + 1):
        with _hushed():
            result = compute(
                p_features=p.numpy(),
                q_features=q.numpy(),
                seed=seed,
                verbose=False,
                mauve_scaling_factor=SCALING,
            )
        scores.append(float(result.mauve))
    values = torch.tensor(scores, dtype=torch.float64)
    reader, error = _reader(evaluation).label, float(values.std(correction=1))
    return Measurement(float(values.mean()), error, len(written), judge=reader, split=evaluation.subject.split)


@contextmanager
def _hushed() -> Iterator[None]:
    """Suppress what the clustering library prints: it warns below 39 texts a cluster, and MAUVE has ten."""
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _reader(evaluation: Evaluation) -> Reader:
    reader = evaluation.subject.embedder or evaluation.subject.judge
    if reader is None:
        raise UserError("MAUVE needs a judge or a sentence embedder for its features")
    return reader


def has_mauve() -> bool:
    return importlib.util.find_spec("mauve") is not None


def _library() -> Any:
    try:
        from mauve import compute_mauve
    except ImportError:
        raise UserError(NO_LIBRARY) from None
    return compute_mauve


@metric("mauve", title="MAUVE", judge=True, embedder=True, reads=("data",))
def mauve(evaluation: Evaluation) -> Measurement:
    """MAUVE of the samples against as many held-out rows, or all of them."""
    _reader(evaluation), _library()  # before anything is generated
    return mauve_of(evaluation, evaluation.decode(evaluation.held_out()), evaluation.texts())
