"""The HTTP service as its clients see it: OpenAI's own, and those that hang up, ask for too much or speak nonsense."""

from __future__ import annotations

import asyncio
import gc
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import uvicorn
from transformers import BertTokenizerFast
from typer.testing import CliRunner

from imdm.benchmarks import serving as bench
from imdm.cli.app import app
from imdm.cli.serving import named, serve
from imdm.core.errors import UserError
from imdm.core.files import read_lines
from imdm.data.tokenizers import special_ids, train_bpe
from imdm.serving.api import ChoiceStream, Completion, Infill, Order
from imdm.serving.connected import Gone, while_connected
from imdm.serving.engine import Engine
from imdm.serving.guard import LOCAL, Guard, is_local
from imdm.serving.jobs import Frame
from imdm.serving.listening import listen
from imdm.serving.metrics import Metrics
from imdm.serving.play import Author
from imdm.serving.ready import responsive
from imdm.serving.server import Server, address, connections, in_background, patient
from imdm.serving.server import serve as run_service
from imdm.serving.settings import Settings
from imdm.shipped import DEFAULT, TEACHER
from imdm.writer import Writer
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES
from tests.documents.test_results import table
from tests.serving.test_engine import WHOLE, Gate

KEY = "sesame"
PROMPT = "The cat"


def tiny_writer(seed: int = 0, **changes: Any) -> Writer:
    """A model of random weights with a tokenizer: it writes nonsense, but always the same."""
    tokenizer = train_bpe(SENTENCES * 5, 320)
    special = special_ids(tokenizer)
    size = {"vocab_size": special.vocab_size, "mask_token_id": special.mask, "length": 24}
    return Writer(tiny_model(seed, **size | changes), tokenizer)


@pytest.fixture(scope="module")
def writer() -> Writer:
    return tiny_writer(mask="infinite-uniform-8-1.0")


@pytest.fixture(scope="module")
def whole() -> Writer:
    made = tiny_writer(1, **WHOLE)
    made.model.output.bias.data[WHOLE["eos_token_id"]] += 3  # or it would hardly ever end
    return made


@pytest.fixture(scope="module")
def known() -> Writer:
    return tiny_writer(2, **WHOLE, lengths=[0.0] * 20 + [1.0])


