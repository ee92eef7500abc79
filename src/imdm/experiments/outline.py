"""A recipe's settings, checked without torch: unknown keys and names, wrong types, values out of range.

Config classes sit beside the code that they configure, which imports torch, and that takes seconds. So this module does
not import them. It reads their fields from the source files, and makes classes with the same fields and no methods.
What needs the classes themselves is checked later: rules between several settings (their validators), and the settings
of backbones.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import Field, create_model

from imdm.config import Config
from imdm.registry import Registry

ROOT = Path(__file__).parent.parent.parent
IMPORTED = ("imdm.config", "imdm.errors", "imdm.registry", "math", "pathlib", "pydantic", "re", "typing")
"""Modules without torch, which are imported. Others of imdm are read; names of any other module are not known here."""


class UnreadableError(Exception):
    """Something that only the module itself can tell, once it is imported."""


def check_settings(values: Mapping[str, Any]) -> None:
    """Refuse settings that no recipe can have, in the words of `Recipe.parse`."""
    check_config("imdm.experiments.schema", "Recipe", values, "")


def check_config(module: str, name: str, values: Mapping[str, Any], where: str) -> None:
    """The same for another config class, in the words of its `parse`."""
    defined(module, name).parse(values, where)


@cache
def defined(module: str, name: str) -> Any:
    """The value of a name in a module, made from its source: a type, a number, a registry, a config with its fields
    alone."""
    node = _statements(_file(module)).get(name)
    if isinstance(node, ast.ImportFrom):
        original = next(alias.name for alias in node.names if name in (alias.name, alias.asname))
        return _from(str(node.module), original)
    if isinstance(node, ast.ClassDef):
        return _outlined(module, node)
    if isinstance(node, ast.FunctionDef):
        return _function(module, node)
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        value = _evaluated(module, node.value)
        return _filled(module, name, value) if isinstance(value, Registry) else value
    raise UnreadableError(f"{module}.{name}")


def _from(module: str, name: str) -> Any:
    if module in IMPORTED:
        return getattr(import_module(module), name)
    if module.partition(".")[0] != "imdm":
        raise UnreadableError(f"{module}.{name}")
    return defined(module, name)


def _file(module: str) -> Path:
    place = ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def _statements(file: Path) -> dict[str, ast.stmt]:
    """The statements of a module that define its names, by name; also imports for the type checker."""
    found: dict[str, ast.stmt] = {}
    for node in _every(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def _every(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, and those under its `if`s."""
    for node in body:
        yield from _every(node.body) if isinstance(node, ast.If) else [node]


def _evaluated(module: str, node: ast.expr) -> Any:
    return eval(compile(ast.Expression(node), module, "eval"), _names_in(module, node))


def _function(module: str, node: ast.FunctionDef) -> Any:
    """A function that uses nothing unreadable."""
    names = _names_in(module, node)
    exec(compile(ast.Module([node], []), module, "exec"), names)
    return names[node.name]


def _names_in(module: str, node: ast.AST) -> dict[str, Any]:
    """The values of the module's names in a piece of code."""
    known = _statements(_file(module))
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return {name: defined(module, name) for name in used if name in known and name not in vars(builtins)}


def _outlined(module: str, node: ast.ClassDef) -> type[Config]:
    """A config with the fields of a class."""
    bases = tuple(_evaluated(module, base) for base in node.bases)
    if not bases or not all(isinstance(base, type) and issubclass(base, Config) for base in bases):
        raise UnreadableError(f"{module}.{node.name}")
    made: dict[str, Any] = {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            made |= {} if _is_class_variable(part) else {part.target.id: _field(module, part)}
    return create_model(node.name, __base__=bases, __module__=module, **made)


def _field(module: str, node: ast.AnnAssign) -> tuple[Any, Any]:
    """A field's type and limits. Its default, which is not used, is None."""
    given, value = dict[str, ast.expr](), node.value
    if _is_call(value, "Field"):
        given = {str(keyword.arg): keyword.value for keyword in value.keywords}
        defaults = [*value.args, given.pop("default", None), given.pop("default_factory", None)]
        value = next((one for one in defaults if one is not None), None)
    default = ... if value is None or ast.unparse(value) == "..." else None
    try:
        annotation = _evaluated(module, node.annotation)
        return annotation, Field(default, **{name: _evaluated(module, value) for name, value in given.items()})
    except (UnreadableError, NameError, AttributeError):  # a module imported whole, a class variable: not known here
        return Any, default


def _is_class_variable(node: ast.AnnAssign) -> bool:
    return isinstance(node.annotation, ast.Subscript) and ast.unparse(node.annotation.value) == "ClassVar"


def _is_call(node: ast.AST | None, *of: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in of


def _filled(module: str, name: str, registry: Registry[Any]) -> Registry[Any]:
    """A registry with the entries of its folder: by `@masks.register("kind")` or, where there is such a function, by
    `@metric("name")`. Entries that are functions are known by name only."""
    how = (f"{name}.register", registry.kind)
    for file in sorted(_file(module).parent.glob("*.py")):
        if not any(f"@{one}(" in file.read_text(encoding="utf-8") for one in how):
            continue
        place = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in _statements(file).values():
            for decorator in getattr(node, "decorator_list", ()):
                if _is_call(decorator, *how):
                    entry = defined(place, node.name) if isinstance(node, ast.ClassDef) else None
                    registry.register(ast.literal_eval(decorator.args[0]))(entry)
    return registry
