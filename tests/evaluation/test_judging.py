"""Judges: how texts begin and end for them, what they find coherent, what they would write themselves, and which one
reads where the one that was wanted is not at hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel, WordPiece
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import imdm.shipped
from imdm.core.errors import UserError
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.prepared import PreparedSource
from imdm.data.source import TokenSource
from imdm.data.tokenizers import load_tokenizer, train_bpe
from imdm.diffusion.randomness import Purpose, fold
from imdm.evaluation import Conditional, Evaluation, Judge, Subject, load_judge, measure, metrics, read, to_row
from imdm.evaluation import judge as judging
from imdm.evaluation.base import unpadded
from imdm.evaluation.coherence import coherence_of, halved
from imdm.evaluation.conditional import prompt_continuations
from imdm.evaluation.continuing import _batches, _draw_tokens, _with_cache, _without_cache, judge_continuations
from imdm.evaluation.fetching import _convert, _mend
from imdm.evaluation.infilling import Gaps, _three_pieces, filled, gaps
from imdm.evaluation.judge import NotHereError, judge_at_hand, judge_of, load_judge_or_other
from imdm.evaluation.texts import first_texts
from imdm.sampling import Sampling
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES
from tests.reference.statistics import assert_law

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1}
LLAMA = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
END = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def begun(folder: Path) -> Path:
    """A tiny Llama whose tokenizer puts <bos> before every text, and which reads 40 tokens at once."""
    tokenizer = train_bpe(SENTENCES, 300)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    how = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 40, "initializer_range": 0.3}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **LLAMA, **how)).save_pretrained(folder)
    return folder


def plain(folder: Path) -> Path:
    """A tiny GPT-2, whose tokenizer adds nothing."""
    tokenizer = train_bpe(SENTENCES, 300)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=2048, initializer_range=0.3, **SIZES)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def own(folder: Path) -> Path:
    """One of our own, which reads from left to right."""
    tokenizer = train_bpe(SENTENCES, 300)
    tokenizer.save_pretrained(folder)
    tiny_model(3, vocab_size=len(tokenizer), mask_token_id=3, length=64, causal=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judge]:
    made = {"begun": begun, "plain": plain, "own": own}
    return {name: load_judge(str(make(tmp_path_factory.mktemp(name))), name=name) for name, make in made.items()}


def by_hand(judge: Judge, ids: list[int]) -> list[float]:
    """−log p of each of the ids given those before it, from the second on; plain transformers, no padding."""
    with torch.no_grad():
        log_p = judge.model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits.log_softmax(
            -1
        )
    return [-float(log_p[0, i, token]) for i, token in enumerate(ids[1:])]


# Begin and end


def test_a_judge_begins_texts_as_its_own_tokenizer_does(judges: dict[str, Judge]) -> None:
    text = "The cat saw the moon."
    for name, begins, context in (("begun", True, 40), ("plain", False, 1024), ("own", False, 64)):
        judge = judges[name]
        (ids,) = judge.ids([text])
        assert ids[0] != 0
        assert (judge.begin, judge.end, judge.context) == (0 if begins else None, 1, context)
        expected = by_hand(judge, [0, *ids] if begins else ids)
        for given in [text, "<bos>" + text] if begins else [text]:  # never twice
            score = replace(judge, special=True).score([given])
            assert float(score.count) == len(ids) - (not begins)
            assert float(score.nll) == pytest.approx(sum(expected), rel=1e-4)


def test_the_end_of_a_whole_text_counts(judges: dict[str, Judge]) -> None:
    texts = ["The cat saw the moon.", "The dog met the sea."]
    for judge in judges.values():
        start = [] if judge.begin is None else [0]
        found, without = judge.score(texts, ended=[True, False]), judge.score(texts)
        assert (found.count - without.count).tolist() == [1, 0]
        last = by_hand(judge, [*start, *judge.ids(texts)[0], 1])[-1]
        assert (found.nll - without.nll).tolist() == pytest.approx([last, 0], abs=1e-3)
    plain = judges["plain"]
    assert torch.equal(replace(plain, end=None).score(texts, ended=[True, True]).count, plain.score(texts).count)


def test_samples_of_a_model_of_whole_texts_are_read_with_their_end(judges: dict[str, Judge]) -> None:
    """Of a finished and an unfinished text: no special token reaches the judge but its own end."""
    tokenizer = train_bpe(SENTENCES, 310)
    ids = [tokenizer(text)["input_ids"] for text in ("The cat saw the moon.", "The dog met")]
    rows = torch.full((2, 12), 2)
    rows[0, : len(ids[0]) + 2] = torch.tensor([0, *ids[0], 1])
    rows[1] = torch.tensor(([0, *ids[1] * 12])[:12])
    model = tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=12, **END)
    evaluation = Evaluation(Subject(model, samples=2, judge=judges["begun"], tokenizer=tokenizer))
    evaluation.__dict__["generation"] = SimpleNamespace(tokens=rows)
    assert evaluation.texts()[0] == "The cat saw the moon."
    expected = judges["begun"].score(evaluation.texts(), ended=[True, False]).perplexity()
    assert measure(["gen_ppl"], evaluation)["gen_ppl"].value == pytest.approx(expected)
    assert expected != pytest.approx(judges["begun"].score(evaluation.texts()).perplexity(), rel=1e-3)


def test_what_looks_like_a_special_token_in_a_text_is_text(judges: dict[str, Judge]) -> None:
    """But in rows of a stream, which are decoded with their special tokens."""
    judge, tokenizer = judges["plain"], train_bpe(SENTENCES, 310)
    typed = "The cat<eos> saw <mask>."
    assert judge.tokenizer.decode(judge.ids([typed])[0]) == typed
    assert not set(judge.tokenizer.all_special_ids) & {*judge.ids([typed])[0]}
    text = tokenizer(typed, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for ending, ids in ((END, judge.ids([typed])[0]), ({}, [0, *judge.ids(["The cat"])[0], 1])):
        row = torch.tensor([[0, *text, 1]] if ending else [[0, *tokenizer("The cat")["input_ids"], 1]])
        model = tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=row.shape[1], **ending)
        evaluation = Evaluation(Subject(model, judge=judge, tokenizer=tokenizer))
        assert judge_of(evaluation).ids(evaluation.decode(row)) == [ids]
    assert not judge.special  # that of others


# Coherence


class Letters:
    """A tokenizer whose tokens are the letters a and b."""

    eos_token_id = None

    def __call__(self, texts: list[str], **_: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [["ab".index(letter) for letter in text] for text in texts]}


class Law:
    """A judge's model that knows the probability of every word of `length` letters, and asks nothing else."""

    def __init__(self, p: Any, length: int) -> None:
        self.table = {word: p(word) for n in range(length + 1) for word in product((0, 1), repeat=n)}

    def parameters(self) -> Iterator[Tensor]:
        yield torch.zeros(1)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = torch.zeros(*input_ids.shape, 2)
        for row, ids in enumerate(input_ids.tolist()):
            for i in range(int(attention_mask[row].sum()) - 1):
                prefix = tuple(ids[: i + 1])
                logits[row, i] = torch.tensor([log(self.table[(*prefix, k)] / self.table[prefix]) for k in (0, 1)])
        return SimpleNamespace(logits=logits)


