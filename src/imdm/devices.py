"""Which processes there are and which device each uses: CUDA where there is one, the CPU otherwise.

Accelerate would pick Apple's MPS, which has no float64 and so no exact draws; and without `cpu=True` it runs several
CPU processes as if each were alone.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, PartialState


def processes() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available())


def accelerator() -> Accelerator:
    return Accelerator(cpu=not torch.cuda.is_available())
