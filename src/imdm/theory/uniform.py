"""Where IMDM comes from: uniform diffusion over N data tokens and M masks (Eq. 11), which tends to it as M grows.

K = N + M categories. The M masks are interchangeable, so nothing of size K is ever built: a vector that is constant
over the masks is kept as its N data entries and its one mask entry.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward_law(x: int, alpha: float, data: int, masks: int) -> Tensor:
    """q(z_t | x) at finite M (Eq. 11): (N + 1,), the last entry being the probability of all masks together."""
    K = data + masks
    law = torch.full((data + 1,), (1 - alpha) / K, dtype=torch.float64)
    law[x] += alpha
    law[-1] = (1 - alpha) * masks / K
    return law


def rate_loss(z: int, x: Tensor, x_theta: Tensor, alpha: float, slope: float, masks: int) -> Tensor:
    """The Rao-Blackwellised NELBO rate of uniform diffusion at z_t = z (A.3, with the factor x̄_j/x̄_i it drops).

        −α'/(Kα) · [ Σ_j (x̄_j/x̄_i) ln( x̄_j (x̄_θ)_i / (x̄_i (x̄_θ)_j) ) − K/x̄_i + K/(x̄_θ)_i ],
        x̄ = Kα·x + (1 − α)·1,  i = the category of z_t

    x and x_theta (N,) put no mass on masks; z in 0…N − 1 is a data token, z = N stands for any one mask.
    """
    data = x.numel()
    K = data + masks
    floor = 1 - alpha
    bar, bar_theta = K * alpha * x.double() + floor, K * alpha * x_theta.double() + floor  # (N,)
    at_mask = torch.full((1,), floor, dtype=torch.float64)
    all_bar, all_theta = torch.cat((bar, at_mask)), torch.cat((bar_theta, at_mask))  # (N + 1,)
    count = torch.ones(data + 1, dtype=torch.float64)
    count[-1] = masks
    here, here_theta = all_bar[z], all_theta[z]
    drift = (count * all_bar / here * torch.log(all_bar * here_theta / (here * all_theta))).sum()
    return -slope / (K * alpha) * (drift - K / here + K / here_theta)


def expected_rate(x: int, x_theta: Tensor, alpha: float, slope: float, masks: int) -> Tensor:
    """E over z_t of the NELBO rate for a model that predicts x_theta at masks and carries data tokens over."""
    data = x_theta.numel()
    onehot = torch.eye(data, dtype=torch.float64)
    law = forward_law(x, alpha, data, masks)
    terms = [law[z] * rate_loss(z, onehot[x], onehot[z], alpha, slope, masks) for z in range(data)]
    return torch.stack(terms).sum() + law[-1] * rate_loss(data, onehot[x], x_theta, alpha, slope, masks)


def limit_rate(x: int, x_theta: Tensor, alpha: float, slope: float) -> Tensor:
    """`expected_rate` at M = ∞, the rate of IMDM: (1 − α_t) · −α'_t/(1 − α_t) · (−ln⟨x_θ, x⟩) (Eqs. 12 and 14)."""
    return -slope * -torch.log(x_theta.double()[x])
