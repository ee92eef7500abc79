"""What a command can answer without torch, whose import takes seconds, it answers before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from imdm.benchmarks import benchmarks
from imdm.cli import early
from imdm.data import CoupleConfig, languages
from imdm.evaluation import metrics
from imdm.evaluation.judge import Precision
from imdm.exporting import Weights
from imdm.masks.base import masks
from imdm.process import NoisePolicy
from imdm.runs.distilling import METHODS

SHIPPED = "sentences-teacher"
LISTED = {
    "--help": "reproduce",
    "--version": "imdm ",
    "recipes": "synthetic",
    "models": SHIPPED,
    "train --help": "--out",
}
REFUSED = {
    "nosuch": "No such command 'nosuch'",
    "recipes nosuch": "unknown recipe 'nosuch'; known: ",
    "reproduce nosuch": "unknown recipe 'nosuch'; known: ",
    "reproduce nosuch.yaml": "recipe 'nosuch.yaml': no such file",
    "reproduce broken.yaml": "recipe 'broken.yaml' is not valid YAML",
    "reproduce child.yaml": "unknown recipe 'nosuch'; known: ",
    "reproduce synthetic seed": "override 'seed': write key=value",
    "reproduce synthetic stages.nosuch.seed=1": "unknown stage 'nosuch'; known: ",
    "train synthetic --stage nosuch": "--stage nosuch: recipe 'synthetic' trains teacher",
    "status empty": "empty: no recipe.json there; it is not the folder of a run",
    "report empty": "empty: no results.jsonl there; run 'imdm reproduce'",
    "train nosuch": "unknown recipe 'nosuch'; known: ",
    "generate nosuch": "model 'nosuch': no such folder, one that ships (sentences-imdm, ",
    "generate empty": "model 'empty' has no config.json",
    "generate --prompts nosuch.txt": "--prompts: nosuch.txt is missing",
    "generate --noise nosuch": "unknown noise policy 'nosuch'; known: keep, posterior",
    "generate --nosuch": "No such option: --nosuch",
    "generate --steps 0": "steps = 0: must be a whole number from 1 to 1,000,000",
    "generate --temperature -1": "temperature = -1.0: must be 0 (the likeliest token) or in ",
    "generate --top-p 2": "top_p = 2.0: must be in (0, 1]",
    "generate --num 0": "num = 0: must be a whole number of at least 1",
    "generate --length 0": "length = 0: must be a whole number from 1 to ",
    "generate --length 1000000": "length = 1000000: must be a whole number from 1 to ",
    "generate --canvas x": "--canvas ['x']: write token ids and ? for holes",
    "show --into nosuch": "nosuch: no such folder",
    "adopt nosuch.ckpt --out out": "model 'nosuch.ckpt': no such file or folder, nor a hub id",
    f"couple {SHIPPED} --out out --pairs 0": "Invalid value for '--pairs'",
    f"couple {SHIPPED} --out out --start nosuch": "unknown start of pairs 'nosuch'; known: perturbed, prior",
    f"distill sdtt {SHIPPED} --data aligned --out out --mask nosuch-1": "unknown mask 'nosuch'; known: ",
    f"distill sdtt {SHIPPED} --data aligned --out out --rounds 0": "Invalid value for '--rounds'",
    "prepare sample --length 0 --out out": "Invalid value for '--length'",
    f"evaluate {SHIPPED} --data sample --top-p 3": "top_p = 3.0: must be in (0, 1]",
    "show --first nosuch": "model 'nosuch': no such folder",
    "serve nosuch": "model 'nosuch': no such folder",
    f"serve {SHIPPED} {SHIPPED}": "two models would be called 'sentences-teacher'",
    "serve --host 203.0.113.1": "cannot listen on 203.0.113.1, port 8000",
    "show --second nosuch": "model 'nosuch': no such folder",
    "evaluate nosuch --data aligned": "model 'nosuch': no such folder",
    f"evaluate {SHIPPED} --data nosuch": "--data 'nosuch': neither a language (aligned, ",
    f"evaluate {SHIPPED} --data nosuch.txt": "corpus 'nosuch.txt': no such file or folder",
    f"evaluate {SHIPPED} --data nosuch.safetensors": "--data nosuch.safetensors is missing",
    f"evaluate {SHIPPED} --data sample --metrics nosuch": "unknown metric 'nosuch'; known: ",
    f"evaluate {SHIPPED} --data sample --steps nosuch": "--steps 'nosuch': expected whole numbers",
    f"evaluate {SHIPPED} --data sample --precision nosuch": "--precision = nosuch: float32 or bf16",
    f"evaluate {SHIPPED} --data sample --judge-precision nosuch": "--judge-precision = nosuch: float32 or bf16",
    f"evaluate {SHIPPED} --data sample --judge nosuch.gguf": "judge 'nosuch.gguf': no such file or folder",
    f"evaluate {SHIPPED} --data sample --reference nosuch": "model 'nosuch': no such folder",
    f"evaluate {SHIPPED} --data sample --match nosuch": "model 'nosuch': no such folder",
    f"evaluate {SHIPPED} --data sample --pairs nosuch": "coupling 'nosuch': no such folder",
    "lm-eval nosuch --tasks blimp": "model 'nosuch': no such folder",
    f"lm-eval {SHIPPED} --tasks nosuch.yaml": "--tasks nosuch.yaml: no such file",
    "couple nosuch --out out": "model 'nosuch': no such folder",
    f"couple {SHIPPED} --data nosuch --out out": "--data 'nosuch': neither a language (aligned, ",
    "distill sdtt nosuch --data aligned --out out": "model 'nosuch': no such folder",
    f"distill nosuch {SHIPPED} --data aligned --out out": "unknown distillation 'nosuch'; known: ",
    f"distill sdtt {SHIPPED} --data nosuch --out out": "--data 'nosuch': neither a language (aligned, ",
    "prepare nosuch.txt --out out": "corpus 'nosuch.txt': no such file or folder",
    "prepare sample --tokenizer /no/such --out out": "tokenizer '/no/such': no such folder",
    "export nosuch --out out": "model 'nosuch': no such folder",
    f"export {SHIPPED} --out out --weights nosuch": "unknown kind of weights 'nosuch'; known: ",
    f"export {SHIPPED} --out out --card nosuch.md": "--card nosuch.md: no such file",
    "report nosuch": "nosuch: no such folder",
    "status nosuch": "nosuch: no such folder",
    "judge nosuch": "No such command 'nosuch'",
    "judge fetch nosuch": "unknown judge to fetch 'nosuch'; known: smollm2",
    "bench nosuch": "unknown benchmark 'nosuch'; known: ",
    "cost nosuch": "unknown recipe 'nosuch'; known: ",
    "cost synthetic --gpu nosuch": "unknown GPU 'nosuch'; known: ",
}
ONE_PROCESS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from imdm.cli import main

answers = []
for line in json.load(sys.stdin):
    sys.argv, said, code = ["imdm", *line.split()], io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    loaded = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
    answers.append({"code": code, "said": said.getvalue(), "loaded": loaded})
print(json.dumps(answers))
"""


