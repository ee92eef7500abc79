"""What a command refuses before torch is loaded, which takes seconds: unknown names, and files that are not there.

Names stand where each is registered, and here once more: help shows these, and a test holds them against the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from imdm.errors import UserError, unknown
from imdm.shipped import find, folder_of

LANGUAGES = ("aligned", "markov", "two-topic")
ON_LANGUAGES = ("validity", "token_entropy", "factorization_error", "kl", "kl_half", "tv")
ON_DATA = ("nelbo", "val_ppl", "entropy", "distinct_1", "distinct_2", "distinct_3", "repetition")
OF_STEPS = ("step_error", "step_error_half", "step_correlation", "pair_error", "pair_bound")
ON_TEXT = ("gen_ppl", "real_ppl", "real_entropy", "novelty", "pair_overlap", "mauve", *OF_STEPS)
AFTER_PROMPTS = ("cond_gen_ppl", "cond_entropy", "cond_mauve")
METRICS = (*ON_LANGUAGES, *ON_DATA, *ON_TEXT, *AFTER_PROMPTS)
BENCHMARKS = ("sampling", "couplings", "training", "sdtt", "losses", "scaling")
DISTILLATIONS = ("sdtt", "redi", "di4c")
POLICIES = ("posterior", "keep")
PRECISIONS = ("float32", "bf16")
WEIGHTS = ("bf16", "float32", "int8", "mixed")
FETCHABLE = ("smollm2",)


def check_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse what is not among the known names."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def located(name: str | None) -> str | None:
    """A model as it was named; one that ships by its folder. A folder that is not there is refused."""
    if name is None:
        return None
    folder_of(name)
    return str(find(name))


def known_policy(name: str) -> str:
    check_known("noise policy", [name], POLICIES)
    return name


def known_precision(option: typer.CallbackParam, name: str | None) -> str | None:
    if name is not None and name not in PRECISIONS:
        raise UserError(f"{option.opts[0]} = {name}: {' or '.join(PRECISIONS)}")
    return name


def check_folder(run: Path) -> None:
    """Refuse what is no folder."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder")


def check_evaluation(metrics: str | None, data: Iterable[str], judge: str, pairs: Path | None) -> None:
    """Refuse what there is not: metrics, data, a judge's path (its name may be a hub's), pairs."""
    check_known("metric", [name.strip() for name in metrics.split(",")] if metrics is not None else [], METRICS)
    for text in data:
        check_held_out(text)
    place = Path(find(judge))
    if (place.is_absolute() or place.suffix == ".gguf") and not place.exists():
        raise UserError(f"judge {judge!r}: no such file or folder")
    if pairs is not None and not pairs.is_dir():
        raise UserError(f"coupling {str(pairs)!r}: no such folder; make one with 'imdm couple'")


def check_data(text: str) -> None:
    """Refuse data that cannot be meant: `--data` as `parse_data` reads it."""
    _check_given(text)
    place = Path(text)
    if place.is_dir():
        return
    if text.endswith(".safetensors"):
        if not place.is_file():
            raise UserError(f"--data {text} is missing; paths are taken from the folder you run in, {Path.cwd()}")
        return
    if text.partition(":")[0] not in LANGUAGES:
        raise UserError(
            f"--data {text!r}: neither a language ({', '.join(LANGUAGES)}), a .safetensors file nor a folder of "
            "prepared text; make one with 'imdm prepare TEXT --tokenizer MODEL --out FOLDER'"
        )


def check_held_out(text: str) -> None:
    """The same as `parse_held_out` reads it: also text as it is."""
    from imdm.data.corpora import ENDINGS, PRESETS, Corpus

    _check_given(text)
    place = Path(text)
    if place.is_dir() or text == "sample" or text in PRESETS or text.partition(":")[0] in LANGUAGES:
        return
    if text.endswith(".safetensors"):
        check_data(text)
    elif place.suffix in ENDINGS:
        Corpus(text).check()
    else:
        named = ", ".join(("sample", *sorted(PRESETS)))
        raise UserError(
            f"--data {text!r}: neither a language ({', '.join(LANGUAGES)}), a .safetensors file, prepared "
            f"text, a text ({', '.join(ENDINGS)}, a folder of these) nor one of {named}"
        )


def _check_given(text: str) -> None:
    if not text:  # which as a path would be the folder one is in
        raise UserError("--data is empty; give a language, a file or a folder")
