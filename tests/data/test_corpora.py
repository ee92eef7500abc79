"""Text to rows: sources, tokenizers, packing, resume, and what is refused."""

from __future__ import annotations

import io
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from imdm.core.errors import UserError
from imdm.data.corpora import PRESETS, Corpus, unspace, unspace_wikitext
from imdm.data.encoding import Encoded
from imdm.data.packing import Packer, PrepareConfig, prepare
from imdm.data.prepared import Prepared, PreparedSource
from imdm.data.text import PreparedData, TextData
from imdm.data.tokenizers import load_tokenizer, special_ids, tokenizer_hash, train_bpe

SENTENCES = [f"The {a} {v} the {b}." for a in ("cat", "dog", "bird") for v in ("saw", "met") for b in ("sea", "moon")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(SENTENCES * 5, 320).save_pretrained(folder)
    return folder


def manifest(**changes: object) -> Prepared:
    settings = {"source": "", "identity": [], "split": "train", "length": 6, "packing": "wrapped", "limit": None}
    settings |= {"tokenizer": "", "vocab_size": 100, "mask_token_id": 99, "begin": 1, "end": 2, "pad": 0}
    return Prepared(**(settings | changes))


def test_wrapped_packing_by_hand() -> None:
    packer = Packer(manifest())
    assert packer.rows(Encoded.of([[10, 11, 12], [13]])).tolist() == [[1, 10, 11, 12, 2, 2]]
    assert packer.carry.tolist() == [13, 2]
    assert packer.rows(Encoded.of([[14, 15, 16, 17, 18]])).tolist() == [[1, 13, 2, 14, 15, 2], [1, 16, 17, 18, 2, 2]]
    assert packer.carry.tolist() == []


def test_unwrapped_packing_by_hand() -> None:
    packer = Packer(manifest(packing="unwrapped"))
    assert packer.rows(Encoded.of([[10, 11], [10, 11, 12, 13, 14, 15]])).tolist() == [
        [1, 10, 11, 2, 0, 0],
        [1, 10, 11, 12, 13, 2],
    ]


@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_every_format_gives_the_same_documents(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"corpus.{ending}"
    write(path, SENTENCES)
    assert list(Corpus(str(path)).documents()) == SENTENCES
    assert list(Corpus(str(tmp_path)).documents()) == SENTENCES


def write(path: Path, texts: list[str]) -> None:
    if path.suffix == ".txt":
        path.write_text("\n".join(texts) + "\n\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"text": texts}), path)


def test_a_folder_named_after_splits_is_read_by_split(tmp_path: Path) -> None:
    for name, texts in (("train-00", SENTENCES[:3]), ("train-01", SENTENCES[3:5]), ("valid", SENTENCES[5:])):
        write(tmp_path / f"{name}.txt", texts)
    assert list(Corpus(str(tmp_path)).documents()) == SENTENCES[:5]
    assert list(Corpus(str(tmp_path), split="valid").documents()) == SENTENCES[5:]
    with pytest.raises(UserError, match="no .* file for 'test'"):
        Corpus(str(tmp_path), split="test").check()


class Hub:
    """A stand-in for the hub: it knows one dataset, which comes as a script."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self.rows, self.asked = rows, list[tuple[object, ...]]()

    def load(
        self,
        name: str,
        config: str | None = None,
        *,
        split: str,
        streaming: bool,
        revision: str | None = None,
        data_dir: str | None = None,
    ) -> object:
        assert streaming
        assert revision is None or config is None  # the hub's own parquet files know folders, not configurations
        self.asked.append((name, config or data_dir, split, revision))
        if name == "nobody/nothing":
            raise ValueError("Dataset 'nobody/nothing' doesn't exist on the Hub\nmore words")
        if revision is None:
            raise RuntimeError(f"Dataset scripts are no longer supported, but found {name}.py")
        return self.rows


def test_datasets_of_the_hub_are_streamed_and_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"sentence": "he did n't , of course"}, {"sentence": "  "}, {"sentence": "mr. <unk> is N"}])
    monkeypatch.setattr("datasets.load_dataset", hub.load)
    assert list(Corpus("ptb", split="valid").documents()) == ["he didn't, of course", "mr. <unk> is N"]
    name = "ptb-text-only/ptb_text_only"
    assert hub.asked == [(name, None, "validation", None), (name, None, "validation", "refs/convert/parquet")]
    with pytest.raises(UserError, match="some/where, row 1 is broken"):
        list(Corpus("some/where").documents())
    assert "he did n't , of course" in Corpus("some/where", split="test", field="sentence").documents()
    assert hub.asked[-1][2] == "test"
    with pytest.raises(UserError, match="scientific_papers, row 1 is broken"):
        list(Corpus("arxiv", split="valid").documents())
    assert hub.asked[-1] == ("armanc/scientific_papers", "arxiv", "validation", "refs/convert/parquet")
    with pytest.raises(UserError, match="^dataset 'nobody/nothing' cannot be loaded: Dataset 'nobody/nothing' doesn't"):
        list(Corpus("nobody/nothing").documents())
    with pytest.raises(UserError, match="unknown split of lambada 'train'; known: valid"):
        Corpus("lambada").check()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_a_held_out_split(name: str) -> None:
    Corpus(name, split="valid").check()
    assert PRESETS[name].hub.count("/") == 1
    assert PRESETS[name].clean("Plain words stay.") == "Plain words stay."


def test_wikitext_is_put_together() -> None:
    spaced = 'a well @-@ known " band " sold 1 @,@ 000 records , i.e. 2 @.@ 5 % ( of 40 )'
    assert unspace_wikitext(spaced) == 'a well-known "band" sold 1,000 records, i.e. 2.5% (of 40)'


@pytest.mark.parametrize("names", [("a", "valid"), ("train/a", "valid/b"), ("book", "dev-00"), ("x", "validation/y")])
def test_what_is_called_valid_is_held_out(names: tuple[str, str], tmp_path: Path) -> None:
    for name, texts in zip(names, (SENTENCES[:5], SENTENCES[5:]), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / f"{name}.txt", texts)
    write(tmp_path / "test.txt", ["never read"])
    assert Corpus(str(tmp_path)).has_splits()
    assert list(Corpus(str(tmp_path)).documents()) == SENTENCES[:5]
    assert list(Corpus(str(tmp_path), split="valid").documents()) == SENTENCES[5:]


def test_names_that_only_begin_like_a_split(tmp_path: Path) -> None:
    for name in ("testament", "training", "validity"):
        write(tmp_path / f"{name}.txt", [name])
    assert not Corpus(str(tmp_path)).has_splits()
    assert len(list(Corpus(str(tmp_path)).documents())) == 3


def test_without_a_valid_file_some_of_train_is_held_out_and_test_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", SENTENCES)
    write(tmp_path / "test.txt", ["never read"])
    assert list(Corpus(str(tmp_path), split="valid", hold_out=4).documents()) == SENTENCES[3::4]


def test_json_lines_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps({"body": text}) + "\n" for text in SENTENCES)
    for field, expected in (("body", SENTENCES), ("text", lines.splitlines())):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        assert list(Corpus("-", field=field).documents()) == expected


def test_other_text_of_the_same_size_is_noticed(tmp_path: Path, tokenizer: Path) -> None:
    config = PrepareConfig(length=16, tokenizer=str(tokenizer))
    write(tmp_path / "a.txt", SENTENCES * 5)
    prepare(Corpus(str(tmp_path / "a.txt")), config, tmp_path / "rows")
    write(tmp_path / "a.txt", list(reversed(SENTENCES)) * 5)
    with pytest.raises(UserError, match="was made of other text; choose another folder"):
        prepare(Corpus(str(tmp_path / "a.txt")), config, tmp_path / "rows")


def test_without_splits_some_documents_are_held_out(tmp_path: Path) -> None:
    write(tmp_path / "all.txt", SENTENCES)
    train = list(Corpus(str(tmp_path), hold_out=4).documents())
    valid = list(Corpus(str(tmp_path), split="valid", hold_out=4).documents())
    assert valid == SENTENCES[3::4]
    assert sorted(train + valid) == sorted(SENTENCES)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("eins\nzwei — drei\n".encode())))
    assert list(Corpus("-").documents()) == ["eins", "zwei — drei"]


BROKEN = {
    "corpus.txt": b"fine\n\xff\xfe broken\nfine too\n",
    "corpus.jsonl": b'{"text": "fine"}\n{"text": 3}\nnot json\n{"other": "x"}\n{"text": "fine too"}\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_stop_or_are_counted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(UserError, match=rf"{name}, line 2 is broken .* skip broken rows .skip_broken"):
        list(Corpus(str(tmp_path / name)).documents())
    corpus = Corpus(str(tmp_path / name), skip_broken=True)
    assert list(corpus.documents()) == ["fine", "fine too"]
    assert corpus.broken == (1 if name.endswith("txt") else 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "no such file or folder; by name there are sample, ag-news, arxiv, lambada, lm1b"),
        ("EMPTY", "no .txt, .jsonl, .parquet file for 'train' in that folder"),
        ("EMPTY/odd.csv", ".csv is not known; known: .txt, .jsonl, .parquet"),
    ],
)
def test_sources_that_cannot_be_read(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("a,b")
    with pytest.raises(UserError, match=message):
        Corpus(source.replace("EMPTY", str(tmp_path))).check()


def test_the_sample_that_comes_with_the_package() -> None:
    texts = list(Corpus("sample").documents())
    assert 900_000 < sum(len(text.encode()) + 1 for text in texts) < 1_100_000
    held_out = list(Corpus("sample", split="valid").documents())
    assert not set(texts) & set(held_out)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("by", [None, "title"])
def test_paragraphs_are_joined_into_documents(tmp_path: Path, ending: str, by: str | None) -> None:
    """Of at least 40 characters; never of two files, nor of two titles."""
    rows = [{"title": f"book {i // 5}", "text": f"paragraph number {i:02}"} for i in range(12)]  # 19 characters each
    assert len("\n\n".join(row["text"] for row in rows[:2])) == 40
    for number, part in enumerate((rows[:8], rows[8:])):
        file = tmp_path / "books" / f"{number}.{ending}"
        file.parent.mkdir(exist_ok=True)
        if ending == "jsonl":
            file.write_text("\n".join(map(json.dumps, part)))
        else:
            pa = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(part), file)
    corpus = Corpus(str(tmp_path / "books"), join=40, join_by=by)
    found = [[int(part[-2:]) for part in text.split("\n\n")] for text in corpus.documents()]
    apart = [[0, 1], [2, 3], [4], [5, 6], [7], [8, 9], [10, 11]]
    assert found == (apart if by else [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]])
    held = [list(replace(corpus, split=split, hold_out=3).documents()) for split in ("train", "valid")]
    assert sorted(held[0] + held[1]) == sorted(corpus.documents())
    plain = Corpus(str(tmp_path / "books"))
    assert len(list(plain.documents())) == 12
    assert len({str(one.identity()) for one in (plain, corpus, replace(corpus, join=41))}) == 3
    with pytest.raises(UserError, match="give how long they are at least"):
        replace(plain, join_by="title").check()
    assert len(list(replace(corpus, join=41).documents())) == 5
    wrong = "no column 'author'" if ending == "parquet" else "line 1 is broken .no field 'author'."
    with pytest.raises(UserError, match=wrong):
        list(replace(corpus, join_by="author").documents())
    (tmp_path / "plain.txt").write_text("one\ntwo")
    with pytest.raises(UserError, match="plain text has no fields"):
        Corpus(str(tmp_path / "plain.txt"), join=40, join_by="title").check()


def test_lm1b_is_put_back_together() -> None:
    spaced = "He did n't say \" yes , of course \" ( at all ) : it 's $ 5 ."
    assert unspace(spaced) == "He didn't say \"yes, of course\" (at all): it's $5."


def prepared(tmp_path: Path, tokenizer: Path, **changes: object) -> PreparedSource:
    write(tmp_path / "c.txt", SENTENCES * 20)
    config = PrepareConfig(length=16, tokenizer=str(tokenizer), **changes)
    prepare(Corpus(str(tmp_path / "c.txt")), config, tmp_path / "out")
    return PreparedSource(tmp_path / "out")


def test_rows_say_what_was_written(tmp_path: Path, tokenizer: Path) -> None:
    source, words = prepared(tmp_path, tokenizer), load_tokenizer(tokenizer)
    special = special_ids(words)
    rows = source.rows(torch.arange(len(source)))["tokens"]
    assert (rows[:, 0] == special.begin).all()
    assert (rows[:, -1] == special.end).all()
    stream = rows[:, 1:-1].flatten().tolist()
    ids = [i for text in SENTENCES * 20 for i in (*words(text, add_special_tokens=False)["input_ids"], special.end)]
    assert stream == ids[: len(stream)]
    assert len(ids) - len(stream) < 14
    m = source.manifest
    assert (m.counts.documents, m.counts.rows) == (240, len(source))
    assert m.counts.tokens == len(ids) - 240
    assert (m.vocab_size, m.mask_token_id) == (special.vocab_size, special.mask)
    assert not (rows == special.mask).any()


def test_a_stopped_run_goes_on_to_the_same_rows(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imdm.data.encoding.AT_ONCE", 16)
    monkeypatch.setattr("imdm.data.packing.SHARD_TOKENS", 600)
    whole = prepared(tmp_path / "a", tokenizer) if (tmp_path / "a").mkdir() is None else None
    (tmp_path / "b").mkdir()

    def stop(counts: object) -> None:
        if counts.documents >= 150:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    write(tmp_path / "b/c.txt", SENTENCES * 20)
    config = PrepareConfig(length=16, tokenizer=str(tokenizer))
    with pytest.raises(KeyboardInterrupt):
        prepare(Corpus(str(tmp_path / "b/c.txt")), config, tmp_path / "b/out", on_progress=stop)
    with pytest.raises(UserError, match="is unfinished; run the same 'imdm prepare' again"):
        PreparedSource(tmp_path / "b/out")
    assert list((tmp_path / "b/out").glob("tokens-*.npy"))
    again = prepared(tmp_path / "b", tokenizer)
    assert len(whole.manifest.shards) > 2
    assert whole.manifest.shards == again.manifest.shards
    index = torch.tensor([0, len(whole) - 1, 7, len(whole) // 2])
    assert torch.equal(whole.rows(index)["tokens"], again.rows(index)["tokens"])
    assert whole.fingerprint == again.fingerprint


def test_other_settings_into_the_same_folder_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    prepared(tmp_path, tokenizer)
    with pytest.raises(UserError, match="was made with packing = 'wrapped', not 'unwrapped'"):
        prepared(tmp_path, tokenizer, packing="unwrapped")


def test_damaged_shards_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    prepared(tmp_path, tokenizer)
    np.save(tmp_path / "out/tokens-00000.npy", np.zeros((2, 16), np.uint16))
    with pytest.raises(UserError, match="does not hold .* rows of .* ids; delete the folder and prepare again"):
        PreparedSource(tmp_path / "out")


def test_too_little_text_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "c.txt", ["Hi."])
    with pytest.raises(UserError, match="too little text for one row of 64 tokens"):
        prepare(Corpus(str(tmp_path / "c.txt")), PrepareConfig(length=64, tokenizer=str(tokenizer)), tmp_path / "out")


def test_text_data_prepares_both_splits_with_one_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "c.txt", SENTENCES * 20)
    data = TextData(path=str(tmp_path / "c.txt"), train_bpe=320, length=16)
    data.check()
    ready = data.ready(tmp_path / "data")
    assert isinstance(ready, PreparedData)
    train, valid = ready.source(0), ready.held_out(0)
    assert train.manifest.tokenizer == valid.manifest.tokenizer
    assert train.manifest.counts.documents == 236
    assert valid.manifest.counts.documents == 4
    assert ready.vocabulary() == (len(load_tokenizer(tmp_path / "data/train")), 3)
    assert data.ready(tmp_path / "data") == ready
    with pytest.raises(UserError, match="give either a tokenizer .* or train_bpe"):
        TextData(path=str(tmp_path / "c.txt")).check()


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer files in that folder"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no such folder, nor a hub id"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="at least 300 ids"):
        train_bpe(SENTENCES, 100)


def test_a_tokenizer_is_known_by_its_hash(tokenizer: Path) -> None:
    assert tokenizer_hash(load_tokenizer(tokenizer)) == tokenizer_hash(load_tokenizer(tokenizer))
    assert tokenizer_hash(load_tokenizer(tokenizer)) != tokenizer_hash(train_bpe(SENTENCES[:1], 310))


def test_settings_of_whoever_saved_the_tokenizer_do_not_matter(tokenizer: Path, tmp_path: Path) -> None:
    """A tokenizer.json may carry padding and truncation; rows would be full of padding."""
    loaded = load_tokenizer(tokenizer)
    loaded.backend_tokenizer.enable_padding(length=64)
    loaded.backend_tokenizer.enable_truncation(2)
    loaded.save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path).backend_tokenizer.encode(SENTENCES[0]).ids) > 2
    assert len(load_tokenizer(tmp_path).backend_tokenizer.encode(SENTENCES[0]).ids) < 64


def test_memory_does_not_grow_with_the_text(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imdm.data.encoding.AT_ONCE", 200)
    monkeypatch.setattr("imdm.data.packing.SHARD_TOKENS", 4000)
    config, peaks = PrepareConfig(length=16, tokenizer=str(tokenizer)), []
    for times in (100, 100, 800):  # the first warms up
        source = tmp_path / f"{times}.txt"
        write(source, SENTENCES * times)
        tracemalloc.start()
        prepare(Corpus(str(source)), config, tmp_path / f"rows-{len(peaks)}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.3 * peaks[1]


def test_too_little_held_out_text_is_said_to_be_held_out(tmp_path: Path) -> None:
    """There is enough to train on: the sentence says which part is short, and what to do."""
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES[:1] * 60))
    data = TextData(path=str(tmp_path / "text.txt"), train_bpe=300, length=64)
    with pytest.raises(
        UserError, match=r"too little text for one row of 64 tokens: of the held-out part, one document in"
    ):
        data.ready(tmp_path / "data")
    assert not (tmp_path / "data" / "train").exists()
