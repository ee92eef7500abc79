"""Folders for plain `transformers`: the same logits and texts, by copies of our code, and nothing of ours needed."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.tokenizers import load_tokenizer, train_bpe
from imdm.diffusion.masks import Single, masks
from imdm.exporting import CODE, export, export_published, export_transformers
from imdm.exporting.copying import copies
from imdm.models import layers
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.loading import load_model
from imdm.models.variants import fold_conditioning
from imdm.writer import load
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused
from tests.conftest import tiny_model
from tests.models.test_hf import FAMILIES, made
from tests.models.test_masked_lm import BACKBONES, IDS, KINDS, MASKS, same

ENDING = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHARES = [0.0, 0.0, 0.2, 0.3, 0.1, 0.2, 0.2]


CODE_FOLDER = TemporaryDirectory()  # late imports read it


def copied() -> Any:
    """The class of the folders, from copies of its own."""
    folder = Path(CODE_FOLDER.name) / "copied"
    folder.mkdir()
    for name, text in {"__init__.py": "", **copies(CODE)}.items():
        (folder / name).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module("copied.modeling_imdm").MaskedDiffusionLM
    finally:
        sys.path.remove(str(folder.parent))


Plain = copied()


def plain(model: MaskedDiffusionLM, folder: Path) -> Any:
    """The same model by the class of the folder."""
    model.save_pretrained(folder / "ours")
    return Plain.from_pretrained(export_transformers(folder / "ours", folder / "out"))


def noise_of(model: MaskedDiffusionLM, ids: Tensor) -> Tensor | None:
    return model.mask.draw(model.sample_keys(len(ids), 3), torch.zeros_like(ids), ids == model.config.mask_token_id)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixture"])
@pytest.mark.parametrize("mask", MASKS)
def test_logits_are_ours(mask: str, kind: str, tmp_path: Path) -> None:
    model = fold_conditioning(tiny_model(mask=mask, **KINDS[kind]))
    other, noise = plain(model, tmp_path), noise_of(model, IDS)
    shown = torch.ones_like(IDS)
    shown[0, :2], shown[1, 4:] = 0, 0
    for asked in ({}, {"attention_mask": shown}, {"labels": IDS % 4}):
        wanted = model(input_ids=IDS, noise=noise, output_hidden_states=True, output_attentions=True, **asked)
        found = other(input_ids=IDS, noise=noise, output_hidden_states=True, output_attentions=True, **asked)
        assert found.keys() == wanted.keys()
        torch.testing.assert_close(found.to_tuple(), wanted.to_tuple(), rtol=0, atol=0)
    x = other.embed(other.noised(IDS, seed=2))
    assert x.shape == (*IDS.shape, model.config.width)
    assert torch.equal(other(input_ids=IDS, noise=1).logits, model(input_ids=IDS, noise=1).logits)
    assert torch.equal(other(input_ids=IDS, noise=1).logits, other(input_ids=IDS, noise=2).logits) == (mask == "single")


@pytest.mark.parametrize(
    "settings",
    [
        *({"mask": mask, "noise": noise} for mask in MASKS for noise in ("posterior", "keep") if mask != "single"),
        {"order": "spread"},
        {"mixture": True},
        ENDING | {"vocab_size": 6},
        ENDING | {"vocab_size": 6, "lengths": SHARES},
    ],
)
def test_texts_are_ours(settings: dict[str, Any], tmp_path: Path) -> None:
    """With the same seed: tokens are equal, so their law is ours, which is compared with enumeration elsewhere."""
    model = fold_conditioning(tiny_model(**settings))
    other, hole = plain(model, tmp_path), model.config.mask_token_id
    canvas = torch.tensor([[0, hole, 3, hole], [0, 3, hole, 3]])
    for ids in (None, canvas, canvas[:, :1]):
        for how in ({}, {"steps": 2, "noise": "keep"}, {"temperature": 0.5, "top_p": 0.9, "order": "spread"}):
            wanted = model.generate(ids, num=8, seed=3, **how).tokens
            assert torch.equal(other.generate(ids, num=8, seed=3, **how), wanted)
    with pytest.raises(ValueError, match="unknown order 'nosuch'; known: random, spread"):
        other.generate(order="nosuch")


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_backbone_drops_as_ours_does(rate: float, tmp_path: Path) -> None:
    other = plain(made(FAMILIES["bert"], dropout=rate), tmp_path).train()
    one, two = (other(input_ids=IDS).logits for _ in range(2))
    assert torch.equal(one, two) == (rate == 0)


@pytest.mark.parametrize("name", [*BACKBONES, "granite", "qwen3", "electra"])
def test_logits_around_a_backbone_are_ours(name: str, tmp_path: Path) -> None:
    """A student of a LLaDA is a Llama and the network that reads its masks' noise."""
    fields = (BACKBONES | FAMILIES)[name]
    model = made(fields, shift=name == "llama", mask="infinite-uniform-4-1.0")
    other, ids = plain(model, tmp_path), torch.where(IDS == 4, 11, IDS)
    noise = noise_of(model, ids)
    shown = torch.ones_like(ids)
    shown[0, :2], shown[1, 4:] = 0, 0
    wanted, found = (m(input_ids=ids, noise=noise, token_type_ids=ids * 0).logits for m in (model, other))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    wanted, found = (m(input_ids=ids, noise=noise, attention_mask=shown).logits for m in (model, other))
    torch.testing.assert_close(found[shown.bool()], wanted[shown.bool()], atol=1e-5, rtol=1e-5)
    assert (other.generate(num=2, steps=2) != 11).all()


