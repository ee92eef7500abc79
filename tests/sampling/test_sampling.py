"""The sampler against enumerated truth: same law as the plain loop, at the price of the reveals alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import NoisePath
from imdm.diffusion.randomness import Purpose, fold
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.sampling import Plan, Revealed, Sampling, Turn, draw, probabilities, reveal_steps, sample, time_grid, turns
from imdm.theory import ExactMarginals
from tests.conftest import tiny_model
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of

N = 40_000
KEYS = fold(21, Purpose.SAMPLE, torch.arange(N))


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("symbols", "length", "masks"), [(2, 2, 2), (2, 3, 2), (3, 2, 1)])
def test_law_is_that_of_the_plain_loop(policy: str, steps: int, symbols: int, length: int, masks: int) -> None:
    """A denoiser that depends on every token and every ε; the whole N-step chain enumerated (false alarm 1e-5 each)."""
    denoiser = TableDenoiser(symbols, length, masks, seed=length)
    law = sequence_law(chain_law(denoiser, all_masked(length, masks), steps, policy), symbols, length)
    made = sample(denoiser, torch.full((N, length), symbols), keys=KEYS, how=Sampling(steps, policy))
    assert_law(counts_of(made.tokens, symbols), law)


@pytest.mark.parametrize("policy", ["posterior", "keep"])
def test_law_from_a_perturbed_start(policy: str) -> None:
    """A partly revealed sequence at t = 0.6, as couplings start."""
    denoiser = TableDenoiser(symbols=2, length=3, masks=2, seed=9)
    start = {(("token", 1), ("mask", a), ("mask", b)): 0.25 for a in range(2) for b in range(2)}
    law = sequence_law(chain_law(denoiser, start, 3, policy, t=0.6), 2, 3)
    canvas = torch.tensor([1, 2, 2]).expand(N, 3)
    made = sample(denoiser, canvas, keys=KEYS, how=Sampling(3, policy), t=torch.full((N,), 0.6))
    assert_law(counts_of(made.tokens, 2), law)


def test_one_step_of_the_best_mdm_is_wrong_half_the_time_and_single_reveals_never_are() -> None:
    language = aligned()
    denoiser, canvas = ExactMarginals(language), torch.full((N, 2), 2)
    one = sample(denoiser, canvas, keys=KEYS, how=Sampling(1)).tokens
    assert_law(counts_of(one, 2), torch.full((4,), 0.25, dtype=torch.float64))
    many = sample(denoiser, canvas[:4000], keys=KEYS[:4000], how=Sampling(64))
    together = many.revealed_at[:, 0] == many.revealed_at[:, 1]
    assert 0 < together.sum() < 400
    assert language.valid(many.tokens[~together]).all()
    assert not language.valid(many.tokens[together]).all()


class Counting(TableDenoiser):
    """Counts what the sampler asks for."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args, seed=0)
        self.sequences, self.rows, self.batches = 0, 0, []

    def trunk(self, state):
        assert state.masked.any(1).all(), "a finished sequence was evaluated"
        self.sequences += len(state.tokens)
        self.batches.append(len(state.tokens))
        return super().trunk(state)

    def head(self, rows):
        self.rows += len(rows)
        return super().head(rows)


@pytest.mark.parametrize("steps", [1, 3, 1000])
def test_network_runs_only_for_reveals_and_head_once_a_position(steps: int) -> None:
    denoiser = Counting(2, 3, 2)
    made = sample(denoiser, torch.full((500, 3), 2), keys=KEYS[:500], how=Sampling(steps))
    distinct = sum(len(set(row)) for row in made.revealed_at.tolist())
    assert denoiser.sequences == distinct == int(made.evaluations.sum())
    assert denoiser.rows == 500 * 3
    assert made.evaluations.max() <= min(steps, 3)


def test_sequences_do_not_wait_for_one_another() -> None:
    """1,000 steps, length 3: three evaluations of the whole batch, not a thousand; with a batch size, full batches."""
    denoiser = Counting(2, 3, 2)
    sample(denoiser, torch.full((500, 3), 2), keys=KEYS[:500], how=Sampling(1000))
    assert len(denoiser.batches) == 3
    denoiser = Counting(2, 3, 2)
    sample(denoiser, torch.full((500, 3), 2), keys=KEYS[:500], how=Sampling(1000), batch_size=64)
    assert set(denoiser.batches[:-3]) == {64}


