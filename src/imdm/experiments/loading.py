"""Loading recipes: found by name in `recipes/` or by path, one level of `extends`, `key=value` overrides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imdm.core.errors import UserError, check_is, shown, unknown
from imdm.core.files import DEEPEST, as_path, parse_yaml, read_json, read_text
from imdm.data.corpora import Corpus
from imdm.data.source import Data
from imdm.experiments.schema import Recipe

HERE = Path(__file__).parent / "recipes"
WITH_PATH = ("text", "prepared", "tokens")
"""Kinds of data that are files."""


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def summaries() -> dict[str, str]:
    """A one-line summary of each recipe that comes with the package, by name."""
    return {name: str(recipe_settings(name)["summary"]) for name in recipe_names()}


def load_recipe(name: str | Path, overrides: tuple[str, ...] | list[str] = (), *, to_run: bool = False) -> Recipe:
    """A recipe by name or path, with overrides such as `stages.teacher.training.steps=100`. to_run: also refuse
    missing data."""
    return parse_recipe(recipe_settings(name), overrides, to_run=to_run)


def _check_files(data: Data) -> None:
    """Refuse missing files of a recipe's data."""
    kind, path, valid = (getattr(data, name, None) for name in ("kind", "path", "valid"))
    if kind in ("prepared", "tokens") and not as_path(str(path), "data.path").exists():
        what = "file" if kind == "tokens" else "folder; make it with 'imdm prepare'"
        raise UserError(f"data: {path}: no such {what}")
    for corpus, split in ((path, "train"), (valid, "valid")) if kind == "text" else ():
        if corpus is not None:
            Corpus(corpus, split).check()


def stages_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stages in a recipe's settings that are not parsed yet."""
    stages = settings.get("stages")
    return stages if isinstance(stages, dict) else {}


def trained_by(settings: Mapping[str, Any]) -> list[str]:
    """The names of the stages that train a model, in a recipe's settings that are not parsed yet."""
    stages = stages_of(settings).items()
    return [name for name, stage in stages if isinstance(stage, dict) and stage.get("kind") == "train"]


def recipe_settings(name: str | Path) -> dict[str, Any]:
    """The settings in a recipe's file, found by name or path and merged with the file that it extends."""
    values = _read_yaml(name)
    base = values.pop("extends", None)
    if base is not None:
        if not isinstance(base, str):
            raise UserError(f"recipe {str(name)!r}: extends = {shown(base)}: expected a recipe's name or YAML file")
        parent = _read_yaml(base)
        if "extends" in parent:
            raise UserError(f"recipe {str(name)!r} extends {base!r}, which itself extends; one level is allowed")
        values = _merge(parent, values)
    return values


def parse_recipe(
    values: dict[str, Any], overrides: tuple[str, ...] | list[str] = (), *, to_run: bool = False
) -> Recipe:
    """A recipe from plain settings, which are not modified. to_run: also refuse missing data."""
    check_is("overrides", overrides, (list, tuple), "a list of settings such as 'seed=1'")
    settings: dict[str, Any] = _unshared(values)
    for override in map(str, overrides):
        _override(settings, override)
    recipe = Recipe.parse(settings, "")
    for one in variants(recipe).values():  # they must parse too
        if to_run:
            _check_files(one.data)
    return recipe


def read_recipe(run: Path) -> Recipe | None:
    """The recipe that made a run's folder, where one did."""
    file = run / "recipe.json"
    if not file.exists():
        return None
    return Recipe.parse(read_json(file, "recipe"), str(file))


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe of each variant by name; of a recipe without variants, itself under the name ''."""
    alone: dict[str, Any] = {"variants": {}, "quick": None}
    members = {
        name: Recipe.parse(_merge(recipe.resolved(), changes) | alone, f"variants.{name}")
        for name, changes in recipe.variants.items()
    }
    return members or {"": recipe}


def _read_yaml(name: str | Path) -> dict[str, Any]:
    file = as_path(str(name), "recipe")
    by_path = file.suffix in (".yaml", ".yml")
    path = file if by_path or len(file.parts) != 1 else HERE / f"{name}.yaml"
    if not path.is_file() or (not by_path and path.parent != HERE):
        if not by_path:
            raise UserError(f"unknown recipe {str(name)!r}; known: {', '.join(recipe_names())}, or any .yaml file")
        raise UserError(f"recipe {str(name)!r}: no such file" + " (a folder)" * path.is_dir())
    try:
        values = parse_yaml(read_text(path, f"recipe {str(name)!r}"))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"recipe {str(name)!r} is not valid YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"recipe {str(name)!r}: expected a mapping of settings")
    return values


def _unshared(value: Any) -> Any:
    """A deep copy without YAML aliases: an override in one place must not change another."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: write key=value, such as stages.teacher.training.steps=100")
    *parents, last = key.split(".")
    if len(parents) > DEEPEST:
        raise UserError(f"override {shown(override)}: nested too deeply")
    place = values
    for depth, parent in enumerate(parents):
        if parents[:depth] == ["stages"] and parent not in place:
            raise unknown("stage", parent, map(str, place))
        if parent == "objective" and isinstance(place.get(parent), str):
            place[parent] = {"kind": place[parent]}  # its name stands for its default settings
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise UserError(f"override {override!r}: {'.'.join(parents[: depth + 1])!r} is a value, not a section")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"override {shown(override)}: {shown(text)} is not a valid value ({error})") from None
    earlier = place.get(last)
    section: dict[str, Any] = earlier if isinstance(earlier, dict) else {}
    if isinstance(value, str) and ("path" in section or (key == "data" and section.get("kind") in WITH_PATH)):
        place[last]["path"] = value  # data=PATH: a section that has a path takes another one
    elif key == "data" and section and not isinstance(value, dict):
        raise UserError(
            f"{shown(override)}: this recipe's data are of kind {section.get('kind')!r}, which has no path; recipes of "
            "text take one: sentences-cpu, match-text-cpu, or your own"
        )
    else:
        place[last] = value
