"""The factorization error TC_θ of Eq. 6: how far one factorized reverse step is from the true joint.

A model with noise is a mixture of factorized distributions, p̂(x) = E_ε ∏_ℓ p_θ(x^ℓ | z, ε); with a single mask there
is one component and the value is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imdm.data.statistics import Measurement
from imdm.data.synthetic import Language
from imdm.diffusion.randomness import Purpose, as_key, fold
from imdm.evaluation.base import Evaluation, bootstrap_weights, metric, spread
from imdm.models import Denoiser
from imdm.theory.information import contexts, keep_and_reveal, marginal, revealed_subsets


@dataclass(frozen=True)
class Components:
    """The components of the mixture: log p_θ of every data token at every position, (n, L, V); `exact` if these are all
    components, equally likely, rather than n independent draws."""

    log_probs: Tensor
    exact: bool


@torch.no_grad()
def component_laws(denoiser: Denoiser, tokens: Tensor, draws: int, seed: int) -> Components:
    """The components for one sequence (L,), one for each noise of its masks. All noises are enumerated if there are at
    most `draws` of them: one for a single mask without mixture, K^masked for a finite one."""
    device, mask = denoiser.device, denoiser.process.mask
    holes = int((tokens == denoiser.process.mask_id).sum())
    possible = None if denoiser.process.mixture else mask.noises(holes)
    n = possible if possible is not None and possible <= draws else draws
    exact = n == possible
    keys = fold(as_key(seed), Purpose.COMPONENT, torch.arange(n)).to(device)
    state = denoiser.process.noised(tokens.to(device).expand(n, -1), torch.ones(n, device=device), keys)
    every = mask.every(holes) if exact else None
    if every is not None:
        state = state.with_noise(torch.zeros_like(state.tokens).masked_scatter(state.masked, every.to(device)))
    parts = []
    for part in torch.arange(n, device=device).split(4096):
        some = state[part]
        parts.append(denoiser.head(denoiser.trunk(some).flatten(0, 1)).unflatten(0, some.tokens.shape).cpu())
    return Components(torch.cat(parts).double(), exact)


def joint_under(laws: Tensor, positions: tuple[int, ...], symbols: int) -> Tensor:
    """∏ over `positions` of each component's probabilities, for all values there: (n, V, …, V)."""
    joint = torch.ones(len(laws), dtype=torch.float64)
    for position in positions:
        factor = laws[:, position, :symbols].exp()  # (n, V)
        joint = joint.unsqueeze(-1) * factor.view(len(laws), *[1] * (joint.ndim - 1), symbols)
    return joint


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p ln(p/q), nats."""
    return torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum()


def single_step_error(
    denoiser: Denoiser, language: Language, t: float, s: float, draws: int = 10_000, seed: int = 0
) -> Tensor:
    """TC_θ(z_s | z_t), enumerated over every context and every set of positions revealed between t and s."""
    keep, reveal = keep_and_reveal(denoiser.process, t, s)
    total = torch.zeros((), dtype=torch.float64)
    for context in contexts(language, keep):
        if not context.masked:
            continue
        laws = component_laws(denoiser, context.tokens, draws, seed).log_probs
        for subset, weight in revealed_subsets(len(context.masked), reveal):
            if subset:
                positions = tuple(context.masked[i] for i in subset)
                model = joint_under(laws, positions, language.symbols).mean(0)
                total += context.probability * weight * divergence(marginal(context.conditional, subset), model)
    return total


@metric("factorization_error", title="factorization error (nats)", language=True, samples=False, steps=False)
def factorization_error(evaluation: Evaluation) -> Measurement:
    """Eq. 6 at full masking, Σ_x p(x) ln[p(x)/p̂(x)], standard error by bootstrap over the noise draws."""
    subject, language = evaluation.subject, evaluation.language
    everything = tuple(range(language.length))
    masked = torch.full((language.length,), language.mask_id)
    laws = component_laws(subject.model, masked, subject.draws, subject.seed)
    joint = joint_under(laws.log_probs, everything, language.symbols).flatten(1)  # (n, V^L)
    truth = language.joint.flatten()
    value = float(divergence(truth, joint.mean(0)))
    if laws.exact:
        return Measurement(value, 0.0, len(joint))
    again = bootstrap_weights(len(joint), subject.seed) @ joint  # (r, V^L)
    return Measurement(value, spread([divergence(truth, law) for law in again]), len(joint))