def topics(word: tuple[int, ...]) -> float:
    """A text is about a or about b, and nine letters in ten are of its topic."""
    return sum(0.5 * 0.9 ** word.count(z) * 0.1 ** word.count(1 - z) for z in (0, 1))


def letters(judge_law: Any, context: int = 16, seed: int = 0) -> Evaluation:
    judge = Judge("law", Law(judge_law, 8), Letters(), context=context)
    return Evaluation(Subject(tiny_model(), judge=judge, seed=seed))


@pytest.mark.parametrize("seed", range(3))
def test_coherence_by_enumeration(seed: int) -> None:
    """Words of four to six letters, each probability by the law itself; one of a single letter is left out."""
    texts = ["".join(word) for n in (4, 5, 6) for word in product("ab", repeat=n)][:: 3 + seed]
    found = coherence_of(letters(topics, seed=seed), [*texts, "a", ""])
    ids = [tuple("ab".index(letter) for letter in text) for text in texts]
    n, by_shift = len(texts), set[float]()
    for shift in range(1, n):
        values = []
        for i, word in enumerate(ids):
            other, half = ids[(i + shift) % n], len(word) // 2
            strange = other[: len(other) // 2]
            gain = topics(word) / topics(word[:half]) / (topics((*strange, *word[half:])) / topics(strange))
            values.append(log(gain) / (len(word) - half))
        by_shift.add(round(sum(values) / n, 5))
    assert round(found.value, 5) in by_shift
    assert (found.n, found.judge) == (n, "law")
    assert found.stderr > 0
    assert found == coherence_of(letters(topics, seed=seed), texts)  # fixed by the seed


def test_coherence_of_two_texts_by_hand() -> None:
    """Texts of one topic each: what the other begins with says the opposite."""
    found = coherence_of(letters(topics), ["aaaa", "bbbb"])
    own, other = topics((0,) * 4) / topics((0,) * 2), topics((1, 1, 0, 0)) / topics((1, 1))
    assert found.value == pytest.approx(log(own / other) / 2, abs=1e-5)
    assert found.stderr == pytest.approx(0, abs=1e-5)


def test_a_judge_that_looks_at_nothing_before_finds_no_coherence() -> None:
    unigram = coherence_of(letters(lambda word: 0.7 ** word.count(0) * 0.3 ** word.count(1)), ["aaaa", "bbbb", "abab"])
    assert unigram.value == pytest.approx(0, abs=1e-6)
    assert unigram.n == 3


def test_halves_fit_into_what_a_judge_reads_at_once(judges: dict[str, Judge]) -> None:
    judge = replace(judges["begun"], context=8)
    assert halved(judge, [0, 5, 6, 7]) == ([5], [6, 7])  # the begin token is no part of it
    assert halved(judge, [0, 5]) is None
    assert halved(judge, list(range(4, 30))) == ([4, 5, 6], [7, 8, 9, 10])
    for judge in judges.values():
        found = coherence_of(Evaluation(Subject(tiny_model(), judge=judge)), [" ".join(SENTENCES[:9]), *SENTENCES])
        assert found.n == 13
    with pytest.raises(UserError, match="at least two texts of two tokens, and has 1"):
        coherence_of(letters(topics), ["ab", "a"])


def test_padding_is_no_text_for_a_model_of_a_stream(judges: dict[str, Judge]) -> None:
    """Rows of one document each, padded a little and a lot: the figures are the same."""
    tokenizer, found = train_bpe(SENTENCES, 310), list[dict[str, float]]()
    written = ["The cat saw the sea.", "The dog met the moon.", "A bird, too."]
    ids = [[0, *tokenizer(text)["input_ids"], 1] for text in written]
    for length in (40, 80):
        rows = torch.tensor([row + [2] * (length - len(row)) for row in ids])
        data = TokenSource(rows, len(tokenizer), 3)
        model = tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=length)
        subject = Subject(model, samples=3, data=data, split="valid", judge=judges["plain"], tokenizer=tokenizer)
        assert Evaluation(subject).decode(rows) == [f"<bos>{text}<eos>" for text in written]
        names = ["infill_real_ppl", "real_coherence", "infill_continued_ppl"]
        found.append({name: one.value for name, one in measure(names, subject).items()})
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert abs(found[0]["real_coherence"]) > 1e-3
    tokenizer.pad_token = tokenizer.eos_token  # the end token pads, and ends the text once
    assert unpadded(torch.tensor([[0, 5, 1, 1, 1], [0, 5, 6, 7, 1], [0, 5, 1, 6, 7]]), tokenizer) == [
        [0, 5, 1],
        [0, 5, 6, 7, 1],
        [0, 5, 1, 6, 7],
    ]


