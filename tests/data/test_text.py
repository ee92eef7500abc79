"""Text out and text measured: the writer, the judge against plain transformers, entropy against scipy, and by hand."""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

import imdm
import imdm.cli
from imdm.cli.app import app
from imdm.core.errors import UserError
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.prepared import PreparedSource
from imdm.data.source import TokenSource
from imdm.data.statistics import sample_entropy
from imdm.data.text import TextData
from imdm.data.tokenizers import load_tokenizer, train_bpe
from imdm.evaluation import Conditional, Evaluation, Judge, Subject, load_embedder, load_judge, matched, measure
from imdm.evaluation.conditional import prompt_continuations
from imdm.evaluation.fetching import fetch
from imdm.evaluation.text import found_in, read_before
from imdm.exporting import export
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.objectives import next_log_probs
from imdm.sampling import Revealed, Sampling
from imdm.writer import Writer, load
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of text with its tokenizer, and prepared rows beside it."""
    home = tmp_path_factory.mktemp("text")
    tokenizer = train_bpe(SENTENCES * 5, 320)
    torch.manual_seed(0)
    config = MaskedDiffusionConfig(
        vocab_size=len(tokenizer), mask_token_id=3, length=24, width=16, blocks=1, heads=2, condition=8
    )
    MaskedDiffusionLM(config).save_pretrained(home / "model")
    tokenizer.save_pretrained(home / "model")
    (home / "text.txt").write_text("\n".join(SENTENCES * 10))
    prepare(Corpus(str(home / "text.txt")), PrepareConfig(length=24, tokenizer=str(home / "model")), home / "rows")
    return home


@pytest.fixture(scope="module")
def writer(folder: Path) -> Writer:
    return imdm.load(folder / "model")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    home = tmp_path_factory.mktemp("judge")
    tokenizer = train_bpe(SENTENCES, 300)
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 1024, "bos_token_id": 0, "eos_token_id": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that its opinions differ
    model.save_pretrained(home)
    tokenizer.save_pretrained(home)
    return replace(load_judge(str(home)), special=True)  # as one reads rows of a stream


# Writing


def test_a_prompt_is_continued_and_kept(writer: Writer) -> None:
    texts = writer.write("The cat", steps=3, num=2, seed=4)
    assert [text.prompt for text in texts] == ["The cat"] * 2
    assert all(text.text.startswith("The cat") for text in texts)
    assert all(len(text.tokens) == 24 for text in texts)
    assert texts[0].tokens[0] == 0
    assert texts[0].tokens[-1] == 1
    assert 3 not in texts[0].tokens
    assert max(text.evaluations for text in texts) <= 3
    assert texts[0].text != texts[1].text
    assert writer.write("The cat", steps=3, num=2, seed=4) == texts
    assert writer.write(["The cat", "A dog"], steps=2, length=12)[1].prompt == "A dog"


def test_from_nothing(writer: Writer) -> None:
    (text,) = writer.write(steps=2, length=10)
    assert text.revealed_at.count(-1) == 2  # begin and end
    assert len(text.tokens) == 10


def test_blanks_are_filled_and_the_rest_is_kept(writer: Writer) -> None:
    (text,) = writer.infill("The ___ saw the ___.", steps=2, blank=2)
    assert text.revealed_at.count(-1) == len(text.tokens) - 4
    assert text.text.startswith("The")
    assert text.text.endswith(".")
    the = writer.tokenizer("The", add_special_tokens=False)["input_ids"]
    assert text.tokens[1 : 1 + len(the)] == the  # no lone space before the blank, which brings its own
    assert " saw the" in text.text


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Of GPT-2's kind, of BERT's and of Llama's, with a truncation and a padding that whoever saved it has set."""
    names = list(SPECIAL.values())
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder, trainer = decoders.WordPiece(), trainers.WordPieceTrainer(vocab_size=200, special_tokens=names)
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>"))
        parts, trainer = (pre_tokenizers, decoders), trainers.BpeTrainer(vocab_size=200, special_tokens=names)
        made.pre_tokenizer, made.decoder = (
            part.ByteLevel() if kind == "bytes" else part.Metaspace()  # type: ignore[attr-defined]
            for part in parts
        )
    made.train_from_iterator(SENTENCES, trainer)
    made.enable_truncation(3)
    made.enable_padding(length=40)
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


