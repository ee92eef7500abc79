"""Evaluation in parts: nothing is done twice, nothing depends on how the work was cut. Real processes share parts in
test_cli.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from imdm.core.errors import UserError
from imdm.core.files import written_aside
from imdm.data.source import LanguageSource
from imdm.data.synthetic import languages
from imdm.evaluation import Evaluation, Parts, Subject, measure
from imdm.evaluation.parts import at_once, part_size
from imdm.sampling import Sampling
from tests.conftest import tiny_model


class StopError(Exception):
    pass


def columns(part: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"square": part**2, "half": part / 2}


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    for parts in (Parts(), Parts(tmp_path)):
        found = parts.collect(1000, lambda: "squares", columns)
        assert torch.equal(found["square"], torch.arange(1000) ** 2)
        assert torch.equal(found["half"], torch.arange(1000) / 2)


def test_a_gpu_computes_several_parts_at_once(tmp_path: Path) -> None:
    """2¹⁷ tokens at a time; the parts on disk are the same, so that another machine resumes them."""
    assert [part_size(n) for n in (512, 5000)] == [64, 313]
    assert [at_once(512, 256), at_once(512, 1024), at_once(5000, 256), at_once(5000, 1024)] == [8, 2, 1, 1]
    sizes: list[int] = []

    def counts(part: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes.append(len(part))
        if len(sizes) == 3:
            raise StopError
        return columns(part)

    for parts in (Parts(None, 512), Parts(tmp_path, 512)):
        sizes.clear()
        with pytest.raises(StopError):
            parts.collect(1000, lambda: "squares", counts)
        assert sizes == [256] * 3
    sizes[:] = [0] * 3
    found = Parts(tmp_path).collect(1000, lambda: "squares", counts)
    assert sizes[3:] == [64] * 7 + [40]  # what was computed before is not computed again
    assert torch.equal(found["square"], torch.arange(1000) ** 2)
    assert torch.equal(Parts(None, 512).collect(100, lambda: "squares", columns)["half"], torch.arange(100) / 2)


def test_a_stopped_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    asked: list[int] = []

    def breaks(part: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(asked) == 5:
            raise StopError
        asked.append(int(part[0]))
        return columns(part)

    with pytest.raises(StopError):
        Parts(tmp_path).collect(1024, lambda: "squares", breaks)
    assert asked == [0, 64, 128, 192, 256]

    asked.clear()

    def counts(part: torch.Tensor) -> dict[str, torch.Tensor]:
        asked.append(int(part[0]))
        return columns(part)

    found = Parts(tmp_path).collect(1024, lambda: "squares", counts)
    assert asked == list(range(320, 1024, 64))  # what was done is not done again
    assert torch.equal(found["square"], torch.arange(1024) ** 2)

    asked.clear()
    Parts(tmp_path).collect(1024, lambda: "other work", counts)
    Parts(tmp_path).collect(1023, lambda: "squares", counts)
    assert len(asked) == 32  # other work, or another number, is not taken for it


def test_a_spoilt_part_is_made_again(tmp_path: Path) -> None:
    Parts(tmp_path).collect(200, lambda: "squares", columns)
    spoilt = sorted(tmp_path.rglob("part-*.safetensors"))[1]
    spoilt.write_bytes(spoilt.read_bytes()[:20])
    found = Parts(tmp_path).collect(200, lambda: "squares", columns)
    assert torch.equal(found["square"], torch.arange(200) ** 2)


def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    def full() -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with (
        pytest.raises(UserError, match="part cannot be written: I/O error: No space left"),
        written_aside(tmp_path / "part"),
    ):
        full()
    assert not list(tmp_path.iterdir())


def test_only_ones_own_parts_are_forgotten(tmp_path: Path) -> None:
    mine, others = Parts(tmp_path / "parts"), Parts(tmp_path / "parts")
    mine.collect(100, lambda: "mine", columns)
    others.collect(100, lambda: "theirs", columns)
    mine.forget()
    assert len(list((tmp_path / "parts").iterdir())) == 1
    others.forget()
    assert not (tmp_path / "parts").exists()
    Parts().forget()


def test_a_measurement_is_the_same_in_parts(tmp_path: Path) -> None:
    language = languages["aligned"](length=3, symbols=2)
    model = tiny_model(length=3, vocab_size=3)
    about = {"samples": 300, "how": Sampling(steps=2), "truth": language, "data": LanguageSource(language)}
    names = ["validity", "entropy", "nelbo", "kl"]
    plain = measure(names, Subject(model, **about))
    kept = measure(names, Subject(model, **about, parts=Parts(tmp_path)))
    again = measure(names, Subject(model, **about, parts=Parts(tmp_path)))
    assert plain == kept == again
    written = model.generate(num=300, steps=2).tokens  # what generate writes is what is measured
    assert torch.equal(Evaluation(Subject(model, **about)).generation.tokens, written)
