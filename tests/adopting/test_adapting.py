"""A causal language model that stays one, or becomes a diffusion model: attention that opens, training from left to
right and writing so, and the recipe `adapt-smollm2` in small."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import imdm
from imdm.adopting.adopt import adopted_config, write_published
from imdm.core.errors import UserError
from imdm.data.source import LanguageSource, TokenSource
from imdm.data.synthetic import aligned
from imdm.data.tokenizers import load_tokenizer, special_ids, train_bpe
from imdm.diffusion.ending import Ending
from imdm.diffusion.randomness import Purpose, fold
from imdm.evaluation import Subject, measure, read
from imdm.experiments import Recipe, Run, load_recipe, parse_recipe
from imdm.experiments.status import status
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import Steps, _Step
from imdm.models.loading import load_model
from imdm.models.pretrained import built, plain_config
from imdm.objectives import Autoregressive, Nelbo, next_log_probs
from imdm.sampling import Sampling, sample
from imdm.training import TrainConfig, Trainer
from tests.cli.test_cli import imdm as command
from tests.cli.test_cli import refused
from tests.conftest import tiny_model
from tests.diffusion.test_whole import SETTINGS, stories
from tests.models.test_hf import (
    CAUSAL,
    FAMILIES,
    GPT2,
    GROUPED,
    HOLES,
    MASK,
    SIZES,
    TOKENS,
    expected,
    logits_of,
    made,
    theirs,
)
from tests.reference.statistics import assert_law, counts_of

LANGUAGE = aligned(length=3, symbols=3)
SMALL = {"model_type": "llama"} | SIZES | {"vocab_size": LANGUAGE.vocab_size}


def causal_logits(lm: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return lm(input_ids=tokens).logits


# Left to right


@pytest.mark.parametrize("kind", list(CAUSAL))
def test_a_causal_backbone_says_what_its_own_class_says(kind: str) -> None:
    model = made(FAMILIES[kind], causal=True)
    tokens = TOKENS.clamp(max=MASK - 1)
    wanted = expected(causal_logits(theirs(model, FAMILIES[kind]), tokens))
    found = next_log_probs(model, tokens)
    torch.testing.assert_close(found, wanted[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dit", "llama", "gpt2", "gemma3_text"])
def test_it_writes_by_its_own_law(kind: str) -> None:
    """Every text of three symbols after a given one, against the product of its conditionals."""
    if kind == "dit":
        model = tiny_model(vocab_size=4, length=3, causal=True)
    else:
        model = made(FAMILIES[kind] | {"vocab_size": 4, "pad_token_id": 0}, vocab_size=4, length=3, causal=True)
    first = torch.full((4000, 1), 2)
    canvas = torch.cat((first, torch.full((4000, 2), 3)), 1)
    keys = model.sample_keys(4000, seed=1)
    told: list[int] = []
    found = sample(model, canvas, keys=keys, how=Sampling(), batch_size=1500, on_progress=told.append)
    every = torch.cartesian_prod(torch.tensor([2]), torch.arange(3), torch.arange(3))
    law = next_log_probs(model, every).sum(1).exp().detach().double()
    assert_law(counts_of(found.tokens[:, 1:], 3), law / law.sum())
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert found.evaluations.tolist() == [2] * 4000
    assert found.revealed_at.unique(dim=0).tolist() == [[-1, 0, 1]]
    assert told == [1500, 3000, 4500, 6000, 7000, 8000]
    with pytest.raises(UserError, match="noise_keys: this model is autoregressive"):
        sample(model, canvas, keys=keys, noise_keys=keys, how=Sampling())
    again = sample(model, canvas[7:9], keys=keys[7:9], how=Sampling())
    assert torch.equal(again.tokens, found.tokens[7:9])  # each follows from its own key


def test_what_it_has_read_is_remembered() -> None:
    model = made(FAMILIES["llama"], causal=True)
    x = model.get_input_embeddings()(TOKENS)
    first, past = model.backbone.onward(x[:, :2])
    second, past = model.backbone.onward(x[:, 2:3], past)
    third, _ = model.backbone.onward(x[:, 3:], past)
    torch.testing.assert_close(torch.cat((first, second, third), 1), model.backbone(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", list(CAUSAL))
def test_a_cache_of_fixed_size_gives_the_same(kind: str) -> None:
    """Also when it is emptied and used again. Sliding windows and experts have none."""
    model = made(FAMILIES[kind], causal=True)
    cache = model.backbone.fixed_cache(8)
    if "sliding_window" in FAMILIES[kind] or "num_experts" in FAMILIES[kind]:
        assert cache is None
        return
    for eager in (False, True):
        model.lm.set_attn_implementation("eager" if eager else "sdpa")
        reads_as_in_one_pass(model, model.backbone.fixed_cache(8))


def reads_as_in_one_pass(model: MaskedDiffusionLM, cache: Any) -> None:
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS.flip(1)):
            x = model.get_input_embeddings()(tokens)
            parts = [model.backbone.onward(some, cache)[0] for some in x.split([2, 1, 1, 2], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), model.backbone(x), atol=1e-5, rtol=1e-5)
            cache.reset()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "factor": 2.0}
NO_CACHE = {
    "bloom": {"vocab_size": 12, "hidden_size": 16, "n_layer": 2, "n_head": 2},  # counts positions by itself
    "llama": GROUPED | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "phi3": SIZES
    | {"num_key_value_heads": 2, "original_max_position_embeddings": 8}
    | {"rope_parameters": LONG | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
}


@pytest.mark.parametrize("kind", list(NO_CACHE))
def test_models_without_a_fixed_cache(kind: str) -> None:
    model = made({"model_type": kind} | NO_CACHE[kind], causal=True)
    assert model.backbone.fixed_cache(8) is None


def test_a_mask_for_each_sequence() -> None:
    """XGLM takes no mask that is the same for all."""
    sizes = {"d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2, "max_position_embeddings": 16}
    model = made({"model_type": "xglm", "vocab_size": 12} | sizes, causal=True)
    cache = model.backbone.fixed_cache(8)
    if cache is None:
        pytest.skip("this version of transformers has none for XGLM")
    reads_as_in_one_pass(model, cache)


def prompts(many: int = 40) -> Tensor:
    """Of unequal length."""
    return torch.tensor([[0, 3, MASK, MASK, MASK, MASK], [0, 3, 5, 7, MASK, MASK]]).repeat(many // 2, 1)


def stepping(kind: str = "llama", **changes: Any) -> tuple[MaskedDiffusionLM, Tensor]:
    """A model that could capture its steps, and what it writes without. Here is no GPU, so that nothing is captured."""
    if kind == "dit":
        model = tiny_model(vocab_size=12, length=6, causal=True, **changes)
    else:
        model = made(FAMILIES[kind], causal=True, **changes)
    plain = model.generate(prompts(), seed=1).tokens
    model.steps = Steps()
    return model, plain


def used(model: MaskedDiffusionLM) -> list[Any]:
    """What it has captured."""
    return [step for step in model.steps.kept.values() if step is not None]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("kind", ["dit", "llama", "gpt2", "mistral"])
def test_steps_that_can_be_captured_write_the_same(kind: str, ends: bool) -> None:
    """Again, for another number of texts, and both in turn. A model without a fixed cache goes on with its own."""
    model, plain = stepping(kind, **({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1} if ends else {}))
    has, found = kind in ("llama", "gpt2"), []
    for many in (40, 40, 30, 40, 30):
        assert torch.equal(model.generate(prompts()[:many], seed=1).tokens, plain[:many])
        found.append(used(model))
    assert [len(each) for each in found] == ([1, 1, 2, 2, 2] if has else [0] * 5)
    assert {id(step) for each in found for step in each} == {id(step) for step in found[-1]}  # none was made again
    assert torch.equal(model.generate(prompts()[:20], seed=1).tokens, plain[:20])
    assert len(used(model)) == 2 * has  # the oldest is gone
    assert copy.deepcopy(model).steps.kept == {}
    model.to(torch.float64)
    assert used(model) == []


def test_while_one_thread_writes_another_does_without() -> None:
    model, plain = stepping()
    with torch.no_grad(), model.steps.reading(model, 40, 6):
        before = used(model)
        assert len(before) == 1
        with ThreadPoolExecutor(2) as threads:
            found = [threads.submit(model.generate, prompts()[:many], seed=1).result() for many in (40, 30)]
        assert all(torch.equal(one.tokens, plain[: len(one.tokens)]) for one in found)
        assert used(model) == before


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_steps_are_made_in_any_mode_and_used_in_any(order: tuple[bool, ...]) -> None:
    model, plain = stepping()
    for inference in order:
        with torch.inference_mode(inference):
            assert torch.equal(model.generate(prompts(), seed=1).tokens, plain)
    assert len(used(model)) == 1


def test_a_model_whose_steps_cannot_be_captured_writes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, tokens: Tensor) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    model, plain = stepping()
    monkeypatch.setattr(_Step, "read", fails)
    assert torch.equal(model.generate(prompts(), seed=1).tokens, plain)
    assert list(model.steps.kept.values()) == [None]


def test_no_steps_with_gradients_or_in_training() -> None:
    model, _ = stepping()
    with model.steps.reading(model, 4, 6) as step:
        assert step is None  # gradients are on here
    with torch.no_grad(), model.train().steps.reading(model, 4, 6) as step:
        assert step is None
    with torch.no_grad(), model.eval().steps.reading(model, 4, 6) as step:
        assert step is not None


def test_other_embeddings_are_read() -> None:
    model, plain = stepping()
    assert torch.equal(model.generate(prompts(), seed=1).tokens, plain)
    other = copy.deepcopy(model.get_input_embeddings())
    other.weight.data = other.weight.data.flip(0)
    model.set_input_embeddings(other)
    found = model.generate(prompts(), seed=1).tokens
    model.steps = None
    assert torch.equal(found, model.generate(prompts(), seed=1).tokens)
    assert not torch.equal(found, plain)


def test_writing_is_not_compiled() -> None:
    """Also after a pass that was: each layer would be compiled for its own part of the cache."""
    model, plain = stepping()
    model.compile_trunk(training=False)
    layers = list(model.lm.model.layers)
    for layer in layers:
        layer._compiled_call_impl = lambda *given, **named: pytest.fail("compiled")
    assert torch.equal(model.generate(prompts(), seed=1).tokens, plain)


def test_large_caches_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = stepping()
    monkeypatch.setattr(Steps, "BYTES", 2 * 2 * 40 * 6 * 8 * 4)  # layers, keys and values, texts, places, width, bytes
    assert torch.equal(model.generate(prompts(), seed=1).tokens, plain)
    assert [step.bytes for step in used(model)] == [Steps.BYTES]
    monkeypatch.setattr(Steps, "BYTES", Steps.BYTES - 1)
    assert torch.equal(model.generate(prompts(), seed=1).tokens, plain)
    assert used(model) == []


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral", "olmoe"])
def test_rounding_is_no_reason_to_refuse_an_autoregressive_model(kind: str) -> None:
    """Wide, and with hidden states of tens. Experts get other numbers of rows with another last token."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 16}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    fields = {"model_type": kind, "initializer_range": 0.2, "pad_token_id": 0} | sizes
    lm = built(fields if kind == "llama" else fields | experts)
    with torch.no_grad():
        lm.base_model.norm.weight.fill_(30.0)
    backbone = {"kind": "hf", "config": plain_config(lm.config.to_dict()), "shift": False}
    MaskedDiffusionLM.around(
        MaskedDiffusionConfig(vocab_size=12, length=6, width=512, dropout=0.0, causal=True, backbone=backbone), lm
    )


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("llama", {"is_causal": False}, "this 'llama' model attends to later positions"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "this 'gemma3_text' model attends to later positions"),
        ("openai-gpt", GPT2, "'openai-gpt' models have no cache of keys and values"),
    ],
)
def test_what_is_not_causal_is_refused_as_autoregressive(kind: str, changes: dict[str, Any], why: str) -> None:
    fields = FAMILIES.get(kind, {"model_type": kind}) | changes
    with pytest.raises(UserError, match=why):
        made(fields, causal=True)


