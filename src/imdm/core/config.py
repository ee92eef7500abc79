"""The base of every typed config: frozen, unknown keys refused, errors in one sentence."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from imdm.core.errors import UserError, shown, unknown
from imdm.core.settings import Settings

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

C = TypeVar("C", bound="Config")


def check_name(name: str) -> str:
    """A name that is safe as a folder's name."""
    if not re.fullmatch(r"[\w-][\w.-]{0,99}", name):
        raise ValueError("a name has letters, digits, '-', '_' and '.', does not begin with '.', and is not too long")
    return name


Name = Annotated[str, AfterValidator(check_name)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
"""Any 64-bit integer."""


def one_of(kind: str, known: Iterable[str]) -> BeforeValidator:
    """Refuses names that are not known when it is used: `Annotated[str, one_of("metric", metrics)]`."""

    def check(name: Any) -> Any:
        if name not in list(known):
            raise unknown(kind, name, known)
        return name

    return BeforeValidator(check)


ALWAYS_HASHED: dict[str, str] = {
    "LanguageData": "name settings",
    "TokenData": "mask_token_id",
    "TextData": "valid field tokenizer train_bpe length packing with_documents limit skip_broken",
    "Prepared": "train_bpe",
    "CoupleConfig": "pairs steps noise start shard batch_size precision compile",
    "ReDi": "noise policy",
    "Rounds": "rounds iterations promote keep_optimizer",
    "SDTT": "first_dt teacher_steps divergence",
    "Di4C": "latents threshold distil_share teacher_steps data_weight control_variate",
    "TrainConfig": "batch micro_batch lr warmup betas eps weight_decay clip ema dropout precision compile weights "
    "checkpoint_every keep_checkpoints log_every tensorboard",
    "ModelSettings": "preset width blocks heads condition length dropout softcap tie_word_embeddings mask mixture "
    "schedule",
    "Watch": "every metrics steps samples",
    "TrainStage": "start data mask mixture seed objective watch",
    "Conditional": "prompts prefix suffix continuations window tokens",
    "EvaluateStage": "steps samples draws noise precision seed judge judge_precision judge_stage embedder temperatures "
    "conditional",
    "Recipe": "seed threads variants quick",
    "Quick": "variants",
}
"""Settings that are hashed even at their default, by class. Do not add any: all others enter a hash only where they are
not at their default, so that a new one changes no hash."""


class _RaisesUserErrors(ModelMetaclass):
    """Makes constructors of configs raise UserErrors, as `parse` does."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805  (of a class of classes)
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise UserError(explain(error, cast("type[BaseModel]", cls), values, "")) from None


class Config(BaseModel, metaclass=_RaisesUserErrors):
    """A small typed config that sits beside the code it configures.

    A setting at its default does not enter a hash, so a new setting makes no finished run stale. For that, the default
    of a new setting is the earlier behaviour, and defaults never change: new behaviour is a new setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls: type[C], values: Any, where: str = "") -> C:
        """Validate plain data; errors are one UserError that names each field."""
        if isinstance(values, cls):
            return values
        if not isinstance(values, dict):
            raise UserError(f"{where or cls.__name__}: expected a mapping of settings, got {shown(values)}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(explain(error, cls, values, where)) from None

    def hashed(self) -> dict[str, Any]:
        """The settings that enter a hash, as plain data: all that are not at their default, `kind`, and those of
        `ALWAYS_HASHED`; also in nested configs."""
        plain, always = self.model_dump(mode="json"), {"kind"}
        for cls in type(self).__mro__:
            always |= set(ALWAYS_HASHED.get(cls.__name__, "").split())
        return {
            name: _hashed(getattr(self, name), plain[name])
            for name, field in type(self).model_fields.items()
            if name in always or getattr(self, name) != field.get_default(call_default_factory=True)
        }

    def digest(self) -> str:
        return digest(self.hashed())


def _hashed(value: Any, plain: Any) -> Any:
    """What of a config's value enters a hash: nested configs and settings without defaults, else the value itself."""
    if isinstance(value, Config | Settings):
        return value.hashed()
    if isinstance(value, dict):
        return {key: _hashed(value[inside], plain[key]) for inside, key in zip(value, plain, strict=True)}
    if isinstance(value, list | tuple):
        return [_hashed(one, other) for one, other in zip(value, plain, strict=True)]
    return plain


def first_difference(before: Any, now: Any, place: str = "", but: Collection[str] = ()) -> str | None:
    """The first difference of two settings, in words: `training.steps (10, now 20)`. What is at its default may be
    missing in either. but: names of settings that do not matter."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys(name for name in (*before, *now) if name not in but):
            inside = name if place in ("", "stage") else f"{place}.{name}"
            if (difference := first_difference(before.get(name, UNSET), now.get(name, UNSET), inside, but)) is not None:
                return difference
        return None
    return None if before == now else f"{place} ({before!r}, now {now!r})"


class Unset(dict[str, Any]):
    """The place of a setting that is missing."""

    def __repr__(self) -> str:
        return "not set"


UNSET = Unset()


def explain(error: ValidationError, cls: type[BaseModel], values: Any, where: str) -> str:
    """A pydantic report as a sentence: field, value, what would be right."""
    parts = []
    for item in error.errors():
        location = _location(tuple(step for step in item["loc"] if step != "[key]"), values)
        path = ".".join((where, *location) if where else location)
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {path!r}{_siblings(cls, location, values)}")
        elif item["type"] == "missing":
            parts.append(f"{path!r} is required")
        else:
            message = item["msg"].removeprefix("Value error, ")
            message = message[:1].lower() + message[1:]
            if isinstance(item["input"], dict):  # a whole section: name the problem, not the section
                parts.append(f"{path!r}: {message}" if path else message)
            else:
                parts.append(f"{path!r} = {shown(item['input'])}: {message}")
    return "; ".join(parts)


def _location(steps: tuple[int | str, ...], values: Any) -> tuple[str, ...]:
    """The place in the settings: pydantic's path without the names of union members."""
    path, node = [], values
    for depth, step in enumerate(steps):
        listed = isinstance(node, list | tuple) and isinstance(step, int) and step < len(node)
        inside = listed or (isinstance(node, dict) and step in node)
        if inside:
            node = node[step]
        if inside or depth == len(steps) - 1:
            path.append(str(step))
    return tuple(path)


def _siblings(cls: type[BaseModel], location: tuple[str, ...], values: Any) -> str:
    """The key that an unknown one is close to, else all that are known at its place, where that is a config's."""
    model: Any = cls
    for step in location[:-1]:
        fields = getattr(model, "model_fields", {})
        values = values.get(step) if isinstance(values, dict) else None
        inside = (
            fields[step].annotation if step in fields else get_args(model)[1] if get_origin(model) is dict else None
        )
        model = _kind_of(inside, values)
    names = sorted(getattr(model, "model_fields", ()))
    close = get_close_matches(location[-1], names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(names)})" if names else ""


def _kind_of(annotation: Any, values: Any) -> Any:
    """The type of a setting; of several configs the one that the values are of, by their `kind`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    kind = values.get("kind") if isinstance(values, dict) else None
    several = [one for one in get_args(annotation) if "model_fields" in dir(one)]
    kinds = [
        one for one in several if "kind" in one.model_fields and kind in get_args(one.model_fields["kind"].annotation)
    ]
    return (kinds or several)[0] if len(kinds or several) == 1 else None


def digest(value: Any) -> str:
    """A short hash of plain data that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
