"""Validity: the share of generated sequences that the language can say (Table 1)."""

from __future__ import annotations

from imdm.evaluation.base import Evaluation, Measurement, mean, metric


@metric("validity", language=True)
def validity(evaluation: Evaluation) -> Measurement:
    return mean(evaluation.language.valid(evaluation.generation.tokens))
