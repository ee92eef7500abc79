"""Programs that run in several processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

ENVIRONMENT = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""With the last, matmuls in bf16 do not die of an illegal instruction on some CPUs."""
CRASHED = re.compile(r"exitcode\s*:\s*-(6|11)\b")  # SIGABRT, SIGSEGV
PATIENCE = 600.0


@dataclass(frozen=True)
class Program:
    """What `torchrun` would run in so many processes, without importing torch anew in each: the words after `python`,
    which are a script, or `-m` and a module, and its arguments."""

    words: Sequence[str]
    world: int = 1


def torchrun(world: int) -> list[str]:
    """The words before a program, or `-m` and a module, that is to run in so many processes."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    return [sys.executable, *(several if world > 1 else [])]


class Ended(NamedTuple):
    said: str
    failed: bool


def launched(lines: Sequence[Program | Sequence[str]], home: Path, cwd: Path | None = None) -> list[str]:
    """Run programs and commands side by side, all of which must succeed: what each of them said.

    Threads of gloo crash a process of torch now and then, with no line of Python at fault: once in some 400 trainings
    of this suite. So after a crash in native code, and after nothing else, they are run once more, with what was in
    `home` before."""
    with tempfile.TemporaryDirectory() as aside:
        before = shutil.copytree(home, Path(aside) / "home") if home.exists() else None
        ended = run(lines, cwd)
        failed = [one.said for one in ended if one.failed]
        if failed and CRASHED.search(failed[0]):
            warnings.warn(f"a process crashed in native code, and is tried again: {failed[0][-2000:]}", stacklevel=2)
            shutil.rmtree(home, ignore_errors=True)
            if before is not None:
                shutil.copytree(before, home)
            ended = run(lines, cwd)
    assert not any(one.failed for one in ended), next(one.said for one in ended if one.failed)
    return [one.said for one in ended]


def run(lines: Sequence[Program | Sequence[str]], cwd: Path | None = None) -> list[Ended]:
    """How programs and commands side by side end."""
    with tempfile.TemporaryDirectory() as aside:
        begun = [
            _Forked(line, cwd, Path(aside) / str(i)) if isinstance(line, Program) else _Command(line, cwd)
            for i, line in enumerate(lines)
        ]
        return [one.ended() for one in begun]


class _Command:
    """A command in processes of its own, which import all that they need."""

    def __init__(self, line: Sequence[str], cwd: Path | None) -> None:
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(line, env=os.environ | ENVIRONMENT, cwd=cwd, **how)

    def ended(self) -> Ended:
        said = self.process.communicate(timeout=PATIENCE)[0]
        return Ended(said, self.process.returncode != 0)


class _Forked:
    """A program in processes forked from one that has imported torch and imdm. said: a file for what they say."""

    def __init__(self, program: Program, cwd: Path | None, said: Path) -> None:
        self.said, place, given = said, (cwd or Path.cwd()).absolute(), dict(os.environ) | ENVIRONMENT
        said.touch()
        if program.world > 1:  # they meet at a port that is open already, as under `torchrun`
            self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            given |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(program.world))
        self.processes: list[BaseProcess] = []
        for rank in range(program.world):
            own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if program.world > 1 else {}
            arguments = (list(program.words), given | own, place, said)
            self.processes.append(forkserver().Process(target=_work, args=arguments, daemon=True))
            self.processes[-1].start()

    def ended(self) -> Ended:
        """Once all have ended. When one fails, the others, which may wait for it, are killed."""
        deadline = time.monotonic() + PATIENCE
        while waiting := [one.sentinel for one in self.processes if one.exitcode is None]:
            if not wait(waiting, deadline - time.monotonic()) or any(one.exitcode for one in self.processes):
                break
        if all(one.exitcode == 0 for one in self.processes):
            return Ended(self.said.read_text(errors="replace"), False)
        for one in self.processes:
            one.join(1)  # one that crashed makes others fail too, and may be told of after them
        codes = [f"process {rank}: exitcode: {one.exitcode}" for rank, one in enumerate(self.processes)]
        for one in self.processes:
            one.kill()
            one.join()
        return Ended("\n".join([self.said.read_text(errors="replace"), *codes]), True)


@cache
def forkserver() -> ForkServerContext:
    """What forks processes, one for all tests of this process. It has run nothing: imports only."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["imdm.training", "imdm.experiments.stages", __name__])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)  # read when torch is imported
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _work(words: list[str], environment: Mapping[str, str], place: Path, said: Path) -> None:
    """In a forked process: as `python WORDS` in this place."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if words[0] == "-m":
        sys.path.insert(0, str(place))
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
