"""A model made ready to hand on: small, with its tokenizer and a card that says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from imdm.data.tokenizers import copy_tokenizer, has_tokenizer
from imdm.errors import UserError
from imdm.files import written_aside
from imdm.models import MaskedDiffusionLM, fold_conditioning, load_model

CARD = "README.md"


def export(
    model: str | Path, out: str | Path, *, precision: Literal["float32", "bf16"] = "bf16", card: str | None = None
) -> Path:
    """Write `model` to the folder `out`: adaLN folded into the other weights, in `precision`, its tokenizer beside it
    where it has one, and a card: the text given, or what the model's own configuration says."""
    folder = Path(out)
    if folder.exists():
        raise UserError(f"--out {str(out)!r} is there already; choose another folder")
    folded = fold_conditioning(load_model(model))
    torch.nn.Module.to(folded, torch.bfloat16 if precision == "bf16" else torch.float32)
    with written_aside(folder) as aside:
        folded.save_pretrained(aside)
        text = Path(model).is_dir() and has_tokenizer(Path(model))
        if text:
            copy_tokenizer(Path(model), aside)
        (aside / CARD).write_text(card if card is not None else _facts(folded, folder.name, text), encoding="utf-8")
    return folder


def _facts(model: MaskedDiffusionLM, name: str, text: bool) -> str:
    config = model.config
    kind = "An autoregressive language model" if config.causal else f"A masked diffusion model, mask {model.mask.name},"
    count = sum(parameter.numel() for parameter in model.parameters())
    use = f'`imdm.load("{name}")` writes with it.' if text else f'`imdm.load_model("{name}")` writes token ids with it.'
    if config.causal:
        use = f"`imdm evaluate MODEL --judge {name}` lets it read what others write."
    return f"""# {name}

{kind} of {count / 1e6:.1f}M parameters.

- {config.blocks} blocks of width {config.width}, {config.heads} heads; sequences of up to {config.length} tokens
- vocabulary of {config.vocab_size:,} ids, the mask among them

{use}
"""
