"""A recipe: one YAML file that is one reproducible experiment: data, model, and stages that build on each other."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from imdm.core.config import Config, Name, Seed, digest, one_of
from imdm.core.errors import MOST_STEPS, TEMPERATURES, is_temperature, unknown
from imdm.data.coupling import CoupleConfig
from imdm.data.text import DataConfig
from imdm.diffusion.ending import Ending
from imdm.diffusion.masks import Mask, parse_mask
from imdm.diffusion.process import NoisePolicy
from imdm.diffusion.schedule import Schedule, parse_schedule
from imdm.evaluation import Conditional, metrics
from imdm.evaluation.judge import labelled
from imdm.models import PRESETS, BackboneSettings
from imdm.models.backbones.base import is_default, parse_backbone
from imdm.models.shape import SETTINGS, Shape
from imdm.objectives import Objective, parse_objective
from imdm.sampling.options import RevealOrder
from imdm.training import TrainConfig

MaskField = Annotated[SerializeAsAny[Mask], BeforeValidator(parse_mask)]
ObjectiveField = Annotated[SerializeAsAny[Objective], BeforeValidator(parse_objective)]
ScheduleField = Annotated[SerializeAsAny[Schedule], BeforeValidator(parse_schedule)]


def _backbone(value: Any) -> BackboneSettings | None:
    """The settings of a backbone; None for the default one, however it was given."""
    settings = parse_backbone(value)
    return None if is_default(settings) else settings


BackboneField = Annotated[SerializeAsAny[BackboneSettings] | None, BeforeValidator(_backbone)]


def _temperature(value: float) -> float:
    if not is_temperature(value):
        raise ValueError(TEMPERATURES)
    return value


Temperature = Annotated[float, AfterValidator(_temperature)]


MetricName = Annotated[str, one_of("metric", metrics)]
PresetName = Annotated[str, one_of("model preset", PRESETS)]
StepCount = Annotated[int, Field(ge=1, le=MOST_STEPS)]


class ModelSettings(Config):
    """The denoiser: a `preset` size, or sizes one by one. Vocabulary and length follow the data unless given. backbone:
    another than `dit`, by name or settings."""

    preset: PresetName | None = None
    width: int | None = None
    blocks: int | None = None
    heads: int | None = None
    condition: int | None = None
    length: int | None = None
    dropout: float = 0.1
    softcap: float | None = None
    tie_word_embeddings: bool = False
    mask: MaskField = Field(default_factory=lambda: parse_mask("single"))
    mixture: bool = False
    schedule: ScheduleField = Field(default_factory=lambda: parse_schedule("log-linear"))
    backbone: BackboneField = None

    def build(
        self,
        vocab_size: int,
        mask_token_id: int,
        length: int,
        *,
        causal: bool = False,
        ending: Ending | None = None,
    ) -> Shape:
        """causal: an autoregressive model of the same size; ending: how rows end, where they are whole texts."""
        sizes = {k: v for k, v in self.model_dump().items() if v is not None and k in SETTINGS}
        sizes = {"length": length, "vocab_size": vocab_size, "mask_token_id": mask_token_id} | sizes
        if ending is not None:
            sizes |= {"bos_token_id": ending.begin, "eos_token_id": ending.end, "pad_token_id": ending.pad}
        if causal:
            sizes |= {"causal": True, "mask": "single", "mixture": False, "softcap": None}
        return Shape.preset(self.preset, **sizes) if self.preset is not None else Shape(**sizes)


class Watch(Config):
    """Metrics measured during training, with few samples: `watch: {every: 100, metrics: [validity], samples: 2000}`."""

    every: int = Field(100, ge=1)
    metrics: tuple[MetricName, ...] = ()
    steps: StepCount = 1
    samples: int = Field(2000, ge=1)


class AdoptStage(Config):
    """Convert a published model: the name of a downloaded one, a folder or a hub id, with the length of the data and,
    where its rows are whole texts, their ending. adapt: a causal model made bidirectional, to be trained into a
    diffusion model; causal: one as it is, to be trained autoregressively; shift, mask_token_id: for one that was
    trained as a diffusion model (`imdm.adopt`)."""

    kind: Literal["adopt"]
    source: str = Field(min_length=1)
    adapt: bool = False
    causal: bool = False
    shift: bool | None = None
    mask_token_id: int | None = Field(None, ge=0)

    def inputs(self) -> list[str]:
        return []

    def how(self) -> dict[str, Any]:
        """The settings as `imdm.adopt` has them."""
        return {name: value for name, value in self.model_dump(exclude={"kind", "source"}).items() if value is not None}


class TrainStage(Config):
    """Train a model. start: the stage (or model folder) it starts from, None for random weights; teacher: the stage (or
    model folder) of its teacher, if it is not `start`; data: the coupling stage (or folder) it reads, None for the
    recipe's data; mask: another mask than the start's; mixture: give the student a latent λ (Di4C on a single mask);
    seed: another than the recipe's, for students that share a teacher. A new model under the objective `autoregressive`
    is causal, and can be an evaluation's judge."""

    kind: Literal["train"]
    start: str | None = None
    data: str | None = None
    mask: MaskField | None = None
    mixture: bool = False
    seed: Seed | None = None
    objective: ObjectiveField = Field(default_factory=lambda: parse_objective("nelbo"))
    training: TrainConfig
    watch: Watch = Watch()
    teacher: str | None = None

    def inputs(self) -> list[str]:
        """What the stage reads, each once: the teacher may be the model that the student starts from."""
        return list(dict.fromkeys(name for name in (self.start, self.data, self.teacher) if name is not None))


