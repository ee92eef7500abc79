"""Documents to token ids, a chunk at a time, by one process or by several.

Chunk boundaries depend on the documents alone, and ids are returned in the documents' order, whatever the number of
processes. Worker processes do not import torch.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import active_children, connection, get_context, parent_process
from typing import Any

import numpy as np

from imdm.data.corpora import Corpus
from imdm.errors import UserError
from imdm.room import cores
from imdm.stopping import held_back

AT_ONCE = 2048  # documents
CHARACTERS = 1 << 20
AHEAD = 2  # chunks that are read ahead for each process


@dataclass(frozen=True)
class Chunk:
    """Documents that are encoded together.

    number   how many chunks came before it
    first    how many documents
    """

    number: int
    first: int
    texts: list[str]


@dataclass(frozen=True)
class Encoded:
    """The ids of a chunk's documents, one document after another, and how many each has."""

    first: int
    ids: np.ndarray  # (tokens,)
    lengths: np.ndarray  # (documents,)

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], first: int = 0) -> Encoded:
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        ids = np.fromiter(chain.from_iterable(documents), np.uint32, int(lengths.sum()))
        return cls(first, ids, lengths)

    def after(self, documents: int) -> Encoded:
        """Without the first `documents` of the corpus."""
        skip = min(max(0, documents - self.first), len(self.lengths))
        return Encoded(self.first + skip, self.ids[int(self.lengths[:skip].sum()) :], self.lengths[skip:])

    @property
    def end(self) -> int:
        """The number of documents up to its last."""
        return self.first + len(self.lengths)


def chunks(corpus: Corpus, limit: int | None = None, start: int = 0) -> Iterator[Chunk]:
    """The documents of a corpus, at most `limit`, from number `start` on, in order. A chunk ends when it has many
    characters, and after every `AT_ONCE` documents of the corpus, however short they are."""
    corpus.broken = 0  # rows already read to train a BPE are counted again
    number, first, texts, characters = 0, start, list[str](), 0
    for text in islice(corpus.documents(), start, limit):
        texts.append(text)
        characters += len(text)
        if characters >= CHARACTERS or (first + len(texts)) % AT_ONCE == 0:
            yield Chunk(number, first, texts)
            number, first, texts, characters = number + 1, first + len(texts), [], 0
    if texts:
        yield Chunk(number, first, texts)


def encoded(parts: Iterable[Chunk], backend: Any, processes: int = 1) -> Generator[Encoded, None, None]:
    """The ids of each chunk, in order. backend: the tokenizer of the library `tokenizers`. With one process encoding
    happens in this one, with a thread on each core; several share the cores. Close the generator to end them."""
    if processes == 1:
        yield from (_encode(chunk, backend) for chunk in parts)
    else:
        yield from _by_processes(parts, backend, processes)


def _encode(chunk: Chunk, backend: Any) -> Encoded:
    found = backend.encode_batch_fast(chunk.texts, add_special_tokens=False)
    return Encoded.of([each.ids for each in found], chunk.first)


def _by_processes(parts: Iterable[Chunk], backend: Any, processes: int) -> Iterator[Encoded]:
    threads, others = max(1, cores() // processes), set(active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(backend.to_str(), threads)
    )
    waiting: deque[Future[Encoded]] = deque()
    try:
        for chunk in parts:
            with held_back():  # a signal is for this process alone
                waiting.append(pool.submit(_encode_here, chunk))
            if len(waiting) == AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        for worker in set(active_children()) - others:
            worker.kill()  # they block SIGTERM, and one that waits for its result to be read would wait forever
        raise UserError(
            f"processes = {processes}: one of them died, perhaps out of memory; run the same with fewer to resume"
        ) from None
    finally:
        with held_back():
            pool.shutdown(cancel_futures=True)


_here: Any = None


def _begin(description: str, threads: int) -> None:
    """Start a worker process: load its tokenizer, and exit whenever the parent process ends."""
    global _here
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
    from tokenizers import Tokenizer

    _here = Tokenizer.from_str(description)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _encode_here(chunk: Chunk) -> Encoded:
    return _encode(chunk, _here)
