"""Text prepared by several processes and machines: the same bytes as by one; stopped, killed, short of memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from imdm.core.errors import UserError
from imdm.data.corpora import Corpus
from imdm.data.encoding import Chunk, Encoded, chunks, encoded
from imdm.data.packing import PrepareConfig, prepare, prepare_part
from imdm.data.parts import missing, part_folder
from imdm.data.prepared import Counts, PreparedSource
from imdm.data.tokenizers import load_tokenizer, special_ids, train_bpe
from tests.cli.test_cli import imdm, refused

WORDS = ("cat", "dog", "bird", "sea", "moon", "saw", "met", "the", "a", "of", "and", "—")
TEXTS = [" ".join(WORDS[(3 * i + j * (i % 5 + 1)) % len(WORDS)] for j in range(1 + i * 7 % 23)) for i in range(300)]
LENGTH = 16
PACKINGS = ("wrapped", "unwrapped", "whole")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preparing")
    train_bpe(TEXTS, 320).save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, shards and files so small that there are many of each."""
    monkeypatch.setattr("imdm.data.encoding.AT_ONCE", 16)
    monkeypatch.setattr("imdm.data.encoding.CHARACTERS", 400)
    monkeypatch.setattr("imdm.data.packing.SHARD_TOKENS", 700)
    monkeypatch.setattr("imdm.data.parts.FILE_TOKENS", 150)


def settings(home: Path, **changes: Any) -> PrepareConfig:
    return PrepareConfig(**{"length": LENGTH, "tokenizer": str(home / "tokenizer"), **changes})


def corpus(home: Path) -> Corpus:
    return Corpus(str(home / "text.txt"))