def test_reveal_steps_follow_the_schedule() -> None:
    grid = time_grid(4, torch.ones(1))[0]
    assert grid.tolist() == pytest.approx([1.0, 0.7500025, 0.500005, 0.2500075, 0.0])
    alpha = 1 - (1 - 1e-3) * grid
    survival = (1 - alpha) / (1 - alpha[0])
    u = torch.tensor([[0.999999, 0.8, 0.6, 0.4, 0.1, 0.0]], dtype=torch.float64)
    assert reveal_steps(survival[None], u).tolist() == [[0, 0, 1, 2, 3, 3]]


def test_batch_size_and_order_do_not_change_the_text() -> None:
    """Same keys, another batch: at least 99.9% of tokens equal (rounding may flip a draw)."""
    model = tiny_model(mask="infinite-uniform-8-1.0")
    whole = model.generate(num=256, steps=3, seed=5)
    parts = model.generate(num=256, steps=3, seed=5, batch_size=7)
    assert (whole.tokens == parts.tokens).double().mean() >= 0.999
    assert torch.equal(whole.revealed_at, parts.revealed_at)
    again = model.generate(num=256, steps=3, seed=5)
    assert torch.equal(whole.tokens, again.tokens)
    assert not torch.equal(whole.tokens, model.generate(num=256, steps=3, seed=6).tokens)


def test_prompts_are_kept_and_holes_filled() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    hole = model.config.mask_token_id
    canvas = torch.tensor([[0, 1, hole, hole, 2, hole], [3, hole, hole, hole, hole, hole]])
    made = model.generate(canvas, num=5, steps=2)
    assert made.tokens.shape == (10, 6)
    given = canvas.repeat_interleave(5, 0)
    assert torch.equal(made.tokens[given != hole], given[given != hole])
    assert not (made.tokens == hole).any()
    assert (made.revealed_at[given != hole] == -1).all()
    longer = model.generate(torch.tensor([[1, 2]]), length=5, steps=2)
    assert longer.tokens.shape == (1, 5)
    assert longer.tokens[0, :2].tolist() == [1, 2]


def test_a_full_canvas_comes_back_without_any_evaluation() -> None:
    model = tiny_model()
    canvas = torch.tensor([[0, 1, 2, 3, 2, 1]])
    made = model.generate(canvas, steps=4)
    assert torch.equal(made.tokens, canvas)
    assert made.evaluations.tolist() == [0]


def test_trace_tells_the_story() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    hole = model.config.mask_token_id
    made = model.generate(num=20, steps=4, trace=True)
    canvases = made.trace.canvases
    assert canvases.shape == (20, 5, 6)
    assert (canvases[:, 0] == hole).all()
    assert torch.equal(canvases[:, -1], made.tokens)
    shown = canvases != hole
    assert (shown[:, 1:] >= shown[:, :-1]).all()
    assert (made.trace.log_probs < 0).all()
    assert model.generate(num=1).trace is None


def test_progress_counts_tokens() -> None:
    seen: list[int] = []
    tiny_model().generate(num=3, steps=2, on_progress=seen.append)
    assert seen[-1] == 18
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps = 0"),
        ({"num": 0}, "num = 0"),
        ({"length": 7}, "length = 7: must be a whole number from 1 to 6"),
        ({"temperature": -0.5}, "temperature = -0.5: must be 0 "),
        ({"policy": "keep"}, "unknown sampling option 'policy'; known: noise, order, steps, temperature, top_p"),
        ({"keys": torch.zeros(2, dtype=torch.int64)}, "keys: expected 1 numbers of 64 bits"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"input_ids": torch.tensor([[1]]), "length": 50}, "length = 50: must be a whole number from 1 to 6"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"noise": "hold"}, "unknown noise policy 'hold'"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"input_ids": torch.zeros(1, 7, dtype=torch.int64)}, "the prompt has 7 tokens, the model takes at most 6"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.int64), "length": 3}, "more than length = 3"),
        ({"input_ids": torch.tensor([[9]])}, "token 9 is outside the vocabulary 0…4"),
        ({"input_ids": torch.tensor([[-1]])}, "token -1 is outside"),
        ({"input_ids": torch.tensor([1])}, "expected a canvas .* one prompt is \\[ids\\]"),
        ({"on_step": 3}, "on_step = 3: expected a function"),
    ],
)
def test_bad_requests_get_a_sentence(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        tiny_model().generate(**arguments)


def test_draw_partitions_the_unit_interval() -> None:
    p = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.2499999, 0.25, 0.7499999, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.log().expand(6, 6), u).tolist() == [1, 1, 2, 2, 4, 4]


