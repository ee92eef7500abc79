"""Time and memory of sampling: ours beside a plain loop that holds (B, L, V) and draws in float64, in one run.

python benchmarks/sampling.py --preset small --length 1024 --vocabulary 50258 --batch 32 --steps 1,8
python benchmarks/sampling.py --preset tiny --length 64 --vocabulary 1000 --batch 8        (on a CPU)
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from imdm.models import MaskedDiffusionConfig, MaskedDiffusionLM
from imdm.sampling.sampler import time_grid
from imdm.state import Noised


@torch.no_grad()
def plain(model: MaskedDiffusionLM, batch: int, steps: int) -> Tensor:
    """Eq. 13 as it is written: every step the whole network, every position a token, torch's own generator."""
    config, process = model.config, model.process
    tokens = torch.full((batch, config.length), config.mask_token_id, device=model.device)
    noise = process.noised(tokens, torch.ones(batch, device=model.device), model.sample_keys(batch, 0)).noise
    grid = time_grid(steps, torch.ones(1, device=model.device))[0]
    for t, s in itertools.pairwise(grid):
        masked = tokens == config.mask_token_id
        probabilities = model(Noised(tokens, masked, noise, t.expand(batch))).double().exp()  # (B, L, V)
        drawn = torch.multinomial(probabilities.flatten(0, 1), 1).view(batch, -1)
        reveal = masked & (torch.rand(tokens.shape, device=model.device) < process.split(t, s).reveal)
        tokens = torch.where(reveal, drawn, tokens)
        if noise is not None:
            noise = torch.where(masked[..., None], torch.rand_like(noise) * 2 - 1, noise)
    return tokens


def median(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds, after two runs that do not count."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for number in range(repeats + 2):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        if number >= 2:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2] * 1e3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="small")
    arguments.add_argument("--mask", default="infinite-uniform-768-1.0")
    arguments.add_argument("--length", type=int, default=1024)
    arguments.add_argument("--vocabulary", type=int, default=50_258)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--steps", default="1,8")
    arguments.add_argument("--repeats", type=int, default=20)
    arguments.add_argument("--compile", action="store_true", help="compile the network first")
    arguments.add_argument("--json", help="append one JSON object a line to this file")
    given = arguments.parse_args()
    cuda = torch.cuda.is_available()
    config = MaskedDiffusionConfig.preset(
        given.preset, vocab_size=given.vocabulary, length=given.length, mask=given.mask, softcap=None
    )
    model = MaskedDiffusionLM(config).eval()
    model = model.cuda().to(torch.bfloat16) if cuda else model  # type: ignore[assignment]
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    bare = model.trunk
    trunks = {"plain": bare, "ours": torch.compile(bare, dynamic=False) if given.compile else bare}
    print(f"{machine}, torch {torch.__version__}, {model.dtype}")
    print(f"{'steps':>6} {'plain':>12} {'ours':>12} {'ratio':>7} {'memory':>20}")
    for steps in map(int, given.steps.split(",")):
        took, memory = {}, {}
        loops = {
            "plain": partial(plain, model, given.batch, steps),
            "ours": partial(model.generate, num=given.batch, steps=steps, seed=1),
        }
        for name, work in loops.items():
            model.trunk = trunks[name]  # type: ignore[method-assign]
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            took[name] = median(work, given.repeats)
            memory[name] = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
        ratio = took["plain"] / took["ours"]
        print(
            f"{steps:>6} {took['plain']:>9.1f} ms {took['ours']:>9.1f} ms {ratio:>7.1f} "
            f"{memory['plain']:>7.1f} / {memory['ours']:.1f} GiB"
        )
        if given.json:
            row = vars(given) | {"steps": steps, "machine": machine, "ms": took, "gib": memory}
            with open(given.json, "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