# What a judge would write


def test_a_judge_that_remembers_reads_the_same(judges: dict[str, Judge]) -> None:
    """Texts of different lengths, five tokens further: with its memory, and from the beginning each time."""
    prompts = ["The", "The cat saw the", "A"]
    for name in ("begun", "plain"):
        judge = judges[name]
        texts = [[*judge.start(ids), *ids] for ids in judge.ids(prompts)]
        with torch.no_grad():
            remembering, anew, tokens = _with_cache(judge, texts), _without_cache(judge, texts), None
            for place in range(5):
                found, expected = remembering(tokens), anew(tokens)
                assert torch.allclose(found, expected, atol=1e-4), (name, place)
                tokens = expected.argmax(-1)


@pytest.mark.parametrize("name", ["begun", "own"])
def test_a_judge_draws_from_its_law(judges: dict[str, Judge], name: str) -> None:
    """Two tokens after a prompt, sorted into the likeliest first token and the rest, against the law without special
    tokens (false alarm 1e-5); and every draw follows from its key."""
    judge, n = judges[name], 4000
    prompt = [*judge.start([9]), *judge.ids(["The"])[0]]
    keys = fold(5, Purpose.SAMPLE, torch.arange(n))
    judge = replace(judge, batch_size=n)
    with torch.no_grad():
        drawn = _draw_tokens(judge, [prompt] * n, 2, keys)
        law = _without_cache(judge, [prompt])(None)[0].double()
        law[judge.tokenizer.all_special_ids] = -torch.inf
        law = law.softmax(0)
    likely = law.sort(descending=True).indices[:20]
    rest = 1 - law[likely].sum()
    counts = torch.bincount(drawn[:, 0], minlength=len(law))
    assert_law(torch.cat([counts[likely], n - counts[likely].sum()[None]]), torch.cat([law[likely], rest[None]]))
    assert not torch.isin(drawn, torch.tensor(judge.tokenizer.all_special_ids)).any()
    with torch.no_grad():
        assert torch.equal(_draw_tokens(judge, [prompt] * 3, 2, keys[7:10]), drawn[7:10])


