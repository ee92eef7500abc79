"""Rows of prepared text on disk: the manifest of a folder, and access to its rows.

A folder holds `manifest.json` (source, tokenizer's hash, packing, counts), the tokenizer's files, and memory-mapped
shards `tokens-00000.npy`, … of shape (rows, length). `packing.py` makes it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from imdm.core.config import Config
from imdm.core.errors import UserError, reason_of
from imdm.core.files import as_path, check_file, check_once, digest_file, read_recorded
from imdm.diffusion.ending import Ending

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


class Counts(Config):
    """How much was read and written. left_out: documents that are too long for a row, where rows are whole texts."""

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    broken: int = 0
    left_out: int = 0


class Prepared(Config):
    """The manifest of a folder of prepared text. files: the tokenizer's, with their digests."""

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
        return Ending(self.begin, self.end, self.pad) if self.packing == "whole" else None

    def settings(self) -> dict[str, Any]:
        """What must agree for a stopped run to resume."""
        return self.model_dump(mode="json", exclude={"source", "counts", "shards", "carry", "finished", "files"})

    def fingerprint(self) -> str:
        """A hash of the settings, independent of the order of fields, and of every shard."""
        settings = {name: value for name, value in self.hashed().items() if name in self.settings()}
        ordered = {name: settings.pop(name) for name in ORDER if name in settings} | dict(sorted(settings.items()))
        return hashlib.sha256(repr((ordered, self.shards)).encode()).hexdigest()[:16]


def type_of_ids(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def digest_tokens(tokens: np.ndarray) -> str:
    """A hash of the bytes; comparable only for one dtype."""
    total = hashlib.sha256()
    for first in range(0, len(tokens), 1 << 16):
        total.update(tokens[first : first + (1 << 16)].tobytes())
    return total.hexdigest()[:16]


def _check_file(path: Path, digest: str) -> None:
    def check() -> None:
        if not path.is_file() or digest_file(path) != digest:
            raise UserError(
                f"prepared text: {path} is missing or damaged: it is not what was written; prepare the same again to "
                "mend it"
            )

    check_once([path], "file", check)


def check_same_settings(what: str, there: Prepared, fresh: Prepared) -> None:
    """Refuse a folder that was made from other text or with other settings."""
    for name, value in fresh.settings().items():
        if there.settings()[name] != value:
            other = {"identity": "of other text", "tokenizer": "with another tokenizer"}
            how = other.get(name, f"with {name} = {there.settings()[name]!r}, not {value!r}")
            raise UserError(f"{what} was made {how}; choose another folder or delete that one")


def read_prepared(folder: Path) -> Prepared:
    """The manifest of a folder of prepared text."""
    where = f"prepared text {str(folder)!r}"
    return Prepared.parse(read_recorded(folder / "manifest.json", where), where)


def shard_file(folder: Path, index: int) -> Path:
    return folder / f"tokens-{index:05d}.npy"


class PreparedSource:
    """Rows of prepared text, read from disk on demand."""

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
        for name, digest in m.files:
            _check_file(self.folder / name, digest)
        self._shards = [self._open(i, rows, digest) for i, (rows, digest) in enumerate(m.shards)]
        self._first = torch.tensor([0, *(len(s) for s in self._shards)]).cumsum(0)

    def _open(self, index: int, rows: int, digest: str) -> np.ndarray:
        path, again = shard_file(self.folder, index), "delete the folder and prepare again"
        check_file(path, "prepared text")
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy parses the header as Python, which can fail in many ways
            raise UserError(f"prepared text: {path} cannot be read ({reason_of(error)}); {again}") from None
        if tokens.shape != (rows, self.length) or tokens.dtype != type_of_ids(self.vocab_size):
            raise UserError(f"prepared text: {path} does not hold {rows} rows of {self.length} ids; {again}")

        def check() -> None:
            if digest_tokens(tokens) != digest:
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
