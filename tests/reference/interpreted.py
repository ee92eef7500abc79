"""The trainings of `sharded`, whose losses are computed by Triton's kernels, interpreted on the CPU.

`torchrun … -m tests.reference.interpreted JOBS.json`. The interpreter cannot multiply in bf16, so operands are in
float16. How often kernels were called is left in `calls-RANK.txt`, beside the jobs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before it is imported

import torch
from torch import Tensor

from imdm.core import devices
from imdm.kernels import losses, matching
from imdm.models import readout
from tests.reference import sharded


def in_float16(values: Tensor) -> Tensor:
    return values.to(torch.float16).contiguous()


def counting(function: Any, calls: list[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted


def main(jobs: Path) -> None:
    patched: Any = {"_in_bf16": lambda rows: True}
    calls: list[str] = []
    vars(readout).update(patched)
    for module, name in ((losses, "log_prob_of"), (losses, "kl"), (matching, "matched")):
        vars(module).update({"half": in_float16, name: counting(getattr(module, name), calls)})
    for each in json.loads(jobs.read_text()):
        sharded.run(each)
    (jobs.parent / f"calls-{devices.processes().process_index}.txt").write_text("\n".join(calls))
    devices.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
