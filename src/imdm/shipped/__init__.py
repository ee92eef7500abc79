"""Models that ship with the package: each a folder beside this file, with weights, tokenizer and card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

HERE = Path(__file__).parent
DEFAULT = "sentences-imdm"
"""The one that writes when none is named."""


@dataclass(frozen=True)
class Shipped:
    """What the list says of a model; about: the first paragraph of its card."""

    name: str
    about: str
    parameters: int
    megabytes: float


def names() -> list[str]:
    return sorted(place.parent.name for place in HERE.glob("*/config.json"))


def find(name: str | Path) -> str | Path:
    """The folder of a model that ships, if that is its name and no such path is there; otherwise the name as it is."""
    return HERE / str(name) if str(name) in names() and not Path(name).exists() else name


def listed() -> list[Shipped]:
    return [_described(name) for name in names()]


def _described(name: str) -> Shipped:
    folder = HERE / name
    paragraphs = [part.strip() for part in (folder / "README.md").read_text(encoding="utf-8").split("\n\n")]
    about = next(part for part in paragraphs if part and not part.startswith(("#", "---")))
    with safe_open(folder / "model.safetensors", "pt") as weights:
        parameters = sum(prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    return Shipped(name, " ".join(about.split()), parameters, size)


def recorded(name: str) -> dict[int, tuple[float, str]]:
    """The generative perplexity that was measured of a model when it was made, with its first judge, by steps."""
    file = Path(find(name)) / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    read = [row for row in rows if row["metric"] == "gen_ppl"]
    return {row["steps"]: (row["value"], row["judge"]) for row in read if row["judge"] == read[0]["judge"]}
