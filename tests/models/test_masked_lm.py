"""Our models as `transformers` calls a masked language model: outputs, padding, labels, Auto classes, resizing."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, Trainer, TrainingArguments, pipeline

from imdm.core.errors import UserError
from imdm.data.tokenizers import train_bpe
from imdm.diffusion.state import Noised
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM, register
from imdm.models.loading import load_model
from tests.conftest import tiny_model
from tests.documents.test_results import table
from tests.models.test_hf import FAMILIES, GROUPED, made
from tests.reference.known_failures import KNOWN

MASKS = ["single", "finite-7", "infinite-uniform-8-1.0"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "folded": {"condition": 0},
    "capped": {"softcap": 2.0},
    "mixture": {"mixture": True},
    "tied": {"tie_word_embeddings": True},
    "whole": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
IDS = torch.tensor([[3, 4, 0, 4, 2, 4], [4, 4, 1, 2, 4, 3]])
HOLES = IDS == 4
WINDOWED = {"model_type": "mistral", "sliding_window": 3} | {k: v for k, v in GROUPED.items() if k != "sliding_window"}
BACKBONES = {"llama": FAMILIES["llama"], "gpt2": FAMILIES["gpt2"], "mistral": WINDOWED, "gemma2": FAMILIES["gemma2"]}
BACKBONES |= {name: FAMILIES[name] for name in ("bert", "roberta", "modernbert", "distilbert")}


def same(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding, where the mask's own logit is the least number there is in both."""
    return torch.allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_logits_are_those_of_the_state(mask: str, kind: str) -> None:
    model = tiny_model(mask=mask, **KINDS[kind])
    found = model(input_ids=IDS, noise=5)
    keys = model.sample_keys(2, 5)
    noise = model.mask.draw(keys, torch.zeros_like(IDS), HOLES)
    state = Noised(IDS, HOLES, noise, torch.ones(2), model.process.latents(keys))
    assert same(found.logits.log_softmax(-1)[HOLES].exp(), model(state, HOLES).exp())
    assert (found.logits[..., 4] == torch.finfo(torch.float32).min).all()
    assert found.loss is None
    assert found.hidden_states is None
    assert torch.equal(found.logits, model(IDS, noise=5)["logits"])  # by place too
    assert torch.equal(found.logits, model(input_ids=IDS, noise=5, return_dict=False)[0])
    if noise is not None and kind != "mixture":
        assert torch.equal(found.logits, model(input_ids=IDS, noise=noise).logits)


def test_noise_is_drawn_anew_unless_told() -> None:
    model = tiny_model(mask="infinite-uniform-8-1.0")
    torch.manual_seed(0)
    one, two = (model(input_ids=IDS).logits for _ in range(2))
    assert not torch.equal(one, two)
    torch.manual_seed(0)
    assert torch.equal(model(input_ids=IDS).logits, one)
    assert torch.equal(model(input_ids=IDS, noise=1).logits, model(input_ids=IDS, noise=1).logits)
    with pytest.raises(UserError, match=r"noise: mask infinite-uniform-8-1.0 takes \(2, 6, 8\)"):
        model(input_ids=IDS, noise=torch.zeros(2, 6))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_read(kind: str, side: str) -> None:
    model = tiny_model(**KINDS[kind])
    text = torch.tensor([[3, 4, 0, 4]])
    alone = model(input_ids=text, noise=1)
    for junk in (0, 2, 4):
        more = torch.full((1, 2), junk)
        ids = torch.cat((more, text) if side == "left" else (text, more), 1)
        shown = torch.cat((more * 0, text * 0 + 1) if side == "left" else (text * 0 + 1, more * 0), 1)
        both = torch.cat((ids, IDS[:1])), torch.cat((shown, torch.ones(1, 6, dtype=torch.long)))
        where = slice(2, 6) if side == "left" else slice(0, 4)
        found = model(input_ids=both[0], attention_mask=both[1], noise=1)
        assert same(found.logits[:1, where], alone.logits)
    unpadded = model(input_ids=ids, noise=1).logits[:, where]
    assert not torch.allclose(unpadded, alone.logits, atol=1e-3)
    assert torch.isfinite(model(input_ids=text, attention_mask=text * 0, noise=1).logits).all()


