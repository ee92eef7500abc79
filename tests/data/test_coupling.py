"""Couplings: exact z_t, keyed seeds, manifests, resuming and refusing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import imdm
from imdm.core.config import digest
from imdm.core.errors import UserError
from imdm.core.files import read_tensors
from imdm.data.coupling import CoupleConfig, Coupling, couple, shard_path
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.diffusion.schedule import EARLIEST
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from tests.conftest import tiny_model
from tests.reference.statistics import assert_mean

SOURCE = LanguageSource(aligned(length=3, symbols=2), seed=0)
CONFIG = CoupleConfig(pairs=50, steps=16, shard=20)


def teacher(**changes: object) -> MaskedDiffusionLM:
    return tiny_model(vocab_size=3, length=3, **changes)


def columns(folder: Path) -> dict[str, torch.Tensor]:
    return Coupling(folder).rows(torch.arange(len(Coupling(folder))))


def test_pairs_are_completions_of_corrupted_data(tmp_path: Path) -> None:
    couple(teacher(), SOURCE, CONFIG, tmp_path, seed=1)
    rows = columns(tmp_path)
    revealed = rows["noised"] != 2
    assert torch.equal(rows["tokens"][revealed], rows["noised"][revealed])
    assert not (rows["tokens"] == 2).any()
    assert (rows["t"] >= EARLIEST).all()
    assert (rows["t"] <= 1).all()
    assert len(rows["seed"].unique()) == 50
    assert len(Coupling(tmp_path)) == 50
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.json",
        *(f"pairs-0000{i}.safetensors" for i in range(3)),
    ]


def test_times_are_uniform_and_masking_follows_them(tmp_path: Path) -> None:
    couple(teacher(), SOURCE, CoupleConfig(pairs=4000, steps=2), tmp_path)
    rows = columns(tmp_path)
    assert_mean(rows["t"], (1 + EARLIEST) / 2)
    masked = (rows["noised"] == 2).double().mean(1)
    assert_mean(masked - rows["t"].double() * (1 - 1e-3), 0.0)


def test_manifest_says_what_made_the_pairs(tmp_path: Path) -> None:
    model = teacher(mask="infinite-uniform-4-1.0")
    couple(model, SOURCE, CoupleConfig(pairs=5, steps=4, noise="keep"), tmp_path, seed=7)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert len(manifest.pop("digest")) == 16
    assert manifest == {
        "teacher": fingerprint(model),
        "mask": "infinite-uniform-4-1.0",
        "schedule": {"kind": "log-linear", "floor": 1e-3},
        "generator": "philox-4x32-10/1",
        "noise": "keep",
        "steps": 4,
        "start": "perturbed",
        "pairs": 5,
        "shard": 4096,
        "seed": 7,
        "data": SOURCE.fingerprint,
        "length": 3,
        "vocab_size": 3,
        "mask_token_id": 2,
        "precision": "float32",
        "compiled": False,
    }


@pytest.mark.parametrize("mask", ["single", "infinite-uniform-4-1.0"])
def test_shards_batches_and_processes_do_not_change_the_pairs(tmp_path: Path, mask: str) -> None:
    """Seeds, t and z_t are equal to the bit in any order and world size; x̂ up to rounding, here entirely."""
    model = teacher(mask=mask)
    couple(model, SOURCE, CONFIG, tmp_path / "one")
    for rank in (1, 0):
        couple(model, SOURCE, CONFIG, tmp_path / "two", rank=rank, world=2)
    couple(model, SOURCE, CONFIG.model_copy(update={"batch_size": 3}), tmp_path / "small")
    first = columns(tmp_path / "one")
    for other in ("two", "small"):
        again = columns(tmp_path / other)
        for name in ("seed", "t", "noised"):
            assert torch.equal(first[name], again[name])
        assert (first["tokens"] == again["tokens"]).double().mean() >= 0.999


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    couple(teacher(), SOURCE, CONFIG, tmp_path)
    whole = columns(tmp_path)
    untouched = shard_path(tmp_path, 0).stat().st_mtime_ns
    shard_path(tmp_path, 1).unlink()
    (tmp_path / ".partial-pairs-00001.safetensors").write_bytes(b"half a shard")
    with pytest.raises(UserError, match=r"unfinished \(2 of 3 shards\); run the same 'imdm couple' again"):
        Coupling(tmp_path)
    seen: list[int] = []
    couple(teacher(), SOURCE, CONFIG, tmp_path, on_progress=seen.append)
    assert shard_path(tmp_path, 0).stat().st_mtime_ns == untouched
    assert all(torch.equal(whole[name], column) for name, column in columns(tmp_path).items())
    assert seen[-1] == 50


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"config": {"steps": 8}}, "steps"),
        ({"config": {"noise": "keep"}}, "noise"),
        ({"seed": 2}, "seed"),
        ({"teacher": 1}, "teacher"),
    ],
)
def test_another_run_into_the_same_folder_is_refused(tmp_path: Path, change: dict, field: str) -> None:
    couple(teacher(), SOURCE, CONFIG, tmp_path, seed=1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    config = CONFIG.model_copy(update=change.get("config", {}))
    with pytest.raises(UserError, match=f"was made with {field} = .*; choose another folder or delete that one"):
        couple(teacher(seed=change.get("teacher", 0)), SOURCE, config, tmp_path, seed=change.get("seed", 1))
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_shards_of_another_manifest_are_made_again(tmp_path: Path) -> None:
    couple(teacher(), SOURCE, CONFIG, tmp_path, seed=1)
    old = columns(tmp_path)
    (tmp_path / "manifest.json").unlink()
    couple(teacher(seed=1), SOURCE, CONFIG, tmp_path, seed=2)
    assert not torch.equal(old["seed"], columns(tmp_path)["seed"])


def test_data_the_teacher_cannot_read_is_refused(tmp_path: Path) -> None:
    for language in (aligned(length=3, symbols=3), aligned(length=4, symbols=2)):
        with pytest.raises(UserError, match="the data has"):
            couple(teacher(), LanguageSource(language), CONFIG, tmp_path / "pairs")
    assert not (tmp_path / "pairs").exists()


def test_prior_couplings_need_no_data(tmp_path: Path) -> None:
    config = CoupleConfig(pairs=8, steps=4, start="prior")
    couple(teacher(), None, config, tmp_path)
    rows = columns(tmp_path)
    assert (rows["noised"] == 2).all()
    assert (rows["t"] == 1).all()
    with pytest.raises(UserError, match="need data"):
        couple(teacher(), SOURCE, config, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_imdm_teacher_starts_from_the_noise_the_seed_gives(tmp_path: Path) -> None:
    """Steps = 1 from all masks: x̂ is the draw under ε(seed), so the student sees the very noise that made x̂."""
    model = teacher(mask="infinite-uniform-4-1.0")
    couple(model, None, CoupleConfig(pairs=30, steps=1, start="prior"), tmp_path)
    rows = columns(tmp_path)
    from imdm.sampling import Sampling, sample

    again = sample(model, rows["noised"], keys=rows["seed"], how=Sampling(1))
    assert torch.equal(again.tokens, rows["tokens"])


@pytest.fixture
def made(tmp_path: Path) -> Coupling:
    couple(teacher(mask="infinite-uniform-4-1.0"), SOURCE, CONFIG, tmp_path)
    return Coupling(tmp_path)


def test_the_student_it_was_made_for_is_taken(made: Coupling) -> None:
    model = teacher(mask="infinite-uniform-4-1.0")
    made.check(model.config, fingerprint(model), uses_seed=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 4, "mask_token_id": 2}, "the data has 3 token ids with mask 2, the model has 4 with mask 2"),
        ({"schedule": "cosine"}, "has schedule"),
        ({"length": 2}, "the data has 3 tokens a row, the model takes at most 2"),
        ({"mask": "infinite-normal-4-1.0"}, "was made under mask infinite-uniform-4-1.0"),
    ],
)
def test_other_students_are_refused(made: Coupling, changes: dict, message: str) -> None:
    settings = {"vocab_size": 3, "length": 3, "mask": "infinite-uniform-4-1.0"}
    with pytest.raises(UserError, match=message):
        made.check(tiny_model(**(settings | changes)).config, made.manifest.teacher, uses_seed=True)


def test_another_noise_policy_is_refused(made: Coupling) -> None:
    model = teacher(mask="infinite-uniform-4-1.0")
    made.check(model.config, made.manifest.teacher, uses_seed=True, policy="posterior")
    with pytest.raises(UserError, match="was made under noise policy 'posterior', not under 'keep'"):
        made.check(model.config, made.manifest.teacher, uses_seed=True, policy="keep")


def test_another_teacher_or_generator_is_refused(made: Coupling) -> None:
    model = teacher(mask="infinite-uniform-4-1.0")
    with pytest.raises(UserError, match="was made by teacher .* make couplings with the model you start from"):
        made.check(model.config, fingerprint(teacher(seed=1)), uses_seed=True)
    made.manifest = made.manifest.model_copy(update={"generator": "philox-4x32-10/0"})
    with pytest.raises(UserError, match="drawn by generator"):
        made.check(model.config, made.manifest.teacher, uses_seed=True)
    made.check(imdm.with_mask(model, "finite-3").config, made.manifest.teacher, uses_seed=False)


def test_damaged_couplings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder; make one with 'imdm couple'"):
        Coupling(tmp_path / "none")
    with pytest.raises(UserError, match=r"manifest.json is missing"):
        Coupling(tmp_path)
    couple(teacher(), SOURCE, CONFIG, tmp_path)
    shard = shard_path(tmp_path, 2)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        Coupling(tmp_path)
    shard.write_bytes(shard_path(tmp_path, 0).read_bytes())
    with pytest.raises(UserError, match="is not the shard of these pairs that its name says"):
        Coupling(tmp_path)
    couple(teacher(), SOURCE, CONFIG, tmp_path)  # makes what is not what it should be again
    assert shard.read_bytes() == whole
    fingerprint_of_pairs = Coupling(tmp_path).fingerprint
    for wrong, message in (
        ({"tokens": torch.full((10, 3), 7)}, "token 7 is outside the vocabulary"),
        ({"noised": torch.full((10, 3), -1)}, "token -1 is outside the vocabulary"),
        ({"tokens": torch.full((10, 3), 0.5)}, "holds fractions"),
        ({"t": torch.full((10,), 1.5)}, r"times outside \(0, 1\]"),
        ({"t": torch.full((10,), float("nan"))}, r"times outside \(0, 1\]"),
        ({"tokens": torch.zeros(9, 3, dtype=torch.int32)}, "does not hold 10 pairs of 3 tokens"),
    ):
        columns = read_tensors(shard, "test") | wrong
        save_file(columns, shard, metadata={"manifest": fingerprint_of_pairs, "shard": "2"})
        with pytest.raises(UserError, match=message):
            Coupling(tmp_path)
        shard.write_bytes(whole)


def test_a_teacher_made_ready_writes_the_same_pairs_and_bf16_needs_a_gpu(tmp_path: Path) -> None:
    model = teacher(mask="infinite-uniform-4-1.0")
    plain, ready = CoupleConfig(pairs=20, steps=8), CoupleConfig(pairs=20, steps=8, compile=True)
    assert ready.writer(model).config.condition == 0  # folded
    for name, config in (("plain", plain), ("ready", ready)):
        couple(model, SOURCE, config, tmp_path / name)
    assert Coupling(tmp_path / "ready").fingerprint != Coupling(tmp_path / "plain").fingerprint  # other rounding
    rows = [Coupling(tmp_path / name).rows(torch.arange(20)) for name in ("plain", "ready")]
    assert all(torch.equal(rows[0][column], rows[1][column]) for column in rows[0])
    with pytest.raises(UserError, match="bf16 needs a GPU"):
        couple(model, SOURCE, CoupleConfig(pairs=2, precision="bf16"), tmp_path / "half")


def test_pairs_made_before_there_was_a_choice_of_precision_are_still_good(tmp_path: Path) -> None:
    couple(teacher(), SOURCE, CoupleConfig(pairs=5, steps=4), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    old = {name: value for name, value in manifest.items() if name not in ("precision", "compiled", "digest")}
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    assert len(Coupling(tmp_path)) == 5
    assert Coupling(tmp_path).fingerprint == digest(old)