def test_prompts_and_canvases(tmp_path: Path) -> None:
    other = plain(tiny_model(), tmp_path)
    made = other.generate(torch.tensor([[1, 2], [3, 0]]), num=2, seed=3)
    assert made.shape == (4, 6)
    assert made[:, :2].tolist() == [[1, 2], [1, 2], [3, 0], [3, 0]]
    assert torch.equal(made, other.generate(torch.tensor([[1, 2], [3, 0]]), num=2, seed=3))
    assert not torch.equal(made, other.generate(torch.tensor([[1, 2], [3, 0]]), num=2, seed=4))
    assert other.generate(torch.tensor([[1, 4, 0]]))[0, [0, 2]].tolist() == [1, 0]
    assert other.generate(torch.tensor([[1]]), max_new_tokens=3).shape == (1, 4)
    assert other.generate(length=3).shape == (1, 3)
    for mask in ([[0, 1], [1, 1]], [[1, 0], [1, 1]]):  # padding before or after a prompt is room to write in
        ids = torch.where(torch.tensor(mask) == 1, torch.tensor([[1, 1], [3, 0]]), 2)
        made = other.generate(ids, attention_mask=torch.tensor(mask), num=40)
        assert (made[:40, 0] == 1).all()
        assert len(set(made[:40, 1].tolist())) > 1
        assert made[40:, :2].tolist() == [[3, 0]] * 40
    for wrong in ({"steps": 0}, {"temperature": -1}, {"top_p": 0}, {"length": 7}):
        with pytest.raises(ValueError, match="steps|temperature|top_p|length"):
            other.generate(torch.tensor([[1]]), **wrong)
    for wrong in ({"length": 7}, {"length": 0}, {"max_new_tokens": 7}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match="from 1 to 6"):
            other.generate(**wrong)
    with pytest.raises(ValueError, match="num = 0"):
        other.generate(num=0)


def test_it_trains_and_grows(tmp_path: Path) -> None:
    other = plain(tiny_model(dropout=0.1), tmp_path).train()
    other.gradient_checkpointing_enable()
    other(input_ids=IDS, labels=IDS % 4).loss.backward()
    assert all(p.grad is not None for p in other.parameters())
    other.generate(steps=1)
    assert other.training
    other.resize_token_embeddings(8)
    assert other(input_ids=IDS).logits.shape[-1] == 8
    with pytest.raises(ValueError, match="at least 5, as token 4 is special"):
        other.resize_token_embeddings(4)
    llama = plain(made(FAMILIES["llama"]), tmp_path / "llama")
    for size, asked in ((14, {"new_num_tokens": 14}), (16, {"pad_to_multiple_of": 16})):
        llama.resize_token_embeddings(**asked)
        assert (llama.config.vocab_size, llama.config.backbone["config"]["vocab_size"]) == (size, size)
        llama.save_pretrained(tmp_path / "grown")
        assert Plain.from_pretrained(tmp_path / "grown")(input_ids=IDS).logits.shape[-1] == size
    whole = plain(tiny_model(vocab_size=8, mask_token_id=3, **ENDING | {"eos_token_id": 7}), tmp_path / "whole")
    with pytest.raises(ValueError, match="at least 8"):
        whole.resize_token_embeddings(7)


