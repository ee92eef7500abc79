"""Names of result rows in words: model, mask, and metric. Rows keep their own names (`sdtt+redi`,
`infinite-uniform-768-1.0`, `gen_ppl`); pages, terminals and plots use these."""

from __future__ import annotations

import re
from collections.abc import Sequence

from imdm.core.errors import UserError
from imdm.diffusion.masks import parse_mask
from imdm.evaluation import metrics
from imdm.objectives import objectives


def metric_in_words(metric: str) -> str:
    """With its unit; one that declares no title, or is not known here, keeps its name."""
    return (metrics[metric].title if metric in metrics else "") or metric


def objective_in_words(kind: str) -> str:
    """`SDTT`, `data (NELBO)`; one that declares no other keeps its name."""
    return objectives[kind].title or kind


def method_in_words(method: str) -> str:
    """`sdtt+redi at 0.001` → `SDTT + ReDi at 0.001`; other methods keep their names."""
    stem, rest = _parts(method)
    return " + ".join(map(objective_in_words, stem)) + rest


def mask_in_words(mask: str, exact: bool = False) -> str:
    """`single mask`, `6,144 masks`, `infinite masks`. exact: with the distribution, dimension and scale of the
    noise."""
    kind, latent, _ = mask.partition("+mixture")
    try:
        words = parse_mask(kind).in_words(exact)
    except UserError:  # rows outlive the module of a mask
        words = f"mask {kind}"
    return words + (" with a latent" if latent else "")


def model_in_words(method: str, mask: str, exact: bool = False) -> str:
    """`teacher`; `student, infinite masks (SDTT + ReDi)`; of no distillation `from scratch, single mask`."""
    if method.partition(",")[0] == "teacher" and mask == "single":
        return method
    stem, _ = _parts(method)
    if stem and all(objectives[one].preset is not None for one in stem):
        return f"student, {mask_in_words(mask, exact)} ({method_in_words(method)})"
    return f"{method_in_words(method)}, {mask_in_words(mask, exact)}"


def named(models: Sequence[tuple[str, str]]) -> list[str]:
    """Methods and masks in words; with their masks' settings where names would clash; only their masks where all are of
    one method."""
    plain = [model_in_words(*model) for model in models]
    if len(set(plain)) < len(models) and len({method for method, _ in models}) == 1:
        return [mask_in_words(mask, exact=True) for _, mask in models]
    return [model_in_words(*model, exact=plain.count(name) > 1) for model, name in zip(models, plain, strict=True)]


def _parts(method: str) -> tuple[list[str], str]:
    """The objectives that a method's name begins with, and the rest of the name; none if it begins otherwise."""
    found = re.match(r"[\w+-]+(?=$|[ ,])", method)
    stem = found.group().split("+") if found else []
    return (stem, method[found.end() :]) if found and all(one in objectives for one in stem) else ([], method)
