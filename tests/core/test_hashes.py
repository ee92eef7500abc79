"""Hashes of settings: a new setting with a default changes none, and what was made before is still known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import create_model
from pydantic.fields import FieldInfo

import imdm.cli  # noqa: F401  (so that every config of the package is there)
from imdm.core.config import ALWAYS_HASHED, Config, digest
from imdm.core.errors import UserError
from imdm.core.files import read_json, write_json
from imdm.core.settings import Settings
from imdm.data.prepared import Prepared
from imdm.data.source import LanguageSource
from imdm.data.synthetic import aligned
from imdm.experiments import Quiet, Recipe, Run, checks, load_recipe, parse_recipe, plan, run_jobs
from imdm.experiments.status import status
from imdm.models.identity import fingerprint
from imdm.objectives import parse_objective
from imdm.training import TrainConfig, Trainer
from imdm.training.config import NEUTRAL_SETTINGS
from tests.conftest import tiny_model
from tests.evaluation.test_ratios import row

LOOK = {"kind": "evaluate", "models": {"teacher": "t"}, "metrics": ["entropy"]}
EXAMPLES: dict[str, dict[str, Any]] = {
    "Single": {},
    "Finite": {},
    "Infinite": {"dim": 8},
    "LogLinear": {},
    "Cosine": {"floor": 0.01},
    "LanguageData": {"settings": {"length": 3}},
    "TokenData": {"path": "a.safetensors", "vocab_size": 9},
    "PreparedData": {"path": "rows"},
    "TextData": {"path": "sample", "train_bpe": 4096},
    "Nelbo": {},
    "ReDi": {},
    "SDTT": {"iterations": 200},
    "Di4C": {},
    "Autoregressive": {},
    "Match": {"phases": [{"gradient": "fkl", "steps": 900}, {}], "steps": {1: 1, 4: 2}},
    "Starts": {"prior": 1.0},
    "Phase": {"gradient": "ipf"},
    "AuxiliarySettings": {"lr": 1e-3},
    "CoupleConfig": {"pairs": 9},
    "PrepareConfig": {},
    "Counts": {},
    "Conditional": {},
    "Watch": {},
    "Quick": {"stages": ["a"]},
    "PageSettings": {"sections": ["quality"]},
    "Manifest": {
        **{"teacher": "t", "mask": "single", "schedule": {"kind": "log-linear", "floor": 0.001}, "generator": "g"},
        **{"noise": "keep", "steps": 4, "start": "prior", "pairs": 5, "shard": 4, "seed": 7, "data": "", "length": 3},
        **{"vocab_size": 3, "mask_token_id": 2},
    },
    "Prepared": {
        **{"source": "s", "identity": ["i", 1], "split": "train", "length": 8, "packing": "wrapped", "limit": None},
        **{"tokenizer": "t", "vocab_size": 9, "mask_token_id": 3, "begin": 0, "end": 1, "pad": 1},
        **{"shards": [[4, "abc"]]},
    },
    "Part": {
        "whole": {
            **{"source": "s", "identity": ["i", 1], "split": "train", "length": 8, "packing": "whole", "limit": None},
            **{"tokenizer": "t", "vocab_size": 9, "mask_token_id": 3, "begin": 0, "end": 1, "pad": 1},
        },
        **{"number": 2, "of": 3},
    },
    "TrainConfig": {"steps": 3},
    "Lora": {"rank": 4},
    "BackboneSettings": {"kind": "dit"},
    "HFSettings": {"kind": "hf", "config": {"model_type": "gpt2", "n_layer": 2}},
    "ModelSettings": {"preset": "mini"},
    "TrainStage": {"kind": "train", "mask": "infinite-uniform-8-1.0", "objective": "redi", "training": {"steps": 3}},
    "AdoptStage": {"kind": "adopt", "source": "smollm2", "adapt": True},
    "CoupleStage": {"kind": "couple", "teacher": "teacher"},
    "EvaluateStage": LOOK,
    "Recipe": {
        **{"name": "n", "summary": "s", "experiment": "e", "data": {"kind": "language"}, "model": {}},
        "stages": {
            "teacher": {"kind": "train", "training": {"steps": 3}},
            "look": LOOK | {"metrics": ["validity"]},
        },
    },
    "Row": row("single", 0, 1.0).model_dump(),
}
"""Settings for each config of the package."""
KNOWN = {
    "Single": "90d1c94c56bfd2b0",
    "Finite": "00f12535a09ee13a",
    "Infinite": "8bbb6599a64a5cc5",
    "LogLinear": "de0434ea9c549696",
    "Cosine": "57b09dd455fb3c54",
    "LanguageData": "ab0c84da41de0775",
    "TokenData": "dcfd10d28b5feba7",
    "PreparedData": "542670846ba2e78e",
    "TextData": "9a43e1cecd4eef11",
    "Nelbo": "98748d999c8c955b",
    "ReDi": "4d5f140522e46d12",
    "SDTT": "623c54923d512113",
    "Di4C": "7cbd044391dcf84f",
    "Autoregressive": "fc08745a6bdc17d9",
    "CoupleConfig": "5fbe1816bc0c7550",
    "Conditional": "a00406f0908c2590",
    "Watch": "51928300e8bbd5b8",
    "Quick": "226aa37d7ae6ecd6",
    "Manifest": "87ebc233f9d62e9d",
    "TrainConfig": "882dcea6101e97a4",
    "ModelSettings": "8eec7228f6614068",
    "TrainStage": "25ffa833eb126499",
    "CoupleStage": "31be55d97fc0a04d",
    "EvaluateStage": "839ddc0e59f12b0c",
    "Recipe": "00f2961d415bbe6e",
}
"""Their hashes as they were when every setting entered them, default or not; the same in every process."""


def walk(base: type[Any] = Config) -> Iterator[type[Any]]:
    """Those of runs: what the service is asked has no hash."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("imdm.") and not cls.__module__.startswith("imdm.serving."):
            yield cls
        yield from walk(cls)


