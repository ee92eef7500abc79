"""Published checkpoints in, the same layout out; and files that would run code if they could."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import imdm
from imdm.adopting.adopt import adopt_into, source_files, write_published
from imdm.adopting.checkpoints import NEEDED, read_pickled, read_weights
from imdm.adopting.sources import check_source
from imdm.core.errors import UserError
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused
from tests.reference.published import logits, made

SIZE: dict[str, Any] = {"vocabulary": 11, "width": 16, "blocks": 2, "heads": 2, "condition": 6}
TOKENS = torch.tensor([[10, 3, 10, 0, 7, 10], [1, 10, 10, 10, 2, 9]])
MDLM = {"model_type": "mdlm", "model_length": 6, "n_heads": 2, "dropout": 0.1, "time_conditioning": False}


def expected(weights: dict[str, Tensor], added: Tensor | None = None) -> Tensor:
    """Log-probabilities of data tokens at masked positions."""
    every = logits(weights, TOKENS, SIZE["heads"], added)
    every[..., 10] = -torch.inf
    return every.log_softmax(-1)[TOKENS == 10]


def folder(
    tmp_path: Path, weights: dict[str, Tensor], config: dict[str, Any] | None = None, prefix: str = "backbone."
) -> Path:
    place = tmp_path / "published"
    place.mkdir()
    save_file({prefix + name: weight for name, weight in weights.items()}, place / "model.safetensors")
    if config is not None:
        (place / "config.json").write_text(json.dumps(config))
    return place


def lightning(file: Path, weights: dict[str, Tensor], average: bool = True, **more: Any) -> Path:
    """A checkpoint as Lightning writes it, the averaged weights in a list."""
    state = OrderedDict((f"backbone.{name}", weight) for name, weight in weights.items())
    shadow = [weight + 0.1 for name, weight in weights.items() if not name.endswith("inv_freq")]
    content = {"state_dict": state, "epoch": 3, "optimizer_states": [{"state": {0: torch.ones(4)}}]} | more
    torch.save(
        content | ({"ema": {"decay": 0.9999, "num_updates": 5, "shadow_params": shadow}} if average else {}), file
    )
    return file


@pytest.mark.parametrize("prefix", ["backbone.", "backbone.backbone.", "_orig_mod.backbone.", ""])
def test_mdlms_layout_gives_the_same_log_probabilities(tmp_path: Path, prefix: str) -> None:
    weights = made(**SIZE)
    model = imdm.adopt(folder(tmp_path, weights, MDLM, prefix))
    assert (model.config.length, model.config.mask_token_id, model.mask.name) == (6, 10, "single")
    found = model(model.noised(TOKENS), TOKENS == 10)
    torch.testing.assert_close(found, expected(weights), atol=1e-5, rtol=1e-5)
    assert not model.training


def test_what_a_configuration_says_goes_before_a_guess_and_what_is_told_before_both(tmp_path: Path) -> None:
    source = folder(tmp_path, made(**SIZE), MDLM | {"mask_index": 4, "softcap": -1})
    assert (imdm.adopt(source).config.mask_token_id, imdm.adopt(source).config.softcap) == (4, None)
    told = imdm.adopt(source, mask_token_id=5, length=9, softcap=30.0).config
    assert (told.mask_token_id, told.length, told.softcap) == (5, 9, 30.0)
    wide = made(vocabulary=30_522, width=768, blocks=1, heads=12, condition=2)
    del wide["rotary_emb.inv_freq"]
    (tmp_path / "bert").mkdir()
    found = imdm.adopt(folder(tmp_path / "bert", wide), length=128).config
    assert (found.mask_token_id, found.heads) == (103, 12)


def test_radds_layout_has_no_adaln(tmp_path: Path) -> None:
    weights = made(**SIZE | {"condition": 0})
    model = imdm.adopt(folder(tmp_path, weights), length=6)
    assert model.config.condition == 0
    torch.testing.assert_close(model(model.noised(TOKENS), TOKENS == 10), expected(weights), atol=1e-5, rtol=1e-5)


def test_imdms_noise_is_read_beside_the_mask(tmp_path: Path) -> None:
    weights = made(**SIZE, noise=5)
    source = folder(tmp_path, weights, MDLM)
    model = imdm.adopt(source)
    assert model.mask.name == "infinite-uniform-5-1.0"
    state = model.noised(TOKENS, seed=3)
    up = torch.nn.functional.gelu(
        state.noise @ weights["vocab_embed.imdm_mlp.0.weight"].T + weights["vocab_embed.imdm_mlp.0.bias"]
    )
    added = (up @ weights["vocab_embed.imdm_mlp.2.weight"].T) * (TOKENS == 10)[..., None]
    torch.testing.assert_close(model(state, TOKENS == 10), expected(weights, added), atol=1e-5, rtol=1e-5)
    assert imdm.adopt(source, mask="infinite-normal-5-2.0").mask.name == "infinite-normal-5-2.0"
    assert imdm.adopt(source, softcap=50.0).config.softcap == 50.0
    with pytest.raises(UserError, match=r"of mask infinite-uniform-5-1.0, not infinite-uniform-7-1.0"):
        imdm.adopt(source, mask="infinite-uniform-7-1.0")


def test_finite_masks(tmp_path: Path) -> None:
    weights = made(**SIZE, masks=4)
    model = imdm.adopt(folder(tmp_path, weights, MDLM))
    assert model.mask.name == "finite-4"
    state = model.noised(TOKENS, seed=1)
    added = weights["vocab_embed.imdm_mlp.weight"][state.noise.long().reshape(TOKENS.shape)] * (TOKENS == 10)[..., None]
    torch.testing.assert_close(model(state, TOKENS == 10), expected(weights, added), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("averaged", [True, False])
def test_a_lightning_checkpoint_gives_its_average_unless_told(tmp_path: Path, averaged: bool) -> None:
    weights = made(**SIZE)
    file = lightning(tmp_path / "mdlm.ckpt", weights)
    model = imdm.adopt(file, length=6, averaged=averaged)
    wanted = weights | {k: v + 0.1 for k, v in weights.items() if averaged and not k.endswith("inv_freq")}
    torch.testing.assert_close(model(model.noised(TOKENS), TOKENS == 10), expected(wanted), atol=1e-5, rtol=1e-5)
    plain = imdm.adopt(lightning(tmp_path / "plain.ckpt", weights, average=False), length=6)
    torch.testing.assert_close(plain(plain.noised(TOKENS), TOKENS == 10), expected(weights), atol=1e-5, rtol=1e-5)


def test_an_average_that_does_not_match_is_refused(tmp_path: Path) -> None:
    file = lightning(tmp_path / "odd.ckpt", made(**SIZE), ema={"shadow_params": [torch.ones(3)]}, average=False)
    with pytest.raises(UserError, match="do not match its .* parameters"):
        imdm.adopt(file, length=6)
    assert imdm.adopt(file, length=6, averaged=False).config.width == 16


class Malicious:
    """Unpickled by an ordinary reader it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("where", ["hyper_parameters", "state_dict"])
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, where: str) -> None:
    trap, weights = tmp_path / "trap", made(**SIZE)
    bad = Malicious(trap)
    if where == "state_dict":
        weights |= {"bad": bad}  # type: ignore[dict-item]
        content: Any = {"state_dict": OrderedDict((f"backbone.{k}", v) for k, v in weights.items())}
        torch.save(content, tmp_path / "bad.ckpt")
    else:
        lightning(tmp_path / "bad.ckpt", weights, **{where: {"config": bad, "tokenizer": Path("x"), "more": [bad]}})
    assert imdm.adopt(tmp_path / "bad.ckpt", length=6).config.width == 16
    assert not trap.exists()
    torch.load(tmp_path / "bad.ckpt", weights_only=False)
    assert trap.exists()  # the trap works on those who run it


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R.",
        b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001/0\x85R.",
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
        b"\x80\x02ctorch.serialization\nload\nX\x01\x00\x00\x00x\x85R.",
        b"(S'x'\nios\nsystem\n.",
    ],
)
def test_every_name_that_is_not_needed_does_nothing(tmp_path: Path, opcodes: bytes) -> None:
    file = tmp_path / "raw.ckpt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", opcodes)
    assert type(read_pickled(file)).__name__ == "Inert"


