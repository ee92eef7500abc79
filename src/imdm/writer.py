"""A model with its tokenizer: prompts in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imdm.core.devices import checked_device
from imdm.core.errors import UserError, check_blanks, check_seed, check_whole, shorter, shown
from imdm.core.memory import check_memory
from imdm.data.tokenizers import (
    Special,
    check_ids,
    has_tokenizer,
    load_plain_tokenizer,
    load_tokenizer,
    special_ids,
)
from imdm.diffusion.ending import Ending
from imdm.models.fast import faster
from imdm.models.loading import load_model, load_network
from imdm.models.network import Network
from imdm.sampling import Generation, Revealed
from imdm.shipped import find

BLANK = "___"


@dataclass(frozen=True)
class Piece:
    """A piece of text, revealed at `step` (−1: given by the prompt)."""

    text: str
    step: int


@dataclass(frozen=True, repr=False)
class Story:
    """The steps of generation. texts: before the first step and after each, ░ for masks; log_probs: the model's
    log-probability of each token when it was drawn, 0 where `revealed_at` is −1."""

    texts: list[str]
    log_probs: list[float]

    def __repr__(self) -> str:
        return f"Story({len(self.texts) - 1} steps)"


@dataclass(frozen=True, repr=False)
class Text:
    """A text generated for one prompt. tokens: of a model of whole texts, those up to the end; revealed_at: the step of
    each token (−1: of the prompt, or the end, which was drawn beforehand); trace: on request."""

    prompt: str
    text: str
    tokens: list[int]
    revealed_at: list[int]
    evaluations: int
    trace: Story | None = None

    def __repr__(self) -> str:
        return f"Text({shorter(self.text, 60)!r}, {len(self.tokens)} tokens, {self.evaluations} evaluations)"


@dataclass(frozen=True, repr=False)
class Writer:
    """Generates, continues and infills text.

    >>> writer = load("stories-imdm")  # which ships; or the folder of another model
    >>> writer.write("Once upon a time", steps=4)[0].text.startswith("Once upon a time")
    True
    """

    model: Network
    tokenizer: Any

    def __post_init__(self) -> None:
        special, config = self._special, self.model.config
        check_ids(self.tokenizer, config.vocab_size, config.mask_token_id)
        if config.ending not in (None, ending := Ending(special.begin, special.end, special.pad)):
            raise UserError(f"the tokenizer has {ending}, the model {config.ending}; they do not belong together")

    def __repr__(self) -> str:
        return f"Writer({self.model!r})"

    @cached_property
    def _special(self) -> Special:
        return special_ids(self.tokenizer)

    def write(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        num: int = 1,
        length: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> list[Text]:
        """`num` continuations of each prompt (unconditional samples without one), to `length` tokens, one prompt after
        another. A model of whole texts ends them itself, within `length` tokens; if it knows their lengths, a text that
        does not fit is cut. Text i of the result depends on the i-th key of `seed`, so equal prompts get different
        continuations. Options as in `MaskedDiffusionLM.generate`: steps, noise, temperature, top_p, trace and the
        like."""
        texts = [""] if prompts is None else _checked_texts(prompts, "prompt")
        if prompts is not None and (not texts or not all(prompt.strip() for prompt in texts)):
            raise UserError("the prompt is empty; leave it out to write from nothing")
        most = self.model.config.length
        length = most if length is None else length
        check_whole("length", length, 1, most)
        return self._filled(texts, [self.prefixed(prompt, length) for prompt in texts], num, seed, options)

    def infill(
        self,
        text: str | Sequence[str],
        *,
        num: int = 1,
        blank: int = 4,
        marker: str = BLANK,
        seed: int = 0,
        **options: Any,
    ) -> list[Text]:
        """Fill every `marker` in the text, or in each of several, with `blank` tokens, `num` times. Seed and options as
        in `write`; texts of one length are written together. For a model of whole texts the text is complete: it ends
        where given."""
        texts, marker = _checked_texts(text, "text"), _checked_text("marker", marker)
        if not texts:
            raise UserError("nothing to fill in: there is no text")
        return self._filled(texts, [self.blanked(one, blank, marker) for one in texts], num, seed, options)

    def blanked(self, text: str, blank: int, marker: str) -> list[int]:
        """begin, the text with holes, end; and padding, where rows are whole texts, as in the model's training data."""
        check_whole("blank", blank, 1, self.model.config.length)
        check_blanks(text, marker)
        special, ids, parts = self._special, [], text.split(marker)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            ids += [special.mask] * blank * (number > 0)
            ids += self._known_ids(part if last else part.rstrip(" "))  # a blank's first token has its own space
        return self._whole(ids)

    def framed(self, text: str) -> list[int]:
        """A text without holes as a row: begin, the text, end; and padding, where rows are whole texts."""
        return self._whole(self._known_ids(_checked_text("text", text)))

    def _whole(self, ids: list[int]) -> list[int]:
        special = self._special
        row = [special.begin, *ids, special.end]
        if len(row) > self.model.config.length:
            raise UserError(f"the text has {len(row)} tokens, the model takes at most {self.model.config.length}")
        return self._padded(row)

    def _padded(self, row: list[int]) -> list[int]:
        """A row with padding to the training length, for a model of whole texts; for others as it is."""
        ending, length = self.model.process.ending, self.model.config.length
        return row if ending is None else row + [ending.pad] * (length - len(row))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens such as `<mask>` or `<eos>` are ordinary characters."""
        if not text:
            return []
        if self._direct:
            ids = self._backend().encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        special = self._special
        for token in {special.mask, special.begin, special.end, special.pad}.intersection(ids):
            name = self.tokenizer.convert_ids_to_tokens(token)
            raise UserError(
                f"the text {shown(text)} has {name!r}, which this tokenizer cannot read as text; leave it out"
            )
        return ids

    def _known_ids(self, text: str) -> list[int]:
        """Token ids of a text that is to be part of another: one that has no token would be missing there."""
        ids, unknown = self.encode(text), self.tokenizer.unk_token_id
        if unknown in ids:
            part = next((part for part in (*text.split(), *text) if unknown in self.encode(part)), text)
            raise UserError(
                f"the text {shown(text)} has {shown(part)}, which this tokenizer does not know; leave it out"
            )
        return ids

    @property
    def _framed(self) -> int:
        """Number of tokens around a prompt and its holes: begin and end, or only begin where the model generates the
        end."""
        return 2 if self.model.process.ending is None else 1

    def room(self, prompt: str) -> int:
        """The most tokens the model can generate after a prompt."""
        return self.model.config.length - len(self.encode(prompt)) - self._framed

    def prefixed(self, prompt: str, length: int) -> list[int]:
        """begin, the prompt, holes, end: as in the rows the model was trained on. A model of whole texts generates the
        end itself. If it knows their lengths, the row breaks off after `length` tokens, and so may the text; else
        padding follows, so that the text ends before."""
        special, ids, whole = self._special, self._known_ids(prompt), self.model.process.ending is not None
        holes = length - len(ids) - self._framed
        if holes < 1:
            raise UserError(f"the prompt has {len(ids)} tokens; with {length} in all there is no room to write")
        row = [special.begin, *ids, *[special.mask] * holes]
        if not whole:
            return [*row, special.end]
        return self._padded(row) if self.model.config.lengths is None else row

    def _filled(
        self, prompts: list[str], rows: list[list[int]], num: int, seed: int, options: dict[str, Any]
    ) -> list[Text]:
        """Each row completed `num` times; rows of one length share a canvas."""
        if len({len(row) for row in rows}) == 1:
            generation = self.model.generate(torch.tensor(rows), num=num, seed=seed, **options)
            return [self._text(prompts[i // num], generation, i) for i in range(len(generation.tokens))]
        check_seed(seed)
        check_whole("num", num)
        check_memory("num", num, 8 * len(rows))
        own_keys, noises = options.pop("keys", None), options.pop("noise_keys", None)
        keys = self.model.sample_keys(num * len(rows), seed)
        keys = keys if own_keys is None else self.model.checked_keys(own_keys, len(keys))
        noises = None if noises is None else self.model.checked_noise_keys(noises, len(keys))
        texts, count = dict[int, Text](), 0
        for length in sorted({len(row) for row in rows}):
            some = [i for i, row in enumerate(rows) if len(row) == length]
            place = torch.tensor([num * i + j for i in some for j in range(num)])
            generation = self.model.generate(
                torch.tensor([rows[i] for i in some]),
                num=num,
                keys=keys[place.to(keys.device)],
                noise_keys=None if noises is None else noises[place.to(keys.device)],
                **options | _shifted_callbacks(options, place, count),
            )
            texts |= {at: self._text(prompts[at // num], generation, i) for i, at in enumerate(place.tolist())}
            count += int((generation.revealed_at >= 0).sum())
        return [texts[i] for i in range(len(texts))]

    def _text(self, prompt: str, generation: Generation, row: int) -> Text:
        ending, size = self.model.config.ending, generation.tokens.shape[1]
        if ending is not None:
            size = int(ending.lengths(generation.tokens[row]))
        tokens, revealed_at = generation.tokens[row, :size].tolist(), generation.revealed_at[row, :size].tolist()
        text = Text(prompt, self.decode(tokens), tokens, revealed_at, int(generation.evaluations[row]))
        if generation.trace is None:
            return text
        pieces, steps = self.pieces(text), generation.trace.canvases.shape[1]
        texts = ["".join(p.text if p.step < step else "░" * len(p.text) for p in pieces) for step in range(steps)]
        return replace(text, trace=Story(texts, generation.trace.log_probs[row, :size].tolist()))

    def decode(self, tokens: list[int] | Tensor) -> str:
        """Text without special tokens; a new line where one document ends and another begins. For a model of whole
        texts, all before the end."""
        tokens = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        ending = self.model.process.ending
        if ending is not None:
            return self._decoded(tokens[: ending.length_of(tokens)])
        documents = groupby(tokens, self._special.end.__eq__)
        texts = [self._decoded(list(ids)) for is_end, ids in documents if not is_end]
        return "\n".join(text for text in texts if text)

    def _decoded(self, ids: list[int]) -> str:
        """Text of ids, its spaces left as they are: cleaned up, the text of some tokens would not begin that of more of
        them."""
        if self._direct:
            return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True))
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @cached_property
    def _direct(self) -> bool:
        """Whether the tokenizer of `transformers` does nothing but call that of the library `tokenizers` inside it,
        which takes a third of the time for a short text."""
        kind = type(self.tokenizer)
        fast_class = next((base for base in kind.__mro__ if base.__name__ == "TokenizersBackend"), None)
        methods = ("__call__", "_encode_plus", "_convert_encoding", "decode", "_decode")
        return fast_class is not None and not any(
            name in vars(self.tokenizer) or getattr(kind, name) is not getattr(fast_class, name) for name in methods
        )

    def _backend(self) -> Any:
        """The tokenizer of `tokenizers` inside ours, with the settings that `encode` needs; other calls may have left
        others."""
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if not backend.encode_special_tokens:
            backend.encode_special_tokens = True
        return backend

    def pieces(self, text: Text) -> list[Piece]:
        """Each token's share of the text, in order, with the step at which it appeared."""
        out, before = [], ""
        for count, step in enumerate(text.revealed_at, 1):
            now = self.decode(text.tokens[:count])
            if now.endswith("\ufffd"):
                continue  # in the middle of a character
            if len(now) > len(before):
                out.append(Piece(now[len(before) :], step))
            before = now
        return out


