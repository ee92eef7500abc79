"""Programs that run in several processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENT = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""With the last, matmuls in bf16 do not die of an illegal instruction on some CPUs."""
CRASHED = re.compile(r"exitcode\s*:\s*-(6|11)\b")  # SIGABRT, SIGSEGV


def torchrun(world: int) -> list[str]:
    """The words before a program, or `-m` and a module, that is to run in so many processes."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    return [sys.executable, *(several if world > 1 else [])]


def launched(lines: Sequence[Sequence[str]], home: Path, cwd: Path | None = None) -> None:
    """Run commands side by side, all of which must succeed.

    Threads of gloo crash a process of torch now and then, with no line of Python at fault: once in some 400 trainings
    of this suite. So after a crash in native code, and after nothing else, they are run once more, with what was in
    `home` before."""
    with tempfile.TemporaryDirectory() as aside:
        before = shutil.copytree(home, Path(aside) / "home") if home.exists() else None
        failed = _run(lines, cwd)
        if failed and CRASHED.search(failed):
            warnings.warn(f"a process crashed in native code, and is tried again: {failed[-2000:]}", stacklevel=2)
            shutil.rmtree(home, ignore_errors=True)
            if before is not None:
                shutil.copytree(before, home)
            failed = _run(lines, cwd)
    assert not failed, failed


def _run(lines: Sequence[Sequence[str]], cwd: Path | None) -> str:
    """What the first command that failed has said."""
    environment = os.environ | ENVIRONMENT
    begun = [
        subprocess.Popen(line, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in lines
    ]
    said = [process.communicate(timeout=600)[0] for process in begun]
    return next((text or "failed" for process, text in zip(begun, said, strict=True) if process.returncode), "")