def test_whole_texts_end_and_are_measured_from_left_to_right() -> None:
    ending = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = made(FAMILIES["llama"], causal=True, **ending)
    written = model.generate(num=50, seed=3)
    assert bool((written.tokens[:, 0] == 0).all())
    assert bool(model.config.ending.fits(written.tokens).all())
    rows = written.tokens
    size = model.config.ending.lengths(rows)
    assert torch.equal(written.evaluations, size - 1)
    assert torch.equal(written.revealed_at.amax(1), written.evaluations - 1)
    told: list[int] = []
    model.generate(num=50, seed=3, on_progress=told.append)
    assert told[-1] == 50 * 5
    found = measure(["nelbo"], Subject(model, samples=50, data=TokenSource(rows, 12, MASK)))["nelbo"].value
    terms = next_log_probs(model, rows).detach()
    kept = torch.arange(1, 6)[None] < size[:, None]
    assert found == pytest.approx(float(-(terms * kept).sum() / (size - 1).sum()), rel=1e-5)


def test_it_learns_from_left_to_right_and_goes_on_exactly(tmp_path: Path) -> None:
    def trainer(folder: str, steps: int) -> Trainer:
        model = made(SMALL, vocab_size=LANGUAGE.vocab_size, length=3, causal=True, dropout=0.1)
        config = TrainConfig(steps=steps, batch=32, lr=1e-2, warmup=5, ema=0.9, checkpoint_every=10)
        return Trainer(model, Autoregressive(), LanguageSource(LANGUAGE), config, tmp_path / folder)

    whole = load_model(trainer("whole", 80).train())
    trainer("parts", 30).train()
    for name, weight in load_model(trainer("parts", 80).train()).state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name])
    x = LANGUAGE.at(torch.rand(200, dtype=torch.float64))
    assert -float(next_log_probs(whole, x).detach().sum(1).mean()) < 0.2  # what follows the first token is certain
    assert whole.config.causal


