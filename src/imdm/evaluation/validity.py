"""Validity: the share of samples with positive probability in the language (Table 1)."""

from __future__ import annotations

from imdm.data.statistics import Measurement, mean
from imdm.evaluation.base import Evaluation, metric


@metric("validity", language=True)
def validity(evaluation: Evaluation) -> Measurement:
    return mean(evaluation.language.valid(evaluation.generation.tokens))