class Loud(PreTrainedTokenizerFast):
    def _decode(self, *given: Any, **settings: Any) -> str:
        return super()._decode(*given, **settings).upper()


@pytest.mark.parametrize("kind", ["bytes", "wordpiece", "metaspace"])
def test_texts_are_read_and_spelt_as_by_the_tokenizer(kind: str) -> None:
    """Though by its inner part alone, unless it does more than that."""
    tokenizer = tokenizer_of(kind)
    model = tiny_model(vocab_size=len(tokenizer), mask_token_id=tokenizer.mask_token_id, length=24)
    writer = Writer(model, tokenizer)
    assert writer._direct
    generator = torch.Generator().manual_seed(0)
    for text in [*SENTENCES, "  The cat , and THE dog .", "Épée\n\n 猫", "a </s", " ", "a <s> <mask> b"]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert writer.encode(text) == ids
        drawn = torch.randint(len(tokenizer), (12,), generator=generator).tolist()
        for some in (ids, [token for token in drawn if token != tokenizer.eos_token_id]):
            said = tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert writer.decode(some) == said
    loud = Writer(model, Loud(tokenizer_object=tokenizer.backend_tokenizer, **SPECIAL))
    assert not loud._direct
    tokenizer.add_tokens(["zebra"])  # a change is seen, and so is one of a copy
    assert writer.encode("zebra") == copy.deepcopy(writer).encode("zebra") == [len(tokenizer) - 1]
    assert loud.decode(writer.encode(SENTENCES[0])) == writer.decode(writer.encode(SENTENCES[0])).upper()


def test_a_word_that_has_no_token_is_refused() -> None:
    """Else it would be missing from the text that goes on from it. The BPE of Llama's kind knows no other letters; by
    bytes everything can be spelt."""
    for kind, text, part in (
        ("wordpiece", "The cat saw 猫猫 .", "猫猫"),
        ("metaspace", "Ω", "Ω"),
    ):
        tokenizer = tokenizer_of(kind)
        model = tiny_model(vocab_size=len(tokenizer), mask_token_id=tokenizer.mask_token_id, length=24)
        with pytest.raises(UserError, match=f"has '{part}', which this tokenizer does not know"):
            Writer(model, tokenizer).write(text)


def test_documents_stand_on_lines_of_their_own(writer: Writer) -> None:
    ids = writer.tokenizer("The cat.", add_special_tokens=False)["input_ids"]
    assert writer.decode([0, *ids, 1, *ids, 1, 1, *ids, 1]) == "The cat.\nThe cat.\nThe cat."


def test_pieces_put_together_are_the_text(writer: Writer) -> None:
    (text,) = writer.write("The cat", steps=4)
    pieces = writer.pieces(text)
    assert "".join(piece.text for piece in pieces) == text.text
    assert pieces[0].step == -1
    assert max(piece.step for piece in pieces) <= 3


def test_a_trace_is_the_text_as_it_appeared(writer: Writer) -> None:
    (text,) = writer.write("The cat", steps=3, trace=True)
    assert text.trace is not None
    assert len(text.trace.texts) == 4
    assert text.trace.texts[-1] == text.text
    assert text.trace.texts[0].startswith("The cat░")
    hidden = [shown.count("░") for shown in text.trace.texts]
    assert hidden == sorted(hidden, reverse=True)
    assert [p < 0 for p in text.trace.log_probs] == [step >= 0 for step in text.revealed_at]
    assert writer.write("The cat", steps=3)[0].trace is None
    assert writer.infill("The ___ saw.", trace=True)[0].trace is not None


