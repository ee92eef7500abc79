"""Names of result rows in words: metric, mask, model. Rows keep their own names (`gen_ppl`, `infinite-uniform-768-1.0`,
`sdtt+redi`); pages, terminals and plots use these. A model has one name, `model_in_words`; among others, that of
`distinct_names`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from imdm.core.errors import UserError
from imdm.diffusion.masks import parse_mask
from imdm.evaluation import Row, metrics
from imdm.evaluation.results import OPTIONS
from imdm.objectives import objectives


def metric_in_words(metric: str) -> str:
    """A metric's title, with its unit; one that declares none, or is not known here, keeps its name."""
    return (metrics[metric].title if metric in metrics else "") or metric


def objective_in_words(kind: str) -> str:
    """`SDTT`, `data (NELBO)`; one that declares no other keeps its name."""
    return objectives[kind].title or kind


def method_in_words(method: str) -> str:
    """`sdtt+redi at 0.001` → `SDTT + ReDi at 0.001`; other methods keep their names."""
    stem, rest = _objectives_and_rest(method)
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
    stem, _ = _objectives_and_rest(method)
    if stem and all(objectives[one].preset is not None for one in stem):
        return f"student, {mask_in_words(mask, exact)} ({method_in_words(method)})"
    return f"{method_in_words(method)}, {mask_in_words(mask, exact)}"


def distinct_names(models: Sequence[tuple[str, str]]) -> list[str]:
    """Names of several models, each given by its method and mask: with their masks' settings where names would clash;
    only their masks where all are of one method."""
    plain = [model_in_words(*model) for model in models]
    if len(set(plain)) < len(models) and len({method for method, _ in models}) == 1:
        return [mask_in_words(mask, exact=True) for _, mask in models]
    return [model_in_words(*model, exact=plain.count(name) > 1) for model, name in zip(models, plain, strict=True)]


def row_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """The name of each row's model among those of these rows, with the sampling options where they differ."""
    suffix = option_suffix(rows)
    models = list(dict.fromkeys((row.method + suffix(row), row.mask) for row in rows))
    words = dict(zip(models, distinct_names(models), strict=True))
    return lambda row: words[row.method + suffix(row), row.mask]


def option_suffix(rows: Sequence[Row]) -> Callable[[Row], str]:
    """What to add to a row's method if rows of one metric differ in sampling options: `, noise keep`."""
    values: dict[tuple[str, str], set[object]] = {}
    for row in rows:
        for name in OPTIONS:
            values.setdefault((row.metric, name), set()).add(getattr(row, name))
    differing = dict.fromkeys(name for (_, name), several in values.items() if len(several) > 1)

    def suffix(row: Row) -> str:
        names = [name for name in differing if _samples(row.metric) and getattr(row, name) is not None]
        return "".join(f", {name} {getattr(row, name)}" for name in names)

    return suffix


def _samples(metric: str) -> bool:
    """Whether a metric uses samples; assumed for an unknown one."""
    return metric not in metrics or metrics[metric].samples


def _objectives_and_rest(method: str) -> tuple[list[str], str]:
    """The objectives that a method's name begins with, and the rest of the name; none if it begins otherwise."""
    match = re.match(r"[\w+-]+(?=$|[ ,])", method)
    stem = match.group().split("+") if match else []
    return (stem, method[match.end() :]) if match and all(one in objectives for one in stem) else ([], method)
