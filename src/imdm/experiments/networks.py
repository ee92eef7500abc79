"""The networks of a recipe: their configurations and sizes, without allocating weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from imdm.core.errors import UserError
from imdm.data.text import TextData
from imdm.experiments.schema import AdoptStage, Recipe, TrainStage
from imdm.models import Network
from imdm.models.backbones.base import DEFAULT
from imdm.models.loading import load_config
from imdm.models.shape import Shape
from imdm.models.sharding import blocks_of
from imdm.shipped import find

TOKENIZERS = {"gpt2": 50_258, "bert-base-uncased": 30_522, "smollm2": 49_153}
"""Ids of the recipes' tokenizers, the mask included: known without downloading them."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
}
"""Published models that recipes adopt, as `transformers` describes them: known without downloading them."""


class Size(NamedTuple):
    """A network. parameters: all of them; block: those of one block; ends: those in no block, as embedding and head."""

    config: Shape
    parameters: int
    block: float
    ends: int

    @property
    def inside(self) -> int:
        """The parameters of all blocks."""
        return self.parameters - self.ends


class Networks:
    """The networks of one recipe, by stage or folder. vocab_size, length: of the data; None: found out from
    it; adopt: returns the configuration of a published model, if it may be downloaded."""

    def __init__(
        self,
        recipe: Recipe,
        vocab_size: int | None = None,
        length: int | None = None,
        adopt: Callable[[AdoptStage], Shape] | None = None,
    ) -> None:
        self.recipe, self.data = recipe, recipe.data
        self._vocab_size, self._length, self._adopt = vocab_size, length, adopt
        self._adopted: dict[str, Shape] = {}

    def size(self, name: str) -> Size:
        """The size of the model that a stage makes, or a folder holds."""
        config = self.config(name)
        return measured(json.dumps(config.settings(), sort_keys=True))

    def config(self, name: str) -> Shape:
        stage = self.recipe.stages.get(name)
        if isinstance(stage, AdoptStage):
            if name not in self._adopted:
                self._adopted[name] = self._published(name, stage) if self._adopt is None else self._adopt(stage)
            return self._adopted[name]
        if not isinstance(stage, TrainStage):
            return load_config(name)
        if stage.start is None:
            vocab_size, length = self.vocab_size, self.length
            config: Shape = self.recipe.model.build(vocab_size, vocab_size - 1, length, causal=stage.objective.causal)
        else:
            config = self.config(stage.start)
        mask = config.mask if stage.mask is None else stage.mask
        mixture = config.mixture or stage.mixture
        return config.changed(mask=mask, mixture=mixture)

    def _published(self, name: str, stage: AdoptStage) -> Shape:
        """The configuration of a published model that is here, or whose size is known."""
        from imdm.adopting import families  # takes seconds
        from imdm.adopting.adopt import adopted_config

        overrides = {"length": self.length, **stage.how()}
        if Path(find(stage.source)).exists():
            return adopted_config(stage.source, **overrides)
        where = f"model {stage.source!r}"
        raw = PUBLISHED.get(stage.source)
        family = None if raw is None else families.family_of(raw, where)
        if family is None:
            raise UserError(
                f"stages.{name} adopts the published {where}, whose size is known only once it is downloaded; give the "
                f"folder that it is in (stages.{name}.source=PATH)"
            )
        how = families.How(**{way: overrides.pop(way) for way in ("adapt", "causal")})
        return families.config_of(family, None, overrides, how, where)

    @cached_property
    def length(self) -> int:
        """Tokens a row."""
        if self._length is not None:
            return self._length
        return self.data.length if isinstance(self.data, TextData) else self.data.source(self.recipe.seed).length

    @cached_property
    def vocab_size(self) -> int:
        if self._vocab_size is not None:
            return self._vocab_size
        data = self.data
        if isinstance(data, TextData) and data.tokenizer is not None and not Path(find(data.tokenizer)).is_dir():
            if data.tokenizer not in TOKENIZERS:
                raise UserError(
                    f"tokenizer {data.tokenizer!r} is not here, so its size is unknown; give its number of ids and "
                    "one for the mask (vocab_size), or the folder it is in (data.tokenizer=PATH)"
                )
            return TOKENIZERS[data.tokenizer]
        return data.vocabulary()[0]


@lru_cache(maxsize=256)
def measured(settings: str) -> Size:
    """The size of a network with these settings, built on the device `meta` and counted. Another backbone counts as
    blocks of ours with as many weights."""
    config = Shape(**json.loads(settings))
    with torch.device("meta"):
        model = Network(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in blocks_of(model)]
    if config.backbone["kind"] != DEFAULT:
        config = copy.deepcopy(config)
        ends = config.vocab_size * config.width * (1 if config.tie_word_embeddings else 2)
        config.blocks = max(1, round((sum(blocks) or parameters - ends) / (12 * config.width**2)))
    return Size(config, parameters, sum(blocks) / max(1, len(blocks)), parameters - sum(blocks))