def test_the_folder_is_still_ours(tmp_path: Path) -> None:
    """With its tokenizer and card, from weights that were whole numbers; and what is saved from it names no code."""
    tokenizer = train_bpe(["the cat sat on the mat"] * 4, 300)
    model = tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=16)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "small", weights="int8")
    folder = export_transformers(tmp_path / "small", tmp_path / "hub")
    names = {"README.md", "config.json", "model.safetensors", *copies(CODE)}
    assert names <= {file.name for file in folder.iterdir()}
    assert {w.dtype for w in load_file(folder / "model.safetensors").values()} == {torch.float32}
    card = (folder / "README.md").read_text()
    assert "trust_remote_code=True" in card
    required = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    least = next(Requirement(one) for one in required if one.startswith("transformers")).specifier
    assert f"`transformers` {min(str(part.version) for part in least)} or newer" in card
    assert "torch.tensor([[0, *prompt]])" in card
    assert '`imdm.load("hub")`' in card
    model.save_pretrained(tmp_path / "mute")
    assert (
        '`imdm.load_model("ids")`'
        in (export_transformers(tmp_path / "mute", tmp_path / "ids") / "README.md").read_text()
    )
    ids = torch.tensor([[0, 3, 3, 9, 3, 1]])
    small, again = load_model(tmp_path / "small"), load_model(folder)
    assert same(again(input_ids=ids).logits, small(input_ids=ids).logits)
    assert same(Plain.from_pretrained(folder)(input_ids=ids).logits, small(input_ids=ids).logits)
    assert load(folder).write("the cat", steps=2)[0].text.startswith("the cat")
    again.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    half = export_transformers(tmp_path / "small", tmp_path / "half", weights="bf16", card="# Mine")
    assert {w.dtype for w in load_file(half / "model.safetensors").values()} == {torch.bfloat16}
    assert (half / "README.md").read_text() == "# Mine"
    for number, write in enumerate((export, export_published, export_transformers)):
        write(tmp_path / "model", tmp_path / f"bare-{number}", card="")
        assert (tmp_path / f"bare-{number}" / "README.md").read_text() == ""
        assert load_tokenizer(tmp_path / f"bare-{number}").get_vocab() == tokenizer.get_vocab()


def test_what_its_code_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(causal=True).save_pretrained(tmp_path / "judge")
    with pytest.raises(UserError, match="is autoregressive"):
        export_transformers(tmp_path / "judge", tmp_path / "out")
    monkeypatch.setitem(masks._entries, "single", type("Mine", (Single,), {"__module__": "mine"}))
    tiny_model().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="mask Mine is no part of imdm"):
        export_transformers(tmp_path / "model", tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(UserError, match="bf16 or float32, not 'int8'"):
        export_transformers(tmp_path / "model", tmp_path / "out", weights="int8")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="there already"):
        export_transformers(tmp_path / "model", tmp_path / "out")


def test_its_code_needs_torch_transformers_and_numpy_alone() -> None:
    for name, text in copies(CODE).items():
        for node in ast.walk(ast.parse(text)):
            found = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            tops = {each.split(".")[0] for each in found} - set(sys.stdlib_module_names)
            assert tops <= {"torch", "transformers", "numpy"}, name
    assert importlib.import_module("copied.kernels").kernels("draw") is None  # with Triton too


ALONE = """
import importlib.abc, json, sys
import torch

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "imdm":
            raise ImportError("blocked")

sys.meta_path.insert(0, Blocked())
try:
    import imdm
except ImportError:
    pass
else:
    raise SystemExit("imdm can be imported")
"""


def alone(code: str, *arguments: object, **environment: str) -> Any:
    """What a program prints last, as JSON, in a process that cannot import `imdm`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd="/",
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


READ = """
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer
found, (text, *folders) = {}, sys.argv[1:]
for folder in folders:
    model, told = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).vocab_size == model.config.vocab_size
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == type(model).__name__
    hole = model.config.mask_token_id
    ids = torch.tensor([[0, hole, 2, hole]])
    noise = None
    if model.config.mask["kind"] == "infinite":
        noise = torch.linspace(-1, 1, 4 * model.config.mask["dim"]).view(1, 4, -1)
    logits = model(input_ids=ids, noise=noise).logits
    found[folder] = {"logits": logits.double().tolist(), "tokens": model.generate(ids, steps=2, seed=0).tolist()}
    model.save_pretrained(folder + "-again")
    again = AutoModelForMaskedLM.from_pretrained(folder + "-again", trust_remote_code=True)
    assert torch.allclose(again(input_ids=ids, noise=noise).logits, logits)