def test_a_judge_reads_no_padding_and_looks_back_alone() -> None:
    model, text = tiny_model(causal=True), torch.tensor([[3, 1, 0, 2]])
    alone = model(input_ids=text, output_attentions=True)
    assert all((a.triu(1) == 0).all() for a in alone.attentions)
    padded = torch.cat((torch.tensor([[1, 1]]), text), 1)
    for asked in ({}, {"output_attentions": True}):
        found = model(input_ids=padded, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]), **asked).logits
        assert torch.isfinite(found).all()
        assert same(found[:, 2:], alone.logits)
    assert not torch.allclose(model(input_ids=padded).logits[:, 2:], alone.logits, atol=1e-3)


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_read_by_a_backbone(name: str, side: str) -> None:
    """Nor are its positions counted: those of Llama, GPT-2, BERT and RoBERTa are told where tokens stand."""
    model = made(BACKBONES[name], shift=name == "llama")
    text, more = torch.tensor([[3, 11, 4, 11]]), torch.tensor([[7, 8]])
    ids = torch.cat((more, text) if side == "left" else (text, more), 1)
    shown = torch.cat((more * 0, text * 0 + 1) if side == "left" else (text * 0 + 1, more * 0), 1)
    where = slice(2, 6) if side == "left" else slice(0, 4)
    alone = model(input_ids=text).logits
    assert same(model(input_ids=ids, attention_mask=shown).logits[:, where], alone)
    assert not torch.allclose(model(input_ids=ids).logits[:, where], alone, atol=1e-4)


def test_positions_may_be_told() -> None:
    model = tiny_model()
    assert torch.allclose(model(input_ids=IDS).logits, model(input_ids=IDS, position_ids=torch.arange(6)[None]).logits)
    turned = model(input_ids=IDS.flip(1), position_ids=torch.arange(5, -1, -1)[None]).logits.flip(1)
    assert same(turned, model(input_ids=IDS).logits)  # a set of tokens, each with its place
    with pytest.raises(UserError, match="positions 0…5"):
        model(input_ids=IDS, position_ids=torch.arange(1, 7)[None])


def test_the_loss_is_the_mean_over_labels() -> None:
    model = tiny_model()
    labels = torch.full_like(IDS, -100)
    labels[0, 1], labels[1, 4], labels[1, 2] = 2, 0, 1
    found = model(input_ids=IDS, labels=labels)
    law = found.logits.log_softmax(-1)
    wanted = -(law[0, 1, 2] + law[1, 4, 0] + law[1, 2, 1]) / 3
    assert torch.allclose(found.loss, wanted)
    assert torch.allclose(model(input_ids=IDS, labels=labels, return_dict=False)[0], wanted)
    found.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    judge = tiny_model(causal=True)
    text = torch.tensor([[0, 1, 2, 3]])
    law = judge(input_ids=text).logits.log_softmax(-1)[0]
    assert torch.allclose(judge(input_ids=text, labels=text).loss, -(law[0, 1] + law[1, 2] + law[2, 3]) / 3)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_attentions(kind: str) -> None:
    model = tiny_model(**KINDS[kind])
    found = model(input_ids=IDS, noise=1, output_hidden_states=True, output_attentions=True)
    size = 7 if kind == "mixture" else 6
    assert [tuple(h.shape) for h in found.hidden_states] == [(2, 6, 16)] * 3
    assert [tuple(a.shape) for a in found.attentions] == [(2, 2, size, size)] * 2
    assert all(torch.allclose(a.sum(-1), torch.ones(2, 2, size)) for a in found.attentions)
    assert torch.equal(found.hidden_states[0], model.embedding(IDS))
    assert same(model.head_of(found.hidden_states[-1]).logits(), found.logits)
    assert same(found.logits, model(input_ids=IDS, noise=1).logits)
    shown = torch.ones_like(IDS)
    shown[:, 5] = 0
    padded = model(input_ids=IDS, attention_mask=shown, output_attentions=True)
    assert all((a[..., 5] == 0).all() for a in padded.attentions)