def test_so_many_tokens_are_written_after_each_prompt(judges: dict[str, Judge]) -> None:
    for judge in judges.values():
        keys = fold(1, Purpose.SAMPLE, torch.arange(3))
        prompts, counts = ["The cat", "The dog met", "A"], [4, 1, 6]
        found = judge_continuations(judge, prompts, counts, keys)
        assert found == judge_continuations(replace(judge, batch_size=1), prompts, counts, keys)
        again = [
            judge_continuations(judge, [p], [c], keys[i : i + 1])[0]
            for i, (p, c) in enumerate(zip(prompts, counts, strict=True))
        ]
        assert found == again
        (whole,) = judge_continuations(judge, prompts[2:], [7], keys[2:])
        assert whole.startswith(found[2].rstrip("\ufffd"))
        long = " ".join(SENTENCES * 30)
        assert judge_continuations(judge, [long], [3], keys[:1])[0]  # longer than it reads at once


@pytest.mark.parametrize("name", ["begun", "own"])
def test_who_is_written_beside_a_text_does_not_matter(judges: dict[str, Judge], name: str) -> None:
    """Long prompts beside great counts: each text fits, and all of them only in batches."""
    judge = judges[name]
    long, most = " ".join(SENTENCES * 3), judge.context - 1
    prompts, counts = [long, "The cat", long, "A", long], [3, 20, 25, most, 30]
    keys = fold(1, Purpose.SAMPLE, torch.arange(5))
    alone = [
        judge_continuations(judge, [p], [c], keys[i : i + 1])[0]
        for i, (p, c) in enumerate(zip(prompts, counts, strict=True))
    ]
    assert judge_continuations(judge, prompts, counts, keys) == alone
    sizes = [judge.context - 3, 4, judge.context - 25, 1, judge.context - 30]
    together = _batches(judge, sizes, counts)
    assert sorted(sum(together, [])) == list(range(5))
    assert 1 < len(together) < 5
    assert all(max(sizes[i] for i in some) + max(counts[i] for i in some) <= judge.context for some in together)
    with pytest.raises(UserError, match=f"cannot add {most + 1} to a prompt"):
        judge_continuations(judge, prompts[:2], [1, most + 1], keys[:2])