def test_several_texts_are_filled_in_at_once(writer: Writer) -> None:
    """Texts of different length; text i has the i-th key of the seed, as in `write`."""
    texts = ["The ___ saw the dog.", "A ___.", "The ___ saw the dog."]
    heard, told = list[int](), list[Revealed]()
    found = writer.infill(texts, num=2, steps=3, seed=5, on_progress=heard.append, on_step=told.append)
    assert [text.prompt for text in found] == [text for text in texts for _ in range(2)]
    assert heard[-1] == 6 * 4
    assert {int(row) for one in told for row in one.sequences} == set(range(6))
    for text in found:
        assert text.revealed_at.count(-1) == len(text.tokens) - 4
    assert found[0].tokens != found[4].tokens
    alone = writer.infill(texts[0], num=2, steps=3, seed=5)
    assert [text.tokens for text in found[:2]] == [text.tokens for text in alone]  # the first has the first keys
    assert writer.infill([texts[0]], num=2, steps=3, seed=5) == alone


def test_writers_and_texts_are_shown_in_a_line(writer: Writer) -> None:
    (text,) = writer.write("The cat", steps=2, temperature=0)
    assert repr(text).startswith("Text('The cat")
    assert repr(text).endswith("24 tokens, 2 evaluations)")
    assert repr(writer).startswith("Writer(MaskedDiffusionLM(0.0M parameters, 1 blocks of width 16")
    assert len(repr(text)) < 120
    assert len(repr(writer)) < 200


