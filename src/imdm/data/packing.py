"""From documents to rows of token ids on disk: `prepare`; by several machines: `prepare_part`.

Packing, as the paper's models were trained:

    wrapped     documents joined by the end token, cut every L − 2 tokens, a begin and an end token around each piece
    unwrapped   a document a row: begin, its first L − 2 tokens, end, then padding, which to the model is a token like
                others
    whole       a document a row, and all of it: what does not fit is left out. A model for such rows has built in that
                padding follows the end (`Ending`)

They give different perplexities, so results name the packing. A stopped run resumes after its last shard. Rows and
shards depend on text, tokenizer and settings alone, not on the number of processes or machines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from imdm.core.config import Config
from imdm.core.errors import UserError, check_whole
from imdm.core.files import as_path, digest_file, working_in, write_recorded, written_aside
from imdm.data import encoding
from imdm.data.corpora import Corpus
from imdm.data.encoding import Encoded, chunks, encoded
from imdm.data.parts import (
    Part,
    all_parts,
    check_number,
    chunk_file,
    joined,
    part_folder,
    part_folders,
    parts_there,
    remove_parts,
    write_part,
)
from imdm.data.prepared import (
    Counts,
    Packing,
    Prepared,
    PreparedSource,
    check_same_settings,
    digest_tokens,
    read_prepared,
    shard_file,
    type_of_ids,
)
from imdm.data.tokenizers import (
    FILES,
    check_choice,
    load_tokenizer,
    save_tokenizer,
    special_ids,
    tokenizer_hash,
    train_bpe,
)

SHARD_TOKENS = 1 << 24
MOST_PROCESSES = 1024
LOOKED_AT = 4096  # rows in which unknown words are counted
MUCH = 0.01  # of the tokens
Report = Callable[[Counts], None]


class TooLittleError(UserError):
    """A corpus without enough text for one row."""


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


@dataclass
class Packer:
    """Turns the ids of documents into rows. carry: tokens left over for the next row."""

    manifest: Prepared
    carry: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def rows(self, documents: Encoded) -> np.ndarray:
        """The rows (n, L) that these documents complete."""
        return self._joined(documents) if self.manifest.packing == "wrapped" else self._apart(documents)

    def _joined(self, documents: Encoded) -> np.ndarray:
        """Rows cut from documents concatenated, with an end token after each: the packing `wrapped`."""
        m, inner, kind = self.manifest, self.manifest.length - 2, type_of_ids(self.manifest.vocab_size)
        # The stream starts as end tokens only, with what is left of the last chunk in front. Documents then fill all
        # places but the one after each of them, which stays an end token.
        stream = np.full(len(self.carry) + len(documents.ids) + len(documents.lengths), m.end, kind)
        stream[: len(self.carry)] = self.carry
        is_text = np.ones(len(stream) - len(self.carry), bool)
        is_text[np.cumsum(documents.lengths + 1) - 1] = False
        stream[len(self.carry) :][is_text] = documents.ids
        whole = len(stream) // inner
        self.carry = stream[whole * inner :]
        out = np.empty((whole, m.length), kind)
        out[:, 0], out[:, 1:-1], out[:, -1] = m.begin, stream[: whole * inner].reshape(whole, inner), m.end
        return out

    def _apart(self, documents: Encoded) -> np.ndarray:
        """Rows with a document each, the packings `unwrapped` and `whole`; where rows are whole texts, without those
        that do not fit or contain an end token."""
        m, inner, ids, lengths = self.manifest, self.manifest.length - 2, documents.ids, documents.lengths
        last = np.cumsum(lengths)
        first = last - lengths
        # To a model of whole texts an end token within a document would be its end. `ends[i]` counts the end and
        # padding tokens before place i of all documents' ids, so two look-ups say whether a document has one.
        if m.packing == "whole":
            ends = np.concatenate([[0], np.cumsum((ids == m.end) | (ids == m.pad))])
            fits = (lengths <= inner) & (ends[last] == ends[first])
            first, last = first[fits], last[fits]
        out = np.full((len(first), m.length), m.pad, type_of_ids(m.vocab_size))
        for row, start, stop in zip(out, first, np.minimum(last, first + inner), strict=True):
            row[0], row[1 : 1 + stop - start], row[1 + stop - start] = m.begin, ids[start:stop], m.end
        return out


def prepare(
    corpus: Corpus,
    config: PrepareConfig,
    out: str | Path,
    *,
    tokenizer: Any = None,
    processes: int = 1,
    on_progress: Report | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Prepared:
    """Tokenise and pack a corpus into `out`. A finished folder made from the same is left as it is. Parts in it
    (`prepare_part`) are merged and removed.

    processes     worker processes that tokenise; 1: this process does
    on_progress   called with the counts so far, after every chunk
    on_note       called with a note: on what the folder already holds, on text that the tokenizer does not know
    """
    folder = as_path(out, "out")
    tokenizer, fresh = _begin(corpus, config, folder, tokenizer, processes)
    manifest = _resume(folder, fresh)
    if manifest.finished and corpus.source == "-":
        raise UserError(f"prepared text {str(folder)!r} is finished; for other standard input choose another folder")
    tell = on_note or (lambda text: None)
    if manifest.finished:
        manifest = _mend_tokenizer(folder, manifest, tokenizer)
        PreparedSource(folder)  # refuses damaged rows
        remove_parts(folder)
        tell("finished before")
        return manifest
    # Either parts of other machines or the corpus itself gives the ids, after the documents of the shards that are
    # there: the rows are the same, since both come in the order of the corpus and the manifest carries the last,
    # unfinished row.
    parts, done = all_parts(folder, fresh), manifest.counts.documents
    with working_in(folder), _nothing_left_of(folder, shard_file(folder, 0)):
        if done:
            tell(f"resuming after {done:,} documents")
        if parts:
            tell(f"merging {len(parts)} parts")
            broken = parts[0].whole.counts.broken
            manifest = _pack(joined(folder, parts, done), lambda: broken, folder, tokenizer, manifest, on_progress)
            remove_parts(folder)
        else:
            texts = chunks(corpus, config.limit, done)
            with closing(encoded(texts, tokenizer.backend_tokenizer, processes)) as stream:
                manifest = _pack(stream, lambda: corpus.broken, folder, tokenizer, manifest, on_progress)
    if (share := _unknown(folder, manifest, tokenizer)) > MUCH:
        tell(f"{share:.1%} of the tokens are {tokenizer.unk_token}: words that the tokenizer does not know")
    return manifest


def _unknown(folder: Path, manifest: Prepared, tokenizer: Any) -> float:
    """The share of the first rows' tokens that stand for unknown words."""
    token = tokenizer.unk_token_id
    if token is None or token in (manifest.begin, manifest.end, manifest.pad):  # GPT-2's is its end token
        return 0.0
    return float((np.load(shard_file(folder, 0), mmap_mode="r")[:LOOKED_AT] == token).mean())


