"""What the page asks of the service: frames with the text of each token, ways between noises, a judge; its files."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the service needs imdm[serve]")

from fastapi.testclient import TestClient

from imdm.data.tokenizers import train_bpe
from imdm.serving.app import make_app
from imdm.serving.engine import Engine
from imdm.serving.jobs import Busy, TooLong
from imdm.serving.pieces import Pieces
from imdm.serving.play import MOST_JUDGED, PAGE, Author, Judges, ToJudge, refining
from imdm.serving.settings import Settings
from imdm.writer import Writer
from tests.conftest import tiny_model
from tests.data.test_corpora import SENTENCES

END, MASK, LENGTH = 1, 3, 40
WHOLE = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def writers(length: int = LENGTH) -> dict[str, Writer]:
    """Two models of random weights, with and without noise in their masks, the latter in spread order; one that writes
    whole texts."""
    tokenizer = train_bpe(SENTENCES * 5, 320)
    size = {"vocab_size": len(tokenizer), "mask_token_id": MASK, "length": length}
    made = {
        "noisy": tiny_model(1, mask="infinite-uniform-8-1.0", **size),
        "plain": tiny_model(2, order="spread", **size),
        "whole": tiny_model(3, **size, **WHOLE),
    }
    return {name: Writer(model, tokenizer) for name, model in made.items()}


def ids_of(writer: Writer, text: str) -> list[int]:
    return writer.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TestClient, dict[str, Writer]]]:
    models = writers()
    with Engine(models) as engine:
        yield TestClient(make_app(engine), base_url="http://127.0.0.1"), models


def told(client: TestClient, path: str, **asked: Any) -> list[dict[str, Any]]:
    """The data of all events of an answer."""
    answer = client.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("model", ["noisy", "plain", "whole"])
def test_frames_end_in_the_text_that_a_writer_writes(served: Any, model: str) -> None:
    client, models = served
    frames = told(client, "/play/write", model=model, prompt="The cat", steps=5, seed=3)
    (text,) = models[model].write("The cat", steps=5, seed=3)
    last = frames[-1]
    assert "".join(last["pieces"]) == text.text
    assert last["ids"][: len(text.tokens)] == text.tokens
    assert last["evaluations"] == text.evaluations == len(frames)
    assert [frame["done"] for frame in frames] == [False] * (len(frames) - 1) + [True]
    for frame in frames:
        for token, piece, step, probability in zip(
            frame["ids"], frame["pieces"], frame["revealed_at"], frame["probability"], strict=True
        ):
            assert (token is None) == (piece is None)
            assert step < frame["step"]
            assert 0 <= probability <= 1
    given = len(ids_of(models[model], "The cat")) + 1
    assert last["revealed_at"][:given] == [-1] * given
    assert 0 < last["entropy"] < 4


def test_a_row_is_filled_in_and_kept_elsewhere(served: Any) -> None:
    client, _ = served
    row = client.post("/play/tokens", json={"model": "noisy", "text": "The cat sat on the mat."}).json()
    assert "".join(row["pieces"]) == "The cat sat on the mat."
    holes = [2, 3, 6]
    ids = [None if i in holes else token for i, token in enumerate(row["ids"])]
    last = told(client, "/play/write", model="noisy", row=ids, steps=4)[-1]
    assert [i for i, step in enumerate(last["revealed_at"]) if step >= 0] == holes
    assert all(last["ids"][i] == token for i, token in enumerate(ids) if token is not None)


def test_noise_and_draws_change_apart(served: Any) -> None:
    client, _ = served
    for model, moved in (("noisy", True), ("plain", False)):
        asked = {"model": model, "steps": 2, "noise": "keep"}
        base, noise, draws = (
            told(client, "/play/write", **asked, **change)[-1] for change in ({}, {"noise_seed": 9}, {"draws_seed": 9})
        )
        assert base["revealed_at"] == noise["revealed_at"] == draws["revealed_at"]
        assert (base["ids"] != noise["ids"]) == moved
        assert base["ids"] != draws["ids"]


def test_a_way_between_two_noises_has_them_at_its_ends(served: Any) -> None:
    client, _ = served
    asked = {"model": "noisy", "steps": 2, "noise": "keep", "seed": 4}
    points = told(client, "/play/path", **asked, between=[4, 5], points=11)
    assert sorted(point["point"] for point in points) == list(range(11))
    assert all(point["s"] == point["point"] / 10 for point in points)
    assert {point["point"] for point in points[:2]} == {0, 10}  # both ends first
    at = {point["point"]: point["ids"] for point in points}
    assert at[0] == told(client, "/play/write", **asked)[-1]["ids"]
    assert at[10] == told(client, "/play/write", **asked, noise_seed=5)[-1]["ids"]
    assert at[0] != at[10]


@pytest.mark.parametrize("points", [2, 3, 10, 33])
def test_a_way_is_refined_and_leaves_nothing_out(points: int) -> None:
    assert sorted(refining(points)) == list(range(points))
    assert refining(9) == [0, 8, 4, 2, 6, 1, 3, 5, 7]


def test_the_limits_of_the_service_are_the_pages_too() -> None:
    with Engine(writers(), Settings(tokens=100, prompt=10, steps=5)) as engine:
        client = TestClient(make_app(engine), base_url="http://127.0.0.1")
        assert client.get("/play/models").json()["steps"] == 5
        for path, asked, sentence in (
            ("path", {"between": [0, 1], "points": 9}, "tokens are to be written, of 100 at most"),
            ("write", {"prompt": "a text of more than ten"}, "of 10 at most"),
            ("write", {"steps": 6}, "steps = 6: must be a whole number from 1 to 5"),
        ):
            answer = client.post(f"/play/{path}", json={"model": "noisy", **asked})
            assert answer.status_code == 400
            assert sentence in answer.json()["error"]["message"]


def test_the_judge_that_ships_reads(served: Any) -> None:
    client, models = served
    row = models["plain"].blanked("The cat sat ___.", 1, "___")
    found = client.post("/play/judge", json={"model": "plain", "row": row}).json()
    assert found["judge"]
    assert found["perplexity"] > 1
    after = client.post("/play/judge", json={"model": "plain", "row": row, "given": 4}).json()
    assert 0 < after["tokens"] < found["tokens"]
    nothing = client.post("/play/judge", json={"model": "plain", "row": [0, 1]}).json()
    assert nothing["perplexity"] is None


def test_a_judge_has_a_deadline_and_a_queue_that_one_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    judges, author, go = Judges(0.1), Author("plain", writers()["plain"]), threading.Event()
    asked = ToJudge(model="plain", row=[5, 6])
    monkeypatch.setattr(judges, "_score", lambda *_: {"read": go.wait(60)})

    async def work() -> None:
        with pytest.raises(TooLong, match=r"the judge took longer than 0\.1 seconds"):
            await judges.read(author, asked)
        judges.seconds = 60.0
        waiting = [asyncio.create_task(judges.read(author, asked)) for _ in range(MOST_JUDGED - 1)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="16 texts wait for a judge"):
            await judges.read(author, asked)
        waiting[-1].cancel()
        await asyncio.wait(waiting[-1:])
        last = asyncio.create_task(judges.read(author, asked))
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(*waiting[:-1], last) == [{"read": True}] * (MOST_JUDGED - 1)

    asyncio.run(work())


@pytest.mark.parametrize("stuck", [False, True])
def test_each_part_of_a_way_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """So on a slow machine it ends; what has come before a part that takes too long stays."""
    monkeypatch.setattr("imdm.serving.guard.LAST_WORDS", 0.2)  # the whole way takes longer than the limit and this
    models, asked = writers(12), list[int]()
    trunk_at = models["noisy"].model.trunk_at

    def slow(state: Any, rows: Any) -> torch.Tensor:
        asked.append(len(state.tokens))
        time.sleep(3.0 if stuck and len(asked) == 3 else 0.3)
        return trunk_at(state, rows)

    models["noisy"].model.trunk_at = slow  # type: ignore[method-assign]
    with Engine(models, Settings(seconds=2.0)) as engine:
        client = TestClient(make_app(engine), base_url="http://127.0.0.1")
        found = told(client, "/play/path", model="noisy", steps=1, between=[1, 2], points=65)
    if stuck:
        assert found.pop() == {
            "message": "the request took longer than 2 seconds; ask for fewer texts, tokens or steps"
        }
    assert [point["point"] for point in found] == refining(65)[: 16 if stuck else 65]


def test_the_more_steps_the_fewer_points_are_written_together(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = served
    batches, run_all = list[int](), Engine.run_all

    def counted(self: Engine, jobs: Any, **how: Any) -> Any:
        batches.append(len(jobs))
        return run_all(self, jobs, **how)

    monkeypatch.setattr(Engine, "run_all", counted)
    for steps, wanted in ((1, [8, 1]), (16, [4, 4, 1]), (64, [2, 2, 2, 2, 1])):
        batches.clear()
        told(client, "/play/path", model="noisy", steps=steps, between=[1, 2], points=9)
        assert batches == wanted


def test_models_say_what_their_masks_carry_and_how_they_write(served: Any) -> None:
    client, _ = served
    found = client.get("/play/models").json()
    told = [(model["name"], model["noisy"], model["order"]) for model in found["models"]]  # as they were given
    assert told == [("noisy", True, "random"), ("plain", False, "spread"), ("whole", False, "random")]


@pytest.mark.parametrize(
    ("path", "asked", "sentence"),
    [
        ("write", {"model": "none"}, "unknown model 'none'; known: noisy, plain, whole"),
        ("write", {"model": "plain", "steps": 65}, "steps"),
        ("write", {"model": "plain", "prompt": "word " * 200}, "there is no room to write"),
        ("write", {"model": "plain", "prompt": " \n"}, "the prompt has nothing but spaces; leave it empty"),
        ("path", {"model": "noisy", "prompt": "  ", "between": [0, 1]}, "the prompt has nothing but spaces"),
        ("write", {"model": "plain", "row": [0, 5, 1]}, "nothing to fill in"),
        ("write", {"model": "plain", "row": [0, None, 999]}, "999"),
        ("write", {"model": "plain", "row": [None] * 99}, "the row has 99 tokens"),
        ("write", {"model": "plain", "row": [0, None], "prompt": "a"}, "not both"),
        ("write", {"model": "plain", "colour": "red"}, "colour"),
        ("path", {"model": "noisy", "between": [0, 1], "points": 1}, "points"),
        ("tokens", {"model": "plain", "text": "word " * 200}, "the model takes at most 40"),
        ("tokens", {"model": "plain", "text": ""}, "text"),
        ("tokens", {"model": "plain", "text": "\ud800"}, "unicode string"),
        ("write", {"model": "plain", "prompt": "\ud800"}, "unicode string"),
        ("judge", {"model": "plain", "row": [0, 99999]}, "99999"),
        ("judge", {"model": "plain", "row": []}, "row"),
        ("judge", {"model": "plain", "row": [5] * 99}, "the row has 99 tokens, the model takes 1 to 40"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(served: Any, path: str, asked: dict[str, Any], sentence: str) -> None:
    client, _ = served
    answer = client.post(f"/play/{path}", content=json.dumps(asked), headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    message = answer.json()["error"]["message"]
    assert sentence in message
    assert "\n" not in message


def test_the_pages_files_come_from_here_and_nothing_else_does(served: Any) -> None:
    client, _ = served
    page = client.get("/")
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for file in PAGE.iterdir():
        found = client.get(f"/page/{file.name}")
        assert found.status_code == 200
        assert found.content == file.read_bytes()
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "nothing is fetched from outside"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    for name in ("nosuch.js", "../play.py", "%2e%2e/play.py", "..%2fplay.py"):
        assert client.get(f"/page/{name}").status_code == 404


@pytest.mark.parametrize("text", ["a naïve café — 東京 ☃ 👩‍🚀 end", "<b>&amp;</b>", "line\nline"])
def test_pieces_of_tokens_are_the_text(text: str) -> None:
    for writer in writers().values():
        pieces = Pieces(writer)
        row = ids_of(writer, text)
        assert "".join(pieces.of(row)) == text
        half = [token if i % 2 else None for i, token in enumerate(row)]
        assert [piece is None for piece in pieces.of(half)] == [token is None for token in half]


def test_pieces_are_the_text_whatever_the_tokens_are() -> None:
    """Stray bytes, ends in the middle, padding."""
    for writer in writers(20).values():
        size = writer.model.vocab_size
        pieces, rows = Pieces(writer), torch.randint(0, size, (200, 20), generator=torch.Generator().manual_seed(0))
        rows = rows.masked_fill(rows == MASK, 5)
        rows = writer.model.process.closed(rows, torch.ones_like(rows, dtype=torch.bool))
        for row in rows.tolist():
            found = pieces.of(row)
            assert "".join(found) == writer.decode(row)
            assert not any(piece for token, piece in zip(row, found, strict=True) if token == END)


def test_stray_bytes_are_read_a_few_at_a_time() -> None:
    """However many there are, among special tokens or not: no longer rows are decoded, and the text is the same."""
    writer = writers()["plain"]
    strays = [token for token in range(writer.model.vocab_size) if writer.decode([token]) == "\ufffd"]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([*strays, 0, 2, *ids_of(writer, "é")])
    rows = [*tokens[torch.randint(0, len(tokens), (20, 60), generator=generator)].tolist(), strays[:1] * 2000]
    pieces = Pieces(writer)
    for row in rows:
        assert "".join(pieces.of(row)) == writer.decode(row)
    assert max(map(len, pieces._cache)) <= 8
