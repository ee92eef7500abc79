"""Tokenizers: any `AutoTokenizer`, or a byte-pair encoding trained here; and their special ids."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imdm.core.errors import UserError, reason_of
from imdm.core.files import check_folder, read_json, written_aside
from imdm.core.hub import hub_for
from imdm.shipped import check_fetched, find, meant

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt")
ALSO = ("added_tokens.json", "chat_template.jinja")  # beside these
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")  # those that only call the library tokenizers
SPECIAL_TOKENS = ("bos_token", "eos_token", "mask_token", "pad_token", "cls_token", "sep_token", "unk_token")
QWENS = ("qwen", "dream")  # Dream's tokenizer is Qwen's

BPE_SPECIAL = ("<bos>", "<eos>", "<pad>", "<mask>")
BPE_MASK = BPE_SPECIAL.index("<mask>")
"""The first ids of a byte-pair encoding that is trained here, and its mask's."""


@dataclass(frozen=True)
class Special:
    """The special ids of a tokenizer, around the text. mask: the tokenizer's own, or one more id after its last; begin
    and end: [CLS] and [SEP], or end-of-text at both ends; vocab_size counts the mask."""

    mask: int
    begin: int
    end: int
    pad: int
    vocab_size: int


def tokenizer_place(name: str | Path) -> str | Path:
    """The folder or hub id of a tokenizer; a folder that is not there, or has none, is refused."""
    check_fetched(name, "tokenizer")
    name = find(name)
    folder = Path(name)
    check_folder(folder, f"tokenizer {str(name)!r}")
    if folder.is_dir() and not has_tokenizer(folder):
        raise UserError(f"tokenizer {str(name)!r}: no tokenizer files in that folder")
    if hint := meant(name):
        raise UserError(f"tokenizer {str(name)!r}: no such folder; {hint}")
    if not folder.exists() and (folder.is_absolute() or len(folder.parts) > 2):
        raise UserError(f"tokenizer {str(name)!r}: no such folder, nor a hub id")
    return name


def load_tokenizer(name: str | Path) -> Any:
    """A fast tokenizer by folder, by the name of a model that ships, or by hub id."""
    name = tokenizer_place(name)
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
    from transformers import GPT2TokenizerFast as ByteLevelBPE  # type: ignore[attr-defined]

    from imdm.models.denoiser import register  # takes seconds, as `transformers` does

    register()
    folder = Path(name)
    kind = _config_field(folder, "config.json", "model_type")
    own = _config_field(folder, "tokenizer_config.json", "tokenizer_class")
    try:
        if (folder / "tokenizer.json").exists():  # whatever config.json is beside it
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(name))
            if kind in CONFIG_MAPPING and _ends_of(tokenizer) == (None, None):
                with suppress(Exception):  # if the files are not of the class's kind, they say all that is known
                    _name_special(tokenizer, AutoTokenizer.from_pretrained(str(name), trust_remote_code=False))
        elif (folder / "merges.txt").exists() and (kind == "gpt2" or kind not in CONFIG_MAPPING):  # and vocab.json
            tokenizer = (Qwen2Tokenizer if (own or kind).startswith(QWENS) else ByteLevelBPE).from_pretrained(str(name))
        else:
            with hub_for(folder):
                tokenizer = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
    except Exception as error:  # of many kinds: missing, damaged, no network
        where = "" if folder.exists() else "is no folder here, and as a hub id it "
        raise UserError(f"tokenizer {str(name)!r} {where}cannot be loaded: {reason_of(error)}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer {str(name)!r} has no fast version; use one with a tokenizer.json")
    tokenizer.model_max_length = 1 << 40  # truncation is done here
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json may hold truncation settings
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


class PlainTokenizer:
    """A tokenizer.json read by the library `tokenizers` alone: what a `Writer` uses of a tokenizer of `transformers`,
    with the same results. backend: the library's object; names: its special tokens by their names in
    tokenizer_config.json."""

    is_fast = True

    def __init__(self, backend: Any, names: dict[str, str]) -> None:
        self.backend_tokenizer = backend
        ids = {name: backend.token_to_id(names[name]) if name in names else None for name in SPECIAL_TOKENS}
        self.bos_token_id, self.eos_token_id = ids["bos_token"], ids["eos_token"]
        self.cls_token_id, self.sep_token_id = ids["cls_token"], ids["sep_token"]
        self.mask_token_id, self.pad_token_id = ids["mask_token"], ids["pad_token"]
        self.unk_token_id = ids["unk_token"]

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __call__(self, text: str, add_special_tokens: bool, split_special_tokens: bool) -> dict[str, list[int]]:
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        """The text of ids. Spaces are never cleaned up: tokenizers that do so are not read here."""
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(self.backend_tokenizer.id_to_token(token))


def load_plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """The tokenizer of a folder, if it is a tokenizer.json with a configuration of special tokens only; None
    otherwise."""
    from tokenizers import Tokenizer

    files = {file.name for file in folder.glob("*token*.json")}
    if files != {"tokenizer.json", "tokenizer_config.json"}:
        return None
    fields = read_json(folder / "tokenizer_config.json", f"tokenizer {str(folder)!r}")
    if not isinstance(fields, dict) or fields.get("tokenizer_class") not in PLAIN_CLASSES:
        return None
    names = {name: value for name, value in fields.items() if name in SPECIAL_TOKENS}
    if fields.keys() - {*names, "tokenizer_class", "backend", "model_max_length"}:
        return None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library has no error class; `load_tokenizer` reports the error
        return None
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    if not all(name in special for name in names.values()):
        return None
    backend.no_truncation()
    backend.no_padding()
    return PlainTokenizer(backend, names)


