"""Models that ship: found by name, listed, written with, shown side by side. Made here, on a shelf of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import imdm
import imdm.cli
from imdm.cli.app import app, terminal
from imdm.core.errors import UserError
from imdm.core.files import append_line
from imdm.data.tokenizers import load_tokenizer, train_bpe
from imdm.evaluation import load_judge
from imdm.exporting import export
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.loading import load_model
from imdm.shipped import find, listed, meant, names, recorded
from imdm.showing import kept
from tests.data.test_corpora import SENTENCES
from tests.writer.test_film import texts_in

RESULT = {
    **dict.fromkeys(("experiment", "method", "model", "mask", "metric", "precision", "recipe_hash", "time"), "x"),
    **dict.fromkeys(("steps", "evaluations", "value", "n", "length", "temperature"), 1),
    **dict.fromkeys(("stderr", "split", "judge")),
    "seed": 0,
    "sample_seed": 0,
}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = train_bpe(SENTENCES * 5, 320)
    for name, mask in (("stories-teacher", "single"), ("stories-imdm", "infinite-uniform-4-1.0")):
        torch.manual_seed(0)
        sizes = {"length": 24, "width": 16, "blocks": 1, "heads": 2, "condition": 8, "mask": mask}
        config = MaskedDiffusionConfig(vocab_size=len(tokenizer), mask_token_id=3, **sizes)
        made = tmp_path / "made" / name
        MaskedDiffusionLM(config).save_pretrained(made)
        tokenizer.save_pretrained(made)
        card = f"# {name}\n\nWrites about cats,\nand dogs.\n\nMore.\n"
        export(made, tmp_path / "shelf" / name, card=card)
    rows = [{"metric": "gen_ppl", "steps": 2, "value": 123.4, "judge": "somebody"}]
    rows += [{"metric": "entropy", "steps": 2, "value": 3.21, "judge": None}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "shelf" / "stories-imdm" / "results.jsonl").write_text(lines)
    monkeypatch.setattr("imdm.shipped.HERE", tmp_path / "shelf")
    return tmp_path / "shelf"


def test_a_model_is_found_by_name_by_path_and_not_otherwise(shelf: Path) -> None:
    assert names() == ["stories-imdm", "stories-teacher"]
    assert find("stories-imdm") == shelf / "stories-imdm"
    assert find("owner/name") == "owner/name"
    by_name, by_path = imdm.load("stories-imdm"), imdm.load(shelf / "stories-imdm")
    assert by_name.write("The cat", steps=2, seed=1) == by_path.write("The cat", steps=2, seed=1)
    with pytest.raises(UserError, match=r"one that ships \(stories-imdm, stories-teacher\)"):
        load_model("stories-imbm")


def test_the_list_says_what_each_is(shelf: Path) -> None:
    student, _ = listed()
    assert student.name == "stories-imdm"
    assert student.about == "Writes about cats, and dogs."
    assert student.parameters == sum(p.numel() for p in load_model("stories-imdm").parameters())
    assert 0 < student.megabytes < 1
    assert recorded("stories-imdm") == {2: (123.4, "somebody", 3.21)}
    assert recorded("stories-teacher") == {}
    done = CliRunner().invoke(app, ["models"])
    assert done.exit_code == 0
    assert "Writes about cats" in done.output


def test_the_list_needs_no_torch() -> None:
    """Which takes seconds to load."""
    code = "import sys, imdm.cli; from imdm.shipped import listed; listed(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_alone_is_enough(shelf: Path) -> None:
    done = CliRunner().invoke(app, ["generate", "--steps", "2", "--prompt", "The cat"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("The cat")


def test_teacher_and_student_side_by_side(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal(), "_width", 200)  # COLUMNS is read once, when the console is made
    done = CliRunner().invoke(app, ["show", "--prompt", "The cat", "--steps", "1,2"])
    assert done.exit_code == 0, done.output
    assert done.output.count("The cat") >= 5
    assert done.output.count("entropy 3.21, perplexity 123") == 1
    assert done.output.count("entropy") == 1 + 1  # what is on no card is not shown; the last says what it is
    assert done.output.count("With each text: how long it took") == 1


def test_a_model_beside_itself(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal(), "_width", 200)
    twice = ["--first", "stories-imdm", "--second", "stories-imdm"]
    done = CliRunner().invoke(app, ["show", *twice, "--prompt", "The cat", "--steps", "1,2"])
    assert done.exit_code == 0, done.output
    assert done.output.count("entropy 3.21, perplexity 123") == 2


def test_a_folder_of_that_name_has_no_card_of_ours(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shelf / "stories-teacher", tmp_path / "stories-imdm")
    shutil.copy(shelf / "stories-imdm" / "results.jsonl", tmp_path / "stories-imdm")  # not its own
    assert find("stories-imdm") == "stories-imdm"
    assert recorded("stories-imdm") == {}
    assert recorded(str(shelf / "stories-imdm")) == {}


def test_names_that_are_nearly_right_are_answered_without_a_hub(shelf: Path) -> None:
    for ask in (load_tokenizer, load_judge):
        with pytest.raises(UserError, match=r"no such folder; did you mean stories-teacher\?"):
            ask("stories-teachr")
    assert meant("gpt2-large") == ""
    assert meant("stories-teacher") == ""


def test_the_tokenizer_of_a_shipped_model_prepares_text(shelf: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES))
    about = [str(tmp_path / "text.txt"), "--tokenizer", "stories-teacher", "--length", "24"]
    done = CliRunner().invoke(app, ["prepare", *about, "--out", str(tmp_path / "rows")])
    assert done.exit_code == 0, done.output
    evaluate = ["evaluate", "stories-imdm", "--data", str(tmp_path / "rows"), "--metrics", "entropy"]
    done = CliRunner().invoke(app, [*evaluate, "--steps", "1", "--samples", "4"])
    assert done.exit_code == 0, done.output


def test_what_was_shown_is_on_the_page_of_a_run(shelf: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused = CliRunner().invoke(app, ["show", "--into", str(run)])
    assert isinstance(refused.exception, UserError)
    append_line(run / "results.jsonl", RESULT)
    done = CliRunner().invoke(app, ["show", "--prompt", "The cat", "--steps", "1,2", "--into", str(run)])
    assert done.exit_code == 0, done.output
    page = (run / "report.html").read_text()
    assert "The same prompt in few and in more steps" in page
    film = texts_in((run / "pictures" / "film.svg").read_text())
    assert {"given", "r1", "r2"} <= {kind for kind, *_ in film}
    assert [text for kind, text, *_ in film if kind == "quiet"] == ["stories-imdm"]
    assert "as it was written in 2 steps" in page
    assert re.search(r"stories-imdm, 2 steps, [\d.]+ s; model card: entropy [\d.]+, perplexity 123 by somebody:", page)
    assert "With each text: how long it took" in page
    assert [one.steps for one in kept(run)] == [1, 1, 2, 2]
    assert all(one.text.startswith("The cat") for one in kept(run))
