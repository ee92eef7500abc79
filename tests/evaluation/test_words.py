"""Known words: by brute force on a few texts, and what is kept for the next program."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.prepared import PreparedSource
from imdm.data.source import TokenSource
from imdm.data.tokenizers import train_bpe
from imdm.diffusion.ending import Ending
from imdm.evaluation import Evaluation, Subject, measure
from imdm.evaluation import words as known
from imdm.evaluation.words import words
from tests.conftest import tiny_model

LEARNT = ["The cat didn't see a dog.", "A dog ran!", "Tom's cat ran home", "bos eos pad"]
WRITTEN = ["The cat ran.", "The cta didn't ran ran", "Home? Tom’s dog", "123 ...", "Zebra zoo"]
SHARES = [(3, 3), (4, 5), (3, 3), (0, 0), (0, 2)]  # of each text, by hand
TOKENIZER = train_bpe(LEARNT + WRITTEN, 300)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in memory and on disk."""
    monkeypatch.setenv("IMDM_HOME", str(tmp_path))
    monkeypatch.setattr(known, "_vocabularies", {})
    return tmp_path


def rows(texts: list[str], length: int = 64) -> Tensor:
    ids = [[0, *TOKENIZER(text)["input_ids"], 1] for text in texts]
    return torch.tensor([row + [2] * (length - len(row)) for row in ids])


def evaluation(written: list[str], **changes: Any) -> Evaluation:
    """Of a model that wrote these texts."""
    model = tiny_model(vocab_size=len(TOKENIZER), mask_token_id=3, length=64, **changes)
    source = TokenSource(rows(LEARNT), len(TOKENIZER), 3)
    held_out = TokenSource(rows(WRITTEN[:2]), len(TOKENIZER), 3)
    made = Evaluation(
        Subject(model, samples=len(written), train=source, data=held_out, split="valid", tokenizer=TOKENIZER)
    )
    made.__dict__["generation"] = SimpleNamespace(tokens=rows(written))
    return made


def test_what_a_word_is() -> None:
    assert words("'Twas the dogs' well-known café_3, O’Brien's. ΑΒΓ ...") == [
        *("twas", "the", "dogs", "well", "known", "café", "o'brien's", "αβγ"),
    ]


@pytest.mark.parametrize("ending", [{}, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}])
def test_known_words_by_hand(ending: dict[str, int]) -> None:
    """Of rows of a stream and of whole texts: marks of begin, end and padding are no words."""
    found = measure(["known_words", "real_known_words"], evaluation(WRITTEN, **ending))
    hits, count = (torch.tensor(column).double() for column in zip(*SHARES, strict=True))
    assert found["known_words"].value == pytest.approx(10 / 13)
    assert found["known_words"].n == 5
    left_out = torch.stack([(hits.sum() - h) / (count.sum() - c) for h, c in SHARES])  # the jackknife
    error = (4 / 5 * ((left_out - left_out.mean()) ** 2).sum()) ** 0.5
    assert found["known_words"].stderr == pytest.approx(float(error), rel=0.3)
    assert (found["real_known_words"].value, found["real_known_words"].split) == (7 / 8, "valid")


def test_the_end_of_a_whole_text_is_its_end() -> None:
    """What stands behind it is not read; in a stream it is."""
    whole, stream = evaluation(WRITTEN[:1], bos_token_id=0, eos_token_id=1, pad_token_id=2), evaluation(WRITTEN[:1])
    assert whole.subject.model.config.ending == Ending(0, 1, 2)
    more = rows(WRITTEN[:1])
    first = int((more[0] == 1).nonzero()[0, 0])
    junk = TOKENIZER("zzz")["input_ids"]
    more[0, first + 1 : first + 1 + len(junk)] = torch.tensor(junk)
    for made, expected in ((whole, 1.0), (stream, 0.75)):
        made.__dict__["generation"] = SimpleNamespace(tokens=more)
        assert measure(["known_words"], made)["known_words"].value == expected


def test_the_training_text_is_read_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(["known_words"], evaluation(WRITTEN))
    (file,) = (cache / "words").glob("*.txt")
    expected = {word.casefold() for text in LEARNT for word in re.findall(r"[A-Za-z']+", text)}
    assert set(file.read_text().split("\n")) == expected

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(known, "_words_of", refuse)
    assert measure(["known_words"], evaluation(WRITTEN)) == first
    monkeypatch.setattr(known, "_vocabularies", {})  # another program
    assert measure(["known_words"], evaluation(WRITTEN)) == first


def test_texts_without_words_are_no_figure() -> None:
    with pytest.raises(UserError, match="no words"):
        measure(["known_words"], evaluation(["12 34", "..."]))


def test_parts_of_words_at_the_edges_of_wrapped_rows_do_not_count(tmp_path: Path) -> None:
    """Rows are cut inside of words: what is left of one at either end is not known, nor asked about in samples."""
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    text = "The grandmother remembered storms. " * 15
    (tmp_path / "text.txt").write_text(text)
    config = PrepareConfig(length=64, tokenizer=str(tmp_path / "tokenizer"))
    prepare(Corpus(str(tmp_path / "text.txt")), config, tmp_path / "rows")
    source = PreparedSource(tmp_path / "rows")
    made = evaluation(["tery the grandmother tery the unheard"])
    every = {word for row in made.decode(source.rows(torch.arange(len(source)))["tokens"]) for word in words(row[5:-5])}
    assert every > set(words(text))  # there are parts
    subject = replace(made.subject, train=source, data=source)
    whole = Evaluation(subject)
    whole.__dict__["generation"] = made.generation
    assert known.known_to(whole, source) == set(words(text))
    found = measure(["known_words", "real_known_words"], whole)
    assert (found["known_words"].value, found["real_known_words"].value) == (0.75, 1.0)


def test_no_words_without_a_tokenizer() -> None:
    subject = replace(evaluation(WRITTEN).subject, tokenizer=None)
    for name in ("known_words", "real_known_words"):
        with pytest.raises(UserError, match="has no tokenizer"):
            measure([name], subject)
