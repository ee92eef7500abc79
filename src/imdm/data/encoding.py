"""Documents to token ids, a chunk at a time, by one process or by several.

Chunk boundaries depend on the documents alone, and ids are returned in the documents' order, whatever the number of
processes. Worker processes do not import torch.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, cycle, islice
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any

import numpy as np

from imdm.core.errors import UserError
from imdm.core.memory import cores
from imdm.core.stopping import held_back
from imdm.data.corpora import Corpus

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
        """This chunk without the first `documents` of the corpus."""
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
    encodings = backend.encode_batch_fast(chunk.texts, add_special_tokens=False)
    return Encoded.of([each.ids for each in encodings], chunk.first)


class _DiedError(Exception):
    """A worker ended too early."""


class _Worker:
    """A process that encodes what it is sent, chunk after chunk, and ends when the link to it is closed: also when this
    process ends, however it does."""

    def __init__(self, description: str, threads: int) -> None:
        spawned = get_context("spawn")
        self.link, theirs = spawned.Pipe()
        self.process = spawned.Process(target=_run_worker, args=(description, threads, theirs))
        self.process.start()
        theirs.close()  # so that the link breaks with the process

    def send(self, chunk: Chunk) -> None:
        with _linked():
            self.link.send(chunk)

    def encoded(self) -> Encoded:
        """The ids of the oldest chunk that it was sent and that was not returned yet."""
        with _linked():
            reply = self.link.recv()
        if isinstance(reply, BaseException):
            raise reply
        return reply


@contextmanager
def _linked() -> Iterator[None]:
    """Tell a broken link from other errors of files."""
    try:
        yield
    except (EOFError, OSError):
        raise _DiedError from None


def _by_processes(parts: Iterable[Chunk], backend: Any, processes: int) -> Iterator[Encoded]:
    """The ids of each chunk from worker processes in turn. Not by `concurrent.futures`, which may hang if a process of
    its pool dies while a chunk is written to it."""
    workers, waiting = list[_Worker](), deque[_Worker]()
    try:
        with held_back():  # a signal is for this process alone
            for _ in range(processes):
                workers.append(_Worker(backend.to_str(), max(1, cores() // processes)))
        for worker, chunk in zip(cycle(workers), parts, strict=False):
            worker.send(chunk)
            waiting.append(worker)
            if len(waiting) == AHEAD * processes:
                yield waiting.popleft().encoded()
        while waiting:
            yield waiting.popleft().encoded()
    except _DiedError:
        raise UserError(
            f"processes = {processes}: one of them died, perhaps out of memory; run the same with fewer to resume"
        ) from None
    finally:
        with held_back():
            for worker in workers:
                worker.link.close()
            for worker in workers:
                worker.process.join()


def _run_worker(description: str, threads: int, link: Any) -> None:
    """A worker process. It reads ahead, so that neither it nor the one that sends waits for the other to read."""
    os.environ |= {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false"}
    from tokenizers import Tokenizer

    backend, queue = Tokenizer.from_str(description), SimpleQueue[Chunk]()
    threading.Thread(target=_receive, args=(link, queue), daemon=True).start()
    with suppress(OSError):  # nobody reads any more
        while True:
            link.send(_ids_or_error(queue.get(), backend))


def _ids_or_error(chunk: Chunk, backend: Any) -> Encoded | Exception:
    try:
        return _encode(chunk, backend)
    except Exception as error:
        return error


def _receive(link: Any, queue: SimpleQueue[Chunk]) -> None:
    try:
        while True:
            queue.put(link.recv())
    except (EOFError, OSError):
        os._exit(0)
