"""A backbone written in one file of its own, beside the package: it samples by the enumerated law, trains under every
kind of objective, and is copied, saved, folded, compiled and exported like ours."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from imdm.core.errors import UserError
from imdm.data.coupling import CoupleConfig, Coupling, couple
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.diffusion.masks import Finite
from imdm.diffusion.randomness import Purpose, fold
from imdm.diffusion.state import Noised, Rows
from imdm.experiments.schema import ModelSettings
from imdm.exporting import export
from imdm.models.backbones import backbones
from imdm.models.configuration import MaskedDiffusionConfig
from imdm.models.denoiser import MaskedDiffusionLM
from imdm.models.fast import faster
from imdm.models.identity import fingerprint
from imdm.models.loading import load_model
from imdm.models.variants import fold_conditioning, with_mask
from imdm.objectives import Step, parse_objective
from imdm.sampling import Sampling, sample
from imdm.training import TrainConfig, Trainer
from tests.conftest import tiny_config, tiny_model
from tests.reference.enumeration import all_masked, chain_law, sequence_law
from tests.reference.statistics import assert_law, counts_of

GRU = '''
from torch import nn

from imdm.core.settings import setting
from imdm.models.backbones import Backbone, BackboneSettings, backbones


class Settings(BackboneSettings):
    layers: int = setting(default=2, least=1)


@backbones.register("gru")
class GRU(Backbone):
    """Two layers, read in both directions."""

    Settings = Settings

    def __init__(self, config, settings):
        super().__init__(config, settings)
        self.gates = nn.GRU(config.width, config.width // 2, settings.layers, batch_first=True, bidirectional=True)
        self.last = nn.LayerNorm(config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, keys=None):
        return self.last(x + self.drop(self.gates(x)[0]))
'''

LANGUAGE = aligned(length=2, symbols=2)


@pytest.fixture(scope="module", autouse=True)
def gru(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The module above, imported from a file, and forgotten after these tests."""
    file = tmp_path_factory.mktemp("mine") / "my_backbone.py"
    file.write_text(GRU)
    spec = importlib.util.spec_from_file_location("my_backbone", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["my_backbone"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield
    del sys.modules["my_backbone"], backbones._entries["gru"]


def model_of(**changes: Any) -> MaskedDiffusionLM:
    return tiny_model(**({"vocab_size": 3, "length": 2, "backbone": "gru", "mask": "finite-2"} | changes))


class InFull:
    """A model as a table of log-probabilities, for enumeration."""

    def __init__(self, model: MaskedDiffusionLM) -> None:
        self.model, self.process = model, model.process

    @torch.no_grad()
    def trunk(self, state: Noised) -> Tensor:
        rows = self.model.head(self.model.trunk(state).flatten(0, 1))
        return rows.unflatten(0, state.tokens.shape).double().log_softmax(-1)


@pytest.mark.parametrize("noise", ["posterior", "keep"])
@pytest.mark.parametrize("steps", [1, 3])
def test_it_samples_by_the_enumerated_law(noise: str, steps: int) -> None:
    """The whole N-step chain of Eq. 13 enumerated (false alarm 1e-5 each)."""
    model = model_of()
    assert isinstance(model.mask, Finite)
    law = sequence_law(chain_law(InFull(model), all_masked(2, 2), steps, noise), 2, 2)
    keys = fold(31, Purpose.SAMPLE, torch.arange(40_000))
    made = sample(model, torch.full((40_000, 2), 2), keys=keys, how=Sampling(steps, noise))  # type: ignore[arg-type]
    assert_law(counts_of(made.tokens, 2), law)


@pytest.mark.parametrize("objective", ["nelbo", "redi", {"kind": "sdtt", "rounds": 2, "iterations": 15}])
def test_it_trains(objective: Any, tmp_path: Path) -> None:
    """Under each kind of objective the loss of the same batch falls, and what was trained comes back from disk."""
    source: Any = LanguageSource(LANGUAGE)
    if objective == "redi":
        couple(model_of(), source, CoupleConfig(pairs=64, steps=16), tmp_path / "pairs")
        source = Coupling(tmp_path / "pairs")
    student, start = model_of(dropout=0.1), model_of(seed=1)
    config = TrainConfig(steps=30, batch=32, lr=1e-2, warmup=0, ema=0.5, checkpoint_every=20)
    trainer = Trainer(student, parse_objective(objective), source, config, tmp_path / "run", start=start)
    batch = source.rows(torch.arange(64))

    @torch.no_grad()
    def loss(model: MaskedDiffusionLM) -> float:
        kind = parse_objective(objective)
        teacher = kind.companion(model.eval(), model_of(seed=1))
        return float(kind.loss(model, model.process, batch, Step(0, 0, torch.arange(64), 64), teacher))

    before = loss(model_of())
    trained = load_model(trainer.train())
    assert loss(trained) < before
    assert type(trained.backbone).__name__ == "GRU"


def test_it_is_copied_and_moved_like_ours(tmp_path: Path) -> None:
    model = model_of(mask="infinite-uniform-4-1.0")
    tokens = torch.full((5, 2), 2)
    wanted = model(model.noised(tokens))
    model.save_pretrained(tmp_path / "model")
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        load_model(tmp_path / "model"),
        MaskedDiffusionLM.from_pretrained(tmp_path / "model"),
        with_mask(model),
        fold_conditioning(model),
        faster(model, compile=True),
        model.double().float(),
    ]
    for other in copies:
        assert torch.allclose(other(other.noised(tokens)), wanted, atol=1e-6)
        assert fingerprint(other) == fingerprint(model)
        assert other.backbone._modules is other._modules
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert all(name.split(".")[0] in NAMES for name in model.state_dict())
    assert "my_backbone" not in repr(model)
    assert "backbone gru of width 16" in repr(model)


NAMES = {"embedding", "mask_embedding", "gates", "last", "output"}


def test_its_mode_and_dropout_are_the_models() -> None:
    model, tokens = model_of(dropout=0.5), torch.full((5, 2), 2)
    assert torch.equal(model(model.noised(tokens)), model(model.noised(tokens)))
    model.train()
    assert model.backbone.training
    assert not torch.equal(model(model.noised(tokens)), model(model.noised(tokens)))
    model.set_dropout(0.0)
    assert torch.equal(model(model.noised(tokens)), model(model.noised(tokens)))


def test_a_layer_put_in_its_place_is_heard() -> None:
    """As adapters and quantisation do: also a direct child, which wrapper and backbone both know."""
    for model, name in ((model_of(), "last"), (tiny_model(), "norm")):
        tokens = torch.full((3, 2), model.config.mask_token_id)
        before = model(model.noised(tokens))
        setattr(model, name, torch.nn.Identity())
        assert not torch.allclose(model(model.noised(tokens)), before)


def test_its_settings_are_in_the_law_and_ours_are_nowhere(tmp_path: Path) -> None:
    ours, theirs = tiny_config(), tiny_config(backbone={"kind": "gru", "layers": 1})
    assert ours.backbone == {"kind": "dit"}
    for given in (None, "dit", {"kind": "dit"}):
        assert tiny_config(backbone=given).to_json_string() == ours.to_json_string()
        assert tiny_config(backbone=given).law == ours.law
        assert ModelSettings.parse({"backbone": given}).digest() == ModelSettings().digest()
    assert "backbone" not in ours.to_json_string()
    assert theirs.law[-1] == {"kind": "gru", "layers": 1}
    assert theirs.backbone == {"kind": "gru", "layers": 1}
    assert tiny_config(backbone="gru").law[-1] == {"kind": "gru"}
    theirs.save_pretrained(tmp_path)
    assert MaskedDiffusionConfig.from_pretrained(tmp_path).backbone == theirs.backbone
    settings = ModelSettings.parse({"width": 32, "backbone": {"kind": "gru", "layers": 1}})
    assert settings.digest() != ModelSettings(width=32).digest()
    assert ModelSettings.parse(settings.model_dump(mode="json")) == settings
    model = MaskedDiffusionLM(settings.build(3, 2, 2))
    assert model.backbone.gates.num_layers == 1
    count = sum(p.numel() for p in model.parameters())
    assert abs(model.config.parameters - count) < 0.05 * count


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone": "mamba"}, "unknown backbone 'mamba'; known: dit, gru, hf"),
        ({"backbone": {"kind": "gru", "depth": 2}}, r"unknown key 'backbone.depth' \(known: kind, layers\)"),
        ({"backbone": {"kind": "gru", "layers": 0}}, "backbone.layers = 0: must be at least 1"),
        ({"backbone": 3}, "backbone: expected a name or settings with 'kind'"),
        ({"backbone": "gru", "softcap": 5.0}, "model.softcap: backbone 'gru' has no such setting"),
        ({"backbone": "gru", "causal": True}, "model.causal: backbone 'gru' has no such setting"),
    ],
)
def test_what_it_cannot_be_gets_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(**settings)


