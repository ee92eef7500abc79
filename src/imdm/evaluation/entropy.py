"""Entropies of generated text, in nats."""

from __future__ import annotations

import torch

from imdm.evaluation.base import Evaluation, Measurement, mean, metric


@metric("token_entropy")
def token_entropy(evaluation: Evaluation) -> Measurement:
    """The entropy of the pooled token frequencies of all samples (Table 1), with the delta method's standard error."""
    tokens = evaluation.generation.tokens
    frequency = (
        torch.bincount(tokens.flatten(), minlength=evaluation.subject.model.vocab_size).double() / tokens.numel()
    )
    surprise = -frequency.log()[tokens].mean(1)  # (n,): its mean is the entropy, its spread the error
    return mean(surprise)