@pytest.mark.parametrize("known", [True, False])
def test_words_that_a_tokenizer_does_not_know_are_said(known: bool, tmp_path: Path) -> None:
    """All of the dashes: every twelfth word, more or less. Rows are made all the same."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(WORDS if known else WORDS[:-1])]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    told: list[str] = []
    found = prepare(corpus(tmp_path), settings(tmp_path), tmp_path / "rows", on_note=told.append)
    assert found.finished
    if known:
        assert told == []
        return
    rows = PreparedSource(tmp_path / "rows").rows(torch.arange(found.counts.rows))["tokens"]
    assert told == [
        f"{float((rows == 1).double().mean()):.1%} of the tokens are [UNK]: words that the tokenizer does not know"
    ]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, byte for byte."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def by_hand(home: Path, packing: str) -> list[list[int]]:
    """The rows by plain loops over the texts."""
    words = load_tokenizer(home / "tokenizer")
    special, inner = special_ids(words), LENGTH - 2
    documents = [words(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    if packing == "wrapped":
        stream = [i for ids in documents for i in (*ids, special.end)]
        pieces = [stream[k : k + inner] for k in range(0, len(stream) - inner + 1, inner)]
    else:
        pieces = [ids[:inner] for ids in documents if packing == "unwrapped" or len(ids) <= inner]
    rows = [[special.begin, *piece, special.end] for piece in pieces]
    return [row + [special.pad] * (LENGTH - len(row)) for row in rows]


def in_parts(home: Path, config: PrepareConfig, out: Path, of: int, **how: Any) -> None:
    """Made in an order that is not theirs, then put together."""
    for number in (*range(2, of + 1), 1):
        prepare_part(corpus(home), config, out, number, of, **how)
    prepare(corpus(home), config, out)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.usefixtures("small")
def test_rows_are_those_by_hand_and_parts_make_the_same_bytes(packing: str, home: Path, tmp_path: Path) -> None:
    config = settings(home, packing=packing)
    made = prepare(corpus(home), config, tmp_path / "whole")
    rows = PreparedSource(tmp_path / "whole")
    assert rows.rows(torch.arange(len(rows)))["tokens"].tolist() == by_hand(home, packing)
    assert len(made.shards) > 3
    for of in (1, 3):
        in_parts(home, config, tmp_path / f"of-{of}", of)
        assert contents(tmp_path / f"of-{of}") == contents(tmp_path / "whole")


def test_more_parts_than_chunks(home: Path, tmp_path: Path) -> None:
    """Some have nothing to do."""
    prepare(corpus(home), settings(home), tmp_path / "whole")
    in_parts(home, settings(home), tmp_path / "parts", 4)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_processes_make_the_same_bytes(home: Path, tmp_path: Path) -> None:
    for packing in PACKINGS:
        config = settings(home, packing=packing)
        prepare(corpus(home), config, tmp_path / packing)
    prepare(corpus(home), settings(home), tmp_path / "three", processes=3)
    assert contents(tmp_path / "three") == contents(tmp_path / "wrapped")
    in_parts(home, settings(home, packing="whole"), tmp_path / "parts", 2, processes=2)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_machines_that_see_no_common_folder_train_the_same_tokenizer(home: Path, tmp_path: Path) -> None:
    """Each makes its part where it is; the folders are brought together by hand."""
    config = PrepareConfig(length=LENGTH, train_bpe=330, limit=250)
    prepare(corpus(home), config, tmp_path / "whole")
    for number in (1, 2):
        prepare_part(corpus(home), config, tmp_path / f"machine-{number}", number, 2)
    shutil.move(part_folder(tmp_path / "machine-1", 1, 2), tmp_path / "machine-2")
    prepare(corpus(home), config, tmp_path / "machine-2")
    assert contents(tmp_path / "machine-2") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_broken_rows_and_held_out_documents_in_parts(home: Path, tmp_path: Path) -> None:
    lines = [text.encode() for text in TEXTS]
    (tmp_path / "text.txt").write_bytes(b"\n".join([lines[0], b"\xff", *lines[1:], b"\xfe", b"\xff"]))
    text = Corpus(str(tmp_path / "text.txt"), skip_broken=True, hold_out=4)
    whole = prepare(text, settings(home), tmp_path / "whole")
    assert whole.counts.broken == 3
    assert whole.counts.documents == 225
    for number in (1, 2):
        prepare_part(text, settings(home), tmp_path / "parts", number, 2)
    prepare(text, settings(home), tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_chunks_are_bounded_and_begin_anew_after_so_many_documents(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imdm.data.encoding.AT_ONCE", 16)
    monkeypatch.setattr("imdm.data.encoding.CHARACTERS", 400)
    found = list(chunks(corpus(home)))
    assert [text for chunk in found for text in chunk.texts] == TEXTS
    assert [chunk.number for chunk in found] == list(range(len(found)))
    assert {chunk.first for chunk in found} >= set(range(0, 300, 16))
    for chunk in found:
        assert TEXTS[chunk.first] == chunk.texts[0]
        assert sum(map(len, chunk.texts[:-1])) < 400
    behind = [chunk for chunk in found if chunk.first >= found[7].first]
    assert [chunk.texts for chunk in chunks(corpus(home), start=found[7].first)] == [chunk.texts for chunk in behind]


def test_shards_of_long_documents_are_bounded(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end within the documents that are otherwise counted off together."""
    monkeypatch.setattr("imdm.data.encoding.CHARACTERS", 400)
    monkeypatch.setattr("imdm.data.packing.SHARD_TOKENS", 700)
    made = prepare(corpus(home), settings(home), tmp_path / "rows")
    assert len(made.shards) > 2
    assert max(rows for rows, _ in made.shards) * LENGTH < 2 * 700 + 400 * LENGTH / (LENGTH - 2)


def test_documents_behind_a_place() -> None:
    some = Encoded.of([[1, 2], [], [3], [4, 5, 6]], first=10)
    assert some.end == 14
    for start, ids, lengths in ((0, 6, 4), (10, 6, 4), (11, 4, 3), (13, 3, 1), (14, 0, 0)):
        left = some.after(start)
        assert (len(left.ids), len(left.lengths), left.end) == (ids, lengths, 14)
    assert some.after(13).ids.tolist() == [4, 5, 6]


# Stopped


