"""One prompt, completed by two models in few and in more steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from pydantic import TypeAdapter, ValidationError

from imdm.core.errors import UserError
from imdm.core.files import read_json, write_json
from imdm.shipped import recorded
from imdm.writer import load

FIGURES = (
    "With each text: how long it took, then, where its model's card has that number of steps, figures of the model, "
    "not of the text: entropy and perplexity of the beginnings of many, with the judge. Each model writes in its own "
    "order."
)


@dataclass(frozen=True)
class Shown:
    """A prompt's completion by a model in so many steps, with the step at which each piece of it appeared (−1: given).
    seconds: of generation; entropy and perplexity, under `judge`: as on the model's card; None where it has none, since
    the card's are of texts that are cut to one length, and others would not compare."""

    model: str
    steps: int
    pieces: Sequence[tuple[str, int]]
    seconds: float
    entropy: float | None
    perplexity: float | None
    judge: str | None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def figures(self) -> str:
        card = [] if self.entropy is None else [f"entropy {self.entropy:.2f}"]
        if self.perplexity is not None:
            card.append(f"perplexity {self.perplexity:,.0f} by {self.judge}")
        return f"{self.seconds:.2f} s" + (f"; model card: {', '.join(card)}" if card else "")


SHOWN = TypeAdapter(Shown)


def completions(prompt: str, models: Sequence[str], steps: Sequence[int], seed: int = 0) -> Iterator[Shown]:
    """A prompt's completions, step count by step count, each model in turn."""
    writers = [(name, load(name), recorded(name)) for name in models]
    for count in steps:
        for name, writer, measured in writers:
            started = perf_counter()
            (text,) = writer.write(prompt, steps=count, seed=seed)
            took = perf_counter() - started
            pieces = [(piece.text, piece.step) for piece in writer.pieces(text)]
            perplexity, judge, entropy = measured.get(count, (None, None, None))
            yield Shown(name, count, pieces, took, entropy, perplexity, judge)


def keep(shown: Sequence[Shown], run: Path) -> None:
    """Store completions in a run's folder, for its report."""
    write_json(run / "shown.json", [asdict(one) for one in shown])


def kept(run: Path) -> list[Shown]:
    """The stored completions."""
    file = run / "shown.json"
    if not file.exists():
        return []
    values = read_json(file, "shown")
    try:
        return [SHOWN.validate_python(one, strict=False) for one in values]
    except (ValidationError, TypeError):
        raise UserError(f"shown: {file} is damaged or not ours; 'imdm show --into {run}' makes it again") from None
