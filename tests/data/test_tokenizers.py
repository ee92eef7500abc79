"""Tokenizers as models are published with them: special tokens that only their class knows, files without names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from imdm.adopting.adopt import adopt_into
from imdm.core.errors import UserError
from imdm.data.tokenizers import check_same, copy_tokenizer, load_tokenizer, special_ids, train_bpe
from imdm.exporting import export_transformers
from imdm.models.loading import load_model
from imdm.writer import load
from tests.conftest import tiny_model

TEXT = ["the cat sat on the mat; the dog did not.\n\nIt DON'T matter: 1234."] * 9


def byte_level(special: list[str], regex: str | None = None) -> Tokenizer:
    """A byte-level BPE of 300 ids."""
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    split = [] if regex is None else [pre_tokenizers.Split(Regex(regex), "isolated")]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([*split, level]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def word_pieces(special: list[str]) -> Tokenizer:
    words = [*special, "the", "cat", "sat", "on", "mat", "dog", "[unused0]"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    return made


PUBLISHED: dict[str, tuple[Tokenizer, dict[str, str]]] = {
    "bert": (
        word_pieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        {"mask": "[MASK]", "begin": "[CLS]", "end": "[SEP]", "pad": "[PAD]"},
    ),
    "gpt2": (byte_level(["<|endoftext|>"]), {"begin": "<|endoftext|>", "end": "<|endoftext|>"}),
    "roberta": (
        byte_level(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        {"mask": "<mask>", "begin": "<s>", "end": "</s>", "pad": "<pad>"},
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_special_tokens_that_only_the_class_knows(kind: str, tmp_path: Path) -> None:
    """As BERT, GPT-2 and RoBERTa are at the hub: their files name none. Text is split as the files say."""
    backend, wanted = PUBLISHED[kind]
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    words = load_tokenizer(tmp_path)
    special = special_ids(words)
    found = {name: words.convert_ids_to_tokens(getattr(special, name)) for name in wanted}
    assert found == wanted
    assert len(words) == backend.get_vocab_size()
    assert (
        words(TEXT[0], add_special_tokens=False)["input_ids"] == backend.encode(TEXT[0], add_special_tokens=False).ids
    )


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_some_names_are_not_all(kind: str, tmp_path: Path) -> None:
    """A file that names the unknown word or the mask alone; one that is damaged beside it; one that is of no class."""
    backend, wanted = PUBLISHED[kind]
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"unk_token": "[UNK]"} if kind == "bert" else {"mask_token": "<mask>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    words = load_tokenizer(tmp_path)
    assert words.convert_ids_to_tokens(special_ids(words).begin) == wanted["begin"]
    (tmp_path / "config.json").write_text("{")
    assert len(load_tokenizer(tmp_path)) == len(words)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert len(load_tokenizer(tmp_path)) == len(words)


def test_robertas_files_without_a_description(tmp_path: Path) -> None:
    """vocab.json and merges.txt are GPT-2's too; the class is that of the model beside them."""
    backend, wanted = PUBLISHED["roberta"]
    backend.model.save(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    words = load_tokenizer(tmp_path)
    special = special_ids(words)
    assert {name: words.convert_ids_to_tokens(getattr(special, name)) for name in wanted} == wanted
    assert len(words) == backend.get_vocab_size()


@pytest.mark.parametrize("said", ["config", "tokenizer"])
def test_dreams_tokenizer_splits_as_qwens(said: str, tmp_path: Path) -> None:
    """Its files are those of GPT-2's kind, and its class is code that is not run."""
    names = {"bos_token": "<|beginoftext|>", "eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    backend = byte_level(list(names.values()), QWEN)
    backend.model.save(str(tmp_path))
    own = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    }
    own = own if said == "tokenizer" else {"tokenizer_class": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | own))
    if said == "config":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "Dream"}))
    words = load_tokenizer(tmp_path)
    assert words.tokenize(TEXT[0]) == backend.encode(TEXT[0]).tokens
    assert ".ĊĊ" in words.tokenize(TEXT[0])
    assert words.mask_token == "<|mask|>"


def fast(**special: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(sorted(set(special.values()))), **special)


@pytest.mark.parametrize(
    ("special", "begin", "end"),
    [
        ({"cls_token": "[CLS]", "sep_token": "[SEP]", "bos_token": "<s>", "eos_token": "</s>"}, "[CLS]", "[SEP]"),
        ({"cls_token": "[CLS]", "bos_token": "<s>", "eos_token": "</s>"}, "<s>", "</s>"),  # LLaDA's
        ({"cls_token": "[CLS]", "eos_token": "</s>"}, "[CLS]", "</s>"),
        ({"bos_token": "<s>"}, "<s>", "<s>"),
        ({"eos_token": "</s>"}, "</s>", "</s>"),
    ],
)
def test_how_rows_begin_and_end(special: dict[str, str], begin: str, end: str) -> None:
    words = fast(**special)
    found = special_ids(words)
    assert words.convert_ids_to_tokens([found.begin, found.end]) == [begin, end]


def test_a_chat_template_goes_wherever_the_tokenizer_goes(tmp_path: Path) -> None:
    words = train_bpe(TEXT, 300)
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    words.save_pretrained(tmp_path / "one")
    (tmp_path / "two").mkdir()
    copy_tokenizer(tmp_path / "one", tmp_path / "two")
    assert load_tokenizer(tmp_path / "two").chat_template == words.chat_template


def test_an_exported_tokenizer_has_the_mask_and_padding(tmp_path: Path) -> None:
    """With GPT-2's tokenizer the mask is an id after its last, and there is no padding. An export to `transformers`
    names both, since its users write masks as words and pad batches. It is still the model's own."""
    words = fast(bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    model = tiny_model(vocab_size=len(words) + 1, mask_token_id=len(words), length=16)
    model.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    folder = export_transformers(tmp_path / "model", tmp_path / "hub")
    there = AutoTokenizer.from_pretrained(folder)
    ids = there([f"the {there.mask_token} sat", "the cat sat on the mat"], padding=True)["input_ids"]
    assert (there.mask_token_id, there.pad_token, there.model_max_length) == (len(words), "<|endoftext|>", 16)
    assert len(words) in ids[0]
    assert special_ids(load_tokenizer(folder)) == special_ids(words)
    check_same(folder, tmp_path / "model")  # rows that were made with the model's still fit
    fast(bos_token="<|endoftext|>", eos_token="<|other|>").save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="another tokenizer"):
        check_same(folder, tmp_path / "other")
    assert load(folder).write("the cat", seed=1)[0].text == load(tmp_path / "model").write("the cat", seed=1)[0].text


def test_a_bert_is_adopted_with_its_own_tokenizer(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    backend, _ = PUBLISHED["bert"]
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=backend.get_vocab_size(), max_position_embeddings=16, **size)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    backend.save(str(tmp_path / "bert" / "tokenizer.json"))
    (tmp_path / "bert" / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    adopt_into(tmp_path / "bert", tmp_path / "out")
    assert load_model(tmp_path / "out").config.mask_token_id == 4
    assert load(tmp_path / "out").write("the cat", steps=2)[0].text.startswith("the cat")