# Attention that opens


def half_open(model: MaskedDiffusionLM, share: float, seed: int = 0) -> Tensor:
    model.train()
    model.backbone.open_attention(share, fold(seed, Purpose.OPENING, 0))
    return model(model.noised(TOKENS), HOLES).detach()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mistral"])
def test_it_opens_from_causal_to_both_sides(kind: str) -> None:
    """Gemma 2 adds its mask to the scores; Mistral's windows are opened too, as those of a model that is open."""
    model = made(FAMILIES[kind], shift=True)
    lm = theirs(model, FAMILIES[kind] | ({"sliding_window": 64} if "sliding_window" in FAMILIES[kind] else {}))
    shifted = torch.tensor([0, 0, 1, 2, 3, 4])
    causal = expected(causal_logits(lm))[:, shifted][HOLES]
    opened = expected(logits_of(lm, causal=True))[:, shifted][HOLES]
    torch.testing.assert_close(half_open(model, 0.0), causal, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(half_open(model, 1.0), opened, atol=1e-5, rtol=1e-5)
    between = half_open(model, 0.5)
    assert float((between - causal)[:, :MASK].abs().max()) > 1e-3
    assert float((between - opened)[:, :MASK].abs().max()) > 1e-3
    assert torch.equal(between, half_open(model, 0.5))
    assert not torch.equal(between, half_open(model, 0.5, seed=1))
    model.eval()  # measured as it will be
    torch.testing.assert_close(model(model.noised(TOKENS), HOLES), opened, atol=1e-5, rtol=1e-5)


def test_it_sees_that_share_of_what_follows() -> None:
    from imdm.models.backbones.hf import Opening

    visible = Opening(0.3, fold(3, Purpose.OPENING, 7)).visible(200, torch.device("cpu"))
    later = torch.ones(200, 200, dtype=torch.bool).triu(1)
    assert bool(visible[~later].all())
    assert_law([int(visible[later].sum()), int((~visible[later]).sum())], [0.3, 0.7])


def test_a_run_whose_attention_opens_goes_on_exactly(tmp_path: Path) -> None:
    def trainer(folder: str, steps: int, opening: int = 6) -> Trainer:
        model = made(SMALL, vocab_size=LANGUAGE.vocab_size, length=3, shift=True)
        config = TrainConfig(steps=steps, batch=8, lr=1e-3, warmup=0, ema=0.9, opening=opening)
        return Trainer(model, Nelbo(), LanguageSource(LANGUAGE), config, tmp_path / folder)

    seen = []
    run = trainer("whole", 8)
    for _ in range(8):
        run.train_step()
        seen.append(run.bare.backbone.opening.share if run.bare.backbone.opening else 1.0)
    assert seen == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1])
    whole = load_model(trainer("again", 8).train())
    part = trainer("parts", 8)
    part.model.train()
    for _ in range(4):
        part.train_step()
    part.save()
    for name, weight in load_model(trainer("parts", 8).train()).state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name])
    assert trainer("none", 8, 0).run != run.run