def test_draws_follow_the_law() -> None:
    log_p = torch.randn(11, generator=torch.Generator().manual_seed(0)).log_softmax(0)
    u = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_law(torch.bincount(draw(log_p.expand(200_000, 11), u), minlength=11), log_p.double().softmax(0))


@pytest.mark.parametrize("k", [8, 16, 24, 32, 40])
def test_rare_tokens_keep_their_probability(k: int) -> None:
    """A token of probability 2⁻ᵏ in a vocabulary of 50,258 owns a slice of u of that length; float32 would lose it.
    Its two edges are found by bisection."""
    V, rare = 50_258, 30_000
    p = torch.full((V,), (1 - 2.0**-k) / (V - 1), dtype=torch.float64)
    p[rare] = 2.0**-k
    log_p = p.log()

    def edge(token: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            reached = int(draw(log_p[None], torch.tensor([middle], dtype=torch.float64))[0]) >= token
            low, high = (low, middle) if reached else (middle, high)
        return high

    assert edge(rare + 1) - edge(rare) == pytest.approx(2.0**-k, rel=1e-3)


def test_temperature_and_nucleus() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    u = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cold = p**2 / (p**2).sum()
    assert_law(torch.bincount(draw(p.log().expand(100_000, 4), u, temperature=0.5), minlength=4), cold)
    kept = torch.tensor([0.625, 0.375, 0.0, 0.0])
    assert_law(torch.bincount(draw(p.log().expand(100_000, 4), u, top_p=0.7), minlength=4), kept)


def turns_of(revealed_at: Tensor, steps: int, size: int | None) -> tuple[Tensor, list[Turn]]:
    """The turns that reveal each position at this step, −1: never. Times are −k, α is k + 1 before step k."""
    alpha = torch.arange(1.0, steps + 2, dtype=torch.float64).expand(len(revealed_at), -1)
    return turns(Plan(1 - alpha, alpha, revealed_at.clamp(min=0)), revealed_at >= 0, batch_size=size)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.integers(1, 12), st.none() | st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_turns_visit_every_reveal_once_and_in_order(seed: int, B: int, L: int, steps: int, size: int | None) -> None:
    """Whatever is revealed when: each sequence's steps in order, in turns that follow one another, none too large."""
    revealed_at = torch.randint(-1, steps, (B, L), generator=torch.Generator().manual_seed(seed))
    evaluations, found = turns_of(revealed_at, steps, size)
    assert evaluations.tolist() == [len(set(row) - {-1}) for row in revealed_at.tolist()]
    seen, last_turn, last_step = torch.full((B, L), -1), dict[int, int](), dict[int, int]()
    for number, turn in enumerate(found):
        assert 1 <= len(turn.active) <= (size or B)
        assert len(set(turn.active.tolist())) == len(turn.active)
        assert torch.equal(-turn.t, turn.now.double())
        assert torch.equal(turn.split.alpha_s - 1, turn.now.double())
        for place, (sequence, step, before) in enumerate(
            zip(turn.active.tolist(), turn.now.tolist(), turn.split.alpha_t.tolist(), strict=True)
        ):
            assert before - 1 == last_step.get(sequence, 0)
            assert last_turn.get(sequence, number - 1) == number - 1
            last_turn[sequence], last_step[sequence] = number, step
            mine = turn.rows.sequence == place
            assert turn.rows.position[mine].tolist() == (revealed_at[sequence] == step).nonzero()[:, 0].tolist()
            assert turn.rows.slot is not None
            assert turn.rows.slot[mine].tolist() == list(range(int(mine.sum())))
            seen[sequence, turn.rows.position[mine]] = step
        most = max(torch.bincount(turn.rows.sequence).tolist())
        assert turn.rows.most == most
    assert torch.equal(seen, revealed_at)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 7), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_turn_without_some_positions_is_that_planned_without_them(seed: int, B: int, L: int, steps: int) -> None:
    made = torch.Generator().manual_seed(seed)
    revealed_at = torch.randint(-1, steps, (B, L), generator=made)
    masked = torch.rand(B, L, generator=made) < 0.5
    revealed_at[0, 0] = 0
    _, (turn, *_) = turns_of(revealed_at, steps, None)
    first = torch.where(revealed_at < 0, steps, revealed_at).amin(1, keepdim=True)
    _, wanted = turns_of(torch.where(masked & (revealed_at == first), revealed_at, -1), steps, None)
    found = turn.only(masked)
    assert len(wanted) == bool(len(found.active))
    for one in wanted:
        for name in ("active", "now", "t"):
            assert torch.equal(getattr(found, name), getattr(one, name))
        assert found.rows.most == one.rows.most
        assert all(torch.equal(a, b) for a, b in zip(found.rows.tensors(), one.rows.tensors(), strict=True))