def _shifted_callbacks(options: dict[str, Any], place: Tensor, before: int) -> dict[str, Any]:
    """Callbacks for one of several canvases, with indices and counts over all of them."""
    on_step, on_progress = options.get("on_step"), options.get("on_progress")
    callbacks: dict[str, Callable[..., None]] = {}
    if on_step is not None:

        def step(revealed: Revealed) -> None:
            on_step(replace(revealed, sequences=place.to(revealed.sequences.device)[revealed.sequences]))

        callbacks["on_step"] = step
    if on_progress is not None:
        callbacks["on_progress"] = lambda here: on_progress(before + here)
    return callbacks


def _checked_text(name: str, value: Any) -> str:
    """A text that can be encoded."""
    if not isinstance(value, str):
        raise UserError(f"{name} = {shown(value)}: expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} = {shown(value)}: not text that UTF-8 can hold") from None
    return value


def _checked_texts(values: Any, name: str) -> list[str]:
    if isinstance(values, str):
        return [_checked_text(name, values)]
    if not isinstance(values, Sequence):
        raise UserError(f"{name}s = {shown(values)}: expected a text or a list of texts")
    return [_checked_text(name, value) for value in values]


def load(
    name: str | Path,
    device: str | torch.device = "cpu",
    *,
    fast: bool = False,
    precision: str = "float32",
    transformers: bool = True,
) -> Writer:
    """A writer from a model folder, the name of a model that ships (`imdm models`) or a hub id, with the tokenizer
    beside the weights.

    fast           prepared by `faster`, which pays off for many texts on a GPU
    precision      of the weights: `bf16` for large models
    transformers   False: model and tokenizer are not those of `transformers` where nothing of it is needed, so that the
                   first text comes seconds sooner. It is the same text
    """
    name, device = find(name), checked_device(device)
    model = load_model(name, precision) if transformers else load_network(name, precision)
    folder = Path(name)
    if folder.is_dir() and not has_tokenizer(folder):
        raise UserError(
            f"model {str(name)!r} has no tokenizer beside it: it writes ids only (imdm.load_model); 'imdm adopt "
            "--tokenizer' gives one to a model that is converted"
        )
    torch.nn.Module.to(model.eval(), device)
    tokenizer = None if transformers else load_plain_tokenizer(folder)
    return Writer(faster(model) if fast else model, tokenizer or load_tokenizer(name))