def test_what_cannot_open_is_refused(tmp_path: Path) -> None:
    def start(model: MaskedDiffusionLM, **settings: Any) -> None:
        config = TrainConfig.parse({"steps": 6, "batch": 4, "opening": 5} | settings)
        Trainer(model, Nelbo(), LanguageSource(LANGUAGE), config, tmp_path)

    size = {"vocab_size": LANGUAGE.vocab_size, "length": 3}
    for model in (tiny_model(**size), made(FAMILIES["bert"] | {"vocab_size": 4}, **size)):
        with pytest.raises(UserError, match="only a causal model of backbone 'hf' that becomes a diffusion model"):
            start(model)
    with pytest.raises(UserError, match="a captured step has fixed attention"):
        start(made(SMALL, **size), graphs=True)
    with pytest.raises(UserError, match="attention would never be open in training.steps = 5"):
        start(made(SMALL, **size), steps=5)
    bloom = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 4, "pad_token_id": 0}
    with pytest.raises(UserError, match="'bloom' models cannot open gradually"):
        start(made(bloom, **size))


def test_a_model_that_needs_a_mask_a_sequence_opens(tmp_path: Path) -> None:
    xglm = {
        "model_type": "xglm",
        "d_model": 16,
        "num_layers": 1,
        "attention_heads": 2,
        "ffn_dim": 24,
        "pad_token_id": 0,
    }
    model = made(xglm | {"vocab_size": LANGUAGE.vocab_size}, vocab_size=LANGUAGE.vocab_size, length=3)
    config = TrainConfig(steps=3, batch=4, opening=2)
    Trainer(model, Nelbo(), LanguageSource(LANGUAGE), config, tmp_path).train()
    assert model.backbone.opening is None


