"""Values of the command line, parsed and checked before any work: step counts, data, canvases, names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imdm.cli.options import located
from imdm.core.errors import (
    MOST_STEPS,
    TEMPERATURES,
    UserError,
    check_whole,
    is_temperature,
    shorter,
    shown,
    unknown,
)
from imdm.core.files import as_path, parse_yaml, read_json, read_text
from imdm.shipped import HERE as SHIPPED
from imdm.shipped import find, folder_of

if TYPE_CHECKING:
    from torch import Tensor

    from imdm.data.prepared import Packing
    from imdm.data.source import Data, LanguageData, TokenData
    from imdm.data.text import PreparedData
    from imdm.evaluation import Conditional
    from imdm.models.denoiser import MaskedDiffusionLM
    from imdm.models.shape import Shape


@contextmanager
def as_options(*names: str, section: str = "") -> Iterator[None]:
    """Inside this block errors of the library name these arguments as options: `train_bpe = 9`, `(train_bpe)` and, for
    a section of settings, `'prepare.train_bpe'` as `--train-bpe`."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for name in names:
            option = f"--{name.replace('_', '-')}"
            message = message.replace(f"'{section}.{name}'", option)
            message = re.sub(rf"(?<![\w.-]){name}(?= = |\))", option, message)
        raise type(error)(message) from None


@contextmanager
def naming_options(options: Mapping[str, str]) -> Iterator[None]:
    """Inside this block errors have options where the library names settings, or other words of a command."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for setting, option in options.items():
            message = message.replace(setting, option)
        raise type(error)(message) from None


def parse_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--steps {shown(text)}: expected whole numbers separated by commas") from None
    for count in counts:
        check_whole("--steps", count, 1, MOST_STEPS)
    return counts


def parse_part(text: str) -> tuple[int, int]:
    """`--part 2/4`: the second of four."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UserError(f"--part {shown(text)}: expected a part and how many there are, such as 1/4 to 4/4")
    return int(number), int(of)


def parse_temperatures(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--temperature {shown(text)}: expected numbers separated by commas") from None
    if not all(map(is_temperature, values)):
        raise UserError(f"--temperature {shown(text)}: {TEMPERATURES}")
    return values


def parse_match(text: str | None) -> str | float | None:
    """`--match`: an entropy in nats, or a model."""
    if text is None:
        return None
    try:
        entropy = float(text)
    except ValueError:
        return located(text)
    if not 0 < entropy < inf:
        raise UserError(f"--match {text}: an entropy is a positive number of nats")
    return entropy


def parse_data(text: str, config: Shape) -> LanguageData | TokenData | PreparedData:
    """`--data` for a model: a language with settings, a file of tokens, or a folder of prepared text."""
    from imdm.data.source import LanguageData, TokenData
    from imdm.data.text import PreparedData

    values = data_settings(text, config.vocab_size, config.mask_token_id)
    kinds: dict[str, type[LanguageData] | type[TokenData] | type[PreparedData]] = {
        "language": LanguageData,
        "tokens": TokenData,
        "prepared": PreparedData,
    }
    return kinds[values["kind"]].parse(values, "--data")


def data_settings(text: str, vocab_size: int, mask_token_id: int) -> dict[str, Any]:
    """`--data` as the section of a recipe; those of a file of tokens need the model's vocabulary."""
    check_data(text)
    if Path(text).is_dir():
        return {"kind": "prepared", "path": text}
    if text.endswith(".safetensors"):
        return {"kind": "tokens", "path": text, "vocab_size": vocab_size, "mask_token_id": mask_token_id}
    name, _, settings = text.partition(":")
    return {"kind": "language", "name": name, "settings": parse_settings(settings, "--data")}


def parse_settings(text: str, option: str) -> dict[str, Any]:
    """`name=value,name=value`, with YAML values."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    try:
        return {name.strip(): parse_yaml(value) for name, _, value in pairs}
    except ValueError as error:
        raise UserError(
            f"{option} {shown(text)}: not settings such as name=1,other=2 ({shorter(str(error))})"
        ) from None


def parse_held_out(text: str, config: Shape, path: str, reporter: Any) -> tuple[Data, bool]:
    """`--data` of an evaluation, which may also be raw text, prepared with the model's tokenizer; and whether it
    was."""
    check_held_out(text)
    if not is_text(text):
        return parse_data(text, config), False
    from imdm.data.text import prepared_for

    _check_tokenizer(text, path)
    with reporter.bar(f"{text}: documents", 0) as bar:
        return prepared_for(text, path, config.length, bar, _packing(config)), True


def training_settings(text: str, path: str, config: Shape) -> dict[str, Any]:
    """`--data` of a training as the section of a recipe. It may also be raw text, which the run prepares with the
    model's tokenizer."""
    if not is_text(text):
        return parse_data(text, config).model_dump(mode="json")
    _check_tokenizer(text, path)
    return {"kind": "text", "path": text, "tokenizer": path, "length": config.length, "packing": _packing(config)}


def _packing(config: Shape) -> Packing:
    """How text is packed into rows for a model."""
    return "wrapped" if config.ending is None else "whole"


def is_text(text: str) -> bool:
    """Whether `--data` is raw text: a file, a folder of files, `sample`, or one of the named texts."""
    from imdm.data.corpora import ENDINGS, PRESETS

    place = Path(text)
    if (place / "recipe.json").exists() and (place / "data").is_dir():
        raise UserError(f"--data {text!r} is a run; its text is in {place / 'data'}")
    marks = ("manifest.json", "train/manifest.json", "config.json", "recipe.json")
    ours = any((place / mark).exists() for mark in marks)
    return not ours and (place.is_dir() or place.suffix in ENDINGS or text == "sample" or text in PRESETS)


def _check_tokenizer(text: str, path: str) -> None:
    from imdm.data.tokenizers import has_tokenizer

    if Path(path).is_dir() and not has_tokenizer(Path(path)):
        raise UserError(f"--data {text!r} is text, but model {path!r} has no tokenizer to read it with")


def parse_conditional(text: str | None) -> Conditional:
    """`--conditional prefix=50,continuations=5`: changes to the paper's protocol."""
    from imdm.evaluation import Conditional

    return Conditional.parse(parse_settings(text or "", "--conditional"), "--conditional")


def parse_rows(rows: list[str]) -> list[list[int | None]]:
    """`--canvas`: rows of token ids, None for holes."""
    try:
        return [[None if word in ("?", "_") else int(word) for word in row.split()] for row in rows]
    except ValueError:
        raise _no_canvas(rows) from None


def parse_canvas(rows: list[str], model: MaskedDiffusionLM, length: int | None) -> Tensor:
    """Rows of ids and holes as one canvas; shorter rows end in holes."""
    import torch

    hole = model.config.mask_token_id
    parsed = [[hole if token is None else token for token in row] for row in parse_rows(rows)]
    longest = max(max(map(len, parsed)), min(length or 0, model.config.length))
    try:
        return torch.tensor([row + [hole] * (longest - len(row)) for row in parsed])
    except (RuntimeError, OverflowError, ValueError):  # not a possible token id
        raise _no_canvas(rows) from None


def _no_canvas(rows: list[str]) -> UserError:
    return UserError(f"--canvas {shown(rows)}: write token ids and ? for holes, such as '0 ? ? 1'")


def read_prompts(path: Path) -> list[str]:
    """The lines of a file, empty ones left out."""
    try:
        prompts = [line.strip() for line in read_text(path, "--prompts").splitlines() if line.strip()]
    except UserError as error:
        raise UserError(str(error).removesuffix("; it is damaged or not ours")) from None
    if not prompts:
        raise UserError(f"--prompts {path} holds no prompt")
    return prompts


def check_known(kind: str, names: Iterable[str], choices: Iterable[str]) -> None:
    """Refuse unknown names."""
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)


