"""Validity: the share of generated sequences that the language can say (Table 1)."""

from __future__ import annotations

from imdm.evaluation.base import Measurement, Subject, mean, metrics


@metrics.register("validity")
def validity(subject: Subject) -> Measurement:
    return mean(subject.language.valid(subject.generation.tokens))
