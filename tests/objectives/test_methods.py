"""The paper's claim, taken literally: any distillation trains any mask, and none of them asks which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from imdm.core.files import read_lines
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource, TokenSource
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import Mask, masks, parse_mask
from imdm.diffusion.masks.finite import ZeroEmbedding
from imdm.diffusion.randomness import Purpose, integers
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.variants import with_mask
from imdm.objectives import SDTT, Di4C, Nelbo, Objective, ReDi
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_model

SOURCE = LanguageSource(aligned(length=3, symbols=2), seed=0)
OBJECTIVES: dict[str, Objective] = {
    "nelbo": Nelbo(),
    "sdtt": SDTT(rounds=2, iterations=3, first_dt=0.2),
    "redi": ReDi(),
    "redi-fresh": ReDi(noise="fresh"),
    "di4c": Di4C(rounds=2, iterations=3, latents=3, teacher_steps=4),
}
MASKS = ["single", "mixture", "finite", "infinite-uniform-8-1.0", "infinite-normal-8-1.0"]  # finite: 6,144


def student(mask: str) -> tuple[MaskedDiffusionLM, MaskedDiffusionLM]:
    start = tiny_model(vocab_size=3, length=3)
    return start, with_mask(start, None if mask == "mixture" else mask, mixture=mask == "mixture")


class Coin(Mask):
    """A mask that nothing in the package knows: two faces, and a layer whose weights have names of their own."""

    kind: str = "coin"

    @property
    def name(self) -> str:
        return "coin"

    def noise(self, keys: Tensor, position: Tensor, draw: Tensor) -> Tensor:
        return integers(keys, Purpose.NOISE, position, draw, 2)

    def embedding(self, width: int) -> nn.Module:
        return nn.Sequential(ZeroEmbedding(2, width))


@pytest.fixture
def _coins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(masks._entries, "coin", Coin)
        yield


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", OBJECTIVES)
def test_every_method_trains_every_mask(method: str, mask: str, tmp_path: Path) -> None:
    if (method, mask) == ("di4c", "single"):
        pytest.skip("refused: a single mask has no latent (test_di4c)")
    start, model = student(mask)
    source: object = SOURCE
    if method.startswith("redi"):
        couple(start, SOURCE, CoupleConfig(pairs=32, steps=4), tmp_path / "pairs")
        source = Coupling(tmp_path / "pairs")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = TrainConfig(steps=6, batch=16, lr=1e-2, warmup=0, ema=0.5, log_every=3, checkpoint_every=6)
    folder = Trainer(model, OBJECTIVES[method], source, config, tmp_path / "run", start=start).train()
    trained = MaskedDiffusionLM.from_pretrained(folder)
    assert trained.mask == (parse_mask(mask) if mask != "mixture" else parse_mask("single"))
    weights = trained.state_dict()
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    new = [name for name in weights if name.startswith(("mask_embedding.", "mixture."))]
    assert bool(new) == (mask != "single")
    last = [name for name in new if name.endswith(("output.weight", "second.weight", "embedding.weight"))]
    assert all(not torch.equal(weights[name], before[name]) for name in last)
    assert not torch.equal(weights["output.weight"], before["output.weight"])


def test_finite_means_6144_masks_unless_said() -> None:
    assert parse_mask("finite").name == "finite-6144"


@pytest.mark.usefixtures("_coins")
@pytest.mark.parametrize("method", OBJECTIVES)
def test_objectives_do_not_know_the_masks(method: str, tmp_path: Path) -> None:
    """Each of them trains a mask that was made after them, from couplings to a model on disk, and learns its faces."""
    start = tiny_model(vocab_size=3, length=3)
    source: object = SOURCE
    if method.startswith("redi"):
        couple(start, SOURCE, CoupleConfig(pairs=32, steps=4), tmp_path / "pairs")
        source = Coupling(tmp_path / "pairs")
    config = TrainConfig(steps=6, batch=16, lr=1e-2, warmup=0, log_every=3, checkpoint_every=6)
    model = with_mask(start, "coin")
    folder = Trainer(model, OBJECTIVES[method], source, config, tmp_path / "run", start=start).train()
    trained = MaskedDiffusionLM.from_pretrained(folder)
    assert trained.mask == Coin()
    heads, tails = trained.state_dict()["mask_embedding.0.weight"]
    assert heads.any()
    assert tails.any()
    assert not torch.equal(heads, tails)


# Early signals of ReDi


@pytest.fixture
def pairs(tmp_path: Path) -> Coupling:
    couple(tiny_model(vocab_size=3, length=3), SOURCE, CoupleConfig(pairs=24, steps=8), tmp_path / "pairs")
    return Coupling(tmp_path / "pairs")


def test_signals_by_hand(pairs: Coupling) -> None:
    model = tiny_model(vocab_size=3, length=3, mask="infinite-uniform-8-1.0")
    rows = pairs.rows(torch.arange(24))
    with torch.no_grad():
        state = model.process.noised(rows["noised"], rows["t"], rows["seed"])
        chance = model(state).exp().gather(-1, rows["tokens"][..., None])[..., 0][state.masked]
        unseen = model.process.noised(rows["noised"], rows["t"], model.sample_keys(24, seed=5))
        best = model(unseen).exp().amax(-1)[unseen.masked]
    found = ReDi().signals(model, pairs, seed=5)
    assert found["fitted"] == pytest.approx(float((chance > 0.5).double().mean()))
    assert found["decided"] == pytest.approx(float((best > 0.5).double().mean()))
    assert set(ReDi().signals(tiny_model(vocab_size=3, length=3), pairs, seed=5)) == {"fitted"}
    assert ReDi(noise="fresh").signals(model, pairs, seed=5) == {}  # nothing to fit, nothing to fear


def signals(*fitted: float) -> list[tuple[int, dict[str, float]]]:
    return [(100 * (i + 1), {"fitted": f, "decided": f}) for i, f in enumerate(fitted)]


def test_a_run_that_will_end_unfitted_is_said_to() -> None:
    worry = ReDi().worry(signals(0.3, 0.35, 0.4), steps=600)
    assert worry is not None
    assert "40% of the pairs' tokens at step 300, about 55% at the end" in worry
    assert ReDi().worry(signals(0.3, 0.5, 0.7), steps=600) is None  # on its way
    assert ReDi().worry(signals(0.95, 0.95, 0.95), steps=600) is None  # there
    assert ReDi().worry(signals(0.3, 0.35, 0.4), steps=1000) is None  # too early to say
    assert ReDi().worry([(300, {"fitted": 0.4})] * 3, steps=300) is None  # a single mask cannot fit


@pytest.mark.parametrize(
    ("settings", "length", "warnings"),
    [
        ({"warmup": 3}, 3, []),
        ({"warmup": 0}, 3, []),
        ({"warmup": 4}, 3, ["training.warmup = 4: .* and there are 6; a tenth of these is usual"]),
        ({}, 3, ["training.warmup = 2,500: "]),
        ({"warmup": 0}, 5, ["the rows have 3 tokens, and the model writes 5 unless told otherwise"]),
    ],
)
def test_settings_that_are_hardly_meant_are_said(
    settings: dict[str, int], length: int, warnings: list[str], tmp_path: Path
) -> None:
    said: list[str] = []
    source, config = TokenSource(torch.randint(0, 3, (20, 3)), 5, 4), TrainConfig(steps=6, batch=8, **settings)
    Trainer(tiny_model(length=length), Nelbo(), source, config, tmp_path, on_warning=said.append).train()
    assert len(said) == len(warnings)
    assert all(re.match(wanted, found) for wanted, found in zip(warnings, said, strict=True))


def test_the_trainer_reports_passes_and_warns_once(tmp_path: Path) -> None:
    said: list[str] = []
    couple(
        tiny_model(vocab_size=3, length=3, trained=False), SOURCE, CoupleConfig(pairs=24, steps=8), tmp_path / "pairs"
    )
    pairs = Coupling(tmp_path / "pairs")  # of fair coins, which a student that hardly moves cannot know
    model = tiny_model(vocab_size=3, length=3, trained=False, mask="infinite-uniform-8-1.0")
    config = TrainConfig(steps=12, batch=8, lr=1e-9, warmup=0, log_every=6)
    Trainer(model, ReDi(), pairs, config, tmp_path / "run", watch_every=2, on_warning=said.append).train()
    rows = read_lines(tmp_path / "run" / "history.jsonl")
    assert [row["passes"] for row in rows if "passes" in row] == [round(8 * s / 24, 2) for s in (2, 4, 6, 8, 10, 12)]
    assert [row["warning"] for row in rows if "warning" in row] == said
    assert len(said) == 1
    assert "train longer, on fewer pairs, or a larger model" in said[0]
