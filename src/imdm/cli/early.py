"""Checks before torch is imported, which takes seconds: unknown names and missing files.

Names of metrics, languages and benchmarks, and the options of distillations, are read from the source files that
register them, since importing those imports torch.
"""

from __future__ import annotations

import re
import sys
from ast import literal_eval
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from imdm.core.errors import UserError, check_seed, check_whole, unknown
from imdm.core.files import as_path, read_json
from imdm.shipped import HERE as SHIPPED
from imdm.shipped import find, folder_of

HERE = Path(__file__).parent.parent


def registered(files: str, how: str) -> tuple[tuple[str, str], ...]:
    """Each name that a file of the package registers by the decorator `how`, and the decorator's other arguments."""
    decorator = re.compile(rf'^@{re.escape(how)}\(\s*"([\w-]+)"([^\n]*(?:\n[ )][^\n]*)*)', re.MULTILINE)
    texts = [file.read_text(encoding="utf-8") for file in HERE.glob(files)]
    return tuple(sorted((match[1], match[2]) for text in texts for match in decorator.finditer(text)))


def presets() -> dict[str, dict[str, Any]]:
    """What `imdm distill` runs: the options of each method and their defaults, `{"sdtt": {"rounds": 7, …}, …}`."""
    declared = re.compile(
        r'^@objectives\.register\("([\w-]+)"\)(?:(?!^@).)*?^    def preset\(([^)]*)\)', re.MULTILINE | re.DOTALL
    )
    texts = [file.read_text(encoding="utf-8") for file in HERE.glob("objectives/*.py")]
    found = sorted(match.groups() for text in texts for match in declared.finditer(text))
    option = re.compile(r"(\w+): [\w |]+ = ([^,\s]+)")
    return {name: {one: literal_eval(value) for one, value in option.findall(options)} for name, options in found}


def defaults(option: str) -> str:
    """The defaults of an option of `imdm distill`: `8,000 for match, 10,000 for sdtt`."""
    return ", ".join(f"{PRESETS[name][option]:,} for {name}" for name in having(option))


def having(option: str) -> list[str]:
    """The methods of `imdm distill` that have this option."""
    return [name for name, options in PRESETS.items() if option in options]


LANGUAGES = tuple(name for name, _ in registered("data/synthetic.py", "languages.register"))
MASKS = tuple(name for name, _ in registered("diffusion/masks/*.py", "masks.register"))
BENCHMARKS = tuple(name for name, _ in registered("benchmarks/*.py", "benchmarks.register"))
_METRICS = registered("evaluation/*.py", "metric")
METRICS = tuple(name for name, _ in _METRICS)
ON_LANGUAGES = tuple(name for name, needs in _METRICS if "language=True" in needs)
AFTER_PROMPTS = tuple(name for name, needs in _METRICS if "prompts=True" in needs)
ELSEWHERE = tuple(name for name in METRICS if name not in (*ON_LANGUAGES, *AFTER_PROMPTS))
PRESETS = presets()
POLICIES = ("posterior", "keep")
ORDERS = ("random", "spread")
STARTS = ("perturbed", "prior")
PRECISIONS = ("float32", "bf16")
WEIGHTS = ("bf16", "float32", "int8", "mixed")
GPUS = ("h200", "h100", "b200", "a100", "a100-40", "l40s", "rtx4090")
LAYOUTS = ("imdm", "mdlm", "transformers")


def known_of(module: str, registry: str, here: tuple[str, ...]) -> tuple[str, ...]:
    """The names in a registry, if its module is imported (others may have registered more); else those read here."""
    loaded = sys.modules.get(module)
    return here if loaded is None else tuple(sorted(vars(loaded)[registry]))


def known_languages() -> tuple[str, ...]:
    return known_of("imdm.data.synthetic", "languages", LANGUAGES)