def prepare_part(
    corpus: Corpus,
    config: PrepareConfig,
    out: str | Path,
    number: int,
    of: int,
    *,
    tokenizer: Any = None,
    processes: int = 1,
    on_progress: Report | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Part:
    """One of `of` parts of the work of `prepare`, counted from 1; each may be made by another machine. Each reads the
    whole corpus and tokenises its share into a folder within `out`. When all parts are finished, `prepare` merges them:
    the rows are the same as without parts."""
    check_number(number, of)
    if corpus.source == "-":
        raise UserError("standard input cannot be shared by several parts; use files")
    folder = as_path(out, "out")
    place, tell = part_folder(folder, number, of), on_note or (lambda text: None)
    tokenizer, fresh = _begin(corpus, config, folder, tokenizer, processes)
    part = Part(whole=fresh, number=number, of=of)
    if _resume(folder, fresh).finished:
        tell("all parts were merged before")
        return part.model_copy(update={"finished": True, "whole": read_prepared(folder)})
    for one in parts_there(folder, of):
        check_same_settings(f"part {one.number} of {of} in {str(folder)!r}", one.whole, fresh)
        part = one if one.number == number else part
    if part.finished:
        tell("finished before")
        return part
    with working_in(place), _nothing_left_of(place, chunk_file(place, 0)):
        if part.files:
            tell(f"resuming after {part.whole.counts.documents:,} documents")
        whole = part.whole.model_copy(update={"files": _save_tokenizer(tokenizer, place)})
        part = part.model_copy(update={"whole": whole})
        return write_part(place, part, corpus, tokenizer.backend_tokenizer, processes, on_progress)


@contextmanager
def _nothing_left_of(folder: Path, rows: Path) -> Iterator[None]:
    """Leave nothing behind: an error in this block removes the manifest and tokenizer that it wrote, unless there are
    rows too."""
    ours = [file for file in (folder / "manifest.json", *map(folder.joinpath, FILES)) if not file.exists()]
    try:
        yield
    except UserError:
        if not rows.exists():
            for file in ours:
                file.unlink(missing_ok=True)
        raise


def _begin(corpus: Corpus, config: PrepareConfig, folder: Path, tokenizer: Any, processes: int) -> tuple[Any, Prepared]:
    """The tokenizer, and the manifest before any work; refuses wrong settings."""
    check_whole("processes", processes, 1, MOST_PROCESSES)
    if config.tokenizer is not None and folder.resolve() == Path(config.tokenizer).resolve():
        raise UserError(f"{str(folder)!r} is the tokenizer's own folder; choose another one for the rows")
    corpus.check()
    tokenizer = tokenizer if tokenizer is not None else _tokenizer_for(corpus, config, folder)
    special = special_ids(tokenizer)
    return tokenizer, Prepared(
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


def _mend_tokenizer(folder: Path, manifest: Prepared, tokenizer: Any) -> Prepared:
    """Write the tokenizer's files again if they are damaged; the given tokenizer is the same."""
    if all((folder / name).is_file() and digest_file(folder / name) == digest for name, digest in manifest.files):
        return manifest
    with working_in(folder):
        manifest = manifest.model_copy(update={"files": _save_tokenizer(tokenizer, folder)})
        write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest


def _save_tokenizer(tokenizer: Any, folder: Path) -> tuple[tuple[str, str], ...]:
    """Write the tokenizer's files: their names, with their digests."""
    return tuple((file.name, digest_file(file)) for file in save_tokenizer(tokenizer, folder))


def _pack(
    documents: Iterable[Encoded],
    broken: Callable[[], int],
    folder: Path,
    tokenizer: Any,
    manifest: Prepared,
    on_progress: Report | None,
) -> Prepared:
    """Make the missing shards of a folder. The tokenizer is written before the manifest that names it."""
    manifest = manifest.model_copy(update={"files": _save_tokenizer(tokenizer, folder)})
    write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    packer = Packer(manifest, np.array(manifest.carry, np.int64))
    counts, waiting, tokens = manifest.counts, list[np.ndarray](), 0
    for some in documents:
        rows = packer.rows(some)
        waiting.append(rows)
        tokens += rows.size
        counts = Counts(
            documents=some.end,
            tokens=counts.tokens + len(some.ids),
            rows=counts.rows + len(rows),
            broken=broken(),
            left_out=counts.left_out + (len(some.lengths) - len(rows) if manifest.packing == "whole" else 0),
        )
        if on_progress is not None:
            on_progress(counts)
        # Only here is a run resumed, so only here does a shard end: what is waiting and the packer's carry belong to
        # the documents counted so far. Where that is depends on the text alone, not on how many processes encode it.
        if _is_shard(tokens, some.end):
            manifest, waiting, tokens = _write_shard(folder, manifest, waiting, counts, packer), [], 0
    if tokens:
        manifest = _write_shard(folder, manifest, waiting, counts, packer)
    if not manifest.shards:
        if manifest.packing == "whole":
            raise TooLittleError(f"corpus {manifest.source!r}: no document fits into a row of {manifest.length} tokens")
        raise TooLittleError(f"corpus {manifest.source!r}: too little text for one row of {manifest.length} tokens")
    counts = counts.model_copy(update={"broken": broken()})
    manifest = manifest.model_copy(update={"counts": counts, "finished": True})
    write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest


def _is_shard(tokens: int, documents: int) -> bool:
    """Whether rows of so many tokens make a shard: possible after every `AT_ONCE` documents of the corpus, in between
    where documents are long."""
    return tokens >= SHARD_TOKENS and (documents % encoding.AT_ONCE == 0 or tokens >= 2 * SHARD_TOKENS)


def _tokenizer_for(corpus: Corpus, config: PrepareConfig, folder: Path) -> Any:
    check_choice(config.tokenizer, config.train_bpe)
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    if (own := made_tokenizer(folder)) is not None:
        return own
    if corpus.source == "-":
        raise UserError("a BPE cannot be trained on standard input, which can be read only once; use a file")
    tokenizer = train_bpe(islice(corpus.documents(), config.bpe_documents), int(config.train_bpe or 0))
    with tempfile.TemporaryDirectory() as place:  # a loaded one writes the same files again
        tokenizer.save_pretrained(place)
        return load_tokenizer(place)


def made_tokenizer(folder: Path) -> Any:
    """The tokenizer beside rows, or beside parts of them; None if there is none yet."""
    for place in (folder, *part_folders(folder).values()):
        if (place / "manifest.json").exists() and (place / "tokenizer.json").exists():
            with suppress(UserError):  # damaged; training it again gives the same
                return load_tokenizer(place)
    return None


def _resume(folder: Path, fresh: Prepared) -> Prepared:
    if not (folder / "manifest.json").exists():
        return fresh
    there = read_prepared(folder)
    check_same_settings(f"prepared text {str(folder)!r}", there, fresh)
    return there


def _write_shard(folder: Path, manifest: Prepared, rows: list[np.ndarray], counts: Counts, packer: Packer) -> Prepared:
    """Write one more shard, then a manifest that lists it: a crash in between loses only that shard."""
    tokens = np.concatenate(rows)
    index = len(manifest.shards)
    with written_aside(shard_file(folder, index)) as aside, open(aside, "wb") as file:
        np.save(file, tokens)
    shards = (*manifest.shards, (len(tokens), digest_tokens(tokens)))
    manifest = manifest.model_copy(update={"shards": shards, "counts": counts, "carry": tuple(packer.carry.tolist())})
    write_recorded(folder / "manifest.json", manifest.model_dump(mode="json"))
    return manifest
