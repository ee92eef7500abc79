"""Our models in lm-eval: what is asked of the model and what lm-eval makes of it, on tasks of the tests' own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'imdm[lm-eval]'")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from imdm.cli.app import app
from imdm.core.errors import UserError
from imdm.data.corpora import Corpus
from imdm.data.packing import PrepareConfig, prepare
from imdm.data.prepared import PreparedSource
from imdm.data.tokenizers import train_bpe
from imdm.evaluation.bound import bounds
from imdm.lm_eval import DiffusionLM, Tasks, figures
from imdm.lm_eval.model import TAIL
from imdm.models.loading import load_model
from imdm.objectives import Nelbo
from imdm.shipped import TEACHER
from imdm.training import TrainConfig, Trainer
from imdm.writer import Writer
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES

WHOLE = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
BEGIN, END, PAD, MASK = range(4)
LENGTH = 24


def tiny_writer(**changes: object) -> Writer:
    tokenizer = train_bpe(SENTENCES * 5, 320)
    return Writer(tiny_model(vocab_size=len(tokenizer), mask_token_id=MASK, length=LENGTH, **changes), tokenizer)


@pytest.fixture(scope="module")
def stream() -> Writer:
    return tiny_writer()


@pytest.fixture(scope="module")
def whole() -> Writer:
    return tiny_writer(**WHOLE)


def lm_of(writer: Writer, **settings: Any) -> DiffusionLM:
    return DiffusionLM(writer, **({"n": 4, "steps": 3, "progress": False} | settings))


def asking(kind: Any, *arguments: Any, task: str = "some") -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=(task, 0, 1))


def likelihoods(lm: DiffusionLM, *pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    return lm.loglikelihood([asking("loglikelihood", *pair) for pair in pairs])


def written(lm: DiffusionLM, context: str, **options: Any) -> str:
    return lm.generate_until([asking("generate_until", context, options)])[0]


# Rows


def test_rows_of_both_kinds_of_models(stream: Writer, whole: Writer) -> None:
    tokens = stream.tokenizer("The cat sat", add_special_tokens=False)["input_ids"]
    context, continuation = tokens[:2], tokens[2:]
    full = 1 + len(tokens)
    [row] = lm_of(stream)._continuation_rows(context, continuation)
    assert row.row == (BEGIN, *tokens, *[MASK] * min(TAIL, LENGTH - full - 1), END)
    assert (row.first, row.last) == (3, full)
    [row] = lm_of(stream, tail=0)._continuation_rows(context, continuation)
    assert row.row == (BEGIN, *tokens)
    [row] = lm_of(whole)._continuation_rows(context, continuation)
    assert row.row == (BEGIN, *tokens, *[MASK] * (LENGTH - full))
    assert lm_of(stream)._canvas(context, 5) == ([BEGIN, *context, *[MASK] * 5, END], 3)
    assert lm_of(whole)._canvas(context, 5) == ([BEGIN, *context, *[MASK] * 5, *[PAD] * (LENGTH - 8)], 3)


def test_space_at_the_end_of_a_context_goes_to_the_continuation(stream: Writer) -> None:
    lm = lm_of(stream)
    assert lm._encoded("The cat ", "sat") == lm._encoded("The cat", " sat")
    before, after = lm._encoded("The cat ", "sat")
    assert stream.tokenizer.decode(before) == "The cat"
    assert stream.tokenizer.decode(after) == " sat"
    assert lm._encoded("", "The") == ([], lm._ids("The"))
    before, after = lm._encoded("The c", "at")  # which have a token in common
    assert stream.tokenizer.decode(before + after) == "The cat"
    assert after


def test_what_a_task_asks_is_text_unless_a_chat_template_made_it() -> None:
    writer = tiny_writer()
    lm = lm_of(writer)
    before, after = lm._encoded("The <eos> cat", " sat<mask>")
    assert writer.tokenizer.decode(before + after) == "The <eos> cat sat<mask>"
    assert not {BEGIN, END, PAD, MASK} & {*before, *after, *lm._ids("<pad>")}
    writer.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    asked = lm.apply_chat_template([{"role": "user", "content": "The cat"}])
    begins = lm.writer.tokenizer.convert_ids_to_tokens(lm.special.begin)
    assert lm._ids(begins + asked) == lm._ids(asked)  # a row begins with it once
    assert lm._ids(asked) == [*writer.encode("The cat"), END]


def test_long_contexts_are_cut_from_the_left_and_long_texts_divided(stream: Writer, whole: Writer) -> None:
    for lm in (lm_of(stream), lm_of(whole)):
        most = LENGTH - 1
        [row] = lm._continuation_rows(list(range(10, 100)), [5, 6])
        assert row.row == (BEGIN, *range(100 - most + 2, 100), 5, 6)
        text = list(range(10, 10 + 2 * most + 3))
        rows = list(lm._continuation_rows([], text))
        assert [token for row in rows for token in row.row[row.first : row.last]] == text
        assert [row.size for row in rows] == [most, most, 3]
        assert rows[2].row == (BEGIN, *text[-most:])  # the last sees what fits of the text before
        row, start = lm._canvas(list(range(10, 100)), 256)
        assert len(row) == LENGTH
        assert row.count(MASK) == LENGTH // 2 - (lm.writer is stream)
        assert row[1:start] == list(range(10, 100))[-(start - 1) :]


# Likelihoods


def test_likelihoods_are_those_bounds_whatever_the_order(stream: Writer) -> None:
    pairs = [("The cat", " sat on the mat."), ("", "A dog"), ("The cat ", "sat"), ("One", ""), ("The", " red fox ran")]
    lm = lm_of(stream, n=8)
    values = likelihoods(lm, *pairs)
    assert values[3] == (0.0, True)
    others = likelihoods(lm_of(stream, n=8, batch_size=3), *pairs[::-1])[::-1]
    assert [value for value, _ in others] == pytest.approx([value for value, _ in values], abs=1e-4)
    assert [same for _, same in others] == [same for _, same in values]
    [row] = lm._continuation_rows(*lm._encoded(*pairs[0]))
    [(_, one)] = bounds(stream.model, [row], 8)
    assert values[0][0] == pytest.approx(one.value, abs=1e-4)
    assert lm.stderrs["some"][0] == pytest.approx(one.stderr, abs=1e-4)
    assert lm.stderr == pytest.approx(sum(lm.stderrs["some"]) / 5)


def test_a_long_text_is_the_sum_of_its_parts(stream: Writer) -> None:
    lm, text = lm_of(stream), " ".join(SENTENCES)
    [value] = lm.loglikelihood_rolling([asking("loglikelihood_rolling", text)])
    rows = list(lm._continuation_rows([], lm._ids(text)))
    assert len(rows) > 2
    found = dict(bounds(stream.model, rows, 4))
    assert value == pytest.approx(sum(one.value for one in found.values()), abs=1e-3)
    assert lm.stderrs["some"] == pytest.approx([sum(one.stderr**2 for one in found.values()) ** 0.5], abs=1e-3)


def test_greedy_is_what_is_certain(stream: Writer) -> None:
    """One token: greedy if and only if it is the likeliest."""
    lm = lm_of(stream, tail=0)
    context = lm._ids("The cat")
    with torch.no_grad():
        best = int(stream.model(stream.model.noised(torch.tensor([[BEGIN, *context, MASK]])))[0, -1].argmax())
    for token in (best, (best + 1) % 300 + 10):
        [row] = lm._continuation_rows(context, [token])
        assert lm._greedy([[row]]) == [token == best]


# Texts


@pytest.mark.parametrize("kind", ["stream", "whole"])
def test_texts_end_at_the_first_stop(kind: str, request: pytest.FixtureRequest) -> None:
    lm = lm_of(request.getfixturevalue(kind))
    text = written(lm, "The cat", max_gen_toks=12, do_sample=True)
    assert text
    stop = text[len(text) // 2]
    assert written(lm, "The cat", max_gen_toks=12, do_sample=True, until=["nowhere", stop]) == text[: text.index(stop)]
    assert written(lm, "The cat", max_gen_toks=12, do_sample=True, until=stop) == text[: text.index(stop)]
    assert len(lm._ids(written(lm, "The cat", max_gen_toks=2))) <= 4


def test_texts_are_the_samplers_and_end_with_the_end_token(stream: Writer) -> None:
    lm, context = lm_of(stream), stream.tokenizer("The cat", add_special_tokens=False)["input_ids"]
    ids = stream.tokenizer(" sat on the", add_special_tokens=False)["input_ids"]
    assert lm._text(context, [*ids, END, *ids]) == " sat on the"
    assert lm._text([], [END, *ids]) == ""
    how = lm._how({"do_sample": False, "temperature": 0.7})
    assert (how.steps, how.temperature) == (3, 0)
    assert lm._how({"do_sample": True, "temperature": 0.7, "top_p": 0.9}).temperature == 0.7
    assert lm_of(stream, temperature=0.5)._how({}).temperature == 0.5


@pytest.mark.parametrize("noise", [None, "keep"])
def test_texts_are_written_with_the_models_noise_policy(noise: str | None) -> None:
    lm = lm_of(tiny_writer(mask="infinite-uniform-4-1.0", noise=noise))
    used = list[str]()
    generate = lm.model.generate
    lm.model.generate = lambda *given, **how: used.append(how["noise"]) or generate(*given, **how)
    written(lm, "The cat", max_gen_toks=4)
    assert used == [lm.get_model_info()["noise"]] == [noise or "posterior"]


def test_equal_requests_get_different_texts_and_order_changes_none(stream: Writer) -> None:
    requests = [asking("generate_until", text, {"max_gen_toks": 8, "do_sample": True}) for text in ("A dog", "The", "")]
    texts = lm_of(stream).generate_until(requests)
    assert lm_of(stream, batch_size=1).generate_until(requests[::-1])[::-1] == texts
    assert len(set(lm_of(stream).generate_until([requests[0]] * 4))) > 1


# Tasks


def task(folder: Path, name: str, rows: list[dict[str, Any]], text: str) -> str:
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {folder / name}.jsonl}}\ntest_split: train\n"
    )
    file = folder / f"{name}.yaml"
    file.write_text(data + text)
    return str(file)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return lambda *arguments: task(tmp_path, *arguments)


PAIRS = """output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{[good, bad]}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXTS = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""