def check_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown names."""
    for name in names:
        if name not in known:
            raise unknown(kind, name, known)


def located(name: str | None) -> str | None:
    """A model as it was named; a shipped one by its folder. A missing folder is refused."""
    if name is None:
        return None
    folder_of(name)
    return str(find(name))


def called(model: str, parts: int = 1) -> str:
    """A short name for a given model: the name of a shipped one or of a hub id; else its folder's, or the parent's if
    the folder is called `model`. parts: how much of the path, from its end."""
    folder = Path(find(model)).resolve()
    if folder.parent == SHIPPED or not folder.is_dir():
        return folder.name if folder.parent == SHIPPED else model
    path = folder.parts[1:-1] if folder.name == "model" else folder.parts[1:]
    return "/".join(path[-parts:]) or folder.name


def known_order(name: str | None) -> str | None:
    check_known("order", [] if name is None else [name], ORDERS)
    return name


def known_policy(name: str | None) -> str | None:
    check_known("noise policy", [] if name is None else [name], POLICIES)
    return name


def known_precision(option: typer.CallbackParam, name: str | None) -> str | None:
    if name is not None and name not in PRECISIONS:
        raise UserError(f"{option.opts[0]} = {name}: {' or '.join(PRECISIONS)}")
    return name


def known_mask(name: str | None) -> str | None:
    """A mask as it was named. Only its kind is checked here, the first part, as in infinite-uniform-768-1.0."""
    if name is not None:
        check_known("mask", [name.partition("-")[0]], known_of("imdm.diffusion.masks.base", "masks", MASKS))
    return name


def known_seed(seed: int) -> int:
    check_seed(seed, "--seed")
    return seed


def known_start(name: str) -> str:
    check_known("start of pairs", [name], STARTS)
    return name


def check_length(length: int | None, model: str) -> None:
    """Refuse more tokens than a local model's length."""
    if length is None or (folder := folder_of(model)) is None:
        return
    config = read_json(folder / "config.json", f"model {model!r}")
    most = config.get("length") if isinstance(config, dict) else None
    check_whole("length", length, 1, most if isinstance(most, int) else length)


def check_evaluation(metrics: str | None, data: Iterable[str], judge: str | None, pairs: Path | None) -> list[str]:
    """The requested metrics. Refuses unknown metrics, and missing data, judges given by path and pairs."""
    asked = [name.strip() for name in metrics.split(",")] if metrics is not None else []
    check_known("metric", asked, known_of("imdm.evaluation", "metrics", METRICS))
    for text in data:
        check_held_out(text)
    place = Path(find(judge)) if judge is not None else None
    if place is not None and (place.is_absolute() or place.suffix == ".gguf") and not place.exists():
        raise UserError(f"judge {judge!r}: no such file or folder")
    if pairs is not None and not pairs.is_dir():
        raise UserError(f"coupling {str(pairs)!r}: no such folder; make one with 'imdm couple'")
    return asked


def check_tasks(names: Iterable[str]) -> None:
    """Refuse empty names of lm-eval tasks and missing files."""
    for name in names:
        if not name:
            raise UserError(
                "--tasks: a name is empty; give names of lm-eval's tasks or YAML files, separated by commas"
            )
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise UserError(f"--tasks {name}: no such file; paths are taken from the folder you run in, {Path.cwd()}")


def check_data(text: str) -> None:
    """Refuse missing or unknown data: `--data` as `parse_data` reads it."""
    _check_given(text)
    place = Path(text)
    if place.is_dir():
        return
    if text.endswith(".safetensors"):
        if not place.is_file():
            raise UserError(f"--data {text} is missing; paths are taken from the folder you run in, {Path.cwd()}")
        return
    if text.partition(":")[0] not in known_languages():
        raise UserError(
            f"--data {text!r}: neither a language ({', '.join(known_languages())}), a .safetensors file nor a folder "
            "of prepared text; make one with 'imdm prepare TEXT --tokenizer MODEL --out FOLDER'"
        )


def check_held_out(text: str) -> None:
    """The same as `parse_held_out` reads it: also raw text."""
    from imdm.data.corpora import ENDINGS, PRESETS, Corpus

    _check_given(text)
    place = Path(text)
    if place.is_dir() or text == "sample" or text in PRESETS or text.partition(":")[0] in known_languages():
        return
    if text.endswith(".safetensors"):
        check_data(text)
    elif place.suffix in ENDINGS:
        Corpus(text).check()
    else:
        named = ", ".join(("sample", *sorted(PRESETS)))
        raise UserError(
            f"--data {text!r}: neither a language ({', '.join(known_languages())}), a .safetensors file, prepared "
            f"text, a text ({', '.join(ENDINGS)}, a folder of these) nor one of {named}"
        )


def _check_given(text: str) -> None:
    if not text:  # as a path it would be the current folder
        raise UserError("--data is empty; give a language, a file or a folder")
    as_path(text, "--data")