def python(*arguments: str, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "1000"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=wide, **settings)


def test_lists_and_refusals_do_not_wait_for_torch(tmp_path: Path) -> None:
    """One after another in one process, in which nothing heavy is ever loaded."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.yaml").write_text("name: [")
    (tmp_path / "child.yaml").write_text("extends: nosuch\nname: child\n")
    before = sorted(tmp_path.iterdir())
    lines = [*LISTED, *REFUSED]
    done = python("-c", ONE_PROCESS, cwd=tmp_path, input=json.dumps(lines))
    assert done.returncode == 0, done.stderr
    for line, answer in zip(lines, json.loads(done.stdout), strict=True):
        assert answer["loaded"] == [], f"imdm {line}"
        assert answer["code"] == (2 if line in REFUSED else 0), (line, answer["said"])
        assert (LISTED | REFUSED)[line] in answer["said"], line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("line", ["--help", "recipes", "generate nosuch", "generate --steps 0"])
def test_a_process_of_its_own_does_not_either(line: str, tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", "imdm", *line.split(), cwd=tmp_path)
    assert done.returncode == (2 if line in REFUSED else 0)
    imported = {row.split("|")[-1].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert "imdm.cli" in imported
    assert "torch" not in imported


QUICK = {"--help": 0.5, "generate nosuch": 1.0, "generate --steps 0": 1.0, "train nosuch.yaml": 1.0}
"""Seconds of a processor that a command may take on the machine it was measured on; the test allows four times that."""


@pytest.mark.parametrize("line", QUICK)
def test_what_needs_no_torch_is_quick(line: str, tmp_path: Path) -> None:
    """Seconds of a processor, which a busy machine does not change much; the best of three."""

    def took() -> float:
        before = os.times()
        python("-m", "imdm", *line.split(), cwd=tmp_path)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(took() for _ in range(3)) < 4 * QUICK[line]


def test_names_that_are_known_early_are_the_registered_ones() -> None:
    assert set(early.LANGUAGES) == set(languages)
    assert set(early.METRICS) == set(metrics)
    assert len(early.METRICS) == len(set(early.METRICS))
    assert set(early.BENCHMARKS) == set(benchmarks)
    assert set(early.MASKS) == set(masks)
    assert set(early.STARTS) == set(get_args(CoupleConfig.model_fields["start"].annotation))
    assert early.DISTILLATIONS == METHODS
    assert set(early.POLICIES) == set(get_args(NoisePolicy))
    assert set(early.PRECISIONS) == set(get_args(Precision))
    assert set(early.WEIGHTS) == set(get_args(Weights))


def test_standard_output_that_is_closed_is_a_sentence(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "from imdm.cli import main; import sys; sys.argv = ['imdm', 'recipes']; main()"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *line], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed; what was to be printed is lost\n")
