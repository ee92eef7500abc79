"""Throughput of `imdm prepare` beside plain `encode_batch`, and whether its memory grows with the input.

    python -m imdm.benchmarks.preparing TEXT.txt --tokenizer FOLDER --megabytes 32,256

Each size is made by repeating the lines of TEXT, shuffled, and is prepared in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from imdm.data.corpora import Corpus
from imdm.data.encoding import AT_ONCE
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.tokenizers import load_tokenizer


def repeated(text: Path, megabytes: int, out: Path) -> None:
    lines = text.read_text(encoding="utf-8").splitlines()
    order = random.Random(0)
    room = megabytes << 20
    with open(out, "w", encoding="utf-8") as file:
        while room > 0:
            order.shuffle(lines)
            for line in lines:
                room -= file.write(line + "\n")
                if room <= 0:
                    break


def measured(source: Path, tokenizer: str, out: Path) -> dict[str, float]:
    """Both ways in this process: all lines through `encode_batch` in the same batches, then `prepare`."""
    backend = load_tokenizer(tokenizer).backend_tokenizer
    started, batch = time.perf_counter(), list[str]()
    for line in Corpus(str(source)).documents():
        batch.append(line)
        if len(batch) == AT_ONCE:
            backend.encode_batch(batch, add_special_tokens=False)
            batch = []
    backend.encode_batch(batch, add_special_tokens=False)
    bare = time.perf_counter() - started

    started = time.perf_counter()
    rows = prepare(Corpus(str(source)), PrepareConfig(length=128, tokenizer=tokenizer), out)
    took = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"bare_s": bare, "prepare_s": took, "tokens": rows.counts.tokens, "peak_mib": peak}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("text", type=Path)
    arguments.add_argument("--tokenizer", required=True)
    arguments.add_argument("--megabytes", default="32,256")
    arguments.add_argument("--measure", nargs=2, metavar=("SOURCE", "OUT"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measured(Path(options.measure[0]), options.tokenizer, Path(options.measure[1]))))
        return
    print(f"{'input':>8} {'encode_batch':>13} {'prepare':>9} {'of its speed':>13} {'tokens/s':>11} {'peak memory':>12}")
    for size in map(int, options.megabytes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "text.txt"
            repeated(options.text, size, source)
            again = [sys.executable, __file__, str(options.text), "--tokenizer", options.tokenizer]
            process = subprocess.run(
                [*again, "--measure", str(source), f"{folder}/rows"], check=True, capture_output=True, text=True
            )
            f = json.loads(process.stdout.splitlines()[-1])
            print(
                f"{size:>5} MB {f['bare_s']:>11.1f} s {f['prepare_s']:>7.1f} s {f['bare_s'] / f['prepare_s']:>13.2f} "
                f"{f['tokens'] / f['prepare_s']:>11,.0f} {f['peak_mib']:>8.0f} MiB"
            )


if __name__ == "__main__":
    main()
