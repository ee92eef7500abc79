"""The output distribution of a k-step sampler on an enumerated language: KL and total variation to the truth.

A trajectory's last network evaluation draws all remaining positions independently. So p̂(x), the mean over trajectories
of

    ∏ over positions revealed last of p_θ(x^ℓ | z, ε) · 1[x agrees with everything revealed before]

is an unbiased estimate of the output distribution, with far less variance than counting samples. At one step with a
single mask it is exact, and the KL is the factorization error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imdm.data.statistics import Measurement
from imdm.data.synthetic import Language
from imdm.diffusion.state import Noised
from imdm.evaluation.base import Evaluation, bootstrap_weights, metric, spread
from imdm.evaluation.factorization import divergence, joint_under
from imdm.models import Denoiser
from imdm.sampling import Generation, probabilities

AT_ONCE = 1 << 21  # elements of (trajectories, sequences) in memory at a time


@torch.no_grad()
def last_laws(
    denoiser: Denoiser, generation: Generation, keys: Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> Tensor:
    """The distribution of each trajectory's last step: log p_θ, as it was drawn from, at the positions revealed last,
    one-hot at those revealed before: (n, L, V)."""
    last = generation.revealed_at == generation.revealed_at.amax(1, keepdim=True)  # (n, L)
    tokens = generation.tokens.masked_fill(last, denoiser.process.mask_id)
    noise = denoiser.process.mask.draw(keys, generation.draws, last)
    state = Noised(tokens, last, noise, torch.ones(len(tokens), device=tokens.device), generation.latents)
    laws = []
    for part in torch.arange(len(tokens), device=tokens.device).split(4096):
        some = state[part]
        rows = denoiser.head(denoiser.trunk(some).flatten(0, 1)).unflatten(0, some.tokens.shape)
        if not temperature == top_p == 1.0:
            p = probabilities(rows, temperature, top_p)
            rows = (p / p.sum(-1, keepdim=True)).log()
        sure = torch.full_like(rows, -torch.inf).scatter(-1, generation.tokens[part, :, None], 0.0)
        laws.append(torch.where(some.masked[..., None], rows, sure).cpu())
    return torch.cat(laws).double()


@dataclass(frozen=True)
class OutputLaw:
    """p̂ over all sequences (S,) from all trajectories, and from their second half; bootstrap replicates (r, S)."""

    whole: Tensor
    half: Tensor
    replicates: Tensor
    n: int


def output_law(laws: Tensor, language: Language, seed: int) -> OutputLaw:
    """p̂ from the last distributions (n, L, V) of n trajectories."""
    n, positions = len(laws), tuple(range(language.length))
    means = torch.zeros(2, n, dtype=torch.float64)
    means[0] = 1 / n
    means[1, n // 2 :] = 1 / (n - n // 2)
    weight = torch.cat((means, bootstrap_weights(n, seed)))
    size = max(1, AT_ONCE // language.joint.numel())
    total = torch.zeros(len(weight), language.joint.numel(), dtype=torch.float64)
    for part in torch.arange(n).split(size):
        total += weight[:, part] @ joint_under(laws[part], positions, language.symbols).flatten(1)
    return OutputLaw(total[0], total[1], total[2:], n)


def _law(evaluation: Evaluation) -> OutputLaw:
    def make() -> OutputLaw:
        subject = evaluation.subject
        written = evaluation.generation.to(subject.model.device)
        laws = last_laws(subject.model, written, subject.keys, subject.how.temperature, subject.how.top_p)
        return output_law(laws, evaluation.language, subject.seed)

    return evaluation.once("output law", make)


@metric("kl", language=True, infinite=True)
def kl(evaluation: Evaluation) -> Measurement:
    """KL(truth ‖ p̂) in nats, standard error by bootstrap over trajectories."""
    truth, law = evaluation.language.joint.flatten(), _law(evaluation)
    error = spread([divergence(truth, replicate) for replicate in law.replicates])
    return Measurement(float(divergence(truth, law.whole)), error, law.n)


@metric(
    "kl_half",
    title="KL, half the samples (nats)",
    language=True,
    infinite=True,
    counted=lambda samples: samples - samples // 2,
)
def kl_half(evaluation: Evaluation) -> Measurement:
    """The KL from half of the trajectories: if it is clearly larger, n is too small for `kl` to be trusted."""
    truth, law = evaluation.language.joint.flatten(), _law(evaluation)
    return Measurement(float(divergence(truth, law.half)), float("nan"), law.n - law.n // 2)


@metric("tv", title="total variation", language=True)
def tv(evaluation: Evaluation) -> Measurement:
    """Total variation ½ Σ |truth − p̂|, standard error by bootstrap over trajectories."""
    truth, law = evaluation.language.joint.flatten(), _law(evaluation)
    error = spread([0.5 * (truth - replicate).abs().sum() for replicate in law.replicates])
    return Measurement(float(0.5 * (truth - law.whole).abs().sum()), error, law.n)
