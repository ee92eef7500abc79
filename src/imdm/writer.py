"""A model with its tokenizer: prompts in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imdm.data.tokenizers import has_tokenizer, load_tokenizer, special_ids
from imdm.devices import checked_device
from imdm.errors import UserError, check_whole, shown
from imdm.files import no_progress_bars
from imdm.models import MaskedDiffusionLM, faster, load_model
from imdm.sampling import Generation
from imdm.shipped import find

BLANK = "___"


@dataclass(frozen=True)
class Piece:
    """A stretch of written text: given by the prompt (step −1), or revealed at `step`."""

    text: str
    step: int


@dataclass(frozen=True)
class Text:
    """What was written for one prompt. revealed_at: the step of each token, −1 where given."""

    prompt: str
    text: str
    tokens: list[int]
    revealed_at: list[int]
    evaluations: int


@dataclass(frozen=True)
class Writer:
    """Writes, continues and fills in text.

    >>> writer = load("runs/sentences-cpu/seed-0/imdm/model")  # doctest: +SKIP
    >>> writer.write("It was a dark", steps=4)[0].text  # doctest: +SKIP
    """

    model: MaskedDiffusionLM
    tokenizer: Any

    def __post_init__(self) -> None:
        special = special_ids(self.tokenizer)
        config = self.model.config
        if (special.vocab_size, special.mask) != (config.vocab_size, config.mask_token_id):
            raise UserError(
                f"the tokenizer has {special.vocab_size} ids with mask {special.mask}, the model has "
                f"{config.vocab_size} with mask {config.mask_token_id}; they do not belong together"
            )

    def write(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        steps: int = 4,
        num: int = 1,
        length: int | None = None,
        **options: Any,
    ) -> list[Text]:
        """`num` continuations of each prompt (of nothing without one), to `length` tokens, rows of one prompt together.
        Options as in `MaskedDiffusionLM.generate`: seed, noise, temperature, top_p."""
        given = [""] if prompts is None else _texts(prompts)
        if prompts is not None and (not given or not all(prompt.strip() for prompt in given)):
            raise UserError("the prompt is empty; leave it out to write from nothing")
        most = self.model.config.length
        length = most if length is None else length
        check_whole("length", length, 1, most)
        canvas = torch.stack([self._prefix(prompt, length) for prompt in given])
        return self._filled(given, canvas, num, steps, options)

    def infill(
        self, text: str, *, steps: int = 4, num: int = 1, blank: int = 4, marker: str = BLANK, **options: Any
    ) -> list[Text]:
        """Fill every `marker` in the text with `blank` tokens."""
        text, marker = _text("text", text), _text("marker", marker)
        check_whole("blank", blank, 1, self.model.config.length)
        if not marker:
            raise UserError("marker = '': nothing to look for; the usual one is '___'")
        if marker not in text:
            raise UserError(f"nothing to fill in: the text has no {shown(marker)}")
        special, ids, parts = special_ids(self.tokenizer), [], text.split(marker)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            ids += [special.mask] * blank * (number > 0)
            ids += self._encode(part if last else part.rstrip(" "))  # a blank's first token brings its own space
        row = [special.begin, *ids, special.end]
        if len(row) > self.model.config.length:
            raise UserError(f"the text has {len(row)} tokens, the model takes at most {self.model.config.length}")
        return self._filled([text], torch.tensor([row]), num, steps, options)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _prefix(self, prompt: str, length: int) -> Tensor:
        """begin, the prompt, holes, end: the frame of the rows the model was trained on."""
        special, ids = special_ids(self.tokenizer), self._encode(prompt)
        holes = length - len(ids) - 2
        if holes < 1:
            raise UserError(f"the prompt has {len(ids)} tokens; with {length} in all there is no room to write")
        return torch.tensor([special.begin, *ids, *[special.mask] * holes, special.end])

    def _filled(self, prompts: list[str], canvas: Tensor, num: int, steps: int, options: dict[str, Any]) -> list[Text]:
        made = self.model.generate(canvas, num=num, steps=steps, **options)
        return [self._text(prompts[row // num], made, row) for row in range(len(made.tokens))]

    def _text(self, prompt: str, made: Generation, row: int) -> Text:
        tokens = made.tokens[row].tolist()
        return Text(prompt, self.decode(tokens), tokens, made.revealed_at[row].tolist(), int(made.evaluations[row]))

    def decode(self, tokens: list[int]) -> str:
        """Text without special tokens; a new line where one document ends and another begins."""
        end, documents = special_ids(self.tokenizer).end, list[list[int]]([[]])
        for token in tokens:
            if token == end:
                documents.append([])
            else:
                documents[-1].append(token)
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in documents if ids]
        return "\n".join(text for text in texts if text)

    def pieces(self, written: Text) -> list[Piece]:
        """Each token's share of the text, in order, with the step at which it appeared."""
        out, before = [], ""
        for count, step in enumerate(written.revealed_at, 1):
            now = self.decode(written.tokens[:count])
            if now.endswith("\ufffd"):
                continue  # in the middle of a character
            if len(now) > len(before):
                out.append(Piece(now[len(before) :], step))
            before = now
        return out


def _text(name: str, value: Any) -> str:
    """A text that can be encoded."""
    if not isinstance(value, str):
        raise UserError(f"{name} = {shown(value)}: expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} = {shown(value)}: not text that UTF-8 can hold") from None
    return value


def _texts(values: Any) -> list[str]:
    if isinstance(values, str):
        return [_text("prompt", values)]
    if not isinstance(values, Sequence):
        raise UserError(f"prompts = {shown(values)}: expected a text or a list of texts")
    return [_text("prompt", value) for value in values]


def load(name: str | Path, device: str | torch.device = "cpu", *, fast: bool = False) -> Writer:
    """A writer from a model folder, the name of a model that ships (`imdm models`) or a hub id, with the tokenizer that
    lies beside the weights. fast: made ready by `faster`, which pays for many texts on a GPU."""
    name, device = find(name), checked_device(device)
    with no_progress_bars():
        model = load_model(name)
    folder = Path(name)
    if folder.is_dir() and not has_tokenizer(folder):
        raise UserError(f"model {str(name)!r} has no tokenizer beside it; it was trained on ids and writes ids only")
    torch.nn.Module.to(model.eval(), device)
    return Writer(faster(model) if fast else model, load_tokenizer(name))
