"""MAUVE: how close the generated texts are, as a set, to real ones, through `mauve-text`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from imdm.errors import UserError
from imdm.evaluation.base import Measurement, Subject, metrics
from imdm.evaluation.judge import CONTEXT, Judge

SEEDS = 5
SCALING = 5.0


@torch.no_grad()
def features(judge: Judge, texts: list[str]) -> Tensor:
    """The judge's last hidden state at each text's last token: (n, D)."""
    device, out = next(judge.model.parameters()).device, []
    for text in texts:
        ids = judge.tokenizer(text, add_special_tokens=False)["input_ids"][:CONTEXT]
        ids = ids if judge.begin is None else [judge.begin, *ids]
        hidden = judge.model(input_ids=torch.tensor([ids or [0]], device=device), output_hidden_states=True)
        out.append(hidden.hidden_states[-1][0, -1].float().cpu())
    return torch.stack(out)


def mauve_of(real: Tensor, written: Tensor, seeds: int = SEEDS) -> list[float]:
    """MAUVE under clustering seeds 1…, a tenth as many clusters as texts."""
    compute = _library()
    buckets = max(2, min(len(real), len(written)) // 10)
    found = []
    for seed in range(1, seeds + 1):
        done = compute(
            p_features=real.numpy(),
            q_features=written.numpy(),
            num_buckets=buckets,
            seed=seed,
            verbose=False,
            mauve_scaling_factor=SCALING,
        )
        found.append(float(done.mauve))
    return found


def _library() -> Any:
    try:
        from mauve import compute_mauve
    except ImportError:
        raise UserError("metric 'mauve' needs the extra: pip install 'imdm[mauve]' (mauve-text, GPL)") from None
    return compute_mauve


@metrics.register("mauve")
def mauve(subject: Subject) -> Measurement:
    """The mean over five clustering seeds and their spread; features from the judge, references from held-out rows."""
    if subject.judge is None or subject.data is None:
        raise UserError("metric 'mauve' needs a judge for its features and held-out text to compare with")
    rows = subject.data.rows(torch.arange(min(subject.samples, len(subject.data))))["tokens"]
    real = subject.decode(rows)
    values = torch.tensor(mauve_of(features(subject.judge, real), features(subject.judge, subject.texts())))
    spread = float(values.std(correction=1))
    return Measurement(float(values.mean()), spread, subject.samples, judge=subject.judge.name, split=subject.split)