class Setting:
    """Pickled as an object and a state to be set on it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return OrderedDict, (), self.state


def test_nothing_that_was_read_can_be_changed_by_what_follows(tmp_path: Path) -> None:
    """A pickle sets attributes of what it made: not here, so that a tensor cannot be sent to another file."""
    secret = tmp_path / "secret.zip"
    with zipfile.ZipFile(secret, "w") as archive:
        archive.writestr("secret", b"secret!!")
    stream = io.BytesIO()
    torch.save({"state_dict": {"a": torch.zeros(2)}, "more": Setting({"items": 1, "keys": 2})}, stream)
    file = tmp_path / "set.ckpt"
    with zipfile.ZipFile(stream) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            if name.endswith("data.pkl"):  # after each tensor's storage: BUILD {file: …, entry: …}
                build = pickle.dumps({"file": str(secret), "entry": "secret", "offset": 7}, 2)[2:-1]
                assert data.count(b"Q") == 1
                data = data.replace(b"Q", b"Q" + build + b"b")
            after.writestr(name, data)
    assert read_weights(file).tensors["a"].tolist() == [0, 0]
    before_all = {name: (one.of, vars(one)) for name, one in NEEDED.items()}
    raw = tmp_path / "raw.ckpt"
    function = b"\x80\x02ctorch._utils\n_rebuild_parameter\n" + pickle.dumps((None, {"of": 1}), 2)[2:-1] + b"b."
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("archive/data.pkl", function)
    read_pickled(raw)
    assert {name: (one.of, vars(one)) for name, one in NEEDED.items()} == before_all


def test_what_costs_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    torch.save({"wide": torch.zeros(1).expand(1 << 40), "none": torch.zeros(0, 3)}, tmp_path / "wide.ckpt")
    with pytest.raises(UserError, match="beyond its storage"):
        read_weights(tmp_path / "wide.ckpt")
    torch.save({"none": torch.zeros(0, 3), "one": torch.tensor(2.0)}, tmp_path / "empty.ckpt")
    found = read_weights(tmp_path / "empty.ckpt").tensors
    assert (found["none"].shape, found["one"].item()) == ((0, 3), 2.0)
    torch.save({"odd": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "odd.ckpt")
    with pytest.raises(UserError, match="'odd' has an unsupported dtype"):
        read_weights(tmp_path / "odd.ckpt")
    with pytest.raises(UserError, match="no such file"):
        read_weights(tmp_path / "nowhere.ckpt")
    stream = io.BytesIO()
    torch.save({"a": torch.zeros(1000)}, stream)
    with zipfile.ZipFile(stream) as plain, zipfile.ZipFile(tmp_path / "z.ckpt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    with pytest.raises(UserError, match="compressed"):
        read_weights(tmp_path / "z.ckpt")


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    legacy, text = tmp_path / "old.ckpt", tmp_path / "text.ckpt"
    torch.save({"a": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    text.write_bytes(pickle.dumps({"a": 1}))
    for file in (legacy, text):
        with pytest.raises(UserError, match="not a zip archive"):
            read_weights(file)
    other = tmp_path / "other.ckpt"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02garbage")
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        read_weights(other)
    torch.save({"epoch": 1}, tmp_path / "empty.ckpt")
    with pytest.raises(UserError, match="holds no weights"):
        read_weights(tmp_path / "empty.ckpt")


def test_a_tensor_that_reaches_beyond_its_numbers(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"state_dict": {"a": torch.arange(4.0)}}, stream)
    file = tmp_path / "long.ckpt"
    with zipfile.ZipFile(stream) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            after.writestr(name, data[:8] if name.endswith("data/0") else data)
    with pytest.raises(UserError, match="beyond its storage"):
        read_weights(file)


def test_an_archive_whose_end_is_damaged_is_refused(tmp_path: Path) -> None:
    """Where it says that it goes on in another file, `zipfile` does not answer whether it is one, but fails."""
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"a": torch.arange(4.0)}}, file)
    content = bytearray(file.read_bytes())
    other_end = content.rfind(b"PK\x06\x07")  # of an archive of 64 bits
    end = bytes(20) if other_end < 0 else content[other_end : other_end + 20]
    end = b"PK\x06\x07" + bytes([1, 0, 0, 0]) + end[8:16] + bytes([2, 0, 0, 0])
    last = content.rfind(b"PK\x05\x06")
    file.write_bytes(content[: last if other_end < 0 else other_end] + end + content[last:])
    with pytest.raises(UserError, match="no checkpoint"):
        check_source(file)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MDLM | {"model_type": "duo"}, "uniform-state"),
        (MDLM | {"diffusion": "uniform"}, "uniform-state"),
        (MDLM | {"algo": {"name": "duo_base"}}, "uniform-state"),
        (MDLM | {"time_conditioning": True}, "conditioned on time"),
        (MDLM | {"algo": {"name": "mdlm", "time_conditioning": True}}, "conditioned on time"),
        (MDLM | {"graph": {"type": "absorb"}, "model": {"scale_by_sigma": True}}, "SEDD"),
        (MDLM | {"graph": {"type": "uniform"}}, "SEDD"),
        (MDLM | {"parameterization": "ar"}, "SEDD"),
        (MDLM | {"algo": {"name": "ar"}}, "SEDD"),
        (MDLM | {"algo": {"name": "x", "parameterization": "sedd"}}, "SEDD"),
        (MDLM | {"model_type": "bd3lm", "block_size": 4}, "a block diffusion model"),
        (MDLM | {"model_type": "diffusion_gemma"}, "uniform-state"),
    ],
)
def test_models_that_are_none_of_ours_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        imdm.adopt(folder(tmp_path, made(**SIZE), config))


@pytest.mark.parametrize(
    ("config", "told", "words"),
    [
        ({"vocab_size": 12}, {}, "vocab_size = 11, not 12"),
        ({"hidden_dim": 32}, {}, "width = 16, not 32"),
        ({"n_blocks": 3}, {}, "blocks = 2, not 3"),
        ({"n_heads": 4}, {}, "heads = 2, not 4"),
        ({"cond_dim": 128}, {}, "condition = 6, not 128"),
        ({"model": {"hidden_size": 32}}, {}, "width = 16, not 32"),
        ({}, {"heads": 4}, "heads = 2, not 4"),
    ],
)
def test_a_configuration_that_its_tensors_contradict_is_refused(
    tmp_path: Path, config: dict[str, Any], told: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        imdm.adopt(folder(tmp_path, made(**SIZE), MDLM | config), **told)


SDTT: dict[str, Any] = {
    "mode": "train", "time_conditioning": False, "T": 1024, "parameterization": {"name": "multi-round-sdtt"},
    "noise": {"type": "loglinear"}, "data_preprocess": {"legacy_start_end_bos": True},
    "model": {
        "name": "small", "type": "ddit-orig", "hidden_size": 16, "cond_dim": 6, "length": 6, "n_blocks": 2,
        "n_heads": 2, "scale_by_sigma": True, "dropout": 0.2,
    },
}  # fmt: skip


def test_sdtts_tree_of_settings_is_read(tmp_path: Path) -> None:
    """Its `scale_by_sigma` is MDLM's too, and does not make it a SEDD."""
    weights = made(**SIZE)
    model = imdm.adopt(folder(tmp_path, weights, SDTT, "backbone.backbone."))
    assert (model.config.length, model.config.heads, model.config.dropout) == (6, 2, 0.2)
    assert torch.allclose(model.log_probs(model.noised(TOKENS), TOKENS == 10), expected(weights), atol=1e-5)