CLASSES = {cls.__name__: cls for cls in (*walk(), *walk(Settings)) if not getattr(cls, "__abstractmethods__", None)}


def hash_of(settings: Config | Settings) -> str:
    return settings.digest() if isinstance(settings, Config) else digest(settings.hashed())


def test_every_config_has_an_example() -> None:
    assert set(CLASSES) == set(EXAMPLES)
    names = {cls.__name__: cls for cls in walk()}
    assert all(set(fields.split()) <= set(names[name].model_fields) for name, fields in ALWAYS_HASHED.items())


@pytest.mark.parametrize("name", KNOWN)
def test_hashes_are_what_they_were(name: str) -> None:
    assert hash_of(CLASSES[name].parse(EXAMPLES[name])) == KNOWN[name]


def test_the_grid_and_prepared_text_are_still_known() -> None:
    whole = load_recipe("grid", ["data=sentences"])
    later = ("frontier", "match", "measure-variety")  # stages that have come since
    before = [name for name in whole.stages if not any(word in name for word in later)]
    part = whole.model_copy(update={"stages": {name: whole.stages[name] for name in before}})
    assert part.digest() == "762e0af389eb1bc8"
    assert Prepared.parse(EXAMPLES["Prepared"]).fingerprint() == "3370a0b8dd3e3ec5"


def test_the_languages_are_still_known() -> None:
    """`match` joined them later: what was made by the other stages is not made again."""
    whole = load_recipe("languages")
    before = {name: stage for name, stage in whole.stages.items() if "match" not in name}
    assert list(whole.stages)[: len(before)] == list(before)
    assert whole.model_copy(update={"stages": before}).digest() == "c6fdee99888e4f96"


def grown(cls: Any, kind: Any) -> Any:
    """A class of settings with one more."""
    if issubclass(cls, Config):
        return create_model(cls.__name__, __base__=cls, added=(kind, 0))
    return type(cls.__name__, (cls,), {"__annotations__": {"added": kind}, "added": 0})


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_new_setting_changes_no_hash_until_it_is_used(name: str) -> None:
    more = grown(CLASSES[name], dict[str, int] | int)
    before = hash_of(CLASSES[name].parse(EXAMPLES[name]))
    assert hash_of(more(**EXAMPLES[name])) == before
    used = [hash_of(more(**EXAMPLES[name], added=added)) for added in (1, 2, {"a": 1}, {"a": 2})]
    assert len({before, *used}) == 5


