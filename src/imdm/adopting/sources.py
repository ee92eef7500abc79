"""Models of others, to be converted: what is refused before torch is imported, and which files their weights are in."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from imdm.core.errors import UserError
from imdm.core.files import as_path, listed_files, read_json
from imdm.shipped import KIND, check_fetched, find

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ENDINGS = (".safetensors", ".ckpt", ".bin", ".pt", ".pth")
OWNERS = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "google-bert": ("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased"),
    "distilbert": ("distilgpt2", "distilbert-base-uncased", "distilbert-base-cased"),
    "FacebookAI": ("roberta-base", "roberta-large", "xlm-roberta-base", "xlm-roberta-large"),
}
"""Owners of models that `transformers` also knows without one."""
RARE = (".pt", ".pth")  # mostly optimisers and the like: weights only where no other file has them


def check_source(source: str | Path, revision: str | None = None, file: str | Path | None = None) -> None:
    """Refuse what cannot be converted: neither a file, a folder nor, by its form, a hub id; a model of ours; files that
    hold no weights. revision: of a hub id; file: of a folder or a hub id."""
    if hasattr(source, "save_pretrained"):
        raise UserError("give the folder of a model, not the model: save it first (save_pretrained)")
    check_fetched(source, "model")
    path = as_path(find(source), "model")
    inside = None if file is None else Path(file)
    if inside is not None and (inside.suffix not in ENDINGS or inside.is_absolute() or ".." in inside.parts):
        raise UserError(f"file = {str(file)!r}: give a file of weights ({', '.join(ENDINGS)}) by its path in {source}")
    if path.exists() and revision is not None:
        raise UserError(f"revision = {revision!r}: it is for hub ids; {str(source)!r} is here")
    if path.is_file() and file is not None:
        raise UserError(f"file = {str(file)!r}: it is for folders and hub ids; {str(source)!r} is a file already")
    if not path.exists():
        if path.is_absolute() or len(path.parts) != 2 or path.suffix in ENDINGS:
            raise UserError(f"model {str(source)!r}: no such file or folder, nor a hub id (owner/name){_meant(path)}")
        return
    if path.is_file() and path.suffix not in ENDINGS and not _is_archive(path):
        raise UserError(f"model {str(source)!r}: weights are in files of {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if (path / "manifest.json").exists() and not (path / "config.json").exists():
        raise UserError(f"model {str(source)!r} is a folder of prepared text or pairs, not of a model; give it as data")
    beside = (path.parent if path.name == "model.safetensors" else path) / "config.json"
    config = read_json(beside, f"model {str(source)!r}") if beside.is_file() else {}
    if isinstance(config, dict) and config.get("model_type") == KIND:
        raise UserError(f"model {str(source)!r} is one of ours already; use it as it is")
    if file is not None:
        check_archive(path / file)
        return
    for part in weight_files(path) if path.is_dir() else [path]:
        check_archive(part)


def _meant(path: Path) -> str:
    """What a wrong name may have meant: a hub id without its owner, or a file or folder of a similar name."""
    owner = next((owner for owner, names in OWNERS.items() if str(path) in names), None)
    if owner is not None:
        return f"; did you mean {owner}/{path}?"
    beside: list[str] = []
    with suppress(OSError):  # no such folder, or no right to read it
        beside = sorted(one.name for one in path.parent.iterdir())
    close = get_close_matches(path.name, beside, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def weight_files(folder: Path) -> list[Path]:
    """The files that a folder's weights are in."""
    if there := [folder / name for name in INDEXES if (folder / name).exists()]:
        return listed_files(there[0], f"model {str(folder)!r}")
    names = ("model.safetensors", "pytorch_model.bin")
    files = [folder / name for name in names if (folder / name).exists()][:1]
    candidates = sorted(file for file in folder.iterdir() if file.suffix in ENDINGS) if not files else []
    files = files or [file for file in candidates if file.suffix not in RARE] or candidates
    if not files:
        raise UserError(f"{folder} holds no weights; give a folder or a file that does ({', '.join(ENDINGS)})")
    if len(files) > 1:
        some = ", ".join(file.name for file in files[:4]) + (", …" if files[4:] else "")
        raise UserError(f"{folder} holds several files of weights ({some}); say which one (file)")
    return files


def _is_archive(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # it looks for more at the end of the file, and says so of some that are damaged
        return False


def check_archive(file: Path) -> None:
    """Refuse a missing file, and one of PyTorch's that cannot be read without running code in it."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    if file.suffix != ".safetensors" and not _is_archive(file):
        raise UserError(
            f"{file} is no checkpoint that can be read without running code in it: it is not a zip archive, as PyTorch "
            "has written since 1.6; load it where you trust it and save it again, or as safetensors"
        )