def learnt(stream: Writer, folder: Path) -> Writer:
    """A writer of rows from a stream that was trained on SENTENCES."""
    stream.tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 10))
    about = PrepareConfig(length=LENGTH, tokenizer=str(folder / "tokenizer"))
    prepare(Corpus(str(folder / "text.txt")), about, folder / "rows")
    model = tiny_model(vocab_size=len(stream.tokenizer), mask_token_id=MASK, length=LENGTH, trained=False)
    config = TrainConfig(steps=200, batch=16, lr=1e-2, warmup=10, ema=0.9)
    source = PreparedSource(folder / "rows")
    return Writer(load_model(Trainer(model, Nelbo(), source, config, folder / "run").train()), stream.tokenizer)


def test_minimal_pairs_with_a_model_that_has_learnt(tasks: Callable[..., str], stream: Writer, tmp_path: Path) -> None:
    """Words in order against the same tokens in another order: by 2.5 nats at least, with five seeds on three
    instruction sets. Texts are as they were trained on, without lm-eval's space, of which the model knows nothing."""
    rows = [{"good": text, "bad": re.sub(r" (\w+) (\w+) the", r" \2 \1 the", text)} for text in SENTENCES[::3]]
    lm = lm_of(learnt(stream, tmp_path), n=32)
    found = Tasks([tasks("pairs", rows, PAIRS)]).run(lm)
    [figure] = figures(found)
    assert (figure.task, figure.metric, figure.value) == ("pairs", "acc", 1.0)
    assert figure.monte_carlo == pytest.approx(lm.stderr)
    assert 0 < figure.monte_carlo < 5
    assert found["config"]["n"] == 32
    for row in rows:
        (good, _), (bad, _) = likelihoods(lm, *(("", row[kind]) for kind in ("good", "bad")))
        assert good > bad + 1