class Node:
    """Pickled as an object of OmegaConf is: its values are in its state."""

    def __init__(self, value: Any) -> None:
        inside = {name: Node(one) for name, one in value.items()} if isinstance(value, dict) else None
        self.__dict__ |= {"_metadata": None, "_parent": self} | (
            {"_val": value} if inside is None else {"_content": inside}
        )


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"algo": {"name": "mdlm", "time_conditioning": False}, "model": SDTT["model"]}, None),
        ({"algo": {"name": "duo_base"}}, "uniform-state"),
        ({"algo": {"name": "mdlm", "time_conditioning": True}}, "conditioned on time"),
        ({"time_conditioning": True}, "conditioned on time"),
        ({"parameterization": "sedd"}, "SEDD"),
        ({"model": {"length": "${data.length}"}}, "no configuration gives the length of its sequences"),
    ],
)
def test_a_checkpoint_says_itself_what_it_is(
    tmp_path: Path, said: dict[str, Any], refusal: str | None, plain: bool
) -> None:
    """Lightning stores the configuration beside the weights; as data it is read, and no object of it is made."""
    config = {"config": said if plain else Node(said), "tokenizer": Path("x")}
    file = lightning(tmp_path / "last.ckpt", made(**SIZE), hyper_parameters=config)
    if refusal is None:
        model = imdm.adopt(file)
        assert (model.config.length, model.config.heads, model.config.dropout) == (6, 2, 0.2)
    else:
        with pytest.raises(UserError, match=refusal):
            imdm.adopt(file, **({} if "length" in refusal else {"length": 6}))


