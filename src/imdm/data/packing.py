"""From documents to rows of token ids on disk: `prepare`.

A folder holds `manifest.json` (source, tokenizer's hash, packing, counts), the tokenizer's files, and memory-mapped
shards `tokens-00000.npy`, … of shape (rows, length). Packing, as the paper's models were trained:

    wrapped     documents joined by the end token, cut every L − 2 tokens, a begin and an end token around each piece
    unwrapped   a document a row: begin, its first L − 2 tokens, end, then padding, which the model reads like any token
    whole       a document a row, and all of it: what does not fit is left out. A model that is made for such rows knows
                that padding follows the end (`Ending`)

They give different perplexities, so the packing is named. A run that stopped goes on behind its last shard.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from imdm.config import Config
from imdm.data.corpora import Corpus
from imdm.data.tokenizers import FILES, load_tokenizer, save_tokenizer, special_ids, tokenizer_hash, train_bpe
from imdm.ending import Ending
from imdm.errors import UserError, reason_of
from imdm.files import as_path, check_once, digest_file, read_recorded, working_in, write_recorded, written_aside

AT_ONCE = 2048  # documents that the tokenizer works on in parallel
SHARD_TOKENS = 1 << 24
Packing = Literal["wrapped", "unwrapped", "whole"]
ORDER = [
    "identity",
    "split",
    "length",
    "packing",
    "limit",
    "train_bpe",
    "tokenizer",
    "vocab_size",
    "mask_token_id",
    "begin",
    "end",
    "pad",
]


class PrepareConfig(Config):
    """How text becomes rows.

    tokenizer   a folder or hub id; or train_bpe: the size of a byte-pair encoding trained on the source
    limit       at most so many documents
    """

    length: int = Field(128, ge=4, le=1 << 20)
    tokenizer: str | None = None
    train_bpe: int | None = Field(None, le=1 << 20)
    packing: Packing = "wrapped"
    limit: int | None = Field(None, ge=1)
    bpe_documents: int = Field(100_000, ge=1)


class Counts(Config):
    """How much was read and written. left_out: documents that are too long for a row, where rows are whole texts."""

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    broken: int = 0
    left_out: int = 0


class Prepared(Config):
    """What a folder of prepared text says of itself. files: the tokenizer's, with their digests."""

    source: str
    identity: list[Any]
    split: str
    length: int
    packing: Packing
    limit: int | None
    train_bpe: int | None = None
    tokenizer: str
    vocab_size: int
    mask_token_id: int
    begin: int
    end: int
    pad: int
    counts: Counts = Counts()
    shards: tuple[tuple[int, str], ...] = ()
    carry: tuple[int, ...] = ()
    finished: bool = False
    files: tuple[tuple[str, str], ...] = ()

    @property
    def ending(self) -> Ending | None:
        """How rows end, where they are whole texts."""
        return Ending(self.end, self.pad) if self.packing == "whole" else None

    def settings(self) -> dict[str, Any]:
        """What must agree for a stopped run to go on."""
        return self.model_dump(mode="json", exclude={"source", "counts", "shards", "carry", "finished", "files"})

    def fingerprint(self) -> str:
        """Of the settings, in one order wherever they stand above, and of every shard."""
        wanted = {name: value for name, value in self.hashed().items() if name in self.settings()}
        ordered = {name: wanted.pop(name) for name in ORDER if name in wanted} | dict(sorted(wanted.items()))
        return hashlib.sha256(repr((ordered, self.shards)).encode()).hexdigest()[:16]


@dataclass
class Packer:
    """Turns token lists into rows. carry: what is left over for the next row."""

    manifest: Prepared
    carry: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def rows(self, documents: list[list[int]]) -> np.ndarray:
        """The rows (n, L) that these documents complete."""
        m, inner = self.manifest, self.manifest.length - 2
        if m.packing == "whole":
            documents = [ids for ids in documents if len(ids) <= inner and m.end not in ids and m.pad not in ids]
        if m.packing in ("unwrapped", "whole"):
            out = np.full((len(documents), m.length), m.pad, np.int64)
            for row, ids in zip(out, documents, strict=True):
                kept = ids[:inner]
                row[0], row[1 : 1 + len(kept)], row[1 + len(kept)] = m.begin, kept, m.end
            return out
        total = sum(map(len, documents)) + len(documents)
        stream = np.empty(len(self.carry) + total, np.int64)
        stream[: len(self.carry)] = self.carry
        place = len(self.carry)
        for ids in documents:
            stream[place : place + len(ids)] = ids
            stream[place + len(ids)] = m.end
            place += len(ids) + 1
        whole = len(stream) // inner
        self.carry = stream[whole * inner :]
        out = np.empty((whole, m.length), np.int64)
        out[:, 0], out[:, 1:-1], out[:, -1] = m.begin, stream[: whole * inner].reshape(whole, inner), m.end
        return out


