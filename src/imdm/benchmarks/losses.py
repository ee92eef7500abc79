"""The head's losses, forward and backward: linear and cross-entropy, linear and KL, at several vocabularies.

Other implementations run beside ours if they are installed: liger-kernel, cut-cross-entropy (without a bias), torch's
own chunked one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from imdm.benchmarks.measure import Row, Size, Took, device, timed
from imdm.models.readout import Chosen, Compared, Divergence, Head, divergence, reduced

SIZES: dict[Size, tuple[tuple[int, int, int], ...]] = {  # rows, width, vocabulary
    "full": ((32_768, 768, 8192), (32_768, 768, 30_522), (16_384, 768, 50_258)),
    "tiny": ((256, 128, 4096),),
}
KL: Divergence = "backward-kl"
REPEATS = 20


def losses(size: Size) -> Iterator[Row]:
    for shape in SIZES[size]:
        yield from _compared(*shape)


def _compared(R: int, D: int, V: int) -> Iterator[Row]:
    rows = torch.randn(R, D, device=device(), requires_grad=True)
    layer, other = (nn.Linear(D, V, device=device()) for _ in range(2))
    targets = torch.arange(R, device=device()) * 31 % (V - 1)
    head, teacher = Head(rows, layer, V - 1), Head(rows.detach().roll(1, 0), other, V - 1)
    settings = {"rows": R, "width": D, "vocab_size": V}

    def measured(loss: Callable[[], Tensor]) -> Took:
        def both() -> None:
            with _half():
                total = loss().sum()
            torch.autograd.grad(total, (rows, layer.weight, layer.bias))

        return timed(both, REPEATS)

    yield Row(
        work=f"linear + cross-entropy, V={V:,}",
        ours=measured(lambda: reduced(head, Chosen(targets))),
        plain=measured(lambda: Chosen(targets)(head.log_probs(), slice(None))),
        tokens=R,
        flops=3 * 2.0 * R * D * V,
        settings=settings,
        per=f"{R:,} rows",
        also={name: measured(loss) for name, loss in _other_losses(head, targets)},
    )
    against = Compared(KL, teacher)
    yield Row(
        work=f"linear + KL, V={V:,}",
        ours=measured(lambda: reduced(head, against)),
        plain=measured(lambda: divergence(KL, head.log_probs(), teacher.log_probs().detach())),
        tokens=R,
        flops=4 * 2.0 * R * D * V,
        settings=settings,
        per=f"{R:,} rows",
        also={"chunked": measured(lambda: _chunked(head, against))},
    )


def _half() -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device().type == "cuda" else nullcontext()


def _chunked(head: Head, read: Any) -> Tensor:
    """Our loss without its kernels: what runs on any machine."""
    return reduced(head, lambda log_probs, part: read(log_probs, part))


def _other_losses(head: Head, targets: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Cross-entropy by other libraries, as far as they are installed; these do not exclude the mask."""
    yield "chunked", lambda: _chunked(head, Chosen(targets))
    rows, layer = head.rows, head.layer
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions()
        yield (
            "torch",
            lambda: F.linear_cross_entropy(rows, layer.weight, targets, linear_bias=layer.bias, options=options),
        )
    if device().type != "cuda":
        return
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger() -> Tensor:
            half = rows.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()
            loss = Liger.apply(half[0], half[1], targets, half[2], None, -100, 0.0, 0.0, "sum")
            return loss[0] if isinstance(loss, tuple) else loss

        yield "liger-kernel", liger
    if importlib.util.find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy

        def cut() -> Tensor:
            half = rows.bfloat16(), layer.weight.bfloat16()
            return linear_cross_entropy(*half, targets, reduction="sum") + 0.0 * layer.bias.sum()

        yield "cut-cross-entropy", cut
