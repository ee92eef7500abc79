"""Help and unknown commands do not wait for torch, whose import takes a second, nor refusals for the models of
`transformers`, which take two more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from imdm.benchmarks import HOMES, benchmark
from imdm.cli import options, porting
from imdm.evaluation import metrics
from imdm.evaluation.judge import Precision
from imdm.experiments import load_recipe
from imdm.exporting import Weights

SHIPPED = "stories-teacher"
LISTED = {
    "--help": "reproduce",
    "--version": "imdm ",
    "recipes": "synthetic",
    "models": SHIPPED,
    "train --help": "--out",
    "distill --help": "unless given 2 for di4c, 1 for redi, 7 for sdtt.",
    "evaluate --help": "On languages: factorization_error, kl, ",
    "cost --help": "Which: h200, h100, ",
    "bench --help": "couplings, graphs, ",
    "serve --help": "Sequences running or waiting, at most; then 429. [default: 256]",
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
    "reproduce wrong.yaml": "unknown key 'stages.teacher.objectives'",
    "reproduce synthetic sed=1": "unknown key 'sed' (did you mean 'seed'?)",
    "reproduce synthetic x=1": "unknown key 'x' (known: data, experiment, ",
    "reproduce synthetic seed=x": "'seed' = 'x': input should be a valid integer",
    "reproduce synthetic data.kind=nosuch": "'data': input tag 'nosuch' found using 'kind' does not match",
    "reproduce synthetic data.name=nosuch": "unknown language 'nosuch'; known: ",
    "reproduce synthetic model.mask=nosuch": "unknown mask 'nosuch'; known: ",
    "reproduce synthetic model.mask=infinite-uniform-x": "mask 'infinite-uniform-x' is not of the form infinite-LAW-",
    "reproduce synthetic model.preset=nosuch": "unknown model preset 'nosuch'; known: ",
    "reproduce synthetic model.schedule=nosuch": "unknown schedule 'nosuch'; known: ",
    "reproduce synthetic stages.teacher.kind=nosuch": "'stages.teacher': input tag 'nosuch' found using 'kind' does",
    "train synthetic stages.teacher.objective=nosuch": "unknown objective 'nosuch'; known: ",
    'train synthetic stages.teacher.objective={"kind":"sdtt","round":1}': "unknown key 'objective.round'",
    "train synthetic stages.teacher.training.lr=fast": "'stages.teacher.training.lr' = 'fast': input should be a valid",
    "train synthetic stages.teacher.training.steps=0": "'stages.teacher.training.steps' = 0: input should be greater",
    "train synthetic stages.teacher.watch.metrics=[nosuch]": "unknown metric 'nosuch'; known: ",
    "cost synthetic model.width=wide": "'model.width' = 'wide': input should be a valid integer",
    "status empty": "empty: no recipe.json there; it is not the folder of a run",
    "report empty": "empty: no results.jsonl there; run 'imdm reproduce'",
    "train nosuch": "unknown recipe 'nosuch'; known: ",
    "generate nosuch": "model 'nosuch': no such folder, one that ships (stories-imdm, ",
    "generate sentences-imdm": "model 'sentences-imdm' is no longer in the package, which has stories-imdm, ",
    f"evaluate {SHIPPED} --data sample --judge sentences-mdlm": "model 'sentences-mdlm' is no longer in the package",
    "generate empty": "model 'empty' has no config.json",
    "generate bert": "model 'bert' is of type 'bert', not 'imdm'; convert it first (imdm adopt MODEL --out FOLDER, ",
    "generate rows": "model 'rows' is a folder of prepared text or pairs, not of a model",
    "adopt rows --out out": "model 'rows' is a folder of prepared text or pairs, not of a model",
    "distill match bert --data aligned --out out": "model 'bert' is of type 'bert', not 'imdm'; convert it first",
    "generate --infill nothing": "nothing to fill in: the text 'nothing' has no '___'",
    "generate --infill nothing --marker=": "--marker = '': nothing to look for",
    "generate --seed 99999999999999999999": "--seed = 99999999999999999999: must be a whole number from ",
    "reproduce sentences-cpu data=nosuch.txt": "corpus 'nosuch.txt': no such file or folder",
    "train sentences-cpu data.valid=nosuch.txt": "corpus 'nosuch.txt': no such file or folder",
    "train tokens.yaml": "data: nosuch.safetensors: no such file",
    "train rows.yaml": "data: nosuch: no such folder",
    "reproduce synthetic data=own.txt": "'data=own.txt': this recipe's data are of kind 'language', which has no path",
    "train synthetic stages.teacher.training.stepz=3": "'stages.teacher.training.stepz' (did you mean 'steps'?)",
    "train synthetic stages.teacher.training.xyz=3": "'stages.teacher.training.xyz' (known: batch, betas, ",
    "train synthetic stages.evaluate.judg=x": "'stages.evaluate.judg' (did you mean 'judge'?)",
    "generate --prompts nosuch.txt": "--prompts: nosuch.txt is missing",
    "generate --noise nosuch": "unknown noise policy 'nosuch'; known: keep, posterior",
    "generate --order nosuch": "unknown order 'nosuch'; known: random, spread",
    f"export {SHIPPED} --out out --order nosuch": "unknown order 'nosuch'; known: random, spread",
    f"export {SHIPPED} --out out --layout mdlm --order spread": "--layout mdlm has no place for an order",
    "generate --nosuch": "No such option: --nosuch",
    "generate --steps 0": "steps = 0: must be a whole number from 1 to 1,000,000",
    "generate --temperature -1": "temperature = -1.0: must be 0 (the likeliest token) or in ",
    "generate --top-p 2": "top_p = 2.0: must be in (0, 1]",
    "generate --num 0": "num = 0: must be a whole number of at least 1",
    "generate --length 0": "length = 0: must be a whole number from 1 to ",
    "generate --length 1000000": "length = 1000000: must be a whole number from 1 to ",
    "generate --canvas x": "--canvas ['x']: write token ids and ? for holes",
    "show --into nosuch": "nosuch: no such folder",
    "prepare sample --out out": "give either a tokenizer (folder or hub id) or the size of a BPE to train (--",
    "prepare sample --train-bpe 3 --out out": "--train-bpe = 3: at least 300 ids are needed",
    "prepare sample --train-bpe 400 --packing nosuch --out out": "--packing = 'nosuch': input should be 'wrapped', ",
    "prepare sample --train-bpe 400 --limit 0 --out out": "--limit = 0: input should be greater than or equal to 1",
    "adopt broken.yaml --out out": "model 'broken.yaml': weights are in files of .safetensors, ",
    "adopt old.ckpt --out out": "old.ckpt is no checkpoint that can be read without running code in it",
    "adopt empty --out out": "empty holds no weights; give a folder or a file that does",
    f"adopt {SHIPPED} --out out": "model 'stories-teacher' is one of ours already; use it as it is",
    "adopt nosuch/bert --tokenizer /no/such --out out": "tokenizer '/no/such': no such folder",
    "adopt nosuch/bert --out empty": "'empty' is there already; choose another folder",
    f"export {SHIPPED} --out empty": "'empty' is there already; choose another folder",
    "adopt nosuch.ckpt --out out": "model 'nosuch.ckpt': no such file or folder, nor a hub id",
    f"couple {SHIPPED} --out out --pairs 0": "Invalid value for '--pairs'",
    f"couple {SHIPPED} --out out --start nosuch": "--start = 'nosuch': input should be 'perturbed' or 'prior'",
    f"distill sdtt {SHIPPED} --data aligned --out out --mask nosuch-1": "unknown mask 'nosuch'; known: ",
    f"distill sdtt {SHIPPED} --data aligned --out out --rounds 0": "Invalid value for '--rounds'",
    "prepare sample --length 0 --out out": "Invalid value for '--length'",
    f"evaluate {SHIPPED} --data sample --top-p 3": "top_p = 3.0: must be in (0, 1]",
    "show --first nosuch": "model 'nosuch': no such folder",
    "serve nosuch": "model 'nosuch': no such folder",
    f"serve {SHIPPED} {SHIPPED}": "two models would be called 'stories-teacher'",
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
    f"export {SHIPPED} --out out --card nosuch.md": "--card: nosuch.md is missing",
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
import typer.main
from imdm.cli import main
from imdm.cli.app import app

command = typer.main.get_command(app)  # read from signatures once, not for each line
typer.main.get_command = lambda app: command

answers = []
for line in json.load(sys.stdin):
    sys.argv, said, code = ["imdm", *line.split()], io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    slow = ("torch", "torch.distributed.tensor", "transformers.modeling_utils", "accelerate")
    loaded = [name for name in slow if name in sys.modules]
    answers.append({"code": code, "said": said.getvalue(), "loaded": loaded})
print(json.dumps(answers))
"""


