"""Tests of distributions with a stated false-alarm rate.

Every statistical test of the suite goes through here. ALARM is the probability that one such call fails although the
law is right. The draws are keyed by fixed seeds, so a test that passes once passes always; the rate says how likely a
correct program was to fail when the seed was first written down.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats
from torch import Tensor

ALARM = 1e-5


def assert_law(counts: Tensor | np.ndarray, law: Tensor | np.ndarray, alarm: float = ALARM) -> None:
    """Chi-square: observed counts against exact probabilities; impossible outcomes must not occur at all."""
    counts, law = np.asarray(counts, dtype=float).ravel(), np.asarray(law, dtype=float).ravel()
    assert abs(law.sum() - 1) < 1e-9, f"the law sums to {law.sum()}"
    assert counts[law == 0].sum() == 0, "an impossible outcome occurred"
    counts, law = counts[law > 0], law[law > 0]
    if len(law) == 1:
        return
    expected = counts.sum() * law
    assert expected.min() > 0.2, "too few draws for a chi-square test"
    p = stats.chisquare(counts, expected).pvalue
    assert p > alarm, f"chi-square p = {p:.2e}: observed {counts / counts.sum()}, law {law}"


def assert_mean(values: Tensor, expected: float, alarm: float = ALARM) -> None:
    """The mean of independent values against its expectation, by the normal law."""
    values = values.double()
    z = float((values.mean() - expected) / (values.std() / len(values) ** 0.5))
    assert abs(z) < stats.norm.isf(alarm / 2), (
        f"mean {float(values.mean())}, expected {expected}: {z:.1f} standard errors"
    )


def counts_of(tokens: Tensor, symbols: int) -> np.ndarray:
    """How often each sequence of `symbols` symbols occurs: (symbols^L,)."""
    place = symbols ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens * place).sum(1), minlength=symbols ** tokens.shape[1]).numpy()