@pytest.mark.parametrize("averaged", [True, False])
def test_radds_own_checkpoint(tmp_path: Path, averaged: bool) -> None:
    weights = made(**SIZE | {"condition": 0})
    shadow = [weight + 0.1 for name, weight in weights.items() if not name.endswith("inv_freq")]
    content = {"optimizer": {}, "model": weights, "ema": {"shadow_params": shadow}, "step": 3}
    torch.save(content, tmp_path / "checkpoint.pth")
    model = imdm.adopt(tmp_path / "checkpoint.pth", length=6, averaged=averaged)
    wanted = {name: weight + 0.1 * averaged * (not name.endswith("inv_freq")) for name, weight in weights.items()}
    assert torch.allclose(model.log_probs(model.noised(TOKENS), TOKENS == 10), expected(wanted), atol=1e-4)


def test_one_of_several_files_and_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of the hub has models as branches (SDTT) or as files (IMDM)."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked, weights = list[Any](), made(**SIZE)
    place = folder(tmp_path, weights, MDLM)
    (place / "model.safetensors").rename(place / "small.safetensors")
    lightning(place / "large.ckpt", weights)

    def download(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str] | None) -> str:
        there = ["config.json", "small.safetensors", "large.ckpt", "optimizer.pt", "sub/large.ckpt", "original/all.pth"]
        wanted = filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        asked.append((name, revision, sorted(set(wanted) - {"config.json"})))
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UserError, match=r"several files of weights \(large.ckpt, small.safetensors\); say which one"):
        imdm.adopt("owner/name")
    for source, given in (("owner/name", {"revision": "step_7"}), (place, {})):
        last = imdm.adopt(source, file="large.ckpt", averaged=False, **given)
        assert torch.equal(
            last.embedding.weight, imdm.adopt(source, file="small.safetensors", **given).embedding.weight
        )
    (place / "sub").mkdir()
    lightning(place / "sub" / "large.ckpt", weights)
    assert imdm.adopt("owner/name", file=Path("sub/large.ckpt")).config.length == 6  # config.json is above it
    assert asked == [
        ("owner/name", None, ["large.ckpt", "small.safetensors"]),
        ("owner/name", "step_7", ["large.ckpt"]),
        ("owner/name", "step_7", ["small.safetensors"]),
        ("owner/name", None, ["sub/large.ckpt"]),
    ]
    for given, sentence in (
        ({"file": "medium.ckpt"}, "medium.ckpt: no such file"),
        ({"file": "../x.ckpt"}, "by its path in"),
        ({"file": "config.json"}, "give a file of weights"),
        ({"file": "large.ckpt", "revision": "x"}, "it is for hub ids"),
    ):
        with pytest.raises(UserError, match=sentence):
            imdm.adopt(place, **given)
    with pytest.raises(UserError, match="is a file already"):
        imdm.adopt(place / "large.ckpt", file="large.ckpt")
    with pytest.raises(UserError, match="dtype = 'bf16'"):
        imdm.adopt(place, file="large.ckpt", dtype="bf16")  # type: ignore[arg-type]


