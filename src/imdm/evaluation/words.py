"""Known words: the share of words in samples that exist. A model that combines subwords badly makes some up."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from imdm.core.config import digest
from imdm.core.errors import UserError
from imdm.core.files import home, locked, read_text, write_text
from imdm.data.source import Source
from imdm.data.statistics import Measurement, ratio
from imdm.data.tokenizers import tokenizer_hash
from imdm.evaluation.base import Evaluation, metric

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
AT_ONCE = 4096  # rows
_vocabularies: dict[str, frozenset[str]] = {}  # the words of the last few sources


@metric("known_words", reads=("train",))
def known_words(evaluation: Evaluation) -> Measurement:
    """The share of the words of all samples that the training text has (`words`). Standard error over samples."""
    return share_known(evaluation, lambda: evaluation.written()[0], is_wrapped(evaluation.source("train")))


@metric("real_known_words", reads=("data", "train"), samples=False, steps=False)
def real_known_words(evaluation: Evaluation) -> Measurement:
    """The share of known words in as many rows of held-out text, which has names and rare words too."""
    measurement = share_known(evaluation, evaluation.held_out, is_wrapped(evaluation.source("data")))
    return replace(measurement, split=evaluation.subject.split)


def words(text: str) -> list[str]:
    """The words of a text: letters in a row, of any alphabet, with single apostrophes between letters (`don't`), case
    folded. Quotation marks around a word are not part of it, and hyphens divide.

    >>> words("'Tom's well-known DOG didn’t run 2 miles,' he said.")
    ["tom's", 'well', 'known', 'dog', "didn't", 'run', 'miles', 'he', 'said']
    """
    return WORD.findall(text.replace("’", "'").casefold())


def is_wrapped(source: Source) -> bool:
    """Whether rows are cut from a stream wherever they are full, mostly inside of words."""
    manifest = getattr(source, "manifest", None)
    return manifest is not None and manifest.packing == "wrapped"


def share_known(evaluation: Evaluation, rows: Callable[[], Tensor], wrapped: bool) -> Measurement:
    """Known words among all words of rows (n, L), and the error of that ratio over rows by the delta method. wrapped:
    the first and the last word of a row may be parts of words, and do not count."""
    if evaluation.subject.tokenizer is None:
        raise UserError("known words are counted in text, but the model has no tokenizer; evaluate a model of text")
    vocabulary = known_to(evaluation, evaluation.source("train"))
    texts = _words_of_each(evaluation, rows(), wrapped)
    hits = torch.tensor([sum(word in vocabulary for word in some) for some in texts])
    count = torch.tensor([len(some) for some in texts])
    if not int(count.sum()):
        raise UserError("known words: the texts have no words; this metric is for text in letters")
    return ratio(hits, count)


def known_to(evaluation: Evaluation, source: Source) -> frozenset[str]:
    """All words of a source. It is read once, some rows at a time; only the words are kept, in memory and in the user's
    cache folder (IMDM_HOME)."""
    name = digest(["whole words", WORD.pattern, source.fingerprint, tokenizer_hash(evaluation.subject.tokenizer)])
    if name not in _vocabularies:
        while len(_vocabularies) > 3:
            del _vocabularies[next(iter(_vocabularies))]
        file = home() / "words" / f"{name}.txt"
        with locked(file):  # other processes may compute the same
            if not file.exists():
                write_text(file, "\n".join(sorted(_words_of(evaluation, source))))
            _vocabularies[name] = frozenset(read_text(file, "known words").split("\n"))
    return _vocabularies[name]


def _words_of(evaluation: Evaluation, source: Source) -> set[str]:
    """The distinct words of a source."""
    vocabulary: set[str] = set()
    for part in torch.arange(len(source)).split(AT_ONCE):
        vocabulary.update(*_words_of_each(evaluation, source.rows(part)["tokens"], is_wrapped(source)))
    return vocabulary


def _words_of_each(evaluation: Evaluation, rows: Tensor, wrapped: bool) -> list[list[str]]:
    """The words of each row; of wrapped ones those between the first and the last."""
    texts = [words(text) for text in _plain_texts(evaluation, rows)]
    return [some[1:-1] for some in texts] if wrapped else texts


def _plain_texts(evaluation: Evaluation, rows: Tensor) -> list[str]:
    """Rows as text without special tokens, which divide words."""
    special = evaluation.subject.tokenizer.all_special_tokens
    divide = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    return [divide.sub(" ", text) for text in evaluation.decode(rows)]