@pytest.mark.parametrize(("schedule", "t"), [("cosine", 1e-9), ("log-linear", 1e-17)])
def test_a_start_so_late_that_no_time_is_left_fills_every_hole(schedule: str, t: float) -> None:
    """1 − α rounds to 0 there, and the probability to stay masked is 0/0."""
    model = tiny_model(schedule=schedule)
    hole = model.config.mask_token_id
    canvas, late = torch.full((3, 6), hole), torch.full((3,), t, dtype=torch.float64)
    made = sample(model, canvas, keys=model.sample_keys(3, seed=1), how=Sampling(4), t=late)
    assert not bool((made.tokens == hole).any())
    assert made.evaluations.tolist() == [1, 1, 1]


def test_turns_are_full_to_the_end() -> None:
    """100 sequences of 1 to 10 evaluations, 7 at a time: no more turns than there must be."""
    revealed_at = torch.full((100, 10), -1)
    for row in range(100):
        revealed_at[row, : row % 10 + 1] = torch.arange(row % 10 + 1)
    evaluations, found = turns_of(revealed_at, 10, 7)
    assert len(found) == -(-int(evaluations.sum()) // 7)


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("mask", ["single", "infinite-uniform-8-1.0"])
def test_what_the_hook_hears_is_the_whole_story(mask: str, batch_size: int | None) -> None:
    """Tokens, steps and log-probabilities put together from what was revealed are those of the generation."""
    model = tiny_model(mask=mask)
    hole, heard = model.config.mask_token_id, list[Revealed]()
    canvas = torch.tensor([[0, hole, hole, hole, 2, hole], [hole] * 6, [0, 1, 2, 3, 2, 1]])
    made = model.generate(canvas, num=3, steps=4, trace=True, batch_size=batch_size, on_step=heard.append)
    tokens = canvas.repeat_interleave(3, 0)
    revealed_at, log_probs, evaluations = torch.full_like(tokens, -1), torch.zeros(9, 6), torch.zeros(9)
    for one in heard:
        place = one.sequences[one.rows.sequence], one.rows.position
        tokens[place] = one.tokens[one.rows.sequence, one.rows.position]
        assert torch.equal(tokens[one.sequences], one.tokens)
        revealed_at[place] = one.steps[one.rows.sequence]
        log_probs[place] = one.log_probs
        evaluations[one.sequences] += 1
    assert torch.equal(tokens, made.tokens)
    assert torch.equal(revealed_at, made.revealed_at)
    assert torch.equal(log_probs, made.trace.log_probs)
    assert evaluations.tolist() == made.evaluations.tolist()
    assert torch.equal(made.tokens, model.generate(canvas, num=3, steps=4, batch_size=batch_size).tokens)


def test_the_likeliest_tokens_at_temperature_0() -> None:
    """As one token after another is taken by hand, whatever u is; a law that is certain, without a division by zero."""
    model = tiny_model()
    made = model.generate(num=4, steps=1, temperature=0, trace=True)
    best = model(model.noised(torch.full((4, 6), 4))).max(-1)
    assert torch.equal(made.tokens, best.indices)
    assert torch.allclose(made.trace.log_probs, best.values, atol=1e-6)
    assert torch.equal(made.tokens, model.generate(num=4, steps=1, temperature=1e-6).tokens)
    assert torch.equal(model.generate(num=4, steps=1, temperature=0, top_p=0.5).tokens, made.tokens)
    law = probabilities(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]).log(), temperature=0)
    assert law.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_prompt_without_length_is_continued() -> None:
    model = tiny_model()
    made = model.generate(torch.tensor([[1, 2], [3, 0]]), num=2)
    assert made.tokens.shape == (4, 6)
    assert made.tokens[:, :2].tolist() == [[1, 2], [1, 2], [3, 0], [3, 0]]
    assert torch.equal(made.tokens, model.generate(torch.tensor([[1, 2], [3, 0]]), num=2, length=6).tokens)
    holed = model.generate(torch.tensor([[1, 4], [3, 0]]))  # a canvas says how long it is
    assert holed.tokens.shape == (2, 2)


def test_rows_longer_than_the_model_are_refused() -> None:
    model = tiny_model()
    longer = model.noised(torch.full((2, 7), 4))
    for read in (model.trunk, model, lambda state: model(state, rows=state.masked)):
        with pytest.raises(UserError, match="the state has rows of 7 tokens, the model takes at most 6"):
            read(longer)
    with pytest.raises(UserError, match="the canvas has rows of 3 tokens, the model takes at most 2"):
        sample(ExactMarginals(aligned()), torch.full((1, 3), 2), keys=KEYS[:1], how=Sampling())