def test_a_layer_cannot_have_the_name_of_the_wrappers() -> None:
    class Clash(backbones["gru"]):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.output = torch.nn.Linear(2, 2)

    model = tiny_model()
    with pytest.raises(ValueError, match="a layer cannot be called 'output' here"):
        model._take_in(Clash(tiny_config(backbone="gru"), Clash.Settings(kind="gru")))


def test_it_starts_as_its_constructor_left_it() -> None:
    class Ones(backbones["gru"]):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.mix = torch.nn.Linear(4, 4)
            torch.nn.init.ones_(self.mix.weight)

    backbones.register("ones")(Ones)
    try:
        model = model_of(backbone="ones", trained=False)
        assert (model.mix.weight == 1).all()
        assert (model.output.weight == 0).all()
    finally:
        del backbones._entries["ones"]


def test_parameters_and_buffers_of_its_own_are_taken_in_too() -> None:
    class Shifted(backbones["gru"]):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.shift = torch.nn.Parameter(torch.ones(16))
            self.register_buffer("scale", torch.full((16,), 2.0), persistent=False)

        def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
            return super().forward(x) * self.scale + self.shift

    backbones.register("shifted")(Shifted)
    try:
        model = model_of(backbone="shifted")
        assert "shift" in model.state_dict()
        assert "scale" not in model.state_dict()
        other = copy.deepcopy(model).double()
        assert other.backbone.shift is other.shift
        assert other.backbone.scale.dtype == torch.float64
        model.train().generate(num=1)
        assert model.backbone.shift is model.shift
    finally:
        del backbones._entries["shifted"]


