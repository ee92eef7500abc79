"""One prompt, completed by two models in few and in more steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from pydantic import TypeAdapter, ValidationError

from imdm.ending import lengths
from imdm.errors import UserError
from imdm.evaluation.text import sample_entropy
from imdm.files import read_json, write_json
from imdm.shipped import recorded
from imdm.writer import load

SAMPLES = 16  # unconditional samples whose entropy is measured
FIGURES = (
    f"Below a text: how long it took, then figures of its model, not of the text: the entropy of {SAMPLES} texts "
    "written from nothing here, and the perplexity on its card (1,024 texts), with the judge."
)


@dataclass(frozen=True)
class Shown:
    """A prompt's completion by a model in so many steps, with the step at which each piece of it appeared (−1: given).
    seconds: of generation; entropy: of `SAMPLES` unconditional samples, measured now; perplexity: measured when the
    model was made, under `judge`."""

    model: str
    steps: int
    pieces: Sequence[tuple[str, int]]
    seconds: float
    entropy: float
    perplexity: float | None
    judge: str | None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def figures(self) -> str:
        found = [f"{self.seconds:.2f} s", f"entropy {self.entropy:.2f}"]
        if self.perplexity is not None:
            found.append(f"perplexity {self.perplexity:,.0f} by {self.judge}")
        return ", ".join(found)


SHOWN = TypeAdapter(Shown)


def completions(prompt: str, models: Sequence[str], steps: Sequence[int], seed: int = 0) -> Iterator[Shown]:
    """Step count by step count, each model in turn."""
    writers = [(name, load(name), recorded(name)) for name in models]
    for count in steps:
        for name, writer, measured in writers:
            started = perf_counter()
            (text,) = writer.write(prompt, steps=count, seed=seed)
            took = perf_counter() - started
            pieces = [(piece.text, piece.step) for piece in writer.pieces(text)]
            made = writer.model.generate(num=SAMPLES, steps=count, seed=seed)
            tokens = made.tokens.cpu()
            entropy = float(sample_entropy(tokens, lengths(tokens, writer.model.config.ending)).mean())
            yield Shown(name, count, pieces, took, entropy, *measured.get(count, (None, None)))


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