def test_a_backbone_gives_its_own(tmp_path: Path) -> None:
    model = made(FAMILIES["llama"])
    shown = model(input_ids=IDS, output_attentions=True).attentions
    assert model.backbone.get_network().config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    eager = MaskedDiffusionLM.from_pretrained(tmp_path, attn_implementation="eager")
    found = eager(input_ids=IDS, output_attentions=True, output_hidden_states=True)
    assert (len(found.attentions), len(found.hidden_states)) == (2, 3)
    assert (found.attentions[0][..., 0, 5] > 0).all()  # the first sees the last
    assert same(found.logits, model(input_ids=IDS).logits)
    assert torch.allclose(shown[0], found.attentions[0], atol=1e-6)
    model.set_attn_implementation("eager")
    assert model.backbone.get_network().config._attn_implementation == "eager"
    assert torch.allclose(model(input_ids=IDS, output_attentions=True).attentions[0], shown[0], atol=1e-6)
    windowed = made(WINDOWED)(input_ids=IDS, output_attentions=True)
    assert (windowed.attentions[0][..., 0, 5] > 0).all()


def test_embeddings_in_the_place_of_ids() -> None:
    for model in (tiny_model(), made(FAMILIES["bert"])):
        x = model.get_input_embeddings()(IDS)
        assert same(model(inputs_embeds=x).logits, model(input_ids=IDS).logits)
        with pytest.raises(UserError, match="one of them"):
            model(input_ids=IDS, inputs_embeds=x)
        with pytest.raises(UserError, match="one of them"):
            model()
        with pytest.raises(UserError, match="inputs_embeds: expected"):
            model(inputs_embeds=x[..., :3])


def test_a_state_takes_its_own_arguments_alone() -> None:
    model = tiny_model()
    state, rows = model.noised(IDS), HOLES
    assert rows.sum() > 1

    def first(log_probs: Tensor, part: slice) -> Tensor:
        return log_probs[:, 0]

    wanted = model(state, rows=rows)[:, 0]
    assert torch.equal(model(state, rows, reduce=first), wanted)
    assert torch.equal(model(state, rows, first), wanted)
    assert torch.equal(model(state, rows, first, 2), wanted)
    assert torch.equal(model(input_ids=state, rows=rows, reduce=first), wanted)
    for other in ({"attention_mask": torch.ones_like(IDS)}, {"attention_mask": rows}, {"labels": IDS}, {"noise": 1}):
        with pytest.raises(UserError, match=f"{next(iter(other))}: a state of the diffusion takes only rows"):
            model(state, **other)
    with pytest.raises(UserError, match="rows: ids are read whole"):
        model(IDS, rows=rows)


def test_bad_input_gets_a_sentence() -> None:
    model = tiny_model()
    with pytest.raises(UserError, match="input_ids: expected ids"):
        model(input_ids=IDS[0])
    with pytest.raises(UserError, match="takes at most 6"):
        model(input_ids=torch.zeros(1, 7, dtype=torch.long))
    with pytest.raises(UserError, match="attention_mask: expected one number a token"):
        model(input_ids=IDS, attention_mask=torch.ones(2, 5))
    shown = [[1, 1, 1, 1, 0, 0]] * 2
    wanted = model(input_ids=IDS, attention_mask=torch.tensor(shown), noise=1).logits
    assert torch.equal(model(input_ids=IDS, attention_mask=shown, noise=1).logits, wanted)