def _type_of_ids(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def _digest(tokens: np.ndarray) -> str:
    """Of the bytes, which mean what they did in the same type alone."""
    total = hashlib.sha256()
    for first in range(0, len(tokens), 1 << 16):
        total.update(tokens[first : first + (1 << 16)].tobytes())
    return total.hexdigest()[:16]


def _check_file(path: Path, known: str) -> None:
    def check() -> None:
        if not path.is_file() or digest_file(path) != known:
            raise UserError(
                f"prepared text: {path} is missing or damaged: it is not what was written; prepare the same again to "
                "mend it"
            )

    check_once([path], "file", check)


def read_prepared(folder: Path) -> Prepared:
    """What a folder of prepared text says of itself."""
    where = f"prepared text {str(folder)!r}"
    return Prepared.parse(read_recorded(folder / "manifest.json", where), where)


def shard_file(folder: Path, index: int) -> Path:
    return folder / f"tokens-{index:05d}.npy"


def prepare(
    corpus: Corpus,
    config: PrepareConfig,
    out: str | Path,
    *,
    tokenizer: Any = None,
    on_progress: Callable[[Counts], None] | None = None,
) -> Prepared:
    """Tokenise and pack a corpus into `out`; a finished folder made from the same is left as it is."""
    folder = as_path(out, "out")
    if config.tokenizer is not None and folder.resolve() == Path(config.tokenizer).resolve():
        raise UserError(f"{str(folder)!r} is the tokenizer's own folder; choose another one for the rows")
    corpus.check()
    tokenizer = tokenizer if tokenizer is not None else _tokenizer(corpus, config, folder)
    special = special_ids(tokenizer)
    fresh = Prepared(
        source=corpus.source,
        identity=corpus.identity(),
        split=corpus.split,
        length=config.length,
        packing=config.packing,
        limit=config.limit,
        train_bpe=config.train_bpe,
        tokenizer=tokenizer_hash(tokenizer),
        vocab_size=special.vocab_size,
        mask_token_id=special.mask,
        begin=special.begin,
        end=special.end,
        pad=special.pad,
    )
    manifest = _resume(folder, fresh)
    if manifest.finished and corpus.source == "-":
        raise UserError(f"prepared text {str(folder)!r} is finished; for other standard input choose another folder")
    if manifest.finished:
        manifest = _mended(folder, manifest, tokenizer)
        PreparedSource(folder)  # which refuses what is not what was written
        return manifest
    with working_in(folder):
        ours = [file for file in (folder / "manifest.json", *map(folder.joinpath, FILES)) if not file.exists()]
        try:
            return _pack(corpus, config, folder, tokenizer, manifest, on_progress)
        except UserError:
            if not shard_file(folder, 0).exists():  # nothing came of it
                for file in ours:
                    file.unlink(missing_ok=True)
            raise


def _mended(folder: Path, manifest: Prepared, tokenizer: Any) -> Prepared:
    """Write the tokenizer's files again where they are not what was written; the tokenizer at hand is the same."""
    if all((folder / name).is_file() and digest_file(folder / name) == known for name, known in manifest.files):
        return manifest
    with working_in(folder):
        manifest = manifest.model_copy(update={"files": _saved(tokenizer, folder)})
        write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest


def _saved(tokenizer: Any, folder: Path) -> tuple[tuple[str, str], ...]:
    """The tokenizer's files, written, with their digests."""
    return tuple((file.name, digest_file(file)) for file in save_tokenizer(tokenizer, folder))


def _pack(
    corpus: Corpus,
    config: PrepareConfig,
    folder: Path,
    tokenizer: Any,
    manifest: Prepared,
    on_progress: Callable[[Counts], None] | None,
) -> Prepared:
    """What is still missing of a folder. The tokenizer is there before the manifest that names it."""
    manifest = manifest.model_copy(update={"files": _saved(tokenizer, folder)})
    write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    documents = islice(corpus.documents(), manifest.counts.documents, config.limit)
    corpus.broken = 0  # rows read before, by a stopped run or to train a BPE, are passed over and counted again
    packer = Packer(manifest, np.array(manifest.carry, np.int64))
    counts, waiting = manifest.counts, []
    for batch in _batches(documents):
        ids = [
            encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ]
        rows = packer.rows(ids)
        waiting.append(rows)
        counts = Counts(
            documents=counts.documents + len(batch),
            tokens=counts.tokens + sum(map(len, ids)),
            rows=counts.rows + len(rows),
            broken=corpus.broken,
            left_out=counts.left_out + (len(batch) - len(rows) if manifest.packing == "whole" else 0),
        )
        if on_progress is not None:
            on_progress(counts)
        if sum(len(r) for r in waiting) * config.length >= SHARD_TOKENS:
            manifest, waiting = _write(folder, manifest, waiting, counts, packer), []
    if waiting and sum(map(len, waiting)):
        manifest = _write(folder, manifest, waiting, counts, packer)
    if not manifest.shards:
        if config.packing == "whole":
            raise UserError(f"corpus {corpus.source!r}: no document fits into a row of {config.length} tokens")
        raise UserError(f"corpus {corpus.source!r}: too little text for one row of {config.length} tokens")
    manifest = manifest.model_copy(update={"counts": counts, "finished": True})
    write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest


def _tokenizer(corpus: Corpus, config: PrepareConfig, folder: Path) -> Any:
    if (config.tokenizer is None) == (config.train_bpe is None):
        raise UserError("give either a tokenizer (folder or hub id) or the size of a BPE to train (train_bpe)")
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    if (folder / "manifest.json").exists() and (folder / "tokenizer.json").exists():  # made here before
        try:
            return load_tokenizer(folder)
        except UserError:  # torn; trained again it is the same
            pass
    if corpus.source == "-":
        raise UserError("a BPE cannot be trained on standard input, which can be read only once; use a file")
    return train_bpe(islice(corpus.documents(), config.bpe_documents), int(config.train_bpe or 0))


def _resume(folder: Path, fresh: Prepared) -> Prepared:
    if not (folder / "manifest.json").exists():
        return fresh
    there = read_prepared(folder)
    for name, value in fresh.settings().items():
        if there.settings()[name] != value:
            other = {"identity": "of other text", "tokenizer": "with another tokenizer"}
            how = other.get(name, f"with {name} = {there.settings()[name]!r}, not {value!r}")
            raise UserError(f"prepared text {str(folder)!r} was made {how}; choose another folder or delete that one")
    return there


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(documents, AT_ONCE)):
        yield batch