# Infilling


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out text with the tokenizer of a tiny model: rows of a stream, and whole texts."""
    home = tmp_path_factory.mktemp("infilling")
    train_bpe(SENTENCES * 5, 320).save_pretrained(home / "model")
    lines = [*SENTENCES, "A", " ".join(SENTENCES[:2])]
    (home / "text.txt").write_text("\n".join(lines))
    for packing in ("wrapped", "whole"):
        config = PrepareConfig(length=24, tokenizer=str(home / "model"), packing=packing)
        prepare(Corpus(str(home / "text.txt")), config, home / packing)
    return home


def infilling(texts: Path, packing: str, **changes: Any) -> Evaluation:
    rows, tokenizer = PreparedSource(texts / packing), load_tokenizer(texts / "model")
    ending = END if packing == "whole" else {}
    model = tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=24, **ending)
    settings = {"how": Sampling(steps=2), "samples": 64, "data": rows, "split": "valid", "tokenizer": tokenizer}
    return Evaluation(Subject(model, **(settings | changes)))


def test_the_middle_third_is_removed(texts: Path) -> None:
    stream = infilling(texts, "wrapped")
    assert {(int(a), int(b)) for a, b in zip(gaps(stream).first, gaps(stream).last, strict=True)} <= {(8, 15), (8, 14)}
    whole = infilling(texts, "whole")
    here, every = gaps(whole), whole.source("data").rows(torch.arange(14))["tokens"]
    sizes = [[token for token in row if token > 2] for row in every.tolist()]
    long = [i for i, ids in enumerate(sizes) if len(ids) >= 3]
    assert len(long) == 13  # a text of a token has no middle
    for row, i in enumerate(long):
        T = len(sizes[i])
        assert here.rows[row].tolist() == every[i].tolist()
        assert here.holes[row].nonzero()[:, 0].tolist() == list(range(1 + T // 3, 1 + 2 * T // 3))


@pytest.mark.parametrize("packing", ["wrapped", "whole"])
def test_infilling(texts: Path, judges: dict[str, Judge], packing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = infilling(texts, packing, judge=judges["begun"])
    judge, here, made = judge_of(evaluation), gaps(evaluation), filled(evaluation)
    assert not (made == 3).any()
    assert (made != here.rows)[here.holes].any()
    assert torch.equal(made[~here.holes], here.rows[~here.holes])
    heard: list[list[str]] = []
    score = Judge.score
    monkeypatch.setattr(
        Judge, "score", lambda self, some, *rest, **more: heard.append(some) or score(self, some, *rest, **more)
    )
    names = ["infill_ppl", "infill_real_ppl", "infill_continued_ppl", "infill_kept"]
    found = measure(names, evaluation)
    assert (found["infill_kept"].value, found["infill_kept"].stderr) == (1.0, 0.0)
    assert {(one.n, one.split) for one in found.values()} == {(len(here.rows), "valid")}
    assert {found[name].judge for name in names[:3]} == {"begun"}
    written, real, other = heard
    assert (written, real) == (evaluation.decode(made), evaluation.decode(here.rows))
    ended = [True] * len(real) if packing == "whole" else None
    for name, some in zip(names, heard, strict=False):
        assert found[name].value == pytest.approx(score(judge, some, None, ended).perplexity(), rel=1e-5)
    for i, (text, given) in enumerate(zip(other, real, strict=True)):
        before, last = (evaluation.decode(here.rows[i : i + 1, :stop])[0] for stop in (here.first[i], here.last[i]))
        assert text.startswith(before)
        assert text.endswith(given[len(last) :])
        assert text != given
    again = infilling(texts, packing, judge=judges["begun"], seed=1)
    assert measure(names[2:3], again)[names[2]].value != found[names[2]].value


def of_words() -> Any:
    """A tokenizer like BERT's: it joins what it decodes by blanks, and then takes some away again."""
    known = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", "don", "'", "t", "go", "there", ",", "she", "said", "."]
    inner = Tokenizer(WordPiece({word: number for number, word in enumerate(known)}, unk_token="[UNK]"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = {"bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=True, **special)


@pytest.mark.parametrize("ending", [{}, END])
def test_the_parts_of_a_text_are_the_whole(ending: dict[str, int]) -> None:
    """Cut inside of characters of several bytes, and where a tokenizer tidies up."""
    bpe, words = train_bpe(SENTENCES, 310), of_words()
    for tokenizer, text in ((bpe, "Das Mädchen sah 😀 große Vögel."), (words, "don't go there, she said. don't go.")):
        row = torch.tensor([[0, *tokenizer(text, add_special_tokens=False)["input_ids"], 1, 2]])
        model = tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=row.shape[1], **ending)
        evaluation, moved = Evaluation(Subject(model, tokenizer=tokenizer)), 0
        (whole,) = evaluation.decode(row)
        for first in range(1 + bool(ending), row.shape[1] - 5):
            here = Gaps(row, torch.tensor([first]), torch.tensor([first + 3]))
            before, middle, end = _three_pieces(evaluation, here, 0)
            assert before + middle + end == whole
            assert before
            assert middle
            moved += before != evaluation.decode(row[:, :first])[0]
        assert moved


def test_a_given_token_that_is_lost_is_seen(texts: Path) -> None:
    evaluation = infilling(texts, "whole")
    made = filled(evaluation)
    made[0, 1] += 1
    given = int((~gaps(evaluation).holes[0]).sum())
    assert measure(["infill_kept"], evaluation)["infill_kept"].value == pytest.approx(
        1 - 1 / given / len(made), abs=1e-7
    )


@pytest.mark.parametrize("packing", ["wrapped", "whole"])
def test_rows_tell_what_was_written_for_them(texts: Path, packing: str) -> None:
    """How often the network ran for the gaps, or after the prompts; nothing is written from nothing for that."""
    how = Conditional(prompts=4, prefix=2, continuations=2, tokens=4)
    evaluation = infilling(texts, packing, how=Sampling(steps=16), samples=8, conditional=how)
    costs: list[float] = []
    complete = evaluation.complete

    def spy(canvas: Tensor) -> Any:
        made = complete(canvas)
        costs.append(float(made.evaluations.double().mean()))
        return made

    evaluation.__dict__["complete"] = spy
    labels: dict[str, Any] = {"experiment": "e", "method": "m", "recipe_hash": "h"}
    found = measure(["infill_kept", "cond_entropy"], evaluation)
    rows = [to_row(metrics[name], one, evaluation, **labels) for name, one in found.items()]
    assert [row.evaluations for row in rows] == pytest.approx(costs, abs=1e-4)
    assert costs[0] < costs[1] < evaluation.subject.evaluations()  # a third of the places, most of them, all
    assert evaluation.evaluations() == evaluation.subject.evaluations()
    assert len(costs) == 2


def test_prompts_of_whole_texts(texts: Path, judges: dict[str, Judge]) -> None:
    """Texts too short for prompt and window are passed over; nothing after the prompt is given, and a text may end."""
    how = Conditional(prompts=12, prefix=2, continuations=2, tokens=4)
    evaluation = infilling(texts, "whole", judge=judges["begun"], conditional=how)
    canvases: list[Tensor] = []
    complete = evaluation.complete
    evaluation.__dict__["complete"] = lambda canvas: canvases.append(canvas) or complete(canvas)
    made = prompt_continuations(evaluation)
    assert (canvases[0][:, 3:] == 3).all()
    assert (canvases[0][:, 1:3] != 3).all()
    assert made.ended == [bool(((row == 1) | (row == 2)).any()) for row in made.tokens]
    found = measure(["cond_gen_ppl", "cond_entropy"], evaluation)
    expected = judges["begun"].score(made.written, made.prompts, made.ended).perplexity()
    assert found["cond_gen_ppl"].value == pytest.approx(expected, rel=1e-5)
    assert found["cond_entropy"].value <= log(4)
    with pytest.raises(UserError, match="use 0, or infill_ppl"):
        prompt_continuations(infilling(texts, "whole", conditional=how.model_copy(update={"suffix": 2})))


@pytest.mark.parametrize("packing", ["wrapped", "whole"])
def test_texts_that_are_kept_are_those_that_metrics_read(texts: Path, packing: str) -> None:
    """Samples first, then the first continuation of each prompt; none is written for it."""
    how = Conditional(prompts=3, prefix=2, continuations=3, tokens=4)
    evaluation = infilling(texts, packing, conditional=how, samples=5, seed=7)
    assert first_texts(evaluation, 2) == []
    measure(["cond_entropy"], evaluation)
    made = prompt_continuations(evaluation)
    after = [{"prompt": made.prompts[i], "text": made.written[i]} for i in (0, 3)]
    drawn = {"steps": 2, "temperature": 1.0, "top_p": 1.0, "noise": "posterior", "order": "random", "seed": 7}
    assert first_texts(evaluation, 2) == [drawn | {"number": i} | one for i, one in enumerate(after)]
    measure(["entropy"], evaluation)
    samples = [{"text": text} for text in evaluation.texts()[:2]]
    assert first_texts(evaluation, 2) == [drawn | {"number": i % 2} | one for i, one in enumerate(samples + after)]
    assert len(first_texts(evaluation, 9)) == 5 + 3
    assert first_texts(Evaluation(replace(evaluation.subject, tokenizer=None)), 2) == []
    cut = infilling(texts, packing, samples=5, seed=7, first=4)
    measure(["entropy"], cut)
    assert [one["text"] for one in first_texts(cut, 2)] == cut.texts()[:2] != [one["text"] for one in samples]
    long = infilling(texts, "whole", samples=2, first=24)
    measure(["entropy"], long, finite=False)
    assert len(first_texts(long, 2)) in (0, 2)


# A judge at hand


@pytest.fixture
def nothing_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_judge_that_ships_reads_where_another_is_not_at_hand(nothing_fetched: Path) -> None:
    said: list[str] = []
    other = train_bpe(SENTENCES, 300)
    judge = load_judge_or_other("smollm2", "float32", "cpu", tokenizer=other, say=said.append)
    assert judge.label == "sentences-judge"
    assert said == [
        "judge 'smollm2' is not available; using sentences-judge, which ships, instead; get it with 'imdm judge fetch "
        "smollm2'"
    ]
    for refusal in ({"tokenizer": other, "taken": ["sentences-judge"]}, {"tokenizer": None}):
        with pytest.raises(NotHereError, match="'smollm2' is not here"):
            load_judge_or_other("smollm2", "float32", "cpu", say=said.append, **refusal)
    damaged = nothing_fetched / "damaged"
    damaged.mkdir()
    for wrong in ("smolm2", "sentences-juge", str(nothing_fetched / "nothing"), "nothing.gguf", str(damaged)):
        with pytest.raises(UserError) as refusal:  # a mistake, not a judge to be had elsewhere
            load_judge_or_other(wrong, "float32", "cpu", tokenizer=other, say=said.append)
        assert not isinstance(refusal.value, NotHereError)
    assert len(said) == 1


def test_the_judge_of_the_texts_own_tokens_goes_first(
    nothing_fetched: Path, monkeypatch: pytest.MonkeyPatch, judges: dict[str, Judge]
) -> None:
    assert judge_at_hand(load_tokenizer("sentences-judge")) == "sentences-judge"
    here = nothing_fetched / "shipped"
    shutil.copytree(imdm.shipped.HERE / "sentences-judge", here / "sentences-judge")
    own(here / "tiny-judge")
    shutil.copytree(here / "tiny-judge", here / "a-writer")  # reads the same tokens, but is no judge
    config = (here / "a-writer/config.json").read_text()
    (here / "a-writer/config.json").write_text(config.replace('"causal": true', '"causal": false'))
    monkeypatch.setattr(imdm.shipped, "HERE", here)
    assert judge_at_hand(judges["own"].tokenizer) == "tiny-judge"
    assert judge_at_hand(train_bpe(["Other words."], 300)) == "sentences-judge"


def test_evaluate_without_a_judges_name_has_one(
    nothing_fetched: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a name that was given is not read as another."""
    monkeypatch.setattr(judging, "DEFAULT", "smollm2")  # gpt2-large would ask a hub
    tokenizer = load_tokenizer(texts / "model")
    tiny_model(vocab_size=len(tokenizer), mask_token_id=3, length=24).save_pretrained(nothing_fetched / "model")
    tokenizer.save_pretrained(nothing_fetched / "model")
    asked = ["evaluate", nothing_fetched / "model", "--data", texts / "wrapped", "--metrics", "gen_ppl"]
    asked += ["--steps", "1", "--samples", "4"]
    out = nothing_fetched / "results.jsonl"
    assert "'smollm2' is not here" in refused(command(*asked, "--judge", "smollm2", "--out", out))
    assert not out.exists()
    done = command(*asked, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "is not available; using sentences-judge, which ships, instead" in " ".join(done.stderr.split())
    assert [row.judge for row in read(out)] == ["sentences-judge"]


def test_a_converted_judge_has_the_special_tokens_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 reads the begin token of a GGUF file as its end token, too."""
    import transformers

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    words = {word: i for i, word in enumerate(("<unk>", "<s>", "</s>", "a", "b", "c", "d", "e"))}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    wrong = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>")
    lm = LlamaForCausalLM(config)
    for name, found in (("AutoConfig", config), ("AutoTokenizer", wrong)):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lambda *_, found=found, **__: found)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: lm)
    _convert(tmp_path / "weights.gguf", tmp_path / "judge")
    monkeypatch.undo()

    def marks() -> tuple[str, str, str]:
        made = transformers.AutoTokenizer.from_pretrained(tmp_path / "judge")
        return made.bos_token, made.eos_token, made.pad_token

    assert marks() == ("<s>", "</s>", "</s>")
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>").save_pretrained(
        tmp_path / "judge"
    )
    assert marks()[1] == "<s>"
    _mend(tmp_path / "judge")  # one that is there already
    assert marks() == ("<s>", "</s>", "</s>")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "judge")
    assert torch.equal(read.get_input_embeddings().weight, lm.get_input_embeddings().weight)
