"""Validity: the share of generated sequences that the language can say (Table 1)."""

from __future__ import annotations

from imdm.evaluation.base import Measurement, mean, metric
from imdm.evaluation.subject import Evaluation


@metric("validity", language=True)
def validity(evaluation: Evaluation) -> Measurement:
    return mean(evaluation.language.valid(evaluation.generation.tokens))