def _config_field(folder: Path, name: str, field: str) -> str:
    """A field of a configuration in a folder; empty if it is not there."""
    try:
        config = read_json(folder / name, name) if (folder / name).is_file() else {}
    except UserError:
        config = {}
    return str(config.get(field) or "").lower() if isinstance(config, dict) else ""


def _name_special(tokenizer: Any, like: Any) -> None:
    """Name the special tokens as another tokenizer does. Files of some models (BERT's, GPT-2's) leave that to the class
    of their tokenizer."""
    words = tokenizer.get_vocab()
    names = {name: word for name, word in like.special_tokens_map.items() if isinstance(word, str) and word in words}
    tokenizer.add_special_tokens(names)


def _ends_of(tokenizer: Any) -> tuple[int | None, int | None]:
    """The ids that rows begin and end with, as far as the tokenizer names them."""
    begin, cls, sep = tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id
    begin = cls if begin is None or (cls is not None and sep is not None) else begin
    return begin, tokenizer.eos_token_id if sep is None else sep


def special_ids(tokenizer: Any) -> Special:
    """The ids a model needs, chosen as for the paper's models: [CLS] is the begin token of a pair [CLS], [SEP]."""
    size, ends = len(tokenizer), [one for one in _ends_of(tokenizer) if one is not None]
    if not ends:
        raise UserError("the tokenizer has neither an end-of-text nor a [SEP] token; documents could not be separated")
    begin, end = ends[0], ends[-1]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    if tokenizer.mask_token_id is not None:
        return Special(tokenizer.mask_token_id, begin, end, pad, size)
    return Special(size, begin, end, pad, size + 1)


def check_ids(tokenizer: Any, vocab_size: int, mask: int, what: str = "the tokenizer") -> None:
    """Refuse a tokenizer whose ids are not those of a model."""
    special = special_ids(tokenizer)
    if (special.vocab_size, special.mask) != (vocab_size, mask):
        raise UserError(
            f"{what} has {special.vocab_size} ids with mask {special.mask}, the model has {vocab_size} with mask "
            f"{mask}; they do not belong together"
        )


def check_choice(tokenizer: str | None, train_bpe: int | None) -> None:
    """Refuse both a tokenizer and the size of one to train, or neither; and too small a size."""
    if (tokenizer is None) == (train_bpe is None):
        raise UserError("give either a tokenizer (folder or hub id) or the size of a BPE to train (train_bpe)")
    if train_bpe is not None:
        check_bpe_size(train_bpe)


def check_bpe_size(vocab_size: int) -> None:
    """Refuse too small a byte-pair encoding."""
    if vocab_size < 300:
        raise UserError(f"train_bpe = {vocab_size}: at least 300 ids are needed, 256 of them for single bytes")


def train_bpe(documents: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE of `vocab_size` ids, the mask included, with <bos>, <eos>, <pad> and <mask>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_bpe_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BPE_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", mask_token="<mask>"
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of the tokenizer's serialised description."""
    backend = tokenizer.backend_tokenizer.to_str().encode()
    special = repr(sorted((k, str(v)) for k, v in tokenizer.special_tokens_map.items())).encode()
    return hashlib.sha256(backend + special).hexdigest()[:16]


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """The tokenizer's files in `folder`, each whole or not there, whatever was there before."""
    with tempfile.TemporaryDirectory() as place:
        tokenizer.save_pretrained(place)
        return [_copied(file, folder) for file in sorted(Path(place).iterdir())]


def _copied(file: Path, folder: Path) -> Path:
    content = file.read_bytes()
    with written_aside(folder / file.name) as aside:
        aside.write_bytes(content)
    return folder / file.name


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES)


def copy_tokenizer(home: Path, target: Path) -> None:
    """The tokenizer's files, where there are some."""
    for name in (*FILES, *ALSO):
        if (home / name).exists():
            _copied(home / name, target)


def _without_mask(tokenizer: Any) -> str:
    """What decides the ids of text, with or without names for the mask and padding: an export to `transformers` adds
    these."""
    described, special = json.loads(tokenizer.backend_tokenizer.to_str()), special_ids(tokenizer)
    described["added_tokens"] = [one for one in described["added_tokens"] if one["id"] != special.mask]
    return json.dumps([described, asdict(special)], sort_keys=True)


def check_same(model: Path, data: Path | None) -> None:
    """Refuse data made with another tokenizer than the model's, if both have one."""
    if data is None or not has_tokenizer(model) or not has_tokenizer(data):
        return
    both = load_tokenizer(model), load_tokenizer(data)
    mine, theirs = map(tokenizer_hash, both)
    if mine != theirs and len({_without_mask(one) for one in both}) > 1:
        raise UserError(
            f"the data in {str(data)!r} was made with another tokenizer than the model's own ({theirs}, not {mine}); "
            f"prepare it with the tokenizer in {model}"
        )