def called(model: str, parts: int = 1) -> str:
    """A short name for a given model: the name of a shipped one or of a hub id; else its folder's, or the parent's if
    the folder is called `model`. parts: how much of the path, from its end."""
    folder = Path(find(model)).resolve()
    if folder.parent == SHIPPED or not folder.is_dir():
        return folder.name if folder.parent == SHIPPED else model
    path = folder.parts[1:-1] if folder.name == "model" else folder.parts[1:]
    return "/".join(path[-parts:]) or folder.name


def check_length(length: int | None, model: str) -> None:
    """Refuse more tokens than a local model's length."""
    if length is None or (folder := folder_of(model)) is None:
        return
    config = read_json(folder / "config.json", f"model {model!r}")
    most = config.get("length") if isinstance(config, dict) else None
    check_whole("length", length, 1, most if isinstance(most, int) else length)


def check_places(data: Iterable[str], judge: str | None, pairs: Path | None) -> None:
    """Refuse missing data, judges given by path, and pairs."""
    for text in data:
        check_held_out(text)
    place = Path(find(judge)) if judge is not None else None
    if place is not None and (place.is_absolute() or place.suffix == ".gguf") and not place.exists():
        raise UserError(f"judge {judge!r}: no such file or folder")
    if pairs is not None and not pairs.is_dir():
        raise UserError(f"coupling {str(pairs)!r}: no such folder; make one with 'imdm couple'")


def check_file(out: Path | None, what: str) -> None:
    """Refuse a folder as `--out` of a file."""
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file for {what}")


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
    _check_data_text(text)
    place = Path(text)
    if place.is_dir():
        return
    if text.endswith(".safetensors"):
        if not place.is_file():
            raise UserError(f"--data {text} is missing; paths are taken from the folder you run in, {Path.cwd()}")
        return
    if text.partition(":")[0] not in (names := _languages()):
        raise UserError(
            f"--data {text!r}: neither a language ({', '.join(names)}), a .safetensors file nor a folder "
            "of prepared text; make one with 'imdm prepare TEXT --tokenizer MODEL --out FOLDER'"
        )


def check_held_out(text: str) -> None:
    """Refuse missing or unknown data: `--data` as `parse_held_out` reads it, which may be raw text."""
    from imdm.data.corpora import ENDINGS, PRESETS, Corpus

    _check_data_text(text)
    place = Path(text)
    if place.is_dir() or text == "sample" or text in PRESETS:
        return
    if text.endswith(".safetensors"):
        check_data(text)
    elif place.suffix in ENDINGS:
        Corpus(text).check()
    elif text.partition(":")[0] not in (names := _languages()):
        others = ", ".join(("sample", *sorted(PRESETS)))
        raise UserError(
            f"--data {text!r}: neither a language ({', '.join(names)}), a .safetensors file, prepared "
            f"text, a text ({', '.join(ENDINGS)}, a folder of these) nor one of {others}"
        )


def _check_data_text(text: str) -> None:
    if not text:  # as a path it would be the current folder
        raise UserError("--data is empty; give a language, a file or a folder")
    as_path(text, "--data")


def _languages() -> list[str]:
    from imdm.data.synthetic import languages

    return sorted(languages)
