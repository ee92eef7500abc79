"""Rows that are whole texts: their law in sampler, losses, measures and writer, against enumeration and by hand."""

from __future__ import annotations

import pytest
import torch

from imdm.ending import Ending, lengths
from imdm.randomness import Purpose, fold
from imdm.sampling import Sampling, sample
from tests.reference.enumeration import TableDenoiser, all_masked, chain_law, sequence_law, shut
from tests.reference.loop import plain_sample
from tests.reference.statistics import assert_law, counts_of

TWO, ONE = Ending(end=1, pad=2), Ending(end=1, pad=1)
N = 40_000
KEYS = fold(7, Purpose.SAMPLE, torch.arange(N))


def test_where_texts_end_by_hand() -> None:
    rows = torch.tensor([[0, 5, 6, 1, 2, 2], [0, 5, 6, 7, 8, 9], [0, 1, 2, 2, 2, 2], [0, 5, 2, 2, 2, 2]])
    assert TWO.lengths(rows).tolist() == [4, 6, 2, 3]
    assert TWO.finished(rows).tolist() == [True, False, True, True]
    assert TWO.fits(rows).all()
    assert not TWO.fits(torch.tensor([[0, 5, 1, 6, 2, 2]])).any()
    same = torch.tensor([[1, 5, 6, 1, 1, 1], [1, 1, 1, 1, 1, 1]])  # begin, end and padding are one id
    assert ONE.lengths(same).tolist() == [4, 2]
    assert lengths(same, None) is None


def test_what_is_certain_and_what_is_barred_by_hand() -> None:
    hole = 9
    tokens = torch.tensor([[0, 9, 5, 9, 1, 9], [0, 9, 9, 2, 9, 9], [9, 9, 9, 9, 9, 5]])
    masked = tokens == hole
    closed = [[0, 9, 5, 9, 1, 2], [0, 9, 9, 2, 2, 2], [9, 9, 9, 9, 9, 5]]
    assert TWO.closed(tokens, masked).tolist() == closed
    bars = [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]]  # the first place ends nothing
    assert TWO.barred(tokens, masked).int().tolist() == bars
    assert ONE.barred(tokens, masked)[0].tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("policy", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(("symbols", "length", "masks", "ending"), [(3, 3, 2, TWO), (3, 3, 1, ONE), (4, 3, 1, TWO)])
def test_law_of_the_sampler(policy: str, steps: int, symbols: int, length: int, masks: int, ending: Ending) -> None:
    """The whole N-step chain enumerated, with the rule: the first end wins, what is there stays (false alarm 1e-5)."""
    denoiser = TableDenoiser(symbols, length, masks, seed=1, ending=ending)
    law = sequence_law(chain_law(denoiser, all_masked(length, masks), steps, policy), symbols, length)
    made = sample(denoiser, torch.full((N, length), symbols), keys=KEYS, how=Sampling(steps, policy))
    assert_law(counts_of(made.tokens, symbols), law)
    assert ending.fits(made.tokens).all()


def test_law_of_the_process() -> None:
    """The plain loop over `Process.reverse`, whose proposals no bar has touched: there marks may come before text, which
    then stays, so that only what was masked is shut."""
    denoiser = TableDenoiser(3, 3, 1, seed=3, ending=TWO)
    made = plain_sample(denoiser, torch.full((N, 3), 3), KEYS, 1, "keep")
    law = sequence_law(chain_law(denoiser, all_masked(3, 1), 1, "keep"), 3, 3)
    assert_law(counts_of(made, 3), law)


@pytest.mark.parametrize(("canvas", "start"), [([3, 3, 3, 0], "text"), ([3, 3, 1, 3], "end"), ([3, 3, 2, 3], "pad")])
def test_law_with_given_tokens(canvas: list[int], start: str) -> None:
    """Given tokens reappear, always; before text and before an end nothing ends, before padding it may."""
    denoiser = TableDenoiser(3, 4, 1, seed=5, ending=TWO)
    given = tuple(("mask", 0) if token == 3 else ("token", token) for token in canvas)
    law = sequence_law(chain_law(denoiser, {shut(given, given, TWO): 1.0}, 2, "keep"), 3, 4)
    made = sample(denoiser, torch.tensor(canvas).expand(N, 4), keys=KEYS, how=Sampling(2, "keep"))
    assert_law(counts_of(made.tokens, 3), law)
    fixed = torch.tensor(canvas) != 3
    assert (made.tokens[:, fixed] == torch.tensor(canvas)[fixed]).all()
    if start != "pad":
        assert not torch.isin(made.tokens[:, 1:2], torch.tensor([1, 2])).any()


def test_what_is_certain_costs_no_evaluation() -> None:
    """Padding is filled in at the step of the end; a sequence that has nothing else left is evaluated no more."""
    denoiser = TableDenoiser(3, 6, 1, seed=2, ending=TWO)
    written: list[int] = []
    made = sample(
        denoiser,
        torch.full((500, 6), 3),
        keys=KEYS[:500],
        how=Sampling(12),
        trace=True,
        batch_size=64,
        on_progress=written.append,
    )
    assert written[-1] == 500 * 6
    distinct = torch.tensor([len(set(row)) for row in made.revealed_at.tolist()])
    assert torch.equal(made.evaluations, distinct)  # each step that drew something
    assert made.evaluations.float().mean() < 0.9 * Stream.evaluations()
    for step in range(13):  # no canvas has a hole after an end
        canvas = made.trace.canvases[:, step]
        assert not ((canvas == 3) & TWO.ended(canvas)).any()
    assert torch.equal(made.trace.canvases[:, -1], made.tokens)


class Stream:
    @staticmethod
    def evaluations() -> float:
        """How often the same model is evaluated where rows are cut from a stream."""
        denoiser = TableDenoiser(3, 6, 1, seed=2)
        made = sample(denoiser, torch.full((500, 6), 3), keys=KEYS[:500], how=Sampling(12))
        return float(made.evaluations.float().mean())