def test_what_lies_beside_the_weights_is_not_taken_for_them(tmp_path: Path) -> None:
    """An optimiser's state; and a file of that ending is read where there is no other."""
    place = folder(tmp_path, made(**SIZE), MDLM)
    torch.save({"state": {}}, place / "optimizer.pt")
    (place / "model.safetensors").rename(place / "small.safetensors")
    files = source_files(place)
    assert imdm.adopt(place).config.length == 6
    (place / "chat_template.jinja").write_text("{{ messages }}")
    assert source_files(place) == files  # a finished stage stays finished
    (place / "small.safetensors").unlink()
    with pytest.raises(UserError, match=r"optimizer\.pt holds no weights"):
        imdm.adopt(place)


@pytest.mark.parametrize("size", [6, "${model.length}"])
def test_a_block_of_the_whole_length_is_no_block(tmp_path: Path, size: Any) -> None:
    """As MDLM's own models have it in BD3-LM's code."""
    said = {"algo": {"name": "mdlm"}, "block_size": size, "model": SDTT["model"]}
    assert imdm.adopt(folder(tmp_path, made(**SIZE), said)).config.length == 6
    with pytest.raises(UserError, match="a block diffusion model"):
        imdm.adopt(lightning(tmp_path / "b.ckpt", made(**SIZE), hyper_parameters={"config": said | {"block_size": 3}}))