@pytest.mark.parametrize("name", [name for name in EXAMPLES if issubclass(CLASSES[name], Config)])
def test_the_order_of_settings_does_not_matter(name: str) -> None:
    fields = {field: (info.annotation, info) for field, info in reversed(CLASSES[name].model_fields.items())}
    values = {k: v for k, v in vars(CLASSES[name].parse(EXAMPLES[name])).items() if k in EXAMPLES[name]}
    bases = [cls.__name__ for cls in CLASSES[name].__mro__ if cls.__name__ in ALWAYS_HASHED]
    turned: Any = create_model(name, __base__=Config, **fields)
    for base in reversed(bases):
        turned = create_model(base, __base__=turned)
    assert digest(turned.model_construct(**values).hashed()) == digest(CLASSES[name].parse(EXAMPLES[name]).hashed())
    if name == "Prepared":
        turned.settings = Prepared.settings
        whole = turned.model_construct(**vars(Prepared.parse(EXAMPLES[name])))
        assert Prepared.fingerprint(whole) == Prepared.parse(EXAMPLES[name]).fingerprint()


@pytest.mark.parametrize("field", ["training", "objective", "mask", "watch"])
def test_a_new_setting_inside_another_is_left_out_too(field: str) -> None:
    stage = CLASSES["TrainStage"].parse(EXAMPLES["TrainStage"])
    inner = getattr(stage, field)
    more = grown(type(inner), int)
    for added, same in ((0, True), (1, False)):
        other = stage.model_copy(update={field: more(**vars(inner), added=added)})
        assert (other.digest() == stage.digest()) == same


class Heard(Quiet):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


TRAINING = {"steps": 2, "batch": 4, "warmup": 0}
RECIPE = {
    "name": "small",
    "summary": "s",
    "experiment": "e",
    "threads": 1,
    "data": {"kind": "language", "name": "aligned"},
    "model": {"width": 16, "blocks": 1, "heads": 2, "condition": 8},
    "stages": {
        "teacher": {"kind": "train", "training": TRAINING},
        "pairs": {"kind": "couple", "teacher": "teacher", "pairs": 4, "steps": 2},
        "student": {
            **{"kind": "train", "start": "teacher", "data": "pairs", "objective": "redi", "training": TRAINING},
            "mask": "infinite-uniform-4-1.0",
        },
        "look": {"kind": "evaluate", "models": {"student": "redi"}, "metrics": ["validity", "kl"], "samples": 20},
    },
}


@pytest.fixture
def grow() -> Iterator[Any]:
    """Gives every config of the package one more setting, as a new version would have."""
    classes = list(dict.fromkeys([*walk()]))

    def rebuild() -> None:
        for _ in range(3):  # those within others first, in the end
            for cls in classes:
                cls.model_rebuild(force=True)
                for field in cls.model_fields.values():
                    if isinstance(field.default, Config):  # one of before
                        field.default = type(field.default)()

    def add() -> None:
        for cls in classes:
            cls.__pydantic_fields__["added"] = FieldInfo(annotation=int, default=0)
        rebuild()

    yield add
    for cls in classes:
        cls.__pydantic_fields__.pop("added", None)
    rebuild()


def test_a_finished_run_stays_finished_when_every_config_has_a_new_setting(tmp_path: Path, grow: Any) -> None:
    Run(parse_recipe(RECIPE), tmp_path).all()
    results, model = (tmp_path / "results.jsonl").read_text(), tiny_model(vocab_size=3, length=2)

    def trainer() -> Trainer:
        return Trainer(
            model, parse_objective("sdtt"), LanguageSource(aligned()), TrainConfig(**TRAINING), tmp_path / "other"
        )

    before = trainer().run, fingerprint(model), parse_recipe(RECIPE).digest()
    grow()
    assert (trainer().run, fingerprint(model), parse_recipe(RECIPE).digest()) == before
    heard = Heard()
    Run(parse_recipe(RECIPE), tmp_path, heard).all()
    assert heard.lines == [f"{name}: already there" for name in RECIPE["stages"]]
    assert (tmp_path / "results.jsonl").read_text() == results
    kept = Recipe.parse(read_json(tmp_path / "recipe.json", "recipe"))
    assert "added" in json.dumps(kept.resolved()["stages"]["teacher"])  # it is there, in every section
    assert {stage.state for stage in status(tmp_path)["seed 0"]} == {"done"}

    used = parse_recipe(RECIPE, ["stages.student.training.added=1"])
    with pytest.raises(UserError, match=r"'student' .* was made with other training.added"):
        Run(used, tmp_path).all()
    teacher = parse_recipe(RECIPE, ["stages.teacher.objective={kind: nelbo, added: 1}"])
    with pytest.raises(UserError, match=r"'teacher' .* was made with other objective.added"):
        Run(teacher, tmp_path).all()