def test_it_is_exported(tmp_path: Path) -> None:
    model = model_of()
    model.save_pretrained(tmp_path / "model")
    for weights in ("bf16", "int8"):
        export(tmp_path / "model", tmp_path / weights, weights=weights)  # type: ignore[arg-type]
        assert (
            "- backbone gru of width 16; sequences of up to 2 tokens" in (tmp_path / weights / "README.md").read_text()
        )
        assert load_model(tmp_path / weights).generate(num=3).tokens.shape == (3, 2)


def test_some_rows_are_those_of_the_whole() -> None:
    model = model_of()
    state = model.noised(torch.full((3, 2), 2))
    rows = Rows.where(torch.tensor([[True, False], [False, True], [True, True]]))
    assert torch.equal(model.trunk_at(state, rows), rows.of(model.trunk(state)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("backbone", ["dit", "gru"])
def test_several_threads_write_what_one_writes(backbone: str, training: bool) -> None:
    """Of one model at once, other prompts and seeds each; while it trains, its mode is never seen to change."""
    model = tiny_model(backbone=backbone, mask="infinite-uniform-8-1.0", dropout=0.5).train(training)
    asked = [{"num": 9, "steps": 1 + seed % 5, "seed": seed, "trace": True} for seed in range(16)]
    wanted = [model.generate(**one) for one in asked]
    found: dict[int, Any] = {}
    modes: set[bool] = set()

    def write(number: int) -> None:
        for place in range(number, len(asked), 4):
            found[place] = model.generate(**asked[place], on_progress=lambda _: modes.add(model.training))

    threads = [Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modes == {training}
    for place, one in enumerate(wanted):
        assert torch.equal(found[place].tokens, one.tokens)
        assert torch.equal(found[place].trace.log_probs, one.trace.log_probs)
