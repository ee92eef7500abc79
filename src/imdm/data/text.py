"""Text as a recipe's data: already prepared, or prepared during the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from imdm.core.config import digest
from imdm.core.errors import UserError, WriteError
from imdm.core.files import home, locked
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig, TooLittleError, prepare
from imdm.data.prepared import Counts, Packing, PreparedSource
from imdm.data.source import Data, LanguageData, Progress, Source, TokenData
from imdm.data.tokenizers import BPE_MASK, load_tokenizer, special_ids, tokenizer_hash
from imdm.diffusion.ending import Ending

EVERY = 50  # of a source without splits, one document in so many is held out


class PreparedData(Data):
    """`data: {kind: prepared, path: DIR}`: the output of `imdm prepare`; DIR itself, or DIR/train and DIR/valid."""

    kind: Literal["prepared"] = "prepared"
    path: Path

    def vocabulary(self) -> tuple[int, int]:
        manifest = PreparedSource(self._train).manifest
        return manifest.vocab_size, manifest.mask_token_id

    def source(self, seed: int) -> Source:
        return PreparedSource(self._train)

    def held_out(self, seed: int) -> Source | None:
        valid = self.path / "valid"
        return PreparedSource(valid) if valid.exists() else None

    def split(self) -> str:
        return PreparedSource(self._train).manifest.split

    def documents(self, seed: int) -> Source | None:
        folder = self.path / "documents"
        return PreparedSource(folder) if folder.exists() else None

    def ending(self) -> Ending | None:
        return PreparedSource(self._train).ending

    def tokenizer_folder(self) -> Path:
        return self._train

    @property
    def _train(self) -> Path:
        return self.path / "train" if (self.path / "train" / "manifest.json").exists() else self.path


class TextData(Data):
    """`data: {kind: text, path: PATH, train_bpe: 4096, length: 128}`: any text, prepared into the run's folder.

    path        a file or folder of .txt, .jsonl or .parquet, a preset, a hub id, or `sample` (comes with the package)
    valid       held-out text; unless given, the source's own valid split, or one document in 50
    tokenizer   a folder or hub id; or train_bpe: the size of a byte-pair encoding trained on the text
    packing     `wrapped`: documents joined and cut; `unwrapped`: a document a row; `whole`: the same, of those that fit
    join, join_by    join rows into documents of at least so many characters; never across values of a field (`Corpus`)
    with_documents   also prepare the held-out text a document a row, for prompts that begin where a document does
    """

    kind: Literal["text"] = "text"
    path: str
    valid: str | None = None
    field: str = "text"
    tokenizer: str | None = None
    train_bpe: int | None = Field(None, le=1 << 20)
    length: int = Field(128, ge=4, le=1 << 20)
    packing: Packing = "wrapped"
    join: int | None = Field(None, ge=1)
    join_by: str | None = None
    with_documents: bool = False
    limit: int | None = Field(None, ge=1)
    skip_broken: bool = False

    @property
    def is_ready(self) -> bool:
        return False

    def _corpus(self, split: str) -> Corpus:
        name = self.valid if split == "valid" and self.valid is not None else self.path
        corpus = Corpus(name, split, self.field, self.skip_broken, join=self.join, join_by=self.join_by)
        if self.valid is None and not corpus.has_splits():
            corpus.hold_out = EVERY
        return corpus

    def check(self) -> None:
        for split in ("train", "valid"):
            self._corpus(split).check()
        if (self.tokenizer is None) == (self.train_bpe is None):
            raise UserError("data: give either a tokenizer (folder or hub id) or train_bpe, the size of one to train")
        if self.tokenizer is not None:
            load_tokenizer(self.tokenizer)

    def ready(self, folder: Path, progress: Progress | None = None) -> PreparedData:
        """Prepare both splits into `folder`, unless they exist."""
        names = ("length", "tokenizer", "train_bpe", "packing", "limit")
        config = PrepareConfig(**{name: getattr(self, name) for name in names})
        folders = {"train": "train", "valid": "valid"} | ({"documents": "valid"} if self.with_documents else {})
        before = {place for place in folders if (folder / place).exists()}
        try:
            self._prepare(folders, config, folder, progress)
        except UserError as error:
            for place in () if isinstance(error, WriteError) else folders.keys() - before:  # nothing is left behind
                shutil.rmtree(folder / place, ignore_errors=True)
            raise
        return PreparedData(path=folder)

    def _prepare(self, folders: dict[str, str], config: PrepareConfig, folder: Path, progress: Progress | None) -> None:
        for place, split in folders.items():

            def report(counts: Counts, split: str = split) -> None:
                if progress is not None:
                    progress(counts.documents, f"{split}: {counts.rows:,} rows")

            tokenizer = load_tokenizer(folder / "train") if split == "valid" else None
            how = config.model_copy(update={"packing": "unwrapped"}) if place == "documents" else config
            corpus = self._corpus(split)
            try:
                prepare(corpus, how, folder / place, tokenizer=tokenizer, on_progress=report)
            except TooLittleError as error:
                if split == "train" or corpus.hold_out is None:
                    raise
                raise UserError(
                    f"{error}: of the held-out part, one document in {corpus.hold_out}; give more documents, a smaller "
                    "data.length, or held-out text of its own as data.valid"
                ) from None

    def vocabulary(self) -> tuple[int, int]:
        """(vocab_size, mask_token_id) of the tokenizer; an upper bound if it is still to be trained."""
        if self.train_bpe is not None:
            return self.train_bpe, BPE_MASK
        special = special_ids(load_tokenizer(self.tokenizer or ""))
        return special.vocab_size, special.mask

    def source(self, seed: int) -> Source:
        raise UserError("data: this text is not prepared yet")


def prepared_for(
    source: str, model: str | Path, length: int, progress: Progress | None = None, packing: Packing = "wrapped"
) -> PreparedData:
    """The held-out part of any text, tokenised and packed for a model; cached, so that it is made once."""
    tokenizer = load_tokenizer(model)
    corpus = Corpus(source, split="valid")
    corpus.check()
    files = [[str(p.resolve()), p.stat().st_mtime_ns] for p in corpus.files()] if corpus.is_local else []
    how = [] if packing == "wrapped" else [packing]
    identity = digest([corpus.identity(), files, tokenizer_hash(tokenizer), length, *how])
    config = PrepareConfig(length=length, tokenizer=str(model), packing=packing)

    def report(counts: Counts) -> None:
        if progress is not None:
            progress(counts.documents, f"{counts.rows:,} rows")

    folder = home() / "prepared" / identity
    with locked(folder):  # another process may make the same
        prepare(corpus, config, folder, tokenizer=tokenizer, on_progress=report)
    return PreparedData(path=folder)


DataConfig = Annotated[LanguageData | TokenData | PreparedData | TextData, Field(discriminator="kind")]
