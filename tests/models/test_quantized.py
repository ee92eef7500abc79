"""Weights as whole numbers: what is loaded is what was measured, and the law hardly moves."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from imdm.cli.app import app
from imdm.core.errors import UserError
from imdm.core.files import read_metadata
from imdm.diffusion.state import Noised
from imdm.exporting import export
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.models.quantized import LEAST, MOST, Packed, pack, rounded, save, unpack
from imdm.models.rounding import WITHIN, allotted, eight_bits, fewest_bits, matrices
from imdm.models.variants import fold_conditioning
from imdm.sampling import draw
from tests.conftest import tiny_model

ROOT = Path(__file__).parents[2]
FILE = "model.safetensors"


def sharp(factor: float = 2.0, **changes: object) -> MaskedDiffusionLM:
    """A random model whose matrices are scaled up, so that small changes of its weights matter."""
    model = tiny_model(**({"vocab_size": 40, "length": 8, "width": 64, "heads": 4, "condition": 0} | changes))
    with torch.no_grad():
        for weight in matrices(model).values():
            weight.mul_(factor)
    return model


def move_by_hand(model: MaskedDiffusionLM, other: MaskedDiffusionLM, seed: int) -> float:
    """KL of two laws in nats a masked token, on texts of the first masked at random times."""
    x = model.generate(num=400, steps=4, seed=seed).tokens
    keys = model.sample_keys(len(x), seed + 1)
    state = model.process.corrupt(x, torch.linspace(0.05, 1.0, len(x)), keys)
    with torch.no_grad():
        p, q = model(state, rows=state.masked).double(), other(state, rows=state.masked).double()
    return float((p.exp() * (p - q).nan_to_num()).sum(-1).mean())


# Packing


@st.composite
def packings(sample: Callable[[st.SearchStrategy], object]) -> tuple[Tensor, int]:
    shape = sample(st.lists(st.integers(1, 9), min_size=2, max_size=3))
    seed, spread = sample(st.integers(0, 1 << 30)), sample(st.floats(1e-6, 1e6))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread  # type: ignore[arg-type, call-overload]
    empty = sample(st.integers(0, len(weight)))
    weight[:empty] = 0.0  # type: ignore[misc]
    return weight, sample(st.integers(LEAST, MOST))  # type: ignore[return-value]


@given(packings())
@settings(deadline=None, max_examples=150)
def test_what_is_unpacked_is_what_was_rounded(packing: tuple[Tensor, int]) -> None:
    weight, bits = packing
    packed = pack(weight, bits)
    assert packed.planes.shape == (bits, -(-weight.numel() // 8))
    found = unpack(packed, tuple(weight.shape))
    assert found.dtype == torch.float32
    assert torch.equal(found, rounded(weight, bits))
    step = weight.abs().flatten(1).amax(1) / ((1 << (bits - 1)) - 1)
    error = (found - weight).abs().flatten(1).amax(1)
    assert bool((error <= step * (0.5 + 1e-6 * (1 << bits))).all())  # half a step, and the rounding of float32


def test_rows_of_zeros_stay_and_others_reach_their_largest_weight() -> None:
    weight = torch.tensor([[0.0, 0.0, 0.0], [1.2, -2.0, 0.5]])
    assert torch.equal(rounded(weight, 8)[0], torch.zeros(3))
    assert rounded(weight, 8)[1, 1] == -2.0
    assert rounded(weight, 3)[1].tolist() == pytest.approx([4 / 3, -2.0, 2 / 3])  # −3…3 times 2/3
    with pytest.raises(ValueError, match="3 to 16 bits"):
        pack(weight, 2)


# Bits


def test_bits_go_where_they_gain_most_and_no_further_than_asked() -> None:
    effects, sizes = {"sharp": 1.0, "flat": 1e-6, "large": 1.0}, {"sharp": 100, "flat": 100, "large": 10_000}
    bits = allotted(effects, sizes, 1e-3)
    assert bits["flat"] < bits["large"] < bits["sharp"]

    def total(bits: dict[str, int]) -> float:
        return sum(effects[name] * (63 / (2 ** (b - 1) - 1)) ** 2 for name, b in bits.items())

    assert total(bits) <= 1e-3
    assert set(allotted(effects, sizes, 0.0).values()) == {MOST}
    assert set(allotted(effects, sizes, 1e9).values()) == {LEAST}


def test_a_sharp_model_needs_more_than_8_bits_and_gets_them(tmp_path: Path) -> None:
    model = sharp()
    model.save_pretrained(tmp_path / "model")
    coarse = export(tmp_path / "model", tmp_path / "int8", weights="int8")
    fine = export(tmp_path / "model", tmp_path / "mixed", weights="mixed")
    assert coarse.moved is not None
    assert fine.moved is not None
    assert coarse.moved.mean > WITHIN > fine.moved.at_most
    assert move_by_hand(model, load_model(tmp_path / "int8"), 7) > WITHIN
    assert move_by_hand(model, load_model(tmp_path / "mixed"), 7) < WITHIN
    found = load_file(tmp_path / "mixed" / FILE)
    bits = {name: len(planes) for name, planes in found.items() if name.endswith(".planes")}
    assert len(set(bits.values())) > 1
    sizes = [(tmp_path / kind / FILE).stat().st_size for kind in ("int8", "mixed", "model")]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("settings", [{"mask": "infinite-uniform-8-1.0"}, {"mask": "finite-7"}, {"mixture": True}])
def test_the_move_of_every_kind_of_model_is_within_what_was_asked(settings: dict[str, object]) -> None:
    model = sharp(1.5, blocks=1, **settings)
    made = fewest_bits(model, 1e-3)
    assert made.moved.at_most < 1e-3
    assert made.bits.keys() == matrices(model).keys()


def test_a_model_that_reads_from_left_to_right(tmp_path: Path) -> None:
    model = sharp(1.5, causal=True)
    model.save_pretrained(tmp_path / "model")
    made = export(tmp_path / "model", tmp_path / "small", weights="mixed")
    assert made.moved is not None
    assert made.moved.at_most < WITHIN
    small = load_model(made.folder)
    uniform = torch.rand(300, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(300, 1, dtype=torch.int64)
    total = 0.0
    with torch.no_grad():
        for place in range(7):
            p, q = (m.head(m.trunk(Noised.clean(tokens))[:, -1]).double() for m in (model, small))
            total += float((p.exp() * (p - q).nan_to_num()).sum(-1).mean()) / 7
            tokens = torch.cat((tokens, draw(p, uniform[:, place])[:, None]), 1)
    assert total < WITHIN


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(UserError, match="keep the weights in float32 or bf16"):
        fewest_bits(fold_conditioning(sharp()), within=1e-14)


# Loading


@pytest.fixture
def small(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    return export(tmp_path / "model", tmp_path / "small", weights="int8").folder


def test_what_is_loaded_is_what_was_measured(tmp_path: Path, small: Path) -> None:
    original = fold_conditioning(load_model(tmp_path / "model"))
    state = torch.get_rng_state()
    loaded = load_model(small)
    assert torch.equal(torch.get_rng_state(), state)
    assert not loaded.training
    for name, weight in original.named_parameters():
        wanted = rounded(weight, 8) if weight.ndim > 1 else weight
        assert torch.equal(loaded.get_parameter(name), wanted), name
    assert MaskedDiffusionLM.from_pretrained(small, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert MaskedDiffusionLM.from_pretrained(small).dtype == torch.float32


def test_it_is_saved_again_as_any_other(tmp_path: Path, small: Path) -> None:
    loaded = load_model(small)
    loaded.save_pretrained(tmp_path / "again")
    assert "quantized" not in read_metadata(tmp_path / "again" / FILE, "model")
    again = load_model(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    assert json.loads((small / "config.json").read_text()) == json.loads((tmp_path / "again/config.json").read_text())


def test_it_loads_with_another_mask(small: Path) -> None:
    """An MDM in whole numbers as an IMDM: the same log-probabilities until trained."""
    loaded, student = load_model(small), MaskedDiffusionLM.from_pretrained(small, mask="infinite-normal-8-1.0")
    assert student.mask.name == "infinite-normal-8-1.0"
    tokens = torch.tensor([[0, 1, 4, 4, 2, 4]])
    assert torch.equal(student(student.noised(tokens)), loaded(loaded.noised(tokens)))


def test_it_loads_from_a_hub(tmp_path: Path, small: Path) -> None:
    """From what a hub left in the cache."""
    home = tmp_path / "cache" / "models--owner--small"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    shutil.copytree(small, home / "snapshots" / ("0" * 40))
    found = MaskedDiffusionLM.from_pretrained("owner/small", cache_dir=tmp_path / "cache", local_files_only=True)
    assert fingerprint(found) == fingerprint(load_model(small))


def test_tied_weights_are_kept_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied = tiny_model(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "model")
    made = export(tmp_path / "model", tmp_path / "small", weights="int8")
    assert not any(name.startswith("output.weight") for name in load_file(made.folder / FILE))
    loaded = load_model(made.folder)
    assert loaded.output.weight is loaded.embedding.weight
    assert torch.equal(loaded.output.weight, rounded(tied.embedding.weight, 8))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    tensors, metadata = load_file(folder / FILE), read_metadata(folder / FILE, "model")
    tensors, metadata = dict(tensors), {key: metadata[key] for key in ("format", "quantized")}
    change(tensors, metadata)
    save_file(tensors, folder / FILE, metadata)


NAME = "blocks.0.attention.qkv.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop(f"{NAME}.scale"), "lacks its scale"),
        (lambda t, m: t.pop(f"{NAME}.planes"), "lacks its planes"),
        (lambda t, m: t.update({f"{NAME}.planes": t[f"{NAME}.planes"][:2].clone()}), "3 to 16 rows of bytes"),
        (
            lambda t, m: t.update({f"{NAME}.planes": t[f"{NAME}.planes"][:, 1:].clone()}),
            "not a matrix of its listed shape",
        ),
        (lambda t, m: t.update({f"{NAME}.scale": t[f"{NAME}.scale"][1:].clone()}), "not a matrix of its listed shape"),
        (lambda t, m: t.update({f"{NAME}.scale": t[f"{NAME}.scale"] * torch.nan}), "scale that is not a number"),
        (lambda t, m: t.pop("norm.weight"), "lacks 'norm.weight'"),
        (lambda t, m: t.update({"more": torch.zeros(2)}), "has the unknown 'more'"),
        (lambda t, m: m.update(quantized="{"), "has no valid list of its matrices"),
        (lambda t, m: m.update(quantized="[1]"), "has no valid list of its matrices"),
        (lambda t, m: m.update(quantized=json.dumps({NAME: [48, -16]})), "has no valid list of its matrices"),
        (lambda t, m: m.update(quantized=m["quantized"].replace("[48, 16]", "[48, 4, 4]")), "do not have the shapes"),
    ],
)
def test_damaged_files_are_refused(
    small: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None], message: str
) -> None:
    rewrite(small, change)
    with pytest.raises(UserError, match=message):
        load_model(small)


def test_bytes_that_changed_are_noticed(small: Path) -> None:
    content = bytearray((small / FILE).read_bytes())
    content[-1] ^= 1
    (small / FILE).write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        load_model(small)
    (small / FILE).write_bytes(content[:-5])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_model(small)


def test_vectors_are_kept_exactly(tmp_path: Path) -> None:
    weights = {"matrix": torch.randn(4, 4), "half": torch.tensor([1.0, 0.5]), "whole": torch.tensor([0.1, 1 / 3])}
    save(tmp_path / FILE, weights, {"matrix": 5})
    found = load_file(tmp_path / FILE)
    assert (found["half"].dtype, found["whole"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found["whole"], weights["whole"])
    planes, scale = found["matrix.planes"], found["matrix.scale"]
    assert torch.equal(unpack(Packed(planes, scale), (4, 4)), rounded(weights["matrix"], 5))


# The command


def test_the_command_says_how_far_the_law_moved(tmp_path: Path) -> None:
    sharp().save_pretrained(tmp_path / "model")
    for weights, warned in (("int8", True), ("mixed", False)):
        given = ["export", str(tmp_path / "model"), "--out", str(tmp_path / weights), "--weights", weights]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.output
        assert "changes the distribution by 0.0" in done.output
        assert "nats a token" in done.output
        assert ("more than 0.002: --weights mixed" in done.output) == warned
    refused = CliRunner().invoke(
        app, ["export", str(tmp_path / "model"), "--out", str(tmp_path / "x"), "--weights", "4"]
    )
    assert "unknown kind of weights '4'; known: bf16, float32, int8, mixed" in str(refused.exception)
    assert not (tmp_path / "x").exists()


def test_the_command_takes_how_far_it_may_move(tmp_path: Path) -> None:
    sharp().save_pretrained(tmp_path / "model")

    def exported(name: str, *options: str) -> Any:
        given = ["export", str(tmp_path / "model"), "--out", str(tmp_path / name), "--weights", *options]
        return CliRunner().invoke(app, given)

    for name, options in (("near", ("mixed",)), ("far", ("mixed", "--within", "0.1"))):
        done = exported(name, *options)
        assert done.exit_code == 0, done.output
        assert "that is more than" not in done.output
    near, far = ((tmp_path / name / FILE).stat().st_size for name in ("near", "far"))
    assert far < near
    for options, said in (
        (("int8", "--within", "0.1"), "--within is for --weights mixed in layout imdm; leave it out"),
        (("mixed", "--within", "0"), "--within 0: give a number of nats above 0"),
    ):
        assert said in str(exported("x", *options).exception)
        assert not (tmp_path / "x").exists()


def test_a_tame_model_is_fine_in_8_bits_and_measured_alike_every_time() -> None:
    model = fold_conditioning(tiny_model())
    made = eight_bits(model)
    assert 0 < made.moved.at_most < WITHIN
    torch.manual_seed(5)  # randomness is keyed, not ambient
    assert eight_bits(model) == made


def test_what_is_tracked_stays_small() -> None:
    """It is cloned, installed, and sent to whoever runs it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("no git, or not a clone")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) <= 62e6