def test_keys_take_the_place_of_a_seed() -> None:
    model = tiny_model()
    whole = model.generate(num=6, steps=3, seed=7)
    some = model.generate(num=2, steps=3, keys=model.sample_keys(6, 7)[4:])
    assert torch.equal(some.tokens, whole.tokens[4:])


def test_what_is_shown_of_a_generation_is_short() -> None:
    made = tiny_model().generate(num=3, steps=2, trace=True)
    assert repr(made) == "Generation(3 × 6 tokens, with trace)"
    assert repr(made.trace) == "Trace(3 × 6 tokens in 2 steps)"
    assert repr(tiny_model().generate(num=3)) == "Generation(3 × 6 tokens)"


def test_noise_has_a_key_of_its_own() -> None:
    """The same draws under other noise: as if noise and draws had come from two sequences."""
    model, canvas = tiny_model(mask="infinite-uniform-8-1.0"), torch.full((64, 6), 4)
    keys, others = (fold(seed, Purpose.SAMPLE, torch.arange(64)) for seed in (1, 2))
    own, same, new = (
        sample(model, canvas, keys=keys, noise_keys=noise, how=Sampling(3, "keep")) for noise in (None, keys, others)
    )
    assert torch.equal(own.tokens, same.tokens)
    assert torch.equal(own.revealed_at, new.revealed_at)  # when is no matter of noise
    assert not torch.equal(own.tokens, new.tokens)
    for s, end in ((0.0, own), (1.0, new)):
        found = sample(model, canvas, keys=keys, noise_keys=NoisePath.at(keys, others, s), how=Sampling(3, "keep"))
        assert torch.equal(found.tokens, end.tokens)


def test_a_single_mask_has_no_noise_to_change() -> None:
    model, canvas, others = tiny_model(), torch.full((64, 6), 4), fold(5, Purpose.SAMPLE, torch.arange(64))
    one, other = (sample(model, canvas, keys=KEYS[:64], noise_keys=n, how=Sampling(3)) for n in (None, others))
    assert torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("s", [0.0, 0.4, 1.0])
def test_law_is_the_same_on_the_way_from_one_noise_to_another(policy: str, s: float) -> None:
    """Against the enumerated chain, as for noise under the sequence's own key (false alarm 1e-5 each)."""
    denoiser = TableDenoiser(2, 2, 2, seed=4)
    law = sequence_law(chain_law(denoiser, all_masked(2, 2), 3, policy), 2, 2)
    ends = (fold(seed, Purpose.SAMPLE, torch.arange(N)) for seed in (91, 92))
    path = NoisePath.at(*ends, s)
    made = sample(denoiser, torch.full((N, 2), 2), keys=KEYS, noise_keys=path, how=Sampling(3, policy))
    assert_law(counts_of(made.tokens, 2), law)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), "keys: expected 3 numbers of 64 bits"),
        (NoisePath(KEYS[:3], KEYS[3:6], torch.full((3,), 1.5)), r"noise_keys: expected 3 places s in \[0, 1\]"),
        ([1, 2, 3], "keys = .*: expected a tensor"),
    ],
)
def test_bad_keys_of_noise_get_a_sentence(keys: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_model().generate(num=3, noise_keys=keys)


def test_a_model_writes_with_its_own_noise_policy(tmp_path: Path) -> None:
    """Which its configuration remembers, and which is no part of its law."""
    plain, own = (tiny_model(mask="infinite-uniform-4-1.0", noise=noise) for noise in (None, "keep"))
    how = {"num": 64, "steps": 4}
    assert [one.policies()["noise"] for one in (plain, own)] == ["posterior", "keep"]
    assert torch.equal(plain.generate(**how).tokens, own.generate(**how, noise="posterior").tokens)
    assert torch.equal(plain.generate(**how, noise="keep").tokens, own.generate(**how).tokens)
    assert not torch.equal(plain.generate(**how).tokens, own.generate(**how).tokens)
    assert fingerprint(plain) == fingerprint(own)
    own.save_pretrained(tmp_path)
    assert load_model(tmp_path).policies()["noise"] == "keep"
    assert "noise" not in plain.config.to_dict()
    with pytest.raises(UserError, match="unknown noise policy 'kept'; known: keep, posterior"):
        tiny_model(noise="kept")