"""
PUSH = """
model = AutoModelForMaskedLM.from_pretrained(text, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(text, trust_remote_code=True)
model.push_to_hub("me/model")
tokenizer.push_to_hub("me/model")
again = AutoModelForMaskedLM.from_pretrained("me/model", trust_remote_code=True)
inputs = AutoTokenizer.from_pretrained("me/model", trust_remote_code=True)("the <mask> sat", return_tensors="pt")
assert torch.allclose(again(**inputs).logits, model(**inputs).logits)
found["text"] = tokenizer.batch_decode(again.generate(**inputs, steps=2), skip_special_tokens=True)
print(json.dumps(found))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of a model hub as it takes to put a model there and to get it again; all files go up as they are."""

    files: dict[str, bytes]
    commit = "0" * 40

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any) -> None:
        self.reply(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/create"):
            self.answer({"url": f"http://{self.headers['Host']}/me/model", "name": "me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(
                {
                    "commitUrl": f"http://{self.headers['Host']}/me/model/commit/{self.commit}",
                    "commitOid": self.commit,
                    "success": True,
                }
            )
        else:
            self.answer({})

    def do_GET(self) -> None:
        name = self.path.split("/resolve/main/")[-1].split(f"/resolve/{self.commit}/")[-1].split("?")[0]
        if "/resolve/" in self.path and name in self.files:
            tag = f'"{abs(hash(self.files[name])):040x}"'
            self.reply(self.files[name], {"ETag": tag, "X-Repo-Commit": self.commit, "Accept-Ranges": "none"})
        elif self.path.startswith("/api/models/me/model"):
            rows = [
                {"rfilename": name, "path": name, "type": "file", "size": len(b), "oid": "0" * 40}
                for name, b in self.files.items()
            ]
            self.answer(rows if "/tree/" in self.path else {"id": "me/model", "sha": self.commit, "siblings": rows})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET  # noqa: N815  (the server's own convention)


@contextmanager
def hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """The address of a stand-in for a model hub, and the files that were put there."""
    files: dict[str, bytes] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"files": files}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", files
    finally:
        server.shutdown()
        thread.join()


def test_it_runs_where_there_is_no_imdm_and_goes_to_a_hub(tmp_path: Path) -> None:
    """By the Auto classes, in a process of its own: our transformer, and a Llama with infinite masks; then one with its
    tokenizer to a stand-in for a hub, and back."""
    tokenizer = train_bpe(["the cat sat on the mat"] * 4, 300)
    models = {
        "text": tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=16),
        "dit": tiny_model(mask="infinite-normal-8-2.0"),
        "llama": made(FAMILIES["llama"], mask="infinite-uniform-4-1.0"),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / f"{name}-ours")
        if name == "text":
            tokenizer.save_pretrained(tmp_path / "text-ours")
        export_transformers(tmp_path / f"{name}-ours", tmp_path / name)
    with hub() as (address, files):
        where = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_none", "HF_HOME": str(tmp_path / "home")}
        found = alone(READ + PUSH, *(tmp_path / name for name in models), **where)
    for name in ("dit", "llama"):
        hole, said = models[name].config.mask_token_id, found[str(tmp_path / name)]
        noise = torch.linspace(-1, 1, 4 * models[name].config.mask["dim"]).view(1, 4, -1)
        wanted = models[name](input_ids=torch.tensor([[0, hole, 2, hole]]), noise=noise).logits
        torch.testing.assert_close(torch.tensor(said["logits"]).float(), wanted, atol=1e-5, rtol=1e-5)
        assert said["tokens"][0][::2] == [0, 2]
        assert hole not in said["tokens"][0]
    assert {"config.json", "model.safetensors", "tokenizer.json", *copies(CODE)} <= set(files)
    assert {name: files[name].decode() for name in copies(CODE)} == copies(CODE)
    assert json.loads(files["config.json"])["auto_map"]["AutoModelForMaskedLM"] == "modeling_imdm.MaskedDiffusionLM"
    assert found["text"][0].startswith("the")


def test_the_command(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    said = command("export", tmp_path / "model", "--out", tmp_path / "out", "--layout", "transformers").stdout
    assert "layout transformers" in said
    assert Plain.from_pretrained(tmp_path / "out").dtype == torch.float32
    again = command("export", tmp_path / "model", "--out", tmp_path / "out", "--layout", "transformers")
    assert "there already" in refused(again)
    half = ("--layout", "transformers", "--weights", "bf16")
    command("export", tmp_path / "model", "--out", tmp_path / "half", *half)
    assert Plain.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_a_folder_that_is_loaded_leaves_our_operators(tmp_path: Path) -> None:
    """Its code is a copy of ours, but registers nothing with torch under our names."""
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    cos, sin = torch.randn(2, 4, 8)
    before = layers._turned_back_op
    plain(tiny_model(), tmp_path)
    assert torch.ops.imdm.turned_back.default is before._opoverload
    torch.testing.assert_close(before(q, k, v, cos, sin), layers.turned_back(q, k, v, cos, sin))