def test_odd_settings_in_a_checkpoint_do_no_harm(tmp_path: Path) -> None:
    """Names that are no text, and a table called as weights are."""
    deep: Any = ()
    for _ in range(500):
        deep = (deep,)
    said = {"config": {deep: 1, "model": {deep: 2, "length": 6}}}
    assert imdm.adopt(lightning(tmp_path / "a.ckpt", made(**SIZE), hyper_parameters=said)).config.length == 6
    weights = {f"backbone.{name}": weight for name, weight in made(**SIZE).items()}
    torch.save(weights | {"model": {"length": 6}}, tmp_path / "b.ckpt")
    assert imdm.adopt(tmp_path / "b.ckpt", length=6).config.width == 16


def test_what_is_missing_too_much_or_of_another_shape(tmp_path: Path) -> None:
    weights, number = made(**SIZE), iter(range(9))

    def adopted(changed: dict[str, Tensor], **how: Any) -> Any:
        return imdm.adopt(folder(tmp_path / str(next(number)), changed), **{"length": 6} | how)

    for n in range(9):
        (tmp_path / str(n)).mkdir()
    with pytest.raises(UserError, match=r"'blocks.1.mlp.2.bias' is missing"):
        adopted({k: v for k, v in weights.items() if k != "blocks.1.mlp.2.bias"})
    with pytest.raises(UserError, match="a tensor 'extra'"):
        adopted(weights | {"extra": torch.ones(1)})
    with pytest.raises(UserError, match=r"shape \(3,\), not \(16,\)"):
        adopted(weights | {"blocks.0.norm1.weight": torch.ones(3)})
    with pytest.raises(UserError, match="Di4C"):
        adopted(weights | {"latent_projection.0.weight": torch.ones(1)})
    with pytest.raises(UserError, match=r"the length of its sequences; give it \(length\)"):
        adopted(weights, length=None)
    bare = {k: v for k, v in weights.items() if not k.endswith("inv_freq")}
    with pytest.raises(UserError, match=r"its number of attention heads; give it \(heads\)"):
        adopted(bare)
    assert adopted(bare, heads=2).config.heads == 2
    with pytest.raises(UserError, match="does not have base 10,000"):
        adopted(weights | {"rotary_emb.inv_freq": torch.ones(4)})
    with pytest.raises(UserError, match="not laid out as MDLM"):
        adopted({"bert.embeddings": torch.ones(2, 2)})


@pytest.mark.parametrize(("condition", "noise"), [(6, 0), (0, 0), (6, 5)])
def test_out_again_it_is_what_mdlms_class_loads(tmp_path: Path, condition: int, noise: int) -> None:
    weights = made(**SIZE | {"condition": condition}, noise=noise)
    source = folder(tmp_path, weights, MDLM)
    adopt_into(source, tmp_path / "ours")
    said = command("export", tmp_path / "ours", "--out", tmp_path / "theirs", "--layout", "mdlm").stdout
    assert "layout mdlm" in said
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {name: config[name] for name in MDLM} == MDLM
    assert (config["hidden_dim"], config["n_blocks"], config["vocab_size"]) == (16, 2, 11)
    again = {k.removeprefix("backbone."): v for k, v in load_file(tmp_path / "theirs" / "model.safetensors").items()}
    if condition:
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    else:
        assert set(again) == set(made(**SIZE | {"condition": 128}))
        torch.testing.assert_close(expected(again), expected(weights), atol=1e-5, rtol=1e-5)
    assert imdm.adopt(tmp_path / "theirs").mask.name == ("infinite-uniform-5-1.0" if noise else "single")