LIKE = {
    **{"shard": "full", "micro_batch": 2, "checkpoint_blocks": "true", "graphs": "true", "tensorboard": "true"},
    **{"checkpoint_every": 5, "keep_checkpoints": 5, "log_every": 5},
}
"""Values other than the defaults, of settings that change no number."""


def test_a_stage_that_resumes_says_so(tmp_path: Path) -> None:
    heard = Heard()
    Run(parse_recipe(RECIPE), tmp_path, heard).run(["teacher"])
    assert not heard.lines
    (tmp_path / "seed-0/teacher/done.json").unlink()
    Run(parse_recipe(RECIPE, ["stages.teacher.training.steps=4"]), tmp_path, heard).run(["teacher"])
    assert heard.lines == ["teacher: resumes after step 2 of 4"]


def refuse_all(*_: Any) -> None:
    raise UserError("not here")


def test_a_damaged_record_is_of_no_concern_to_other_stages(tmp_path: Path) -> None:
    """Until a stage needs it."""
    Run(parse_recipe(RECIPE), tmp_path).all()
    for text in ("{", '{"settings": {"stage": "x"}}'):
        (tmp_path / "seed-0/student/done.json").write_text(text)
        Run(parse_recipe(RECIPE), tmp_path).run(["teacher"])
        with pytest.raises(UserError, match="'student'"):
            Run(parse_recipe(RECIPE), tmp_path).all()


def test_a_finished_stage_does_not_depend_on_how_it_was_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it, nor what was measured of it, is made again or refused, in either direction; and it stays finished
    where it could not be made."""
    assert LIKE.keys() == NEUTRAL_SETTINGS
    changes = [f"stages.teacher.training.{name}={value}" for name, value in LIKE.items() if name != "tensorboard"]
    plain, other = parse_recipe(RECIPE), parse_recipe(RECIPE, changes)
    for number, (first, second) in enumerate([(plain, other), (other, plain)]):
        out = tmp_path / str(number)
        Run(first, out).all()
        results = (out / "results.jsonl").read_text()
        heard = Heard()
        Run(second, out, heard).all()
        assert heard.lines == [f"{name}: already there" for name in RECIPE["stages"]]
        assert (out / "results.jsonl").read_text() == results
        assert Recipe.parse(read_json(out / "recipe.json", "recipe")) == first
        run_jobs(second, plan(second, out, 1, False), out, 1, heard)
        assert Recipe.parse(read_json(out / "recipe.json", "recipe")) == first
        assert (out / "results.jsonl").read_text() == results
        write_json(out / "recipe.json", second.resolved())
        assert {stage.state for stage in status(out)["seed 0"]} == {"done"}
    monkeypatch.setattr(checks, "processes", lambda: SimpleNamespace(num_processes=3, device=torch.device("cpu")))
    monkeypatch.setattr(checks, "check_precision", refuse_all)
    Run(other, tmp_path / "0").all()
    (tmp_path / "0/seed-0/look/done.json").unlink()
    with pytest.raises(UserError, match="not here"):
        Run(other, tmp_path / "0").all()
    with pytest.raises(UserError, match=r"training.batch = 4: 3 processes cannot share it equally"):
        Run(other, tmp_path / "new").all()
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"'teacher' .* was made with other training.weights \('float32', now 'bf16'\)"):
        Run(parse_recipe(RECIPE, ["stages.teacher.training.weights=bf16"]), tmp_path / "0").all()