def test_what_is_typed_is_text(writer: Writer) -> None:
    """The names of special tokens are characters like others, whatever the tokenizer."""
    typed = "A <mask> <eos>"
    (found,) = writer.write(typed)
    assert found.text.startswith(typed)
    assert found.revealed_at.count(-1) == 2 + len(writer.encode(typed))
    (filled,) = writer.infill("<eos> <mask> b", marker="<mask>", blank=2)
    assert filled.text.startswith("<eos>")
    assert filled.text.endswith(" b")
    assert len([step for step in filled.revealed_at if step >= 0]) == 2

    backend = Tokenizer(WordLevel({"[MASK]": 0, "[SEP]": 1, "[UNK]": 2, "a": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", sep_token="[SEP]", unk_token="[UNK]")
    other = Writer(tiny_model(vocab_size=4, mask_token_id=0, length=8), words)
    assert other.encode("a b [UNK] a") == [3, 2, 2, 3]
    with pytest.raises(
        UserError, match=r"'a \[MASK\]' has '\[MASK\]', which this tokenizer cannot read as text; leave it"
    ):
        other.write("a [MASK]")


def test_several_threads_write_with_one_writer(writer: Writer) -> None:
    asked = [(prompt, seed) for seed in range(6) for prompt in ("The cat", "A dog saw", "It")]
    wanted = [writer.write(prompt, seed=seed, num=2, steps=3) for prompt, seed in asked]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: writer.write(one[0], seed=one[1], num=2, steps=3), asked))
    assert found == wanted


def test_eight_steps_unless_given(writer: Writer) -> None:
    assert writer.write("The cat", seed=2) == writer.write("The cat", seed=2, steps=8)
    assert writer.infill("The ___.") == writer.infill("The ___.", steps=8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.write("The cat", policy="keep"), "unknown sampling option 'policy'; known: noise, order, steps"),
        (lambda w: w.infill([]), "nothing to fill in: there is no text"),
        (lambda w: w.infill(["The ___.", "none"]), "the text 'none' has no '___'"),
        (lambda w: w.infill(["The ___.", "A ___ saw"], num=0), "num = 0"),
        (lambda w: w.write(""), "the prompt is empty; leave it out to write from nothing"),
        (lambda w: w.write(["fine", "  "]), "the prompt is empty"),
        (lambda w: w.write("the cat saw " * 30), "with 24 in all there is no room to write"),
        (lambda w: w.infill("nothing to do"), "the text 'nothing to do' has no '___'"),
        (lambda w: w.infill("___ " * 20), "the model takes at most 24"),
    ],
)
def test_prompts_that_cannot_be_used(writer: Writer, call: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(writer)  # type: ignore[operator]


def test_a_tokenizer_of_another_model_is_refused(writer: Writer) -> None:
    with pytest.raises(UserError, match="they do not belong together"):
        Writer(tiny_model(), writer.tokenizer)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has no tokenizer beside it"):
        load(tmp_path)


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8", "mixed"])
def test_an_exported_model_writes_the_same(writer: Writer, folder: Path, tmp_path: Path, weights: str) -> None:
    """Folded, in fewer bits, with tokenizer and card; loaded in float32."""
    out = export(folder / "model", tmp_path / "small", weights=weights).folder  # type: ignore[arg-type]
    small = imdm.load(out)
    assert small.model.config.condition == 0
    assert small.model.dtype == torch.float32
    kinds = {w.dtype for w in load_file(out / "model.safetensors").values()}
    floats = {"float32": {torch.float32}, "bf16": {torch.bfloat16}}
    assert kinds == floats[weights] if weights in floats else torch.uint8 in kinds
    assert "mask single" in (out / "README.md").read_text()
    assert ("bits a weight" in (out / "README.md").read_text()) == (weights in ("int8", "mixed"))
    assert 'imdm.load("small")` writes with it' in (out / "README.md").read_text()
    tokens = torch.tensor([[0, 3, 3, 3, 5, 1]])
    wanted, found = (m(m.noised(tokens)) for m in (writer.model, small.model))
    assert torch.allclose(wanted.exp(), found.exp(), atol=1e-5 if weights == "float32" else 0.02)
    assert small.write("The cat", steps=2)[0].text.startswith("The cat")
    with pytest.raises(UserError, match="there already"):
        export(folder / "model", out)
    card = tmp_path / "card.md"
    card.write_text("# Mine")
    again = ["export", str(folder / "model"), "--out", str(tmp_path / "again"), "--weights", weights]
    done = CliRunner().invoke(app, [*again, "--card", str(card)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again" / "README.md").read_text() == "# Mine"
    assert "half" in str(CliRunner().invoke(app, [*again[:-1], "half"]).exception)


# The judge


def by_hand(judge: Judge, text: str) -> tuple[float, int]:
    """Plain transformers, one text, no padding."""
    ids = judge.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = judge.model(input_ids=ids, labels=ids).loss
    return float(loss) * (ids.shape[1] - 1), ids.shape[1] - 1


def test_the_judge_agrees_with_plain_transformers(judge: Judge) -> None:
    total = [by_hand(judge, text) for text in SENTENCES]
    expected = np.exp(sum(nll for nll, _ in total) / sum(n for _, n in total))
    for size in (1, 3, 64):
        found = replace(judge, batch_size=size).score(SENTENCES)
        assert found.perplexity() == pytest.approx(expected, rel=1e-4)
        assert found.nll.tolist() == pytest.approx([nll for nll, _ in total], rel=1e-4)


def test_end_of_text_counts_once(judge: Judge) -> None:
    """Text after an end-of-text counts; further end-of-text tokens do not."""
    once, twice = judge.score(["The cat<eos>saw"]), judge.score(["The cat<eos>saw<eos><eos>"])
    assert torch.equal(once.count, twice.count)
    assert float(once.nll) == pytest.approx(float(twice.nll), rel=1e-5)
    tokens = judge.tokenizer("The cat<eos>saw", add_special_tokens=False)["input_ids"]
    assert float(once.count) == len(tokens) - 1


def test_long_texts_are_read_in_windows(judge: Judge) -> None:
    text = " ".join(SENTENCES * 30)
    ids = judge.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > 1024
    windows = -(-len(ids) // 1024)
    assert float(judge.score([text]).count) == len(ids) - windows


def test_a_begin_token_is_read_but_not_counted(judge: Judge) -> None:
    plain, begun = judge.score(["The cat saw"]), replace(judge, begin=0).score(["The cat saw"])
    assert float(begun.count) == float(plain.count) + 1  # now the first word counts too


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """One of our own models that read from left to right, with the tokenizer of the text."""
    torch.manual_seed(2)
    sizes = {"length": 24, "width": 16, "blocks": 1, "heads": 2, "condition": 8, "causal": True}
    tokenizer = load_tokenizer(folder / "model")
    model = MaskedDiffusionLM(MaskedDiffusionConfig(vocab_size=len(tokenizer), mask_token_id=3, **sizes))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_of_our_own_judges(own: Path) -> None:
    judge = load_judge(str(own), name="mine")
    assert judge.label == "mine"
    texts = ["The cat sat.", "A dog saw the cat and the bird."]
    for text in texts:
        for given in (text, "<bos>" + text):  # rows of a stream hold their begin token as text, or do without
            ids = torch.tensor(judge.ids([given]))
            assert ids.shape[1] <= 24
            score = judge.score([given])
            assert float(score.nll) == pytest.approx(-float(next_log_probs(judge.model.model, ids).sum()), rel=1e-5)
            assert int(score.count) == ids.shape[1] - 1
    assert torch.allclose(judge.score(texts).nll[:1], judge.score(texts[:1]).nll, rtol=1e-5)  # padding is not seen
    assert judge.features(texts).shape == (2, 16)
    long = judge.score(["The cat saw the bird. " * 20])
    assert int(long.count) < len(judge.ids(["The cat saw the bird. " * 20])[0]) - 1  # windows of 24


def test_diffusion_models_and_models_of_ids_do_not_judge(folder: Path, own: Path) -> None:
    with pytest.raises(UserError, match="is a diffusion model"):
        load_judge(str(folder / "model"))
    for file in own.glob("token*"):
        file.unlink()
    with pytest.raises(UserError, match="has no tokenizer beside it"):
        load_judge(str(own))


def subject(folder: Path, **changes: object) -> Subject:
    model = MaskedDiffusionLM.from_pretrained(folder / "model")
    rows = PreparedSource(folder / "rows")
    settings = {"how": Sampling(steps=2), "samples": 12, "data": rows, "train": rows}
    settings |= {"tokenizer": load_tokenizer(folder / "model")}
    return Subject(model, **(settings | changes))


def test_generative_perplexity_is_the_judges(folder: Path, judge: Judge) -> None:
    s = subject(folder, judge=judge)
    found = measure(["gen_ppl", "real_ppl"], s)
    assert found["gen_ppl"].value == pytest.approx(judge.score(Evaluation(s).texts()).perplexity())
    assert found["gen_ppl"].judge == judge.name
    assert 0 < found["gen_ppl"].stderr < found["gen_ppl"].value
    assert found["gen_ppl"].n == 12
    assert found["real_ppl"].value != found["gen_ppl"].value
    assert (
        Evaluation(s).decode(s.data.rows(torch.arange(1))["tokens"])[0].startswith("<bos>")
    )  # special tokens are kept


def test_judges_that_are_missing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path))
    with pytest.raises(UserError, match="judge 'smollm2' is not here; get it with 'imdm judge fetch smollm2'"):
        load_judge("smollm2")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_judge(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="unknown judge to fetch 'gpt9'; known: smollm2"):
        fetch("gpt9")
    with pytest.raises(UserError, match="'gen_ppl' needs a judge"):
        measure(["gen_ppl"], subject(folder))


# Conditional generation


def unwrapped(folder: Path, tmp_path: Path) -> PreparedSource:
    texts = [" ".join(SENTENCES[i:] + SENTENCES[:i]) if i % 3 else "Short." for i in range(12)]
    (tmp_path / "d.txt").write_text("\n".join(texts))
    config = PrepareConfig(length=24, tokenizer=str(folder / "model"), packing="unwrapped")
    prepare(Corpus(str(tmp_path / "d.txt")), config, tmp_path / "rows")
    return PreparedSource(tmp_path / "rows")


@pytest.mark.parametrize("window", ["generated", "sequence"])
def test_the_conditional_protocol(folder: Path, tmp_path: Path, judge: Judge, window: str) -> None:
    rows = unwrapped(folder, tmp_path)
    how = Conditional(prompts=6, prefix=5, continuations=2, window=window, tokens=8)
    s = subject(folder, data=rows, judge=judge, conditional=how, split="test")
    made = prompt_continuations(Evaluation(s))
    documents = rows.rows(torch.tensor([1, 2, 4, 5, 7, 8]))["tokens"]  # the others are too short, and padded
    first = 6 if window == "generated" else 1
    assert made.real == Evaluation(s).decode(documents[:, first : first + 8])
    assert len(made.written) == 12
    assert made.tokens.shape == (12, 8)
    if window == "sequence":
        assert torch.equal(made.tokens[:, :5], documents[:, 1:6].repeat_interleave(2, 0))  # prompt included
        assert made.prompts == [""] * 12
    else:
        assert made.prompts == [text for text in Evaluation(s).decode(documents[:, 1:6]) for _ in range(2)]
    found = measure(["cond_gen_ppl", "cond_entropy"], s)
    assert found["cond_gen_ppl"].n == 12
    assert found["cond_gen_ppl"].judge == judge.name
    assert found["cond_gen_ppl"].split == f"test, {window}[0:8] after 5"
    expected = judge.score(made.written, made.prompts).perplexity()
    assert found["cond_gen_ppl"].value == pytest.approx(expected)


def test_spans_are_filled_between_prefix_and_suffix(folder: Path, tmp_path: Path) -> None:
    rows = unwrapped(folder, tmp_path)
    how = Conditional(prompts=6, prefix=5, suffix=6, continuations=2, tokens=8)
    s = Evaluation(subject(folder, data=rows, conditional=how))
    canvases: list[torch.Tensor] = []
    complete = s.complete
    s.__dict__["complete"] = lambda canvas: canvases.append(canvas) or complete(canvas)
    prompt_continuations(s)
    holes = (canvases[0] == 3).any(0).nonzero()[:, 0].tolist()
    assert holes == list(range(6, 17))  # after the begin token and 5, before 6 and the end token
    assert measure(["cond_entropy"], s)["cond_entropy"].split == "generated[0:8] after 5 before 6"


def test_a_tokenizer_that_pads_with_its_end_token(folder: Path, tmp_path: Path) -> None:
    rows = unwrapped(folder, tmp_path)
    ends = rows.manifest.model_copy(update={"pad": rows.manifest.end})
    rows.manifest = ends
    rows._shards = [np.where(shard == 2, ends.end, shard) for shard in rows._shards]  # as GPT-2's would be
    s = subject(folder, data=rows, conditional=Conditional(prompts=8, prefix=5, continuations=1, tokens=8))
    assert len(prompt_continuations(Evaluation(s)).written) == 8
    with pytest.raises(UserError, match="only 8 held-out documents fill a row of 24 tokens"):
        prompt_continuations(
            Evaluation(subject(folder, data=rows, conditional=Conditional(prompts=9, prefix=5, tokens=8)))
        )


def test_prompts_begin_documents_where_these_are_prepared(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(" ".join(SENTENCES[i:] + SENTENCES[:i]) for i in range(12)))
    text = TextData(path=str(tmp_path / "t.txt"), tokenizer=str(folder / "model"), length=24, with_documents=True)
    ready = text.model_copy(update={"valid": str(tmp_path / "t.txt")}).ready(tmp_path / "data")
    model = MaskedDiffusionLM.from_pretrained(folder / "model")
    s = Subject.before(model, ready, seed=0, samples=4, conditional=Conditional(prompts=12, prefix=5, tokens=8))
    starts = load_tokenizer(folder / "model")([" ".join(SENTENCES[i:]) for i in range(12)], add_special_tokens=False)
    assert s.documents is not None
    rows = s.documents.rows(torch.arange(12))["tokens"]
    assert [row[1:6].tolist() for row in rows] == [ids[:5] for ids in starts["input_ids"]]
    assert prompt_continuations(Evaluation(s)).prompts == [
        p for p in Evaluation(s).decode(rows[:, 1:6]) for _ in range(5)
    ]


def test_a_judge_in_bf16_says_so(judge: Judge) -> None:
    assert judge.label == judge.name
    coarse = replace(judge, precision="bf16")
    assert coarse.label == f"{judge.name} (bf16)"
    assert coarse.identity != judge.identity
    other = replace(judge, model=copy.deepcopy(judge.model))
    next(other.model.parameters()).data.add_(1.0)
    assert other.identity != judge.identity  # the same name, other weights


def test_prompts_are_read_but_not_counted(judge: Judge) -> None:
    """The NLL of the whole, less that of the prompt's own tokens."""
    whole, prompt = "The cat saw the moon.", "The cat saw"
    ids = [*judge.tokenizer(prompt)["input_ids"], *judge.tokenizer(" the moon.")["input_ids"]]
    with torch.no_grad():
        log_p = judge.model(input_ids=torch.tensor([ids])).logits.log_softmax(-1)[0]
    known = len(judge.tokenizer(prompt)["input_ids"])
    expected = -sum(float(log_p[i - 1, ids[i]]) for i in range(known, len(ids)))
    score = judge.score([" the moon."], [prompt])
    assert float(score.nll) == pytest.approx(expected, rel=1e-4)
    assert float(score.count) == len(ids) - known
    assert judge.score([whole]).count > score.count


def test_prompts_that_are_not_there(folder: Path, tmp_path: Path, judge: Judge) -> None:
    rows = unwrapped(folder, tmp_path)
    with pytest.raises(UserError, match="conditional.prompts = 20: only 8 held-out documents fill a row"):
        prompt_continuations(
            Evaluation(subject(folder, data=rows, conditional=Conditional(prompts=20, prefix=5, tokens=8)))
        )
    with pytest.raises(UserError, match="rows of 24 tokens are too short for a prompt of 50"):
        prompt_continuations(Evaluation(subject(folder, data=rows, conditional=Conditional(prompts=2))))


# Measures of text


def test_entropy_is_scipys(folder: Path) -> None:
    s = subject(folder)
    expected = [scipy.stats.entropy(list(Counter(row).values())) for row in Evaluation(s).generation.tokens.tolist()]
    assert sample_entropy(Evaluation(s).generation.tokens).tolist() == pytest.approx(expected)
    assert measure(["entropy"], s)["entropy"].value == pytest.approx(np.mean(expected))


def test_entropies_are_matched_by_temperature(folder: Path) -> None:
    s = subject(folder, samples=64)
    with torch.no_grad():
        s.model.output.weight.normal_()  # so that temperature matters
        s.model.output.bias.normal_(0, 2)
    plain = measure(["entropy"], s)["entropy"].value
    for wanted in (plain - 0.3, plain + 0.2):
        found = matched(s, wanted)
        assert measure(["entropy"], found)["entropy"].value == pytest.approx(wanted, abs=0.005)
        assert (found.how.temperature < 1) == (wanted < plain)
    with pytest.raises(UserError, match="no temperature gives an entropy of 9.000"):
        matched(s, 9.0)


def test_found_in_by_hand() -> None:
    text = np.array([[1, 2, 3, 4, 5, 6]])
    samples = torch.tensor([[9, 1, 2, 3, 9, 9], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    assert found_in(samples, [text], n=3).tolist() == [0.25, 1.0, 0.0]
    assert found_in(samples, [text[:, :4], text[:, 2:]], n=3).tolist() == [0.25, 1.0, 0.0]
    assert found_in(samples, [], n=3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("remembered", [0, 1 << 27])
def test_what_was_read_before_is_found_either_way(monkeypatch: pytest.MonkeyPatch, remembered: int) -> None:
    """Against Python's sets, with the source in memory and passing by; another source is not mistaken for the last."""
    monkeypatch.setattr("imdm.evaluation.text.REMEMBERED", remembered)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 3, (7, 12), generator=generator)
    for size in (3, 40):
        source = TokenSource(torch.randint(0, 3, (size, 12), generator=generator), 4, 3)
        there = {tuple(row[i : i + 6].tolist()) for row in source.tokens for i in range(7)}
        wanted = [sum(tuple(row[i : i + 6].tolist()) in there for i in range(7)) / 7 for row in tokens]
        assert read_before(tokens, source).tolist() == pytest.approx(wanted)
        assert read_before(tokens, source, n=50).shape == (7,)


def test_novelty_and_repetition(folder: Path) -> None:
    rows = PreparedSource(folder / "rows").rows(torch.arange(4))["tokens"]
    s = Evaluation(subject(folder))
    copied = replace(s.generation, tokens=rows)
    s.__dict__["generation"] = copied  # a model that copies
    found = measure(["novelty", "repetition", "distinct_1"], s)
    assert found["novelty"].value == 0
    shown = TokenSource(torch.cat([rows[:3], rows[3:].flip(1)]), s.subject.model.vocab_size, 3)
    held_out = measure(["real_novelty"], replace(s.subject, data=shown, split="valid"))["real_novelty"]
    assert (held_out.value, held_out.split) == (0.25, "valid")  # three rows of four were read, one backwards
    assert 0 < found["distinct_1"].value < 1
    copied_pairs = Evaluation(subject(folder, pairs=TokenSource(rows, s.subject.model.vocab_size, 3)))
    copied_pairs.__dict__["generation"] = copied
    assert measure(["pair_overlap"], copied_pairs)["pair_overlap"].value == 1
    s.__dict__["generation"] = replace(copied, tokens=torch.full_like(rows, 7))
    assert measure(["repetition"], s)["repetition"].value == pytest.approx(1 - 1 / 21)


def test_validation_perplexity_is_exp_of_the_nelbo(folder: Path) -> None:
    found = measure(["nelbo", "val_ppl"], subject(folder, samples=64, split="valid"))
    assert found["val_ppl"].value == pytest.approx(np.exp(found["nelbo"].value))
    assert found["val_ppl"].split == "valid"
    vocabulary = len(load_tokenizer(folder / "model")) - 1
    assert found["val_ppl"].value == pytest.approx(vocabulary, rel=0.2)  # a fresh model knows nothing


def mauve_by_hand(real: torch.Tensor, written: torch.Tensor) -> list[float]:
    compute = pytest.importorskip("mauve").compute_mauve
    texts = {"p_features": real.numpy(), "q_features": written.numpy()}
    return [compute(**texts, seed=seed, verbose=False).mauve for seed in range(1, 6)]


def test_mauve_is_that_of_the_library(folder: Path, judge: Judge) -> None:
    pytest.importorskip("mauve")
    s = subject(folder, judge=judge, samples=26)  # 2.6 clusters, which the library rounds up
    found = measure(["mauve"], s)["mauve"]
    rows = s.data.rows(torch.arange(26))["tokens"]
    values = mauve_by_hand(judge.features(Evaluation(s).decode(rows)), judge.features(Evaluation(s).texts()))
    assert found.value == pytest.approx(np.mean(values), abs=1e-6)
    assert found.stderr == pytest.approx(np.std(values, ddof=1), abs=1e-6)


def test_mauve_by_a_sentence_embedder(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("mauve")
    tokenizer = train_bpe(SENTENCES, 300)
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    encoder.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    embedder = load_embedder(str(tmp_path))
    texts = ["The cat saw the dog.", "A dog."]
    found = embedder.features(texts)
    for text, vector in zip(texts, found, strict=True):  # without padding, by hand
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            alone = encoder(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
        assert torch.allclose(vector, alone / alone.norm(), atol=1e-5)

    s = subject(folder, embedder=embedder, samples=30)
    rows = s.data.rows(torch.arange(30))["tokens"]
    measured = measure(["mauve"], s)["mauve"]
    values = mauve_by_hand(embedder.features(Evaluation(s).decode(rows)), embedder.features(Evaluation(s).texts()))
    assert measured.value == pytest.approx(np.mean(values), abs=1e-6)
    assert measured.judge == str(tmp_path)


def test_mauve_says_what_it_needs(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a judge or a sentence embedder"):
        measure(["mauve"], subject(folder))
    with pytest.raises(UserError, match="embedder '.*' cannot be loaded"):
        load_embedder(str(tmp_path))


def test_keys_in_the_place_of_a_seed_for_texts_of_several_lengths(writer: Writer) -> None:
    texts = ["The ___ saw.", "The ___ saw the dog and the ___ cat."]
    keys = writer.model.sample_keys(2, 5)
    assert writer.infill(texts, keys=keys, steps=2) == writer.infill(texts, seed=5, steps=2)
    with pytest.raises(UserError, match="keys: expected 2 numbers"):
        writer.infill(texts, keys=keys[:1], steps=2)