@pytest.fixture(scope="module")
def server(writer: Writer, whole: Writer, known: Writer) -> Iterator[Server]:
    limits = Settings(
        api_key=KEY, hosts=LOCAL, allowed=("texts.example",), body=20_000, prompt=5000, tokens=4000, queue=100
    )
    with in_background(Engine({"tiny": writer, "whole": whole, "known": known}, limits)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Any:
    return client_of(server)


def client_of(server: Server, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=60)


def ask(
    server: Server, body: Any = None, path: str = "/v1/completions", method: str = "POST", **headers: str
) -> tuple[int, dict[str, str], Any]:
    """One request, as it is: status, headers, and what was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, content, {name: value for name, value in sent.items() if value})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    heads = {name.lower(): value for name, value in answer.getheaders()}
    is_json = text and heads.get("content-type") == "application/json"
    return answer.status, heads, json.loads(text) if is_json else text


def until(true: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def rest(writer: Writer, texts: list[Any]) -> list[str]:
    """What `Writer` wrote after each prompt."""
    return [text.text.removeprefix(writer.decode(writer.encode(text.prompt))) for text in texts]


def test_a_completion_is_what_the_writer_writes(client: Any, writer: Writer) -> None:
    made = client.completions.create(model="tiny", prompt=PROMPT, seed=3, extra_body={"steps": 5, "noise": "keep"})
    wanted = writer.write(PROMPT, seed=3, steps=5, noise="keep")
    assert [choice.text for choice in made.choices] == rest(writer, wanted)
    assert (made.model, made.object, made.choices[0].finish_reason) == ("tiny", "text_completion", "length")
    given = 2 + len(writer.encode(PROMPT))
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (given, 24 - given)
    assert made.usage.total_tokens == 24
    assert made.usage.evaluations == wanted[0].evaluations
    assert made.seed == 3


def test_max_tokens_are_written(client: Any, writer: Writer) -> None:
    made = client.completions.create(model="tiny", prompt=PROMPT, seed=3, max_tokens=4, temperature=0.8, top_p=0.9)
    length = 2 + len(writer.encode(PROMPT)) + 4
    wanted = writer.write(PROMPT, seed=3, length=length, temperature=0.8, top_p=0.9)
    assert made.choices[0].text == rest(writer, wanted)[0]
    assert made.usage.completion_tokens == 4


def test_a_text_that_does_not_fit_is_cut(client: Any, known: Writer) -> None:
    """Of a model that knows lengths: here all texts have 20 tokens, begin and end included."""
    for most, reason in ((4, "length"), (None, "stop")):
        (choice,) = client.completions.create(model="known", prompt=PROMPT, seed=3, max_tokens=most).choices
        length = None if most is None else 1 + len(known.encode(PROMPT)) + most
        (wanted,) = known.write(PROMPT, seed=3, length=length)
        assert (choice.text, choice.finish_reason) == (rest(known, [wanted])[0], reason)
        assert len(wanted.tokens) == (20 if length is None else length)
        assert (known.model.config.eos_token_id in wanted.tokens[1:]) == (most is None)


def test_several_prompts_and_several_texts_of_each(client: Any, writer: Writer) -> None:
    prompts = [PROMPT, "A dog sat", "The"]
    made = client.completions.create(model="tiny", prompt=prompts, n=3, seed=5)
    assert [choice.index for choice in made.choices] == list(range(9))
    assert [choice.text for choice in made.choices] == rest(writer, writer.write(prompts, num=3, seed=5))
    (alone,) = client.completions.create(model="tiny", prompt=PROMPT, n=1, seed=5).choices
    assert alone.text == made.choices[0].text
    assert len({choice.text for choice in made.choices}) > 3


def test_a_stream_is_the_same_text_in_pieces(client: Any) -> None:
    asked = {"model": "tiny", "prompt": [PROMPT, "A"], "seed": 4, "extra_body": {"steps": 30}}
    plain = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = ["", ""]
    for piece in pieces[:-1]:
        (choice,) = piece.choices
        said[choice.index] += choice.text
    assert said == [choice.text for choice in plain.choices]
    assert len(pieces) > 4
    reasons = [piece.choices[0].finish_reason for piece in pieces[:-1]]
    assert sorted(map(str, set(reasons))) == ["None", "length"]
    assert reasons.count("length") == 2
    assert pieces[-1].choices == []
    assert pieces[-1].usage.total_tokens == plain.usage.total_tokens
    (once,) = list(client.completions.create(model="tiny", prompt=PROMPT, stream=True, extra_body={"steps": 1}))
    assert once.choices[0].finish_reason == "length"


def test_a_stream_is_the_same_text_where_a_tokenizer_cleans_up_spaces() -> None:
    """Cleaned up, "it '" becomes "it's" with the next token, and what was sent could not be taken back."""
    special, words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["cat", "it", "'", "s", ".", "we", "ve", "i", "m"]
    vocab = {name: number for number, name in enumerate([*special, *words])}
    tokenizer = BertTokenizerFast(vocab=vocab, clean_up_tokenization_spaces=True)
    size = {"vocab_size": len(vocab), "mask_token_id": vocab["[MASK]"], "length": 14}
    writer = Writer(tiny_model(0, **size), tokenizer)
    order = Order.of(Completion(prompt="cat", stream=True), Engine({"tiny": writer}))
    said = ["cat", "it", "'", "s", ".", "we", "'", "ve", "i", "'", "m", "."]
    row = [vocab[name] for name in ("[CLS]", *said, "[SEP]")]
    assert tokenizer.decode(row, skip_special_tokens=True) == "cat it's. we've i'm."
    growing, shown = ChoiceStream(order), [[*row[:n], *[None] * (13 - n), row[-1]] for n in range(2, 13)] + [row]
    frames = [Frame(n, ids, [0] * 14, [], n == len(shown) - 1, n, 0.0) for n, ids in enumerate(shown)]
    pieces = [piece["text"] for frame in frames if (piece := growing.more(0, frame)) is not None]
    (plain,) = order.answer(frames[-1:])["choices"]
    assert "".join(pieces) == plain["text"]
    assert len(pieces) > 5
    assert "".join(Author("tiny", writer).pieces.of(row)) == "cat" + plain["text"] == writer.decode(row)


def test_stop_and_echo(client: Any) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "seed": 4, "extra_body": {"steps": 30}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:2]
    (cut,) = client.completions.create(**asked, stop=["nosuch stop", stop]).choices
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    pieces = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == cut.text
    assert client.completions.create(**asked, echo=True).choices[0].text == PROMPT + text


def test_a_stop_in_the_prompt_stops_nothing(client: Any) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "seed": 4, "echo": True, "extra_body": {"steps": 30}}
    text = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, stop="cat").choices[0].text == text
    stop = text[len(PROMPT) + 3 :][:4]
    for stream in (False, True):
        made = client.completions.create(**asked, stop=["cat", stop], stream=stream)
        pieces = list(made) if stream else [made]
        cut = "".join(piece.choices[0].text for piece in pieces)
        assert cut == text[: text.index(stop, len(PROMPT))]


def test_a_stream_waits_for_a_stop_that_began_before_another(writer: Writer) -> None:
    """Whatever the stops, and wherever they stand: the answer is cut the same in one piece and in many."""
    engine = Engine({"tiny": writer})
    order = Order.of(Completion(prompt="A", stream=True), engine)
    row = writer.encode("A dog saw the cat é on the mat")
    given = writer._special.begin
    holes: list[int | None] = [None] * 40
    frames = [[given, *row[:size], *holes[size:]] for size in range(1, len(row) + 1)] + [[given, *row]]
    text = writer.decode(row).removeprefix("A")
    for begin, size, inside in itertools.product(range(0, 20, 3), (3, 9, 14), (1, 4, 9)):
        long, short = text[begin : begin + size], text[begin + inside :][:2]
        for stops in ([long, short], [f"{long}!", short], [long], [text + "!"]):
            growing = ChoiceStream(replace(order, stops=stops))
            shown = [Frame(n, ids, [], [], n == len(frames) - 1, n, 0.0) for n, ids in enumerate(frames)]
            pieces = [growing.more(0, frame) for frame in shown]
            said = "".join(piece["text"] for piece in pieces if piece is not None)
            cuts = [text.index(stop) for stop in stops if stop in text]
            assert said == text[: min(cuts, default=len(text))], stops


@pytest.mark.parametrize("ends", [False, True])
def test_a_prompt_is_decoded_once_and_a_text_once_a_frame(
    monkeypatch: pytest.MonkeyPatch, writer: Writer, whole: Writer, ends: bool
) -> None:
    engine = Engine({"a": whole if ends else writer})
    order = Order.of(Completion(prompt=PROMPT, seed=3, steps=6, stream=True, n=2), engine)
    decoded, decode = list[int](), Writer.decode

    def counted(self: Writer, tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return decode(self, tokens)

    monkeypatch.setattr(Writer, "decode", counted)
    growing = ChoiceStream(order)

    async def work() -> list[tuple[int, Frame]]:
        return [told async for told in engine.run_all(order.jobs)]

    with engine:
        told = asyncio.run(work())
    for number, frame in told:
        growing.more(number, frame)
    assert len(told) > 2
    assert len(decoded) == len(told) + 2


def test_special_tokens_in_a_prompt_are_text(client: Any, writer: Writer) -> None:
    prompt = "A<pad> <mask>"
    for model in ("tiny", "whole"):
        made = client.completions.create(model=model, prompt=prompt, max_tokens=2, echo=True)
        assert made.choices[0].text.startswith(prompt)
        assert made.usage.prompt_tokens >= 1 + len(writer.encode(prompt))
        assert made.usage.completion_tokens <= 2


def test_blanks_are_filled(server: Server, writer: Writer) -> None:
    text = "The ___ sat on ___."
    wanted = [one.text for one in writer.infill(text, num=2, seed=6, blank=3)]
    assert len(set(wanted)) == 2
    _, _, made = ask(server, {"text": text, "n": 2, "seed": 6, "blank": 3}, "/v1/infill")
    assert [choice["text"] for choice in made["choices"]] == wanted
    assert {choice["finish_reason"] for choice in made["choices"]} == {"stop"}
    _, _, same = ask(server, {"prompt": text, "n": 2, "seed": 6, "blank": 3, "infill": True})
    assert [choice["text"] for choice in same["choices"]] == wanted
    _, heads, told = ask(server, {"text": [text], "seed": 6, "blank": 3, "stream": True}, "/v1/infill")
    assert heads["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in told.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == wanted[0]


def test_a_model_of_whole_texts_says_whether_they_ended(client: Any, whole: Writer) -> None:
    made = client.completions.create(model="whole", prompt=PROMPT, n=30, seed=1)
    wanted = whole.write(PROMPT, num=30, seed=1)
    assert [choice.text for choice in made.choices] == rest(whole, wanted)
    ended = [choice.finish_reason == "stop" for choice in made.choices]
    assert ended == [text.tokens[-1] == WHOLE["eos_token_id"] for text in wanted]
    assert 0 < sum(ended) < 30
    given = 1 + len(whole.encode(PROMPT))
    assert made.usage.completion_tokens == sum(len(text.tokens) - given for text in wanted)


def test_an_end_that_is_drawn_first_was_written_by_no_evaluation() -> None:
    known = tiny_writer(1, **WHOLE, lengths=[0.0] * 20 + [0.2] * 5)
    full = known.decode((known.encode(PROMPT) * 22)[:22])
    assert len(known.encode(full)) == 22  # with begin and end a row
    with in_background(Engine({"known": known}, Settings(api_key=KEY, hosts=LOCAL))) as running:
        for prompt in (full, PROMPT):
            made = client_of(running).completions.create(model="known", prompt=prompt, seed=1)
            (text,) = known.write(prompt, seed=1)
            assert (text.tokens[-1], text.revealed_at[-1]) == (WHOLE["eos_token_id"], -1)
            assert made.usage.completion_tokens == sum(step >= 0 for step in text.revealed_at)
            assert (made.usage.completion_tokens == 0) == (made.usage.evaluations == 0) == (prompt is full)


def test_without_a_seed_texts_differ_and_the_seed_is_told(client: Any) -> None:
    first, second = (client.completions.create(model="tiny", prompt=PROMPT) for _ in range(2))
    assert first.choices[0].text != second.choices[0].text
    again = client.completions.create(model="tiny", prompt=PROMPT, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text


def test_openai_says_what_was_refused(server: Server, client: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key is wrong or missing"):
        client_of(server, "another key").completions.create(model="tiny", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="tokens; with 24 in all there is no room to write"):
        client.completions.create(model="tiny", prompt="cat " * 100)
    with pytest.raises(openai.BadRequestError, match="of which the prompt leaves"):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=100)
    with pytest.raises(openai.NotFoundError, match="unknown model 'nosuch'; known: known, tiny, whole"):
        client.completions.create(model="nosuch", prompt=PROMPT)
    assert "another key" not in "".join(capfd.readouterr())
    assert KEY not in repr(server.engine.settings)


def test_models_health_metrics_and_docs(server: Server, client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "whole", "known"]
    assert client.models.retrieve("whole").length == 24
    assert ask(server, path="/healthz", method="GET", Authorization="")[::2] == (200, {"status": "ok"})
    client.completions.create(model="tiny", prompt=PROMPT)
    status, heads, text = ask(server, path="/metrics", method="GET")
    assert (status, heads["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) imdm_\w+ .+|imdm_\w+(\{.+\})? [\d.e+-]+", line), line
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures['imdm_requests_total{route="/v1/completions",status="200"}']) > 0
    assert float(figures["imdm_tokens_total"]) > 0
    assert (figures["imdm_sequences_running"], figures["imdm_clients"]) == ("0", "1")
    status, _, page = ask(server, path="/docs", method="GET", Authorization="")
    assert status == 200
    assert "POST /v1/completions" in page
    assert "max_tokens" in page
    assert not re.search(r"<script|<link|<img|src=|https?://", page)  # nothing is loaded from anywhere
    assert "/v1/infill" in ask(server, path="/openapi.json", method="GET")[2]["paths"]
    for name in ("suffix", "logprobs", "best_of", "logit_bias", "presence_penalty", "frequency_penalty"):
        assert "Not supported" in str(Completion.model_fields[name].description)
    assert page.count("Not supported") == 6


BAD_FIELDS: dict[str, list[Any]] = {
    "model": [5, [], {}, True],
    "prompt": [5, [5], [[1, 2]], {"a": 1}, [], " ", [" "], True, "\ud800", "x" * 5001, "cat " * 30],
    "max_tokens": [0, -1, 1.5, "5", True, 10**9, [], 23],
    "n": [0, -1, 1.5, "2", 5000, 101],
    "seed": [1.5, "x", 1 << 64, -(1 << 63) - 1, []],
    "steps": [0, -1, 2.5, "8", 1001, 10**12],
    "noise": ["x", 1, ""],
    "temperature": [-1, "1", 1e9, 1e-9, [], float("nan"), float("inf")],
    "top_p": [0, -0.1, 1.1, "1", float("nan")],
    "stream": [1, "yes"],
    "stream_options": [5, []],
    "stop": ["", [""], 5, [1], ["a"] * 17, "x" * 300],
    "echo": [1, "no"],
    "infill": ["yes", True],
    "blank": [0, "4", 4],
    "marker": [5, "___"],
    "suffix": ["x"],
    "logprobs": [3, 0],
    "best_of": [2],
    "presence_penalty": [1.0],
    "frequency_penalty": [1],
    "logit_bias": [{"1": 2.0}],
    "promt": ["The", None],
}
BAD_BODIES = [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 9000, b"{'prompt': 1}", b'{"prompt": "a",}']
FILL = "/v1/infill"
MALFORMED: list[tuple[int, dict[str, Any]]] = [
    *((400, {"body": {"prompt": PROMPT} | {name: value}}) for name, values in BAD_FIELDS.items() for value in values),
    *((400, {"body": body}) for body in BAD_BODIES),
    (404, {"body": {"prompt": PROMPT, "model": "nosuch"}}),
    (404, {"body": {"prompt": PROMPT, "model": ""}}),
    (404, {"body": {"prompt": PROMPT, "model": "../../etc/passwd"}}),
    (400, {"body": {"prompt": ["A"] * 100, "n": 2}}),
    (400, {"body": {"prompt": "a ___ b", "infill": True, "marker": ""}}),
    (400, {"body": {"prompt": "a ___ b", "infill": True, "blank": 100}}),
    (400, {"body": {"prompt": "a ___ b", "infill": True, "max_tokens": 4}}),
    (400, {"body": {}, "path": FILL}),
    (400, {"body": {"text": 5}, "path": FILL}),
    (400, {"body": {"text": None}, "path": FILL}),
    (400, {"body": {"text": []}, "path": FILL}),
    (400, {"body": {"text": "no blank"}, "path": FILL}),
    (400, {"body": {"text": "a ___", "blank": 0}, "path": FILL}),
    (400, {"body": {"text": "a ___", "max_tokens": 4}, "path": FILL}),
    (415, {"body": {"prompt": PROMPT}, "Content_Type": ""}),
    (415, {"body": {"prompt": PROMPT}, "Content_Type": "text/plain"}),
    (415, {"body": {"prompt": PROMPT}, "Content_Type": "application/x-www-form-urlencoded"}),
    (413, {"body": {"prompt": "x" * 20_000}}),
    (413, {"body": {"prompt": PROMPT}, "Content_Length": "99999999999"}),
    (405, {"method": "GET"}),
    (405, {"method": "PUT", "body": {}}),
    (405, {"method": "DELETE"}),
    (405, {"path": "/v1/models", "body": {}}),
    (404, {"path": "/v1/nosuch", "body": {}}),
    (404, {"path": "/v1/models/nosuch", "method": "GET"}),
    (404, {"path": "/v1/models/../../pyproject.toml", "method": "GET"}),
    (404, {"path": "/nosuch/%2e%2e/%2e%2e/etc/passwd", "method": "GET"}),
    (403, {"body": {"prompt": PROMPT}, "Host": "evil.example"}),
    (403, {"body": {"prompt": PROMPT}, "Host": "127.0.0.1.evil.example"}),
    (403, {"path": "/healthz", "method": "GET", "Host": "[::1"}),
    (403, {"body": {"prompt": PROMPT}, "Origin": "http://evil.example"}),
    (403, {"body": {"prompt": PROMPT}, "Origin": "null"}),
    (401, {"body": {"prompt": PROMPT}, "Authorization": ""}),
    (401, {"body": {"prompt": PROMPT}, "Authorization": KEY}),
    (401, {"body": {"prompt": PROMPT}, "Authorization": f"Basic {KEY}"}),
    (401, {"body": {"prompt": PROMPT}, "Authorization": f"Bearer {KEY} "[:-2]}),
    (401, {"path": "/metrics", "method": "GET", "Authorization": "Bearer é"}),
    (401, {"path": "/v1/models", "method": "GET", "Authorization": ""}),
]
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def test_errors_name_the_field(server: Server) -> None:
    """If the sentence begins with it, or with the prompt: all but what is wrong with everything together."""
    for name, values in BAD_FIELDS.items():
        for value in values:
            _, _, answer = ask(server, {"prompt": PROMPT} | {name: value})
            sentence, param = answer["error"]["message"], answer["error"]["param"]
            begins = re.match(rf"(unknown key )?'?{name}'?( =|:|$| )", sentence)
            told = "prompt" if re.match("(the|a) prompt ", sentence) else None
            assert param == (name if begins else told), answer
            assert begins or name in ("prompt", "infill", "n"), answer
    assert ask(server, {"prompt": PROMPT, "model": "nosuch"})[2]["error"]["param"] == "model"
    assert ask(server, b"{")[2]["error"]["param"] is None
    assert ask(server, path="/v1/nosuch", method="GET")[2]["error"]["param"] is None
    chat = ask(server, {"messages": []}, path="/v1/chat/completions")
    assert chat[0] == 404
    assert "POST /v1/completions" in chat[2]["error"]["message"]


def test_a_hundred_malformed_requests(server: Server) -> None:
    """Each has its status and OpenAI's shape, with one sentence; and none of them is work for the engine."""
    assert len(MALFORMED) >= 100
    before = server.engine.counts.turns
    for status, request in MALFORMED:
        found, heads, answer = ask(server, **request)
        assert found == status, (request, answer)
        assert heads["content-type"] == "application/json", request
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == KINDS.get(status, "invalid_request_error")
        sentence = answer["error"]["message"]
        assert 10 < len(sentence) < 1200, request
        assert sentence.isprintable(), request
        assert not re.search(r"[.!?;:]\s*$|[.!?]\s+[A-Z]", sentence), sentence  # one, without an end
        assert not re.search(r"Traceback|File \"|line \d|\.py\b|pydantic", sentence), sentence
        assert KEY not in sentence
    assert server.engine.counts.turns == before
    assert (server.engine.running, server.engine.waiting) == (0, 0)
    assert ask(server, {"prompt": PROMPT})[0] == 200


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"prompt": "a ___ b", "infill": True, "max_tokens": 4}, "max_tokens: with infill, blank says"),
        ({"prompt": PROMPT, "blank": 3}, "blank: it is for blanks"),
        ({"prompt": PROMPT, "marker": "_"}, "marker: it is for blanks"),
        ({"prompt": PROMPT, "logprobs": 0}, "logprobs: this service does not support it; leave it out"),
    ],
)
def test_options_that_would_be_ignored_are_refused(writer: Writer, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Order.of(Completion.parse(asked), Engine({"tiny": writer}))


def test_the_document_tells_the_options_of_infilling() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8").split())
    (told,) = re.findall(r"the options above but ([^.]+)\.", page)
    others = {*Completion.model_fields} - {*Infill.model_fields}
    unsupported = {name for name in others if "Not supported" in str(Completion.model_fields[name].description)}
    assert set(re.findall(r"`(\w+)`", told)) == others - unsupported


def test_null_is_a_field_that_is_not_given(server: Server, client: Any) -> None:
    """OpenAI's client has it for most of them."""
    plain = client.completions.create(model="tiny", prompt="", seed=3)
    nulls = dict.fromkeys(set(Completion.model_fields) - {"seed"})
    status, _, made = ask(server, nulls | {"seed": 3})
    assert (status, made["choices"][0]["text"]) == (200, plain.choices[0].text)
    some: Any = {"n": None, "temperature": None, "echo": None, "stream": None, "max_tokens": None}
    assert client.completions.create(model="tiny", prompt=None, seed=3, **some).choices == plain.choices


def test_a_body_without_a_length_is_limited_too(server: Server) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with suppress(BrokenPipeError, ConnectionResetError):  # it may be refused before all is sent
        connection.request("POST", "/v1/completions", chunks(), headers, encode_chunked=True)
    assert connection.getresponse().status == 413


@pytest.fixture
def gated() -> Iterator[Callable[..., tuple[Server, Gate]]]:
    """A service whose network waits until it is let go."""
    with ExitStack() as running:

        def start(**limits: Any) -> tuple[Server, Gate]:
            writer = tiny_writer()
            gate = Gate(writer.model)
            server = running.enter_context(in_background(Engine({"tiny": writer}, Settings(**limits))))
            running.callback(gate.open)
            return server, gate

        yield start


def begin(server: Server, body: Any, found: list[Any]) -> threading.Thread:
    """A request in a thread of its own."""
    thread = threading.Thread(target=lambda: found.append(ask(server, body)), daemon=True)
    thread.start()
    return thread


def is_closed(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", server.port)).close()
    except ConnectionRefusedError:
        return True
    return False


SLOW = {"prompt": PROMPT, "steps": 1000, "seed": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [0, 700_000])
def test_who_hangs_up_is_forgotten(gated: Any, stream: bool, size: int) -> None:
    """After a large body too, of which a part is read in advance: then reading pauses."""
    server, gate = gated()
    engine, body = server.engine, json.dumps(SLOW | {"stream": stream, "user": "x" * size}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    assert gate.asked.acquire(timeout=60)
    connection.close()
    until(lambda: all(ticket.dropped for group in engine._batches.values() for ticket in group.tickets))
    gate.open()
    until(lambda: not engine.running)
    assert (engine.counts.dropped, engine.counts.sequences, engine.counts.turns) == (1, 0, 1)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_client_that_leaves_while_the_service_stops(lost: bool, stopped: bool) -> None:
    """Work of a client that has left, perhaps before it began, is cancelled, and its task goes on; if the service
    cancels that task too, it ends."""

    async def work() -> None:
        connection = SimpleNamespace(leaving=set(), lost=lost, flow=SimpleNamespace(resume_reading=lambda: None))
        request: Any = SimpleNamespace(scope={"state": {"imdm.connection": connection}})
        task = asyncio.ensure_future(while_connected(request, asyncio.sleep(60)))
        await asyncio.sleep(0)
        if not lost:
            for stop in tuple(connection.leaving):
                stop()
        if stopped:
            if lost:
                await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError if stopped else Gone):
            await task
        assert task.cancelling() == stopped
        assert connection.leaving == set()
        if not lost:
            assert await while_connected(request, asyncio.sleep(0, "all")) == "all"

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_full_queue_and_too_many_clients(gated: Any) -> None:
    server, gate = gated(queue=3, clients=2)
    found: list[Any] = []
    threads = [begin(server, {"prompt": PROMPT, "n": 2}, found)]
    assert gate.asked.acquire(timeout=60)
    status, heads, answer = ask(server, {"prompt": PROMPT, "n": 2})
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (429, "queue_full", "rate_limit_error")
    assert int(heads["retry-after"]) >= 1
    with pytest.raises(openai.RateLimitError, match="2 texts are running or waiting, of 3 at most"):
        client_of(server).completions.create(model="tiny", prompt=PROMPT, n=2, stream=True)
    threads.append(begin(server, {"prompt": PROMPT}, found))
    until(lambda: server.engine.running + server.engine.waiting == 3)
    assert [ask(server, path=path, method="GET")[0] for path in ("/healthz", "/metrics")] == [200, 200]
    status, heads, answer = ask(server, {"prompt": PROMPT})
    assert (status, answer["error"]["code"], heads["retry-after"]) == (429, "too_many_clients", "1")
    gate.open()
    for thread in threads:
        thread.join(60)
    assert [one[0] for one in found] == [200] * 2
    until(lambda: ask(server, {"prompt": PROMPT})[0] == 200)


HALF_SENT = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\n{"


def test_requests_that_come_slowly_take_nobodys_place(gated: Any) -> None:
    """Neither among the clients nor among the connections, of which there are more than may be open."""
    server, gate = gated(clients=1)
    gate.open()
    held = []
    for _ in range(connections(1) + 4):
        held.append(socket.create_connection(("127.0.0.1", server.port)))
        held[-1].sendall(HALF_SENT)
    until(lambda: len([one for one in server.server_state.connections if one.cycle]) == connections(1))
    assert [ask(server, path=path, method="GET")[0] for path in ("/healthz", "/", "/page/app.js")] == [200] * 3
    assert ask(server, {"prompt": PROMPT})[0] == 200
    for connection in held:
        connection.close()


def test_a_request_has_little_time_to_come(gated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much less than to be answered."""
    monkeypatch.setattr("imdm.serving.guard.PATIENCE", 0.2)
    server, _ = gated(seconds=600)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(HALF_SENT)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not come in time" in answer


def test_a_request_that_takes_too_long(gated: Any) -> None:
    server, gate = gated(seconds=0.3)
    status, _, answer = ask(server, SLOW)
    assert (status, answer["error"]["type"]) == (504, "timeout_error")
    assert "took longer than 0.3 seconds" in answer["error"]["message"]
    gate.open()
    until(lambda: not server.engine.running)
    assert server.engine.counts.dropped == 1


def test_a_stream_that_takes_too_long_ends_with_an_error(gated: Any) -> None:
    server, gate = gated(seconds=1.0)
    gate.go.release()
    pieces = client_of(server).completions.create(model="tiny", prompt=PROMPT, stream=True, seed=1)
    with pytest.raises(openai.APIError, match=r"took longer than 1 seconds"):
        list(pieces)


@pytest.mark.parametrize("grace", [60.0, 0.0])
def test_a_signal_ends_the_service_and_leaves_nobody_without_an_answer(gated: Any, grace: float) -> None:
    """Requests that run are finished if there is time, and told otherwise, even while the network still runs; then the
    port is free."""
    server, gate = gated(grace=grace, batch=2)
    found: list[Any] = []
    threads = [begin(server, SLOW | {"seed": i, "stream": i == 0}, found) for i in range(5)]
    until(lambda: server.engine.running + server.engine.waiting == 5)
    server.handle_exit(signal.SIGTERM, None)
    if grace:
        gate.open()
    for thread in threads:
        thread.join(60)
    assert [one[0] for one in found] == [200 if grace else 503] * 5
    if not grace:
        assert all("stopped before the text was finished" in one[2]["error"]["message"] for one in found)
        gate.open()
    until(lambda: not server.engine._thread)
    until(lambda: is_closed(server))


def test_the_end_of_a_block_leaves_nobody_without_an_answer() -> None:
    """Though the network runs for longer than requests may take to finish."""
    writer, found = tiny_writer(), list[Any]()
    gate = Gate(writer.model)
    with in_background(Engine({"tiny": writer}, Settings(grace=0.1))) as server:
        thread = begin(server, SLOW, found)
        assert gate.asked.acquire(timeout=60)
        threading.Thread(target=lambda: (thread.join(60), gate.open()), daemon=True).start()
    assert [one[0] for one in found] == [503]


def test_what_goes_wrong_inside_is_one_sentence(gated: Any) -> None:
    server, gate = gated()
    gate.open()

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("it broke\nin two lines")

    server.engine.writers["tiny"].model.trunk_at = broken
    status, _, answer = ask(server, {"prompt": PROMPT})
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (500, "server_error", "failed")
    assert answer["error"]["message"] == "generation failed; the reason is in the service's log"


def test_a_key_is_asked_for_where_something_is_to_be_had(server: Server) -> None:
    for path in ("/healthz", "/docs", "/openapi.json"):
        assert ask(server, path=path, method="GET", Authorization="")[0] == 200
    for path in ("/v1/models", "/metrics", "/v1/models/tiny"):
        assert ask(server, path=path, method="GET", Authorization="")[0] == 401


def test_what_http_says_of_methods_and_schemes(server: Server) -> None:
    """405 lists what is allowed, HEAD is GET without a body, and the kind of a key is written in any case."""
    for path, method, allowed in (("/v1/completions", "GET", "POST"), ("/v1/models", "POST", "GET")):
        status, heads, _ = ask(server, path=path, method=method)
        assert (status, heads["allow"]) == (405, allowed)
    for path in ("/healthz", "/", "/page/app.js"):
        status, heads, text = ask(server, path=path, method="HEAD", Content_Type="", Accept="*/*")
        assert (status, text) == (200, "")
        assert int(heads["content-length"]) > 0
    assert ask(server, path="/v1/models", method="GET", Authorization=f"bearer {KEY}")[0] == 200


def test_a_proxy_may_have_a_name_of_its_own(server: Server) -> None:
    asked = {"prompt": PROMPT, "steps": 1}
    assert ask(server, asked, Host="texts.example", Origin="https://texts.example")[0] == 200
    assert ask(server, asked, Host="127.0.0.1:8000", Origin="https://Texts.example")[0] == 200
    for origin in ("http://localhost:1", "https://texts.example.evil", "https://[", "texts.example"):
        status, _, answer = ask(server, asked, Origin=origin)
        assert (status, answer["error"]["code"]) == (403, "origin")
    with pytest.raises(UserError, match="give a name alone, such as texts.example"):
        serve(["stories-imdm"], port=0, allow_host=["https://texts.example"])


@pytest.mark.parametrize(
    ("host", "local"), [("Localhost", True), ("127.0.0.2", True), ("0x7f.1", True), ("0.0.0.0", False)]
)
def test_the_address_says_who_can_reach_it(host: str, local: bool) -> None:
    with listen(host, 0) as listening:
        assert is_local(listening.getsockname()[0]) == local


def test_addresses_of_this_machine() -> None:
    found = {name: is_local(name) for name in ("::1", "::ffff:127.0.0.1", "::", "192.0.2.1", "fe80::1%1")}
    assert [name for name, local in found.items() if local] == ["::1", "::ffff:127.0.0.1"]


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: "


def test_who_does_not_send_a_whole_header_is_let_go(gated: Any) -> None:
    server, _ = gated(seconds=0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(HALF)
        assert connection.recv(100) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:  # after a whole request
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(HALF)
        started = time.monotonic()
        while connection.recv(4096):
            pass
        assert time.monotonic() - started < 3


def test_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    """Header and body are two packets: without TCP_NODELAY the second waits for the client's, some 40 ms each time.
    asyncio sets it where a socket names its protocol; uvloop always does."""

    async def accepted(listening: socket.socket) -> int:
        found = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=listening)
        _, writer = await asyncio.open_connection(*listening.getsockname()[:2])
        option = (await found).get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        server.close()
        return option

    assert asyncio.run(accepted(listen("127.0.0.1", 0)))


def test_a_header_has_a_limit(gated: Any) -> None:
    """A body is another matter: it may come in one piece with its header."""
    server, gate = gated()
    gate.open()
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: ")
        with suppress(OSError):  # while it is sent, or afterwards
            for _ in range(64):
                connection.sendall(b"x" * (1 << 14))
                time.sleep(0.01)
            assert connection.recv(100) == b""
        until(lambda: not server.server_state.connections)
    assert time.monotonic() - started < 8  # in 10 seconds it would be closed because it is slow
    assert ask(server, path="/healthz", method="GET")[0] == 200
    assert ask(server, {"prompt": "The cat", "user": "x" * (1 << 18), "max_tokens": 2})[0] == 200


def test_a_service_does_not_stop_to_collect_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full collections skip the models and libraries, and include them again afterwards. Threads take turns sooner. Of
    two services, the first to stop changes nothing for the other."""
    monkeypatch.setattr("imdm.serving.ready._intervals", [])  # other tests' services may be running
    here = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        first, second = responsive(), responsive()
        with first:
            assert gc.get_freeze_count() > 10_000
            second.__enter__()
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert gc.get_freeze_count() > 10_000
        second.__exit__(None, None, None)
        assert sys.getswitchinterval() == pytest.approx(0.004)
        assert gc.get_freeze_count() == 0
    finally:
        sys.setswitchinterval(here)


def test_half_sent_headers_keep_nobody_out(gated: Any) -> None:
    server, _ = gated(clients=1)
    held = []
    for _ in range(60):
        held.append(socket.create_connection(("127.0.0.1", server.port)))
        held[-1].sendall(HALF)
    until(lambda: len(server.server_state.connections) == connections(1) == 36)
    assert ask(server, path="/healthz", method="GET")[0] == 200
    for connection in held:
        connection.close()


def test_who_does_not_read_on_is_let_go() -> None:
    left = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.is_set():
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            if not server.server_state.connections:
                left.set()

    server = uvicorn.Server(uvicorn.Config(endless, http=patient(0.2, 10), lifespan="off", log_level="critical"))
    listening = listen("127.0.0.1", 0)
    running = threading.Thread(target=server.run, args=([listening],), daemon=True)
    running.start()
    with socket.create_connection(listening.getsockname()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert left.wait(60)
    server.should_exit = True
    running.join(60)


def test_the_guard_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imdm.serving.guard.LAST_WORDS", 0.1)
    metrics = Metrics()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def stuck(message: Any) -> None:
        await asyncio.Event().wait()

    async def sent() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    guard = Guard(app, Settings(seconds=0.1), metrics)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    asyncio.run(asyncio.wait_for(guard(scope, sent, stuck), 10))  # type: ignore[arg-type]
    assert metrics.clients == 0


def test_a_service_whose_engine_breaks_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, writer: Writer) -> None:
    engine, listening = Engine({"tiny": writer}), listen("127.0.0.1", 0)

    def fail() -> None:
        raise RuntimeError("it broke")

    def ask_it() -> None:
        found.append(ask(SimpleNamespace(port=listening.getsockname()[1]), {"prompt": PROMPT}))  # type: ignore[arg-type]

    found: list[Any] = []
    monkeypatch.setattr(engine, "_take_up", fail)
    asking = threading.Thread(target=ask_it, daemon=True)
    with pytest.raises(UserError, match="the service stopped after the internal error"):
        run_service(engine, listening, asking.start)
    asking.join(60)
    assert [one[0] for one in found] == [503]


def test_an_address_that_a_browser_can_open() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        assert address(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_the_benchmark_asks_all_and_measures_what_it_says(
    monkeypatch: pytest.MonkeyPatch, writer: Writer, whole: Writer
) -> None:
    """With clients in a process of their own; the texts are those that `Writer` writes."""
    monkeypatch.setattr(bench, "CLIENTS", (1, 4))
    for name, value in {"MIXED": 4, "LONG": 16, "RUNS": 1}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setitem(bench.SIZES, "tiny", {"preset": None, "length": 24, "requests": 8})
    monkeypatch.setattr(bench, "_writer", lambda preset, length: writer)
    *rows, mixed = bench.serving("tiny")
    assert [row.settings["clients"] for row in rows] == [1, 4]
    assert mixed.settings["long"] == 16
    assert mixed.figures["p50"] <= mixed.figures["p95"] <= mixed.ours.ms / 1e3
    assert mixed.figures["p95_without"] <= mixed.also["without the others"].ms / 1e3
    for row in rows:
        assert row.figures["p50"] <= row.figures["p95"] <= row.ours.ms / 1e3
        assert row.figures["p95_in_sequence"] <= row.plain.ms / 1e3
        assert 0 <= row.figures["http_share"] <= 1
        assert row.figures["cpu_seconds"] > 0
    requests = [{"prompt": PROMPT, "seed": i, "steps": 3} for i in range(7)]
    monkeypatch.setattr(os, "cpu_count", lambda: 3 * bench.CORES)
    with in_background(engine := Engine({"tiny": writer})) as server:
        before = engine.counts.sequences
        found = bench.load(server.port, 5, requests)  # by three processes
        assert engine.counts.sequences == before + len(requests)
        with pytest.raises(UserError, match="the clients failed: .*400"):
            bench.load(server.port, 2, [{"steps": 0}])
        monkeypatch.setattr(bench.clients_program, "__file__", "/dev/null")
        with pytest.raises(UserError, match="the clients failed: they ended with 0"):
            bench.load(server.port, 1, requests)
    assert found["texts"] == [rest(writer, writer.write(PROMPT, seed=i, steps=3))[0] for i in range(7)]
    assert 0 < max(found["took"]) <= found["seconds"] <= sum(found["took"]) + 1


def test_the_document_has_what_was_measured_on_a_gpu() -> None:
    rows = read_lines(Path(__file__).parents[2] / "results/serving/h200.jsonl")
    found = table(Path(__file__).parents[2] / "docs/performance.md", "Serving, one NVIDIA H200", corner="clients").rows
    for row, cells in zip(rows, found, strict=True):
        figures = row["figures"]
        after, before = (
            ", ".join(f"{figures[f'{q}{kind}']:.2f} s" for q in ("p50", "p95")) for kind in ("", "_in_sequence")
        )
        speed, inside = row["tokens_per_second"], row["also"]["without HTTP"]["ms"] / 1e3
        seconds, times = f"{row['ours']['ms'] / 1e3:.2f} s", f"{row['ratio']:.1f}"
        wanted = [str(row["settings"]["clients"]), seconds, times, after, before, f"{speed:,.0f}", f"{inside:.2f} s"]
        assert list(cells) == wanted
        assert row["ratio"] == row["plain"]["ms"] / row["ours"]["ms"]


def test_the_benchmark_has_models_of_other_sizes() -> None:
    made = bench._writer("tiny", 32)
    assert made.model.process.mask_id == made.model.config.mask_token_id
    (text,) = made.write(PROMPT, steps=2)
    assert len(text.tokens) == 32


def test_short_runs_are_repeated() -> None:
    runs = iter([(1.0, "a"), (5.0, "b"), (2.0, "c"), (4.0, "d"), (3.0, "e")])
    assert bench.middle(lambda: next(runs)) == (3.0, "e")  # the median of five
    runs = iter([(2.5, "long")])
    assert bench.middle(lambda: next(runs)) == (2.5, "long")


def test_in_turn_is_what_a_queue_of_clients_waits() -> None:
    assert bench.in_turn([1.0, 2.0, 3.0, 4.0], 1) == [1.0, 2.0, 3.0, 4.0]
    assert bench.in_turn([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 3.0, 5.0, 7.0]


def test_an_order_knows_its_limits(writer: Writer) -> None:
    engine = Engine({"tiny": writer}, Settings(tokens=50))
    with pytest.raises(UserError, match=r"asks for 6\d tokens in all, of 50 at most"):
        Order.of(Completion(prompt=PROMPT, n=3), engine)


@pytest.mark.parametrize(("option", "usual", "other"), [("noise", "posterior", "keep"), ("order", "random", "spread")])
def test_an_order_has_the_models_own_policies(option: str, usual: str, other: str) -> None:
    for own, asked, wanted in ((None, None, usual), (other, None, other), (other, usual, usual)):
        engine = Engine({"tiny": tiny_writer(**{option: own})})
        order = Order.of(Completion(prompt=PROMPT, **{option: asked}), engine)
        assert [getattr(engine.check(job), option) for job in order.jobs] == [wanted]


def test_the_examples_of_the_document_run(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says to type, with a tiny model in the place of the one that it speaks of."""
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    with in_background(Engine({"stories-imdm": tiny_writer(length=60)})) as server:
        page = page.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        names: dict[str, object] = {}
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            *before, last = block.strip().splitlines()
            exec("\n".join(before), names)
            assert eval(last, names)
        assert capsys.readouterr().out
        lines = re.findall(r"```sh\n(curl .*?)```", page, re.DOTALL)
        assert len(lines) == 2
        for line in lines:
            if shutil.which("curl") is None:
                continue
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["choices"], done.stdout


def test_the_document_tells_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    told = {name: float(value.replace(",", "")) for name, value in re.findall(r"\| `--(\w+)` \| ([\d,]+) \|", page)}
    assert told == {field.name: field.default for field in fields(Settings) if "help" in field.metadata}


def test_the_command_has_an_option_for_each_limit() -> None:
    limits = {field.name: field.default for field in fields(Settings) if "help" in field.metadata}
    options = signature(serve).parameters
    assert {name: options[name].default for name in limits} == limits
    for refused in ("--batch=0", "--seconds=nan", "--grace=-1", "--body=5"):
        done = CliRunner().invoke(app, ["serve", "stories-imdm", "--port=0", refused])
        assert str(done.exception).startswith(f"{refused.partition('=')[0]} = ")


@pytest.mark.parametrize("key", ["", "  ", "a\nb", "schlüssel", " key", "key "])
def test_keys_that_no_header_can_hold_are_refused(key: str) -> None:
    with pytest.raises(UserError, match="the API key is empty or has characters that no header can hold"):
        serve(api_key=key)


def test_an_empty_variable_is_no_open_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDM_API_KEY", "")
    with pytest.raises(UserError, match="the API key is empty"):
        serve()


def test_a_key_is_in_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that keeps one begins with the command that was given."""
    monkeypatch.setattr("sys.argv", ["imdm", "serve", "--api-key", KEY, f"--api-key={KEY}"])
    with pytest.raises(UserError, match="model 'nosuch': no such folder"):
        serve(["nosuch"], api_key=KEY)
    assert sys.argv == ["imdm", "serve", "--api-key", "…", "--api-key=…"]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imdm.cli.serving.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"imdm serve needs fastapi and uvicorn: pip install 'imdm\[serve\]'"):
        serve()


def test_unless_told_the_default_model_and_its_teacher_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("imdm.cli.serving.named", asked.extend)
    monkeypatch.setattr("imdm.cli.serving.find_spec", lambda name: None)  # goes no further
    with pytest.raises(UserError, match="imdm serve needs"):
        serve()
    assert asked == [DEFAULT, TEACHER]


def test_models_are_served_under_the_names_of_their_folders(tmp_path: Path) -> None:
    for folder in ("one", "run/model"):
        tiny_model().save_pretrained(tmp_path / folder)
    found = named([str(tmp_path / "one"), str(tmp_path / "run/model"), "stories-imdm"])
    assert list(found) == ["one", "run", "stories-imdm"]
    with pytest.raises(UserError, match=r"two models would be called '.*one'; name one yourself, as in other=.*one"):
        named([str(tmp_path / "one")] * 2)


def test_folders_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = ["a/seed-0/student/model", "a/seed-1/student/model", "b/seed-0/student/model", "stories-imdm", "x=y"]
    for folder in folders:
        tiny_model().save_pretrained(folder)
    assert list(named(folders[:2])) == ["seed-0/student", "seed-1/student"]
    assert list(named([folders[0], folders[2]])) == ["a/seed-0/student", "b/seed-0/student"]
    assert list(named(folders[:3])) == ["a/seed-0/student", "seed-1/student", "b/seed-0/student"]
    given = ["old=a/seed-0/student/model", folders[2], "x=y", "other=stories-teacher", "same=a/seed-0/student/model"]
    assert list(named(given)) == ["old", "student", "x=y", "other", "same"]
    assert named(given)["old"] == folders[0]
    with pytest.raises(UserError, match="two models would be called 'old'"):
        named(["old=x=y", f"old={folders[0]}"])
    with pytest.raises(UserError, match="expected a model, or NAME=MODEL"):
        named(["=stories-imdm"])
    with pytest.raises(UserError, match="model 'nosuch': no such folder"):
        named(["old=nosuch"])