def test_choices_texts_and_perplexity(tasks: Callable[..., str], stream: Writer) -> None:
    """What lm-eval reports follows from what the model says one by one."""
    lm, questions = lm_of(stream), ["The cat", "A dog"]
    choices = [
        {"question": q, "choices": ["sat", "ran off", "on the mat"], "answer": i} for i, q in enumerate(questions)
    ]
    texts = [{"question": q, "answer": written(lm, q, until=["\n"], max_gen_toks=6).strip()} for q in questions]
    texts[1]["answer"] += "?"
    files = [tasks("choice", choices, CHOICE), tasks("texts", texts, TEXTS)]
    files.append(tasks("rolling", [{"text": text} for text in SENTENCES[:3]], ROLLING))
    found = {(one.task, one.metric): one for one in figures(Tasks(files).run(lm))}
    best = [max(range(3), key=lambda i: likelihoods(lm, (q, f" {choices[0]['choices'][i]}"))[0][0]) for q in questions]
    assert found["choice", "acc"].value == sum(i == b for i, b in enumerate(best)) / 2
    assert found["texts", "exact_match"].value == 0.5
    assert found["texts", "exact_match"].monte_carlo is None
    assert found["rolling", "word_perplexity"].value > 1


def test_the_class_is_registered_and_made_from_words(tmp_path: Path, stream: Writer, tasks: Callable[..., str]) -> None:
    stream.model.save_pretrained(tmp_path / "model")
    stream.tokenizer.save_pretrained(tmp_path / "model")
    assert get_model("imdm") is DiffusionLM
    rows = [{"good": "A dog ran.", "bad": "Dog ran a."}]
    found = lm_eval.simple_evaluate(
        model="imdm",
        model_args=f"pretrained={tmp_path / 'model'},n=4,progress=False",
        batch_size="8",
        tasks=[tasks("words", rows, PAIRS)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    assert set(found["results"]["words"]) >= {"acc,none"}
    assert found["config"]["monte_carlo_stderr"] > 0


# The command


def test_the_command(tmp_path: Path, stream: Writer, tasks: Callable[..., str]) -> None:
    stream.model.save_pretrained(tmp_path / "model")
    stream.tokenizer.save_pretrained(tmp_path / "model")
    file = tasks("ours", [{"good": text, "bad": text[::-1]} for text in SENTENCES[:3]], PAIRS)
    line = ["lm-eval", str(tmp_path / "model"), "--tasks", file, "--limit", "2", "--n", "4", "--out"]
    done = CliRunner().invoke(app, [*line, str(tmp_path / "out.json")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "ours" in done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["n-samples"]["ours"]["effective"] == 2
    assert found["config"]["n"] == 4
    assert found["model"] == str(tmp_path / "model")


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, ["lm-eval", *arguments], catch_exceptions=False)
    return str(error.value)


def test_refusals_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: Callable[..., str]) -> None:
    model = TEACHER
    assert "--tasks nosuch.yaml: no such file" in refused(model, "--tasks", "nosuch.yaml")
    assert "a name is empty" in refused(model, "--tasks", "pairs,")
    (tmp_path / "empty.yaml").write_text("nothing: here\n")
    assert "empty.yaml' cannot be loaded: " in refused(model, "--tasks", str(tmp_path / "empty.yaml"))
    file = tasks("some", [{"good": "a", "bad": "b"}], PAIRS)
    assert "is a folder" in refused(model, "--tasks", file, "--out", str(tmp_path))
    tiny_model().save_pretrained(tmp_path / "ids")
    assert "has no tokenizer beside it" in refused(str(tmp_path / "ids"), "--tasks", file)
    monkeypatch.setattr("imdm.cli.measuring.find_spec", lambda name: None)
    assert refused(model, "--tasks", file) == "lm-eval is not installed: pip install 'imdm[lm-eval]'"


def test_unknown_tasks_are_refused_with_near_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Few:
        """In the place of lm-eval's own list, which takes long to read."""

        all_tasks = ("blimp", "arc_easy")

        def __init__(self, include_defaults: bool) -> None:
            assert include_defaults

        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name in self.all_tasks]

    monkeypatch.setattr("imdm.lm_eval.tasks.TaskManager", Few)
    assert Tasks(["blimp", "blimp"]).names == ["blimp"]
    with pytest.raises(UserError, match="unknown task 'blimpp': .*; did you mean blimp"):
        Tasks(["blimpp"])


def test_settings_that_cannot_be_meant(stream: Writer) -> None:
    for settings in ({"n": 1}, {"batch_size": "auto"}, {"steps": 0}, {"tail": -1}, {"seed": 0.5}):
        with pytest.raises(UserError, match=next(iter(settings))):
            lm_of(stream, **settings)
    with pytest.raises(UserError, match="until = 7: expected a text or a list of texts"):
        written(lm_of(stream), "The", until=7, max_gen_toks=2)
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        lm_of(stream).apply_chat_template([{"role": "user", "content": "Hello"}])
    with pytest.raises(UserError, match="is autoregressive"):
        lm_of(tiny_writer(causal=True))


def test_the_package_does_not_wait_for_it() -> None:
    line = "import imdm, imdm.cli, sys; print('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, text=True).stdout == "False\n"
