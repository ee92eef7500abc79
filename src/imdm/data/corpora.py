"""Corpora: documents from text, JSON lines, parquet, a folder of these, standard input, or a dataset of a hub.

A corpus is streamed, so its size does not matter. A broken row (bytes that are not UTF-8, a line that is not JSON, no
text) is an error that names the row, unless broken rows are skipped; then they are counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from imdm.core.errors import UserError, reason_of, shorter, unknown
from imdm.core.files import as_path, check_file
from imdm.core.hub import hub_for

SAMPLE = Path(__file__).with_name("sample")
ENDINGS = (".txt", ".jsonl", ".parquet")
SPLIT = re.compile(r"(train|valid|validation|dev|test)([-_.0-9].*)?")
END = 1 << 20  # bytes


@dataclass(frozen=True)
class Preset:
    """A corpus of the paper: where it is on the hub, its splits (ours → its own), the column that holds the text, and
    how the text is cleaned."""

    hub: str
    splits: dict[str, str]
    about: str
    config: str | None = None
    field: str = "text"
    clean: Callable[[str], str] = str


def unspace(text: str) -> str:
    """A text of LM1B with words and punctuation put back together: it comes as spaced tokens ("do n't , he said")."""
    text = re.sub(r" (n't|'s|'re|'ve|'m|'ll|'d)\b", r"\1", text)
    text = re.sub(r" ([.,!?;:%)\]])", r"\1", text)
    text = re.sub(r"([(\[$]) ", r"\1", text)
    return re.sub(r'" ([^"]*?) "', r'"\1"', text)


def unspace_wikitext(text: str) -> str:
    """A text of WikiText with words and punctuation put back together.

    It also marks hyphens and separators inside words and numbers ("well @-@ known , 1 @,@ 000")."""
    return unspace(re.sub(r" @([-,.])@ ", r"\1", text))


TRAIN_VALID_TEST = {"train": "train", "valid": "validation", "test": "test"}

PRESETS = {
    "lm1b": Preset(
        "billion-word-benchmark/lm1b",
        {"train": "train", "valid": "test"},
        "single sentences, shuffled; perplexities are reported on the benchmark's test split, wrapped to 128 tokens",
        clean=unspace,
    ),
    "openwebtext": Preset(
        "Skylion007/openwebtext",
        {"train": "train[:-100000]", "valid": "train[-100000:]"},
        "web pages, wrapped to 1,024 tokens; the last 100,000 documents are held out",
    ),
    "ptb": Preset(
        "ptb-text-only/ptb_text_only",
        TRAIN_VALID_TEST,
        "Penn Treebank: sentences of newspapers, rare words replaced by <unk>, numbers by N",
        field="sentence",
        clean=unspace,
    ),
    "wikitext": Preset(
        "Salesforce/wikitext",
        TRAIN_VALID_TEST,
        "WikiText-103, lines of articles",
        config="wikitext-103-raw-v1",
        clean=unspace_wikitext,
    ),
    "lambada": Preset("EleutherAI/lambada_openai", {"valid": "test"}, "passages of novels", config="default"),
    "ag-news": Preset("fancyzhx/ag_news", {"train": "train", "valid": "test"}, "short news items"),
    "arxiv": Preset("armanc/scientific_papers", TRAIN_VALID_TEST, "papers from arXiv", config="arxiv", field="article"),
    "pubmed": Preset(
        "armanc/scientific_papers", TRAIN_VALID_TEST, "papers from PubMed", config="pubmed", field="article"
    ),
}


BETWEEN = "\n\n"  # rows that are joined
Row = tuple[str, Any]
"""A text, and its group (`Corpus.join`)."""


@dataclass
class Corpus:
    """Where documents come from.

    source    a file, a folder, "-" for standard input, "sample" for the sentences that come with the package, the name
              of a preset, or a hub id (owner/name)
    split     of a preset or a hub dataset; of a folder whose files, or their folders, are named after splits
              (train-00.parquet, valid.txt, test/a.txt; dev and validation are valid); what has no such name is train
    field     of a JSON line or a parquet column
    hold_out  where the source has no splits: every so-many-th document is `valid`, the others `train`; 0: all are both
    join      join consecutive rows, with an empty line between them, into documents of at least so many characters, as
              for paragraphs of books; never across files, nor across values of the field `join_by`, such as a title
              (plain text has no fields); the last of a file or a value may be shorter
    """

    source: str
    split: str = "train"
    field: str = "text"
    skip_broken: bool = False
    hold_out: int = 0
    join: int | None = None
    join_by: str | None = None
    broken: int = 0

    def check(self) -> None:
        """Refuse a corpus that cannot be read, before anything is written."""
        if self.join_by is not None and self.join is None:
            raise UserError(
                f"join_by = {self.join_by!r}: it says where joined rows end; give how long they are at least (join)"
            )
        if self.join_by is not None and self.is_local and any(file.suffix == ".txt" for file in self.files()):
            raise UserError(f"join_by = {self.join_by!r}: plain text has no fields; leave it out, or use JSON lines")
        if self.is_local:
            self.files()
        elif self.source in PRESETS and self.split not in PRESETS[self.source].splits:
            raise unknown(f"split of {self.source}", self.split, PRESETS[self.source].splits)

    def has_splits(self) -> bool:
        """Whether the source has its own splits."""
        return not self.is_local or any(self._split_of(file) == "valid" for file in self._local_files())

    @property
    def is_local(self) -> bool:
        return self.source != "-" and self.source not in PRESETS and not self._is_hub()

    def _is_hub(self) -> bool:
        path = as_path(self.source, "corpus")
        return not path.exists() and not path.is_absolute() and len(path.parts) == 2 and path.suffix not in ENDINGS

    def files(self) -> list[Path]:
        """The local files of the split, in order."""
        files, split = self._local_files(), "train" if self.hold_out else self.split
        if any(self._split_of(file) for file in files):
            files = [file for file in files if (self._split_of(file) or "train") == split]
        if not files:
            raise UserError(f"corpus {self.source!r}: no {', '.join(ENDINGS)} file for {self.split!r} in that folder")
        if files[0].suffix not in ENDINGS:
            ending = files[0].suffix or "a file without ending"
            raise UserError(f"corpus {self.source!r}: {ending} is not known; known: {', '.join(ENDINGS)}")
        return files

    def _local_files(self) -> list[Path]:
        path = SAMPLE if self.source == "sample" else Path(self.source)
        if not path.exists():
            names = ", ".join(("sample", *sorted(PRESETS)))
            raise UserError(f"corpus {self.source!r}: no such file or folder; by name there are {names}")
        files = sorted(p for p in path.rglob("*") if p.suffix in ENDINGS) if path.is_dir() else [path]
        for file in files:
            check_file(file, f"corpus {self.source!r}")
        return files

    def _split_of(self, file: Path) -> str | None:
        """The split named by the file, or by a folder it is in."""
        root = SAMPLE if self.source == "sample" else Path(self.source)
        if root == file:
            return None
        for part in (*file.relative_to(root).parts[:-1], file.stem):
            if match := SPLIT.fullmatch(part.lower()):
                return {"dev": "valid", "validation": "valid"}.get(match[1], match[1])
        return None

    def identity(self) -> list[Any]:
        """What identifies the corpus, without reading all of it."""
        names = [[p.name, p.stat().st_size, _hash_of_ends(p)] for p in self.files()] if self.is_local else []
        joined = [] if self.join is None else [self.join, self.join_by]
        return [self.source if not names else "", self.split, self.field, self.hold_out, names, *joined]

    def size(self) -> int | None:
        """Bytes to read, where that is known."""
        return sum(p.stat().st_size for p in self.files()) if self.is_local else None

    def documents(self) -> Iterator[str]:
        """Every document of the split, in order."""
        for number, text in enumerate(self._joined(), 1):
            if not self.hold_out or (number % self.hold_out == 0) == (self.split == "valid"):
                yield text

    def _joined(self) -> Iterator[str]:
        if self.join is None:
            yield from (text for text, _ in self._all())
            return
        parts, last, size = list[str](), None, -len(BETWEEN)
        for text, group in self._all():
            if parts and (group != last or size >= self.join):
                yield BETWEEN.join(parts)
                parts, size = [], -len(BETWEEN)
            parts.append(text)
            last, size = group, size + len(BETWEEN) + len(text)
        if parts:
            yield BETWEEN.join(parts)

    def _all(self) -> Iterator[Row]:
        """Every row, and its group: only rows of one group are joined."""
        if self.source == "-":
            first = sys.stdin.buffer.readline()
            lines = chain([first], sys.stdin.buffer)
            yield from self._lines(lines, "standard input", as_json=self._is_json(first))
        elif self.is_local:
            for number, path in enumerate(self.files()):
                for text, group in self._file(path):
                    yield text, (number, group)
        else:
            yield from self._hub()

    def _file(self, path: Path) -> Iterator[Row]:
        if path.suffix == ".parquet":
            yield from self._parquet(path)
            return
        with open(path, "rb") as file:
            yield from self._lines(file, str(path), as_json=path.suffix == ".jsonl")

    def _field(self, row: Any) -> str:
        text = row.get(self.field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise TypeError(f"no text in a field {self.field!r}")
        text.encode()  # JSON can encode lone surrogates
        return text

    def _is_json(self, line: bytes) -> bool:
        """Whether the first line of standard input is a JSON object with our field, as then all lines are."""
        try:
            return self.field in json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return False

    def _group(self, row: Mapping[str, Any]) -> Any:
        if self.join_by is not None and self.join_by not in row:
            raise TypeError(f"no field {self.join_by!r}")
        return None if self.join_by is None else row[self.join_by]

    def _lines(self, lines: Iterable[bytes], where: str, as_json: bool = False) -> Iterator[Row]:
        for number, line in enumerate(lines, 1):
            group = None
            try:
                text = line.decode("utf-8").strip()
                if text and as_json:
                    row = json.loads(text)
                    text = self._field(row)
                    group = self._group(row)
            except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, not JSON, no text, nested too deeply
                self._broken(f"{where}, line {number}", shorter(str(error)))
                continue
            if text:
                yield text, group

    def _parquet(self, path: Path) -> Iterator[Row]:
        parquet = _pyarrow()
        try:
            file = parquet.ParquetFile(path)
        except Exception as error:  # pyarrow's own, and OSError
            raise UserError(f"corpus: {path} is not a readable parquet file ({reason_of(error)})") from None
        for column in (self.field, self.join_by):
            if column is not None and column not in file.schema_arrow.names:
                raise UserError(f"corpus: {path} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}")
        texts = _parquet_texts(file, self.field, path)
        groups = repeat(None) if self.join_by is None else _parquet_texts(file, self.join_by, path)
        for row, (text, group) in enumerate(zip(texts, groups, strict=False), 1):
            if not isinstance(text, str):
                self._broken(f"{path}, row {row}", "not UTF-8" if isinstance(text, bytes) else "no text")
            elif text.strip():
                yield text.strip(), group

    def _hub(self) -> Iterator[Row]:
        preset = PRESETS.get(self.source) or Preset(self.source, {self.split: self.split}, "", field=self.field)
        name, (base, _, part) = preset.hub, preset.splits[self.split].partition("[")
        rows = _stream(name, preset.config, base)
        if part:
            rows = _part(rows, part.rstrip("]"), name)
        for number, row in enumerate(rows, 1):
            text = row.get(preset.field)
            if not isinstance(text, str) or (self.join_by is not None and self.join_by not in row):
                missing = self.join_by if isinstance(text, str) else preset.field
                self._broken(f"{name}, row {number}", f"no {missing!r}")
            elif text.strip():
                yield preset.clean(text.strip()), self._group(row)

    def _broken(self, where: str, why: object) -> None:
        self.broken += 1
        if not self.skip_broken:
            raise UserError(f"corpus: {where} is broken ({why}); mend it, or skip broken rows (skip_broken)")


def _parquet_texts(file: Any, column: str, path: Path) -> Iterator[Any]:
    """The values of a column: text, or whatever else is there; bytes that are not UTF-8 as bytes."""
    batches = file.iter_batches(batch_size=4096, columns=[column])
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # pyarrow's own, and OSError
            raise UserError(f"corpus: {path} is not a readable parquet file ({reason_of(error)})") from None
        if batch is None:
            return
        try:
            yield from batch.column(0).to_pylist()
        except UnicodeDecodeError:
            yield from (_as_python(value) for value in batch.column(0))


def _as_python(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return b""


def _hash_of_ends(path: Path) -> str:
    """A hash of a file's first and last megabyte, which distinguishes most files of one size without reading all."""
    with open(path, "rb") as file:
        first = file.read(END)
        file.seek(max(0, path.stat().st_size - END))
        return hashlib.sha256(first + file.read(END)).hexdigest()[:16]


def _stream(name: str, config: str | None, split: str) -> Any:
    """The rows of a hub dataset. One that is a script, which `datasets` no longer runs, is read from the parquet files
    that the hub generates."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("datasets of a hub need the extra: pip install 'imdm[text]'") from None
    options: dict[str, Any] = {"split": split, "streaming": True}
    try:
        with hub_for(name):
            try:
                return load_dataset(name, config, **options)
            except RuntimeError as error:
                if "script" not in str(error):
                    raise
                return load_dataset(name, data_dir=config, revision="refs/convert/parquet", **options)
    except Exception as error:  # the hub's errors are many
        raise UserError(f"dataset {name!r} cannot be loaded: {str(error).splitlines()[0]}") from None


def _part(rows: Any, part: str, name: str) -> Any:
    """A part of a stream: `:-100000` or `-100000:`, where the dataset states its length."""
    total = rows.info.splits["train"].num_examples if rows.info.splits else None
    if not total:
        raise UserError(f"dataset {name!r} does not state its number of rows; its held-out part cannot be found")
    first, last = part.split(":")
    return rows.take(total + int(last)) if last else rows.skip(total + int(first))


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("parquet files need the extra: pip install 'imdm[text]'") from None
    return pyarrow.parquet