@pytest.mark.slow
def test_compiled_layers_agree() -> None:
    model = made(FAMILIES["llama"], shift=True)
    wanted = model(model.noised(TOKENS), HOLES)
    wanted[:, :MASK].sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    for training in (False, True):
        model.compile_trunk(training=training)
        model.train(training)
        found = model(model.noised(TOKENS), HOLES)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert model.is_compiled
    found[:, :MASK].sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients.get(name), atol=1e-4, rtol=1e-4)


# The recipe


def tiny_llama(folder: Path) -> Path:
    """A random Llama with a tokenizer like SmolLM2's: no mask, and the end token pads."""
    tokenizer = train_bpe(stories(60), 300)
    tokenizer.pad_token, tokenizer.mask_token = tokenizer.eos_token, None
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), max_position_embeddings=64, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_recipe(source: Path, text: Path) -> Recipe:
    """The recipe with a random Llama in SmolLM2's place: every stage of it."""
    text.mkdir()
    for name in ("train", "valid"):
        (text / f"{name}.txt").write_text("\n".join(stories(300 if name == "train" else 40)))
    settings = load_recipe("adapt-smollm2").resolved()
    size = special_ids(load_tokenizer(source)).vocab_size
    fields = {"model_type": "llama", "vocab_size": size, "hidden_size": 32, "intermediate_size": 48}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    overrides = [f"data={text}", f"data.tokenizer={source}", "data.length=24", "model.width=32", "threads=1"]
    overrides += [f"model.backbone.config={fields}"]
    training = {"batch": 16, "lr": 3e-3, "warmup": 5, "ema": 0.9, "log_every": 10, "steps": 20}
    for name, stage in settings["stages"].items():
        if stage["kind"] == "adopt":
            overrides.append(f"stages.{name}.source={source}")
        elif stage["kind"] == "train":
            opening = min(stage["training"]["opening"], 10)
            overrides += [f"stages.{name}.training={training | {'opening': opening}}", f"stages.{name}.watch.every=10"]
        else:
            overrides += [
                f"stages.{name}.{setting}" for setting in ("samples=16", "precision=float32", "steps=[4]", "first=4")
            ]
            overrides += [f"stages.{name}.judge={source}", f"stages.{name}.judge_precision=float32"]
    sdtt = {"kind": "sdtt", "rounds": 2, "iterations": 10, "first_dt": 0.1}
    overrides += [
        f"stages.imdm-sdtt.objective={sdtt}",
        f"stages.imdm-match.objective={ {'kind': 'match', **SETTINGS} }",
    ]
    return load_recipe("adapt-smollm2", overrides)