class CoupleStage(CoupleConfig):
    """Make couplings with the model of a stage (or folder)."""

    kind: Literal["couple"]
    teacher: str

    def inputs(self) -> list[str]:
        return [self.teacher]


class EvaluateStage(Config):
    """Measure models: stage (or folder) → its method's name in the result rows.

    judge: the model that scores samples (a downloaded judge's name, a folder, a .gguf file or a hub id), in
    `judge_precision`; if it is not available, one that ships, unless another stage uses that already. judge_stage: a
    stage whose autoregressive model judges instead. embedder: a sentence embedder (folder or hub id) for MAUVE instead
    of the judge. temperatures, top_p: the paper has 1.0 only. precision: of the models; bf16 only on a GPU. compile:
    compile their layers, on a GPU: some twenty seconds once, then faster; not those of autoregressive models. seed:
    other samples than the recipe's, to choose settings on; reports show these results separately. first: use only the
    first so many tokens, of texts that have as many, so that entropies are of texts of equal length. noise, order: of
    all its models, whatever policies a model has of its own. keep: write the first so many texts that metrics read, of
    each model at each step count and temperature, into the stage's folder (`texts.jsonl`).
    """

    kind: Literal["evaluate"]
    models: dict[str, Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    metrics: tuple[MetricName, ...] = Field(min_length=1)
    steps: tuple[StepCount, ...] = Field((1,), min_length=1)
    samples: int = Field(1024, ge=1)
    draws: int = Field(10_000, ge=1, le=1 << 32)
    noise: NoisePolicy = "posterior"
    precision: Literal["float32", "bf16"] = "float32"
    seed: Seed | None = None
    judge: str = "gpt2-large"
    judge_precision: Literal["float32", "bf16"] = "float32"
    judge_stage: str | None = None
    embedder: str | None = None
    temperatures: tuple[Temperature, ...] = Field((1.0,), min_length=1)
    conditional: Conditional = Conditional()
    top_p: float = Field(1.0, gt=0, le=1)
    first: int | None = Field(None, ge=2, le=1 << 20)
    order: RevealOrder = "random"
    compile: bool = False
    keep: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _one_judge(self) -> EvaluateStage:
        if self.judge_stage is not None and self.judge != type(self).model_fields["judge"].default:
            raise ValueError(f"judge = {self.judge!r} and judge_stage = {self.judge_stage!r}: give one of them")
        return self

    def inputs(self) -> list[str]:
        return [*self.models, *([self.judge_stage] if self.judge_stage is not None else [])]

    @property
    def judge_label(self) -> str:
        """The judge's name in result rows."""
        return labelled(self.judge_stage or self.judge, self.judge_precision)


Stage = Annotated[AdoptStage | TrainStage | CoupleStage | EvaluateStage, Field(discriminator="kind")]


def _models_of(stage: AdoptStage | TrainStage | CoupleStage | EvaluateStage) -> list[tuple[str, str]]:
    """The settings of a stage that name models, with the stages or folders they name."""
    if isinstance(stage, AdoptStage):
        return []
    if isinstance(stage, EvaluateStage):
        return [("models", name) for name in stage.models]
    start = stage.start if isinstance(stage, TrainStage) else None
    return [(setting, name) for setting, name in (("start", start), ("teacher", stage.teacher)) if name is not None]


class Quick(Config):
    """A smaller part of a recipe, for a first try: some of its variants, and the named stages with all they need."""

    variants: tuple[str, ...] = ()
    stages: tuple[str, ...]


class PageSettings(Config):
    """What the page of a run shows: its `sections` by name, in order; those for models of text unless given. title,
    lead: in the place of the recipe's name and summary."""

    title: str | None = None
    lead: str | None = None
    sections: tuple[str, ...] | None = None


class Recipe(Config):
    """An experiment of the paper. threads: CPU threads to use, for work too small for many; variants: settings that are
    changed to make the same experiment on other data, each in a folder of its own; report: its page."""

    name: Name
    summary: str
    experiment: str
    seed: Seed = 0
    threads: int | None = Field(None, ge=1, le=4096)
    data: DataConfig
    model: ModelSettings
    stages: dict[Name, Stage] = Field(min_length=1)
    variants: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    quick: Quick | None = None
    report: PageSettings = PageSettings()

    @model_validator(mode="after")
    def _stages_in_order(self) -> Recipe:
        """A stage may only build on stages above it (or on folders)."""
        above: set[str] = set()
        for name, stage in self.stages.items():
            for needed in stage.inputs():
                if needed in self.stages and needed not in above:
                    raise ValueError(f"stage {name!r} builds on {needed!r}, which must come before it")
            above.add(name)
        return self

    @model_validator(mode="after")
    def _stages_of_a_kind(self) -> Recipe:
        """Models come from stages that adopt or train, pairs from couple stages."""
        for name, stage in self.stages.items():
            for setting, needed in _models_of(stage):
                if not isinstance(self.stages.get(needed), AdoptStage | TrainStage | None):
                    raise ValueError(f"stage {name!r}: {setting} names {needed!r}, which trains no model")
            pairs = stage.data if isinstance(stage, TrainStage) else None
            if not isinstance(self.stages.get(pairs or ""), CoupleStage | None):
                raise ValueError(f"stage {name!r}: data names {pairs!r}, which makes no pairs")
        return self

    @model_validator(mode="after")
    def _variants_have_folders(self) -> Recipe:
        """A variant's folder is beside those of the run itself."""
        for name in self.variants:
            if name in ("data", "tensorboard") or re.fullmatch(r"seed--?\d+|.*\.(json|jsonl|html|md)", name):
                raise ValueError(f"variant {name!r}: a run uses that name for something else; choose another")
        return self

    @model_validator(mode="after")
    def _judges_read(self) -> Recipe:
        """A stage that judges must train an autoregressive model."""
        for name, stage in self.evaluations().items():
            if stage.judge_stage not in self.stages:
                continue
            judge = self.stages[stage.judge_stage]
            if not (isinstance(judge, TrainStage) and judge.objective.causal):
                raise ValueError(f"stage {name!r}: its judge {stage.judge_stage!r} must be trained by 'autoregressive'")
        return self

    @model_validator(mode="after")
    def _quick_is_a_part(self) -> Recipe:
        for kind, named, names in (
            ("variant", self.quick.variants if self.quick else (), self.variants),
            ("stage", self.quick.stages if self.quick else (), self.stages),
        ):
            for name in named:
                if name not in names:
                    raise unknown(kind, name, names)
        return self

    def evaluations(self) -> dict[str, EvaluateStage]:
        return {name: stage for name, stage in self.stages.items() if isinstance(stage, EvaluateStage)}

    def reporting(self) -> list[EvaluateStage]:
        """Evaluations that are reported: those without a seed of their own, which serves to choose settings."""
        return [stage for stage in self.evaluations().values() if stage.seed is None]

    def pairs_of(self, name: str) -> str | None:
        """The couplings that a stage's model is compared with: those that it read, or else the first that it made."""
        stage = self.stages.get(name)
        if isinstance(stage, TrainStage) and stage.data is not None:
            return stage.data
        couples = [place for place, s in self.stages.items() if isinstance(s, CoupleStage) and s.teacher == name]
        return next(iter(couples), None)

    def seed_of(self, name: str) -> int:
        """The seed of a stage: its own, or the recipe's."""
        seed = getattr(self.stages.get(name), "seed", None)
        return self.seed if seed is None else seed

    def mask_of(self, name: str) -> Mask | None:
        """The mask of the model that a stage makes; None where it is a folder's."""
        stage = self.stages.get(name)
        if isinstance(stage, AdoptStage):
            return parse_mask("single")
        if not isinstance(stage, TrainStage):
            return None
        if stage.mask is not None:
            return stage.mask
        return self.model.mask if stage.start is None else self.mask_of(stage.start)

    def digest(self) -> str:
        """The hash in result rows: of everything but the seed and the choice of what to run and to show."""
        return digest({k: v for k, v in self.hashed().items() if k not in ("seed", "variants", "quick", "report")})

    def resolved(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