def _write(folder: Path, manifest: Prepared, rows: list[np.ndarray], counts: Counts, packer: Packer) -> Prepared:
    """One more shard, then a manifest that knows it: a crash between the two costs only that shard."""
    tokens = np.concatenate(rows).astype(_type_of_ids(manifest.vocab_size))
    index = len(manifest.shards)
    with written_aside(shard_file(folder, index)) as aside, open(aside, "wb") as file:
        np.save(file, tokens)
    shards = (*manifest.shards, (len(tokens), _digest(tokens)))
    manifest = manifest.model_copy(update={"shards": shards, "counts": counts, "carry": tuple(packer.carry.tolist())})
    write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest


class PreparedSource:
    """Rows of prepared text, read from disk as they are asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = as_path(folder, "prepared text")
        where = f"prepared text {str(folder)!r}"
        if not (self.folder / "manifest.json").exists():
            raise UserError(f"{where}: no such folder, or no manifest in it; make it with 'imdm prepare'")
        self.manifest = read_prepared(self.folder)
        if not self.manifest.finished:
            raise UserError(f"{where} is unfinished; run the same 'imdm prepare' again to finish it")
        m = self.manifest
        self.length, self.vocab_size, self.mask_id = m.length, m.vocab_size, m.mask_token_id
        self.fingerprint, self.ending = m.fingerprint(), m.ending
        for name, known in m.files:
            _check_file(self.folder / name, known)
        self._shards = [self._open(i, rows, digest) for i, (rows, digest) in enumerate(m.shards)]
        self._first = torch.tensor([0, *(len(s) for s in self._shards)]).cumsum(0)

    def _open(self, index: int, rows: int, digest: str) -> np.ndarray:
        path, again = shard_file(self.folder, index), "delete the folder and prepare again"
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python, and fails in as many ways
            raise UserError(f"prepared text: {path} cannot be read ({reason_of(error)}); {again}") from None
        if tokens.shape != (rows, self.length) or tokens.dtype != _type_of_ids(self.vocab_size):
            raise UserError(f"prepared text: {path} does not hold {rows} rows of {self.length} ids; {again}")

        def check() -> None:
            if _digest(tokens) != digest:
                raise UserError(f"prepared text: {path} is damaged: it is not what was written; {again}")

        if os.environ.get("LOCAL_RANK", "0") == "0":  # one of several processes is enough
            check_once([path], "tokens", check)
        return tokens

    def __len__(self) -> int:
        return int(self._first[-1])

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        out = np.empty((len(index), self.length), np.int64)
        shard = torch.searchsorted(self._first, index, right=True) - 1
        for number in shard.unique().tolist():
            mine = (shard == number).nonzero()[:, 0]
            out[mine.numpy()] = self._shards[number][(index[mine] - self._first[number]).numpy()]
        return {"tokens": torch.from_numpy(out)}