def test_the_recipe_in_small(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "llama")
    recipe = tiny_recipe(source, tmp_path / "text")
    run = Run(recipe, tmp_path / "run")
    run.all()
    rows = read(run.results_file)
    by = {(row.method, row.metric): row for row in rows}
    assert {method for method, metric in by if metric == "gen_ppl"} == {
        *("sdtt", "match", "adapted", "fresh", "left-to-right")
    }
    assert by["left-to-right", "gen_ppl"].judge == str(source)
    folder = tmp_path / "run" / "seed-0"
    before, after = (load_model(folder / name / "model") for name in ("smollm2", "imdm-match"))
    special = special_ids(load_tokenizer(source))
    for model in (before, after, load_model(folder / "fresh" / "model")):
        assert (model.config.vocab_size, model.config.mask_token_id) == (special.vocab_size, special.mask)
        assert model.config.ending == Ending(special.begin, special.end, special.end)
        assert model.config.backbone["shift"]
    assert not before.config.causal
    assert load_model(folder / "left-to-right" / "model").config.causal
    mean = before.get_input_embeddings().weight[: special.mask].mean(0)
    torch.testing.assert_close(before.get_input_embeddings().weight[special.mask], mean)
    assert imdm.load(folder / "imdm-match" / "model").write("Tom", steps=4)[0].text.startswith("Tom")
    assert {row.kind for row in status(tmp_path / "run")["seed 0"]} >= {"adopt", "nelbo", "match", "evaluate"}
    again = Run(recipe, tmp_path / "run")
    again.all()  # all is there
    assert read(again.results_file) == rows


def test_an_adopted_stage_is_what_adopt_makes(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "llama")
    for how in ({"adapt": True}, {"causal": True, "whole": True}):
        model = imdm.adopt(source, length=16, **how)
        found = adopted_config(source, length=16, **how)
        assert found.settings() == model.config.settings()


def test_a_stage_is_made_from_what_its_source_holds(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "llama")
    recipe = tiny_recipe(source, tmp_path / "text")
    Run(recipe, tmp_path / "run").run(["smollm2"])
    Run(recipe, tmp_path / "run").run(["smollm2"])  # is there
    assert {row.name: row.state for row in status(tmp_path / "run")["seed 0"]}["smollm2"] == "done"
    lm = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        lm.get_input_embeddings().weight.add_(1.0)
    lm.save_pretrained(source)
    with pytest.raises(UserError, match="stage 'smollm2' .* was made with other inputs: 'files of .*' was made again"):
        Run(recipe, tmp_path / "run").run(["smollm2"])


