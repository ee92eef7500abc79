"""Where training rows come from: anything with a length and rows by index."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from imdm.core.config import Config, digest, one_of
from imdm.core.errors import UserError
from imdm.core.files import read_tensors
from imdm.data.synthetic import Language, languages
from imdm.diffusion.ending import Ending
from imdm.diffusion.randomness import Purpose, as_key, permutation, uniform
from imdm.models import LARGEST_VOCABULARY, check_tokens
from imdm.models.backbones import backbones

if TYPE_CHECKING:
    from imdm.models.shape import Shape

LOOKED_AT = 1024  # rows
Progress = Callable[[int, str], None]
"""Progress of a preparation: documents so far, and a text to show beside it."""


@runtime_checkable
class Source(Protocol):
    """Rows of equal length, by index, always the same."""

    length: int
    vocab_size: int
    mask_id: int
    fingerprint: str

    def __len__(self) -> int: ...

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        """Columns of the rows at `index` (b,); `tokens` (b, L) is always among them."""


class LanguageSource:
    """Exact draws from an enumerated language; row i is the draw keyed by i."""

    SIZE = 1 << 18

    def __init__(self, language: Language, seed: int = 0) -> None:
        self.language, self.seed = language, seed
        self.length, self.vocab_size, self.mask_id = language.length, language.vocab_size, language.mask_id
        self.fingerprint = digest([language.name, language.joint.flatten().tolist(), seed])

    def __len__(self) -> int:
        return self.SIZE

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        return {"tokens": self.language.at(uniform(as_key(self.seed), Purpose.DATA, index))}


class TokenSource:
    """Rows of token ids held in memory: a tensor (N, L)."""

    def __init__(self, tokens: Tensor, vocab_size: int, mask_id: int) -> None:
        self.tokens = tokens
        self.length, self.vocab_size, self.mask_id = tokens.shape[1], vocab_size, mask_id
        content = hashlib.sha256(tokens.contiguous().numpy().tobytes()).hexdigest()
        self.fingerprint = digest([list(tokens.shape), str(tokens.dtype), content])

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: Tensor) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index].long()}


class Data(Config):
    """The `data` section of a recipe, of any kind."""

    @abstractmethod
    def source(self, seed: int) -> Source:
        """The rows to train on."""

    @abstractmethod
    def vocabulary(self) -> tuple[int, int]:
        """(vocab_size, mask_token_id)."""

    def check(self) -> None:
        """Refuse, before any work, data that cannot be prepared; existing rows are checked when they are read."""

    def ready(self, folder: Path, progress: Progress | None = None) -> Data:
        """This data, ready to give rows; files made for that go into `folder`."""
        return self

    @property
    def is_ready(self) -> bool:
        return True

    def held_out(self, seed: int) -> Source | None:
        """Validation rows, if there are some."""
        return None

    def documents(self, seed: int) -> Source | None:
        """Held-out rows that each begin a document, where there are some."""
        return None

    def split(self) -> str | None:
        """The name of the split of `source`, if it has one."""
        return None

    def language(self) -> Language | None:
        """The enumerated truth, where there is one."""
        return None

    def ending(self) -> Ending | None:
        """How rows end, where they are whole texts."""
        return None

    def tokenizer_folder(self) -> Path | None:
        """Where the tokenizer is, for text."""
        return None


class LanguageData(Data):
    """`data: {kind: language, name: aligned, settings: {length: 2, symbols: 2}}`: an enumerated language."""

    kind: Literal["language"] = "language"
    name: Annotated[str, one_of("language", languages)] = "aligned"
    settings: dict[str, Any] = Field(default_factory=dict)

    def language(self) -> Language:
        make = languages[self.name]
        for name, value in self.settings.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 < value < 1e6:
                raise UserError(f"data.settings.{name} = {value!r}: a language's settings are small numbers")
        try:
            return make(**self.settings)
        except TypeError as error:
            raise UserError(f"data.settings: {str(error).replace('()', '')}") from None

    def source(self, seed: int) -> Source:
        return LanguageSource(self.language(), seed)

    def vocabulary(self) -> tuple[int, int]:
        return self.language().vocab_size, self.language().mask_id


class TokenData(Data):
    """`data: {kind: tokens, path: train.safetensors, vocab_size: 30522, mask_token_id: 103}`: a safetensors file whose
    tensor `tokens` (N, L) holds ids; the mask is the last id unless given."""

    kind: Literal["tokens"] = "tokens"
    path: Path
    vocab_size: int = Field(ge=2, le=LARGEST_VOCABULARY)
    mask_token_id: int | None = Field(None, ge=0)

    def vocabulary(self) -> tuple[int, int]:
        return self.vocab_size, self.vocab_size - 1 if self.mask_token_id is None else self.mask_token_id

    def source(self, seed: int) -> Source:
        where = f"data: {self.path}"
        if not self.path.is_file():
            raise UserError(f"{where} is missing; paths are taken from the folder you run in, {Path.cwd()}")
        tokens = read_tensors(self.path, "data").get("tokens")
        if tokens is None or tokens.ndim != 2 or tokens.is_floating_point() or tokens.numel() == 0:
            raise UserError(f"{where} must hold an integer tensor 'tokens' of shape (rows, length)")
        vocab_size, mask_id = self.vocabulary()
        tokens = tokens.long() if tokens.dtype in (torch.uint16, torch.uint32, torch.uint64) else tokens
        check_tokens(tokens, vocab_size, where)
        if bool((tokens == mask_id).any()):
            raise UserError(f"{where} contains the mask token {mask_id}, which data must not")
        return TokenSource(tokens, vocab_size, mask_id)


def check_fits(source: Source, config: Shape) -> None:
    """Refuse a model that cannot read this data."""
    if (source.vocab_size, source.mask_id) != (config.vocab_size, config.mask_token_id):
        raise UserError(
            f"the data has {source.vocab_size} token ids with mask {source.mask_id}, "
            f"the model has {config.vocab_size} with mask {config.mask_token_id}; they must agree"
        )
    if source.length > config.length:
        raise UserError(f"the data has {source.length} tokens a row, the model takes at most {config.length}")
    if config.ending is not None and not _is_whole(source, config.ending):
        raise UserError(
            "the model writes whole texts, followed by padding, and the rows of the data do not end like its "
            "own; prepare the text with packing: whole and the model's tokenizer"
        )


def check_teaches(source: Source, config: Shape) -> None:
    """Refuse rows that a model of a stream would be trained on, padding and all."""
    check_fits(source, config)
    if config.ending is None and getattr(source, "ending", None) is not None:
        whole = "adopt it with --whole, or " if backbones[config.backbone["kind"]].owns_embedding else ""
        raise UserError(
            "the rows of the data are whole texts, followed by padding (packing: whole), and this model of a stream "
            f"would learn the padding as text; {whole}prepare the text with another packing"
        )


def _is_whole(source: Source, ending: Ending) -> bool:
    """Whether rows end like this: by the manifest of prepared text; else by the first rows."""
    if hasattr(source, "ending"):
        return source.ending == ending
    return bool(ending.fits(source.rows(torch.arange(min(LOOKED_AT, len(source))))["tokens"]).all())


class Order:
    """The order of rows in training: a new keyed permutation every epoch. There is no iterator state to save: the
    position follows from the step, so a resumed run continues where it stopped."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, position: Tensor) -> Tensor:
        rows = torch.empty_like(position)
        for epoch in (position // self.size).unique().tolist():
            if epoch != self._epoch:
                self._epoch, self._order = epoch, permutation(self.seed, self.size, epoch)
            here = position // self.size == epoch
            rows[here] = self._order[position[here] % self.size]
        return rows