def test_a_tokenizer_s_output_goes_in(tmp_path: Path) -> None:
    tokenizer = train_bpe(["the cat sat on the mat"] * 4, 300)
    torch.manual_seed(0)
    model = MaskedDiffusionLM(
        MaskedDiffusionConfig(300, mask_token_id=3, length=16, width=16, blocks=1, heads=2, condition=4)
    ).eval()
    with torch.no_grad():
        model.output.weight.normal_()
    inputs = tokenizer(["the <mask> sat", "the cat sat on the <mask>"], return_tensors="pt", padding=True)
    found = model(**inputs)
    assert found.logits.shape == (*inputs["input_ids"].shape, 300)
    assert not bool(inputs["attention_mask"].all())
    alone = model(**tokenizer("the <mask> sat", return_tensors="pt")).logits
    assert same(found.logits[:1, : alone.shape[1]], alone)
    best = pipeline("fill-mask", model=model, tokenizer=tokenizer)("the <mask> sat", top_k=300)
    assert "<mask>" not in [one["token_str"] for one in best if one["score"] > 0]
    assert sum(one["score"] for one in best) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mask", [[[0, 1], [1, 1]], [[1, 0], [1, 1]]])
def test_prompts_of_unequal_length_are_continued(mask: list[list[int]]) -> None:
    model, shown = tiny_model(), torch.tensor(mask)
    ids = torch.where(shown == 1, torch.tensor([[1, 1], [3, 0]]), 2)
    wanted = model.generate(torch.tensor([[1, 4, 4, 4, 4, 4], [3, 0, 4, 4, 4, 4]]), num=20).tokens
    found = model.generate(input_ids=ids, attention_mask=shown, token_type_ids=ids * 0, num=20).tokens
    assert torch.equal(found, wanted)
    assert len(set(found[:20, 1].tolist())) > 1
    assert torch.equal(model.generate(ids.tolist(), attention_mask=mask, num=20).tokens, wanted)
    for wrong in (shown[:, :1], [[1], [1, 1]], "11"):
        with pytest.raises(UserError, match="attention_mask: expected one number a token"):
            model.generate(ids, attention_mask=wrong)