def test_a_stage_refuses_what_is_known_by_its_weights(tmp_path: Path) -> None:
    """MDLM's layout, and DiffuGPT's, whose configuration is GPT-2's."""
    (tmp_path / "mdlm").mkdir()
    write_published(tiny_model(vocab_size=16, length=8), tmp_path / "mdlm")
    (tmp_path / "diffugpt").mkdir()
    names = ("embed_tokens.weight", "denoise_model.wpe.weight", "denoise_model.h.0.ln_1.weight")
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "diffugpt" / "model.safetensors")
    (tmp_path / "diffugpt" / "config.json").write_text(json.dumps({"model_type": "gpt2", "mask_token_id": 1}))
    for name in ("mdlm", "diffugpt"):
        with pytest.raises(UserError, match="run 'imdm adopt' first and start from its folder"):
            adopted_config(tmp_path / name, length=8, shift=True)


def test_what_a_recipe_cannot_start_from_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMDM_HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match="tokenizer 'smollm2' is not here; get it with 'imdm judge fetch smollm2'"):
        Run(load_recipe("adapt-smollm2"), tmp_path / "run").all()
    with pytest.raises(UserError, match="model 'smollm2' is not here; get it with 'imdm judge fetch smollm2'"):
        imdm.adopt("smollm2", adapt=True)
    source = tiny_llama(tmp_path / "llama")
    with pytest.raises(UserError, match="adapt makes its attention bidirectional, causal keeps it causal"):
        imdm.adopt(source, adapt=True, causal=True)
    with pytest.raises(UserError, match="predicts the next token; leave out shift"):
        imdm.adopt(source, causal=True, shift=False)
    for file in source.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="no tokenizer beside it with the begin and end of whole texts"):
        imdm.adopt(source, adapt=True, whole=True)
    recipe = load_recipe("synthetic").resolved()
    recipe["stages"] = {"mine": {"kind": "adopt", "source": str(tmp_path / "nowhere"), "adapt": True}}
    recipe |= {"quick": None, "variants": {}}
    with pytest.raises(UserError, match="no such file or folder, nor a hub id"):
        Run(parse_recipe(recipe), tmp_path / "other").all()


def test_the_command_for_both_ways(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "llama")
    command(
        "adopt", str(source), "--adapt", "--whole", "--length", "24", "--weights", "bf16", "--out", tmp_path / "one"
    )
    model = MaskedDiffusionLM.from_pretrained(tmp_path / "one", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.ending is not None
    command("adopt", str(source), "--causal", "--length", "24", "--out", tmp_path / "two")
    assert load_model(tmp_path / "two").config.causal
    told = refused(command("generate", tmp_path / "one", "--precision", "bf16"))
    assert "--precision = bf16 needs a GPU" in told
    half = load_model(tmp_path / "one", precision="bf16")
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert half.backbone.get_network().model.rotary_emb.inv_freq.dtype == torch.float32
    assert half.generate(num=2, steps=2).tokens.shape == (2, 24)
    assert imdm.load(tmp_path / "one", precision="bf16").model.dtype == torch.bfloat16
    with pytest.raises(UserError, match="float32 or bf16"):
        load_model(tmp_path / "one", precision="int4")
    told = refused(command("adopt", str(source), "--adapt", "--causal", "--out", tmp_path / "three"))
    assert "give one of them" in told


def test_a_causal_model_is_refused_before_any_text_is_prepared(tmp_path: Path) -> None:
    model, text = tmp_path / "model", tmp_path / "text.txt"
    command("adopt", str(tiny_llama(tmp_path / "llama")), "--causal", "--length", "24", "--out", model)
    text.write_text("\n".join(stories(60)))
    told = refused(command("distill", "sdtt", model, "--data", text, "--iterations", "5", "--out", tmp_path / "run"))
    assert "this one is autoregressive" in told
    assert "imdm adopt --adapt" in told
    assert not (tmp_path / "run" / "data").exists()