class Stopper:
    """Interrupts a preparation when it has read so many documents."""

    def __init__(self, documents: int) -> None:
        self.documents = documents

    def __call__(self, counts: Counts) -> None:
        if counts.documents >= self.documents:
            raise KeyboardInterrupt


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("small")
def test_parts_and_rows_that_were_stopped_go_on_and_say_so(processes: int, home: Path, tmp_path: Path) -> None:
    config, out, said = settings(home), tmp_path / "rows", list[str]()
    whole = prepare(corpus(home), config, tmp_path / "whole")
    stop = {"on_progress": Stopper(150), "on_note": said.append}
    with pytest.raises(KeyboardInterrupt):
        prepare_part(corpus(home), config, out, 1, 2, processes=processes, **stop)
    assert missing(out, 2) == [1, 2]
    with pytest.raises(UserError, match="of 2 parts these are missing or unfinished: 1, 2"):
        prepare(corpus(home), config, out)
    with pytest.raises(UserError, match="no manifest in it"):
        PreparedSource(out)
    prepare_part(corpus(home), config, out, 2, 2)
    assert missing(out, 2) == [1]
    prepare_part(corpus(home), config, out, 1, 2, on_note=said.append)
    assert missing(out, 2) == []
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(home), config, out, **stop)
    with pytest.raises(UserError, match="is unfinished; run the same"):
        PreparedSource(out)
    prepare(corpus(home), config, out, on_note=said.append)
    assert contents(out) == contents(tmp_path / "whole")
    prepare_part(corpus(home), config, out, 1, 2, on_note=said.append)
    prepare(corpus(home), config, out, on_note=said.append)
    again = [note for note in said if "resuming after" in note]
    assert len(again) == 2
    assert all(0 < int(note.split()[2]) < whole.counts.documents for note in again)
    assert [note for note in said if note not in again] == [
        *["merging 2 parts"] * 2,
        "all parts were merged before",
        "finished before",
    ]


@pytest.mark.usefixtures("small")
def test_rows_begun_by_one_machine_are_finished_from_parts(home: Path, tmp_path: Path) -> None:
    config, out = settings(home), tmp_path / "rows"
    prepare(corpus(home), config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus(home), config, out, processes=2, on_progress=Stopper(150))
    assert list(out.glob("tokens-*.npy"))
    in_parts(home, config, out, 3)
    assert contents(out) == contents(tmp_path / "whole")


WORKER = """
import os, sys
from imdm.data.encoding import Chunk, encoded
from tokenizers import Tokenizer

if __name__ == "__main__":
    words = Tokenizer.from_file(sys.argv[1])
    stream = encoded((Chunk(i, i, ["the cat"]) for i in range(1 << 40)), words, 2)
    next(stream), next(stream), next(stream)
    from multiprocessing import active_children
    print(*(child.pid for child in active_children()), "torch" in sys.modules, flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
"""