def test_auto_classes_know_our_models_once_one_is_loaded(tmp_path: Path) -> None:
    """In a process of its own: `import imdm` alone changes nothing elsewhere."""
    tiny_model().save_pretrained(tmp_path)
    code = f"""import sys
import imdm
assert "torch" not in sys.modules
from transformers import AutoConfig, AutoModelForMaskedLM
assert not any("imdm" in type(finder).__module__ for finder in sys.meta_path)
try:
    AutoConfig.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    assert "imdm" in str(error)
else:
    raise AssertionError("known already")
imdm.load_model({str(tmp_path)!r})
assert type(AutoConfig.from_pretrained({str(tmp_path)!r})) is imdm.MaskedDiffusionConfig
assert type(AutoModelForMaskedLM.from_pretrained({str(tmp_path)!r})) is imdm.MaskedDiffusionLM
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_auto_classes_load_them(tmp_path: Path) -> None:
    register()
    register()  # as every function that loads does
    model = tiny_model(mask="finite-7")
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForMaskedLM):
        loaded, told = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert isinstance(loaded, MaskedDiffusionLM)
        assert same(loaded(input_ids=IDS, noise=2).logits, model(input_ids=IDS, noise=2).logits)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
    assert isinstance(AutoModelForMaskedLM.from_config(model.config), MaskedDiffusionLM)


def test_common_names_answer() -> None:
    config = MaskedDiffusionConfig(vocab_size=7, hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
    assert (config.width, config.blocks, config.heads) == (16, 3, 2)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (16, 3, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (7, 1024)
    config.hidden_size = 32
    assert config.width == 32
    assert not {"hidden_size", "num_hidden_layers", "auto_map"} & set(config.to_dict())
    theirs = made(FAMILIES["electra"]).config
    assert (theirs.width, theirs.hidden_size, theirs.num_hidden_layers, theirs.num_attention_heads) == (8, 16, 2, 2)
    register()
    assert AutoConfig.for_model("imdm", vocab_size=9).vocab_size == 9
    assert MaskedDiffusionLM.main_input_name == "input_ids"
    assert list(inspect.signature(MaskedDiffusionLM.forward).parameters)[1:4] == [
        "input_ids",
        "attention_mask",
        "labels",
    ]


@pytest.mark.parametrize("kind", ["plain", "tied", "llama", "bert"])
def test_the_vocabulary_can_grow(kind: str, tmp_path: Path) -> None:
    model = made(FAMILIES[kind]) if kind in FAMILIES else tiny_model(**KINDS[kind])
    size, before = model.vocab_size, model(input_ids=IDS).logits
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    torch.manual_seed(0)
    found = model.resize_token_embeddings(size + 3)
    assert found is model.get_input_embeddings()
    assert (model.vocab_size, model.config.vocab_size, found.weight.shape[0]) == (size + 3,) * 3
    after = model(input_ids=IDS).logits
    assert after.shape[-1] == size + 3
    assert same(after[..., :size], before)
    model.save_pretrained(tmp_path)
    assert same(load_model(tmp_path)(input_ids=IDS).logits, after)
    assert (model.generate(num=3, steps=2).tokens != model.config.mask_token_id).all()
    with pytest.raises(UserError, match=r"as token \d+ is special"):
        model.resize_token_embeddings(2)
    assert model.resize_token_embeddings(size).weight.shape[0] == size
    assert same(model(input_ids=IDS).logits, before)


def test_embeddings_can_be_replaced() -> None:
    model = tiny_model()
    before = model(input_ids=IDS).logits
    for get, put in (
        (model.get_input_embeddings, model.set_input_embeddings),
        (model.get_output_embeddings, model.set_output_embeddings),
    ):
        other = copy.deepcopy(get())
        nn.init.normal_(other.weight)
        put(other)
        assert get() is other
        assert not torch.allclose(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize("kind", ["plain", "folded", "capped", "mixture"])
def test_checkpointed_gradients_are_the_same(kind: str) -> None:
    """And what happens in a block is done again: a hook sees it twice."""
    model = tiny_model(**KINDS[kind] | {"dropout": 0.3}).train()
    state = model.noised(IDS, seed=1).dropping(torch.tensor([5, 6]))
    shown = torch.ones_like(IDS)
    shown[0, 4:] = 0

    def slopes() -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(state, HOLES).exp()[:, 0].sum() + model(input_ids=IDS, attention_mask=shown, labels=IDS % 4).loss
        return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))

    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1

    model.blocks[0].mlp.register_forward_hook(count)
    wanted, once = slopes(), seen
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    seen = 0
    found = slopes()
    assert seen == 2 * once
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    model.gradient_checkpointing_disable()
    seen = 0
    slopes()
    assert seen == once


def test_the_trainer_of_transformers_trains_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_model(trained=False)
    rows = [{"input_ids": IDS[i], "labels": torch.where(HOLES[i], 2, -100)} for i in (0, 1)] * 8
    settings = TrainingArguments(
        tmp_path,
        max_steps=12,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=4,
        save_strategy="no",
        disable_tqdm=True,
    )
    before = float(model(input_ids=IDS, labels=torch.where(HOLES, 2, -100)).loss)
    Trainer(model, settings, train_dataset=rows).train()
    assert float(model.eval()(input_ids=IDS, labels=torch.where(HOLES, 2, -100)).loss) < before / 2


def test_the_page_lists_the_common_tests_that_fail() -> None:
    page = Path(__file__).parents[2] / "docs" / "adopting.md"
    rows = table(page, corner="fails").rows
    classes = {"our transformer": "OursTest", "a Llama": "LlamaTest"}
    listed = {(classes[row[1]], name.strip(" `")) for row in rows for name in row[0].split(",")}
    assert listed == {(kind, name) for kind, names in KNOWN.items() for name in names}
