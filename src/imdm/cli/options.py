"""Options of several commands, and options that are made from settings or name what the package knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from imdm.core.errors import UserError, check_seed
from imdm.core.files import as_path
from imdm.shipped import find, folder_of

F = TypeVar("F", bound=Callable[..., Any])
PRECISIONS = ("float32", "bf16")


def options_of(settings: type) -> Callable[[F], F]:
    """Gives a command an option for each field of a dataclass that has a `help`, with the field's type and default.
    The command takes their values as `**` keywords."""
    types = get_type_hints(settings)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[types[field.name], typer.Option(help=field.metadata["help"])],
        )
        for field in fields(settings)
        if "help" in field.metadata
    ]

    def with_options(command: F) -> F:
        own = [one for one in signature(command, eval_str=True).parameters.values() if one.kind != one.VAR_KEYWORD]
        command.__signature__ = Signature([*own, *parameters])  # type: ignore[attr-defined]  # what Typer reads
        return command

    return with_options


class LateHelp(TyperCommand):
    """A command whose help names things that register themselves, such as metrics: `{…}` in it stands for them. What
    registers them takes seconds to import, so that is done when the help is shown."""

    @staticmethod
    def names() -> dict[str, str]:
        """What each `{…}` stands for."""
        raise NotImplementedError

    def fill_in(self) -> None:
        names = self.names()
        for option in self.params:
            option.help = option.help.format_map(names)  # type: ignore[attr-defined]

    def format_help(self, *where: Any) -> None:
        self.fill_in()
        super().format_help(*where)


def given_path(text: str) -> Path:
    """A given path; an empty one, which would be the current folder, is refused."""
    if not text:
        raise UserError("a path is empty; give a file or a folder")
    return as_path(text, "path")


def located(name: str | None) -> str | None:
    """A model as it was named; a shipped one by its folder. A missing folder is refused."""
    if name is None:
        return None
    folder_of(name)
    return str(find(name))


def known_order(name: str | None) -> str | None:
    if name is not None:
        from imdm.sampling.options import check_order

        check_order(name)
    return name


def known_policy(name: str | None) -> str | None:
    if name is not None:
        from imdm.diffusion.process import check_policy

        check_policy(name)
    return name


def known_precision(option: typer.CallbackParam, name: str | None) -> str | None:
    if name is not None and name not in PRECISIONS:
        raise UserError(f"{option.opts[0]} = {name}: {' or '.join(PRECISIONS)}")
    return name


def known_seed(seed: int) -> int:
    check_seed(seed, "--seed")
    return seed


Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, such as stages.teacher.training.steps=100.")
]
RecipeName = Annotated[str, typer.Argument(help="A recipe's name or YAML file.")]
OutRun = Annotated[
    Path | None,
    typer.Option("--out", parser=given_path, metavar="PATH", help="Folder of the run; runs/RECIPE unless given."),
]
OutFolder = partial(typer.Option, parser=given_path, metavar="PATH")
ModelPath = Annotated[
    str, typer.Argument(help="Model folder, the name of one that ships (imdm models), or hub id.", callback=located)
]
Seed = Annotated[int, typer.Option(help="Seed of all randomness, a 64-bit integer.", callback=known_seed)]
NOISE = "Noise of positions that stay masked: posterior (redrawn, the paper) or keep."
Noise = Annotated[str, typer.Option(help=NOISE, callback=known_policy)]
OwnNoise = Annotated[str | None, typer.Option(help=f"{NOISE} The model's own unless given.", callback=known_policy)]
OwnOrder = Annotated[
    str | None,
    typer.Option(
        help="Positions that a step reveals: random (the paper), or spread (far from one another, so that fewer tokens "
        "clash). The model's own unless given.",
        callback=known_order,
    ),
]
