"""Text prepared by several machines: each makes a part of it.

A part is a folder `part-2-of-4` within that of the rows: a manifest, the tokenizer, and files with the ids of its
chunks. Chunks are dealt to the parts in turn. Rows are packed when all parts are finished.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imdm.core.config import Config
from imdm.core.errors import UserError, check_whole
from imdm.core.files import read_recorded, read_tensors, working_in, write_recorded, write_tensors
from imdm.data.corpora import Corpus
from imdm.data.encoding import Chunk, Encoded, chunks, encoded
from imdm.data.prepared import Counts, Prepared, check_same_settings, read_prepared, type_of_ids

FILE_TOKENS = 1 << 22
MOST_PARTS = 10_000


class Part(Config):
    """The manifest of a part.

    whole    the manifest of all parts together; its counts: documents of the corpus read so far, tokens of this part
    files    how many chunks each file holds
    chunks   number of chunks of the whole corpus, once the part is finished
    """

    whole: Prepared
    number: int
    of: int
    files: tuple[int, ...] = ()
    chunks: int = 0
    finished: bool = False


def check_number(number: int, of: int) -> None:
    check_whole("parts", of, 1, MOST_PARTS)
    check_whole(f"part of {of}", number, 1, of)


def part_folder(folder: Path, number: int, of: int) -> Path:
    return folder / f"part-{number}-of-{of}"


def chunk_file(folder: Path, index: int) -> Path:
    return folder / f"chunks-{index:05d}.safetensors"


def _read_part(folder: Path) -> Part:
    where = f"part of prepared text {str(folder)!r}"
    return Part.parse(read_recorded(folder / "manifest.json", where), where)


def part_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """The folders of parts, by (number, number of parts)."""
    matches = [(re.fullmatch(r"part-([0-9]+)-of-([0-9]+)", place.name), place) for place in folder.glob("part-*-of-*")]
    folders = {(int(name[1]), int(name[2])): place for name, place in matches if name is not None}
    return {key: folders[key] for key in sorted(folders) if (folders[key] / "manifest.json").exists()}


def parts_there(folder: Path, of: int | None = None) -> list[Part]:
    """The parts that were started in a folder. Refused if they disagree on the number of parts, or it is not `of`."""
    folders = part_folders(folder)
    numbers = sorted({many for _, many in folders} | ({of} if of is not None else set()))
    if len(numbers) > 1:
        raise UserError(
            f"prepared text {str(folder)!r}: parts of {numbers[0]} and of {numbers[1]} do not go together; use one "
            "number of parts, or delete the folders of the others"
        )
    return [_read_part(place) for place in folders.values()]


def missing(folder: Path, of: int) -> list[int]:
    """Which parts are missing or unfinished; none if they were merged before."""
    if (folder / "manifest.json").exists() and read_prepared(folder).finished:
        return []
    return sorted(set(range(1, of + 1)) - {part.number for part in parts_there(folder, of) if part.finished})


def all_parts(folder: Path, fresh: Prepared) -> list[Part]:
    """All parts of a folder, or none if it has none; an incomplete set is refused."""
    parts = parts_there(folder)
    if not parts:
        return []
    of = parts[0].of
    for part in parts:
        check_same_settings(f"part {part.number} of {of} in {str(folder)!r}", part.whole, fresh)
    if left := missing(folder, of):
        numbers = ", ".join(map(str, left))
        raise UserError(
            f"prepared text {str(folder)!r}: of {of} parts these are missing or unfinished: {numbers}; "
            f"make them (part = {left[0]}/{of}), or delete the folders of all parts to do without"
        )
    for part in parts:
        if (part.chunks, part.whole.counts.documents) != (parts[0].chunks, parts[0].whole.counts.documents):
            raise UserError(
                f"prepared text {str(folder)!r}: parts 1 and {part.number} read different text; delete the folder of "
                "the wrong one and make it again"
            )
    return parts


def remove_parts(folder: Path) -> None:
    """Delete parts once rows are packed."""
    for place in part_folders(folder).values():
        with working_in(place):
            shutil.rmtree(place)


def write_part(
    folder: Path,
    part: Part,
    corpus: Corpus,
    backend: Any,
    processes: int,
    on_progress: Callable[[Counts], None] | None = None,
) -> Part:
    """Make the missing files of a part. backend: the tokenizer's."""
    write_recorded(folder / "manifest.json", part.model_dump(mode="json"))
    seen = Chunk(-1, 0, [])  # the last chunk read, of this part or not

    def ours() -> Iterator[Chunk]:
        nonlocal seen
        for seen in chunks(corpus, part.whole.limit):
            if seen.number % part.of == part.number - 1:
                yield seen

    counts, waiting, tokens = part.whole.counts, list[Encoded](), 0
    with closing(encoded(islice(ours(), sum(part.files), None), backend, processes)) as stream:
        for some in stream:
            waiting.append(some)
            tokens += len(some.ids)
            counts = counts.model_copy(
                update={"documents": some.end, "tokens": counts.tokens + len(some.ids), "broken": corpus.broken}
            )
            if on_progress is not None:
                on_progress(counts)
            if tokens >= FILE_TOKENS:
                part, waiting, tokens = _write_chunks(folder, part, waiting, counts), [], 0
    if waiting:
        part = _write_chunks(folder, part, waiting, counts)
    counts = counts.model_copy(update={"documents": seen.first + len(seen.texts), "broken": corpus.broken})
    part = _with_counts(part, counts).model_copy(update={"chunks": seen.number + 1, "finished": True})
    write_recorded(folder / "manifest.json", part.model_dump(mode="json"))
    return part