def python(*arguments: str, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    wide = os.environ | {"COLUMNS": "1000"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=wide, **settings)


def test_refusals_do_not_wait_for_models(tmp_path: Path) -> None:
    """One after another in one process."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.yaml").write_text("name: [")
    for name, data in (
        ("tokens", "kind: tokens, path: nosuch.safetensors, vocab_size: 3"),
        ("rows", "kind: prepared, path: nosuch"),
    ):
        whole = yaml.safe_dump(
            {**load_recipe("synthetic").resolved(), "data": yaml.safe_load(f"{{{data}}}")}, sort_keys=False
        )
        (tmp_path / f"{name}.yaml").write_text(whole)
    for name, file in (("bert", "config.json"), ("rows", "manifest.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text('{"model_type": "bert"}')
    (tmp_path / "old.ckpt").write_bytes(b"no zip archive")
    (tmp_path / "child.yaml").write_text("extends: nosuch\nname: child\n")
    (tmp_path / "wrong.yaml").write_text("extends: synthetic\nstages: {teacher: {objectives: nelbo}}\n")
    before = sorted(tmp_path.iterdir())
    lines = [*LISTED, *REFUSED]
    done = python("-c", ONE_PROCESS, cwd=tmp_path, input=json.dumps(lines))
    assert done.returncode == 0, done.stderr
    for line, answer in zip(lines, json.loads(done.stdout), strict=True):
        assert set(answer["loaded"]) <= {"torch"}, f"imdm {line}"
        assert answer["code"] == (2 if line in REFUSED else 0), (line, answer["said"])
        assert (LISTED | REFUSED)[line] in answer["said"], line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("line", ["--help", "--version", "models", "train --help", "serve --help", "bench nosuch"])
def test_help_does_not_wait_for_torch(line: str, tmp_path: Path) -> None:
    done = python("-X", "importtime", "-m", "imdm", *line.split(), cwd=tmp_path)
    assert done.returncode == (2 if line in REFUSED else 0)
    imported = {row.split("|")[-1].strip() for row in done.stderr.splitlines() if row.startswith("import time:")}
    assert "imdm.cli" in imported
    assert "torch" not in imported


QUICK = {"--help": 0.5, "nosuch": 0.5, "distill --help": 3.0, "evaluate --help": 3.0}
QUICK |= {"generate --steps 0": 3.0, "train synthetic seed=x": 3.0}
"""Seconds that a command may take on the machine it was measured on; the test allows twice that of a processor."""


@pytest.mark.parametrize("line", QUICK)
def test_answers_are_quick(line: str, tmp_path: Path) -> None:
    """Seconds of a processor, which a busy machine does not change much."""
    before = os.times()
    python("-m", "imdm", *line.split(), cwd=tmp_path)
    after = os.times()
    took = after.children_user + after.children_system - before.children_user - before.children_system
    assert took < 2 * QUICK[line]


def test_names_that_a_command_has_of_its_own_are_those_of_the_package() -> None:
    assert all(callable(benchmark(name)) for name in HOMES)
    assert set(options.PRECISIONS) == set(get_args(Precision))
    assert set(porting.WEIGHTS) == set(get_args(Weights))


def test_help_names_what_is_registered(tmp_path: Path) -> None:
    told = python("-m", "imdm", "evaluate", "--help", cwd=tmp_path).stdout
    assert all(name in told for name in metrics)


def test_standard_output_that_is_closed_is_a_sentence(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "from imdm.cli import main; import sys; sys.argv = ['imdm', 'recipes']; main()"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *line], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed; what was to be printed is lost\n")