def test_law_and_scale_of_noise_come_back(tmp_path: Path) -> None:
    adopt_into(folder(tmp_path, made(**SIZE, noise=5), MDLM), tmp_path / "ours", mask="infinite-normal-5-2.0")
    command("export", tmp_path / "ours", "--out", tmp_path / "theirs", "--layout", "mdlm")
    assert imdm.adopt(tmp_path / "theirs").mask.name == "infinite-normal-5-2.0"
    for changes in ({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}, {"schedule": "cosine"}):
        other = imdm.MaskedDiffusionConfig(vocab_size=11, length=6, width=16, blocks=1, heads=2, condition=4, **changes)
        imdm.MaskedDiffusionLM(other).save_pretrained(tmp_path / "other")
        said = refused(command("export", tmp_path / "other", "--out", tmp_path / "x", "--layout", "mdlm"))
        assert "and the log-linear schedule" in said
    small = {"vocab_size": 11, "length": 6, "width": 16, "blocks": 1, "heads": 2}
    bert = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert |= {"vocab_size": 11, "intermediate_size": 16, "max_position_embeddings": 6}
    kinds = {"is autoregressive": {"causal": True}, "has a latent (Di4C)": {"mixture": True}}
    kinds |= {"has another backbone (bert); use layout transformers": {"backbone": {"kind": "hf", "config": bert}}}
    for what, changes in kinds.items():
        model = imdm.MaskedDiffusionLM(imdm.MaskedDiffusionConfig(**small | changes))
        with pytest.raises(UserError, match=re.escape(f"diffusion transformer (dit); this model {what}")):
            write_published(model, tmp_path / "x")
    eight = ("--layout", "mdlm", "--weights", "int8")
    said = refused(command("export", tmp_path / "ours", "--out", tmp_path / "x", *eight))
    assert "is written in float32; leave out --weights int8" in said
    assert not (tmp_path / "x").exists()


def test_an_adopted_model_is_one_of_ours(tmp_path: Path) -> None:
    model = imdm.adopt(folder(tmp_path, made(**SIZE), MDLM))
    before = model(model.noised(TOKENS), TOKENS == 10)
    infinite = imdm.to_infinite(model, dim=4)
    assert torch.equal(infinite(infinite.noised(TOKENS), TOKENS == 10), before)
    written = model.generate(num=3, steps=2)
    assert written.tokens.shape == (3, 6)
    assert not (written.tokens == 10).any()


def test_the_command(tmp_path: Path) -> None:
    source = folder(tmp_path, made(**SIZE), MDLM)
    said = command("adopt", source, "--out", tmp_path / "ours").stdout
    assert "single" in said
    assert "2 blocks of width 16" in said
    assert "no tokenizer" in said
    assert command("generate", tmp_path / "ours", "--steps", "2").stdout.strip()
    assert "is there already" in refused(command("adopt", source, "--out", tmp_path / "ours"))
    assert "no such file or folder" in refused(command("adopt", tmp_path / "nowhere", "--out", tmp_path / "b"))
    assert "unknown layout" in refused(
        command("export", tmp_path / "ours", "--out", tmp_path / "c", "--layout", "gguf")
    )


def test_what_can_be_converted_is_not_refused_by_its_name(tmp_path: Path) -> None:
    """A checkpoint of PyTorch's under any name, also beside a model of ours; a folder with a manifest of somebody's."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "imdm"}))
    for name in ("best.pth.tar", "checkpoint-last", "mdlm.ckpt"):
        torch.save({"weight": torch.zeros(2)}, tmp_path / name)
        check_source(tmp_path / name)
    for name in ("notes.txt", "model.safetensors"):
        (tmp_path / name).write_bytes(b"not a zip archive")
    with pytest.raises(UserError, match="weights are in files of .safetensors"):
        check_source(tmp_path / "notes.txt")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(UserError, match="is one of ours already"):
            check_source(place)
    bert = tmp_path / "bert"
    bert.mkdir()
    for name in ("config.json", "manifest.json"):
        (bert / name).write_text(json.dumps({"model_type": "bert"}))
    (bert / "model.safetensors").touch()
    check_source(bert)