def test_processes_end_with_the_one_that_began_them(home: Path, tmp_path: Path) -> None:
    """However it ends; and none of them loads torch."""
    (tmp_path / "worker.py").write_text(WORKER)
    about = [str(home / "tokenizer/tokenizer.json"), str(int(signal.SIGKILL))]
    begun = subprocess.Popen([sys.executable, str(tmp_path / "worker.py"), *about], stdout=subprocess.PIPE, text=True)
    assert begun.stdout is not None
    said = begun.stdout.read().split()  # ends when all who hold the pipe have ended
    assert begun.wait() == -signal.SIGKILL
    assert said[2] == "False"
    for number in map(int, said[:2]):
        state = Path(f"/proc/{number}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def killing(text: str, least: int) -> Iterator[Chunk]:
    """Chunks, and after some of them the end of those who encode, but for the first `least`."""
    from multiprocessing import active_children

    for number in range(100):
        if number == 10:
            for child in active_children()[least:]:
                os.kill(child.pid or 0, signal.SIGKILL)
        yield Chunk(number, number, [text])


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("text", ["the cat", "the cat " * 100_000])
def test_a_process_that_is_killed_is_said(home: Path, text: str, least: int) -> None:
    """Of the large text, the one that is left waits for its result to be read, which nobody does any more."""
    backend = load_tokenizer(home / "tokenizer").backend_tokenizer
    with pytest.raises(UserError, match="processes = 2: one of them died, perhaps out of memory"):
        list(encoded(killing(text, least), backend, 2))


# Refused


@pytest.mark.parametrize(
    ("number", "of", "message"),
    [
        (0, 2, "part of 2 = 0: must be a whole number from 1 to 2"),
        (3, 2, "part of 2 = 3"),
        (1, 0, "parts = 0"),
        (1, 10**9, "parts = 1000000000: must be a whole number from 1 to 10,000"),
    ],
)
def test_parts_that_there_cannot_be(number: int, of: int, message: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        prepare_part(corpus(home), settings(home), tmp_path / "rows", number, of)
    assert not (tmp_path / "rows").exists()


def test_what_is_refused_leaves_nothing(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    with pytest.raises(UserError, match="processes = 0: must be a whole number from 1 to 1,024"):
        prepare(corpus(home), settings(home), out, processes=0)
    with pytest.raises(UserError, match="standard input cannot be shared by several parts; use files"):
        prepare_part(Corpus("-"), settings(home), out, 1, 2)
    (tmp_path / "broken.txt").write_bytes(b"fine\n\xff\n")
    for processes in (1, 2):
        with pytest.raises(UserError, match=r"broken.txt, line 2 is broken"):
            prepare_part(Corpus(str(tmp_path / "broken.txt")), settings(home), out, 1, 2, processes=processes)
    assert not out.exists()


def test_parts_that_do_not_go_together(home: Path, tmp_path: Path) -> None:
    config, out = settings(home), tmp_path / "rows"
    prepare_part(corpus(home), config, out, 1, 2)
    with pytest.raises(UserError, match="parts of 2 and of 3 do not go together"):
        prepare_part(corpus(home), config, out, 2, 3)
    with pytest.raises(UserError, match="part 1 of 2 in .* was made with packing = 'wrapped', not 'whole'"):
        prepare_part(corpus(home), settings(home, packing="whole"), out, 2, 2)
    prepare_part(corpus(home), config, out, 2, 2)
    with pytest.raises(UserError, match="part 1 of 2 in .* was made with length = 16, not 20"):
        prepare(corpus(home), settings(home, length=20), out)
    with pytest.raises(UserError, match="part 1 of 2 in .* was made of other text"):
        prepare(Corpus("sample"), config, out)
    shutil.copytree(part_folder(out, 1, 2), part_folder(out, 1, 4))
    with pytest.raises(UserError, match="parts of 2 and of 4 do not go together"):
        prepare(corpus(home), config, out)


@pytest.mark.usefixtures("small")
def test_damaged_parts_are_refused(home: Path, tmp_path: Path) -> None:
    config, out = settings(home), tmp_path / "rows"
    for number in (1, 2):
        prepare_part(corpus(home), config, out, number, 2)
    file = part_folder(out, 2, 2) / "chunks-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    with pytest.raises(UserError, match=r"chunks-00001.safetensors is damaged"):
        prepare(corpus(home), config, out)
    shutil.rmtree(part_folder(out, 2, 2))
    prepare_part(corpus(home), config, out, 2, 2)
    prepare(corpus(home), config, out)  # goes on
    prepare(corpus(home), config, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_parts_of_text_that_changed_in_its_midst_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which its identity does not tell: it looks at the ends of files."""
    monkeypatch.setattr("imdm.data.corpora.END", 64)
    config, text, out = settings(home), tmp_path / "text.txt", tmp_path / "rows"
    text.write_text("\n".join(TEXTS), encoding="utf-8")
    prepare_part(Corpus(str(text)), config, out, 1, 2)
    size = text.stat().st_size
    text.write_bytes(text.read_bytes().replace(TEXTS[100].encode() + b"\n", TEXTS[100].encode() + b" "))
    assert text.stat().st_size == size
    prepare_part(Corpus(str(text)), config, out, 2, 2)
    with pytest.raises(UserError, match="parts 1 and 2 read different text"):
        prepare(Corpus(str(text)), config, out)


# The command


@pytest.mark.parametrize("part", ["2", "0/2", "3/2", "a/b", "1/2/3", "-1/2", ""])
def test_the_command_refuses_parts_that_there_cannot_be(part: str, tmp_path: Path) -> None:
    said = refused(imdm("prepare", "sample", "--train-bpe", "320", "--part", part, "--out", tmp_path / "rows"))
    assert f"--part '{part}': expected a part and how many there are, such as 1/4 to 4/4" in said


def test_the_command_makes_parts_of_held_out_text(home: Path, tmp_path: Path) -> None:
    command = ["prepare", home / "text.txt", "--train-bpe", "320", "--length", "16", "--hold-out", "4", "--out"]
    first = imdm(*command, tmp_path / "rows", "--part", "1/2")
    assert first.returncode == 0, first.stderr
    assert "part 1 of 2" in first.stdout
    assert "missing: 2" in first.stdout
    assert "these are missing or unfinished: 2; make them (--part = 2/2)" in refused(imdm(*command, tmp_path / "rows"))
    second = imdm(*command, tmp_path / "rows", "--part", "2/2", "--processes", "2")
    assert "none is missing; run the same without --part" in second.stdout
    done = imdm(*command, tmp_path / "rows")
    assert done.returncode == 0, done.stderr
    assert "merging 2 parts" in done.stderr
    assert imdm(*command, tmp_path / "whole").returncode == 0
    assert contents(tmp_path / "rows") == contents(tmp_path / "whole")
    again = imdm(*command, tmp_path / "rows", "--part", "1/2")
    assert "the rows are finished" in again.stdout


# Memory


LIMITED = """
import json, re, resource, sys
from pathlib import Path
from imdm.data import packing
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.tokenizers import load_tokenizer

if __name__ == "__main__":
    source, tokenizer, out, processes, room = sys.argv[1:]
    packing.SHARD_TOKENS = 1 << 20
    loaded = load_tokenizer(tokenizer)
    how = {"length": 64, "tokenizer": tokenizer}
    prepare(Corpus("sample"), PrepareConfig(**how, limit=3000), out + "-first", tokenizer=loaded)
    used = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(room), used + int(room)))
    try:
        held = Path(source).read_bytes()
    except MemoryError:
        held = b""
    made = prepare(Corpus(source), PrepareConfig(**how), out, tokenizer=loaded, processes=int(processes))
    print(json.dumps({"held": len(held), "documents": made.counts.documents}))
"""


def under_a_limit(tmp_path: Path, megabytes: int, room: int, processes: int) -> None:
    """Text of so many megabytes in a process that may have `room` more, beyond what it has when it begins."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "[MASK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # the quickest there is
    names = {"unk_token": "[UNK]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "words")
    line = ("w" * 499 + " ") * 8 + "\n"
    with open(tmp_path / "text.txt", "w") as file:
        for _ in range((megabytes << 20) // len(line) + 1):
            file.write(line)
    (tmp_path / "limited.py").write_text(LIMITED)
    about = [tmp_path / "text.txt", tmp_path / "words", tmp_path / "rows", processes, room << 20]
    done = subprocess.run(
        [sys.executable, tmp_path / "limited.py", *map(str, about)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["held"] == 0  # all of it at once does not fit
    assert said["documents"] == (megabytes << 20) // len(line) + 1
    assert np.load(tmp_path / "rows/tokens-00000.npy").shape[1] == 64


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory on Linux alone")
def test_text_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    under_a_limit(tmp_path, 40, 32, 1)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory on Linux alone")
@pytest.mark.parametrize("processes", [1, 2])
def test_text_of_two_gigabytes_in_an_eighth_of_that(processes: int, tmp_path: Path) -> None:
    under_a_limit(tmp_path, 2048, 256, processes)