def _with_counts(part: Part, counts: Counts) -> Part:
    return part.model_copy(update={"whole": part.whole.model_copy(update={"counts": counts})})


def _write_chunks(folder: Path, part: Part, waiting: list[Encoded], counts: Counts) -> Part:
    """Write one more file, then a manifest that lists it."""
    tensors = {
        "ids": np.concatenate([some.ids for some in waiting]).astype(type_of_ids(part.whole.vocab_size)),
        "lengths": np.concatenate([some.lengths for some in waiting]),
        "firsts": np.array([some.first for some in waiting], np.int64),
        "documents": np.array([len(some.lengths) for some in waiting], np.int64),
    }
    write_tensors(chunk_file(folder, len(part.files)), {name: torch.from_numpy(t) for name, t in tensors.items()})
    part = _with_counts(part, counts).model_copy(update={"files": (*part.files, len(waiting))})
    write_recorded(folder / "manifest.json", part.model_dump(mode="json"))
    return part


def joined(folder: Path, parts: list[Part], start: int = 0) -> Iterator[Encoded]:
    """The ids of all documents from number `start` on, in order: one chunk of each part in turn."""
    streams = [_stored_chunks(part_folder(folder, part.number, part.of), part) for part in parts]
    expected = 0
    for number in range(parts[0].chunks):
        some = next(streams[number % len(streams)], None)
        if some is None or some.first != expected:
            raise UserError(
                f"prepared text {str(folder)!r}: part {number % len(streams) + 1} of {len(streams)} does not go with "
                "the others; delete its folder and make it again"
            )
        expected = some.end
        if some.end > start:
            yield some.after(start)


def _stored_chunks(folder: Path, part: Part) -> Iterator[Encoded]:
    """The stored chunks of a part; one file at a time is in memory."""
    for index in range(len(part.files)):
        tensors = read_tensors(chunk_file(folder, index), "prepared text")
        ids, lengths = tensors["ids"].numpy(), tensors["lengths"].numpy()
        document = token = 0
        for first, count in zip(tensors["firsts"].tolist(), tensors["documents"].tolist(), strict=True):
            some = lengths[document : document + count]
            yield Encoded(first, ids[token : token + int(some.sum())], some)
            document, token = document + count, token + int(some.sum())
