"""The command that serves: a page, and an HTTP service for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from imdm.cli.app import STOPPED, app, device, say
from imdm.cli.arguments import as_options, called
from imdm.cli.options import located, options_of
from imdm.core.errors import UserError
from imdm.serving.settings import Settings
from imdm.shipped import DEFAULT, TEACHER

if TYPE_CHECKING:
    import torch

    from imdm.writer import Writer


@app.command()
@options_of(Settings)
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]MODEL]...",
            help="Model folders, names of shipped ones or hub ids; the default model and its teacher unless given. "
            "NAME: its name in the service.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="IMDM_API_KEY", show_default=False, help="Key of requests. Other users can see a command's options."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further host name, such as a proxy's; may be repeated."),
    ] = None,
    **limits: Any,
) -> None:
    """Serve models: a web page, and OpenAI's completions API. Ctrl-C ends it."""
    api_key = _checked_key(api_key)
    STOPPED.append("stopped")
    chosen = named(models or (DEFAULT, TEACHER))
    needed = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if needed:
        raise UserError(f"imdm serve needs {' and '.join(needed)}: pip install 'imdm[serve]'")
    from imdm.serving.engine import Engine
    from imdm.serving.guard import hosts_of, is_local
    from imdm.serving.listening import listen
    from imdm.serving.server import address, serve

    listening = listen(host, port)
    bound, here = listening.getsockname()[0], device()
    with as_options(*limits):
        settings = Settings(**limits, api_key=api_key, **hosts_of(host, bound, allow_host))
    if not is_local(bound) and api_key is None:
        say("anyone who can reach this machine can use the service; --api-key (or IMDM_API_KEY) sets a key")
    if here.type == "cuda":
        say("getting ready, which takes a minute or so on a GPU")
    serve(
        Engine(_writers(chosen, here), settings),
        listening,
        lambda: say(f"{', '.join(chosen)} on {address(listening)} (Ctrl-C ends it)"),
    )


def _checked_key(api_key: str | None) -> str | None:
    """The key of requests. It leaves the command line, which a traceback's file would have."""
    if api_key is None and "IMDM_API_KEY" in os.environ:
        api_key = os.environ["IMDM_API_KEY"]  # an empty key is an error, not the choice of none
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UserError("the API key is empty or has characters that no header can hold, such as a space at its end")
    if api_key is not None:
        sys.argv = [word.replace(api_key, "…") for word in sys.argv]
    return api_key


def _writers(chosen: dict[str, str], device: torch.device) -> dict[str, Writer]:
    """Writers by the names under which they are served."""
    from imdm.writer import load

    return {name: load(place, device, fast=device.type == "cuda") for name, place in chosen.items()}


def named(models: Iterable[str]) -> dict[str, str]:
    """Models by the names under which they are served: the NAME of `NAME=MODEL`, or the result of `called`; if names
    clash, with more of each path."""
    pairs = [_split(model) for model in models]
    places = [located(model) or model for _, model in pairs]
    names, parts = [name or called(model) for name, model in pairs], 1
    while clashing := {i for i, name in enumerate(names) if names.count(name) > 1}:
        parts += 1
        longer = {i: called(pairs[i][1], parts) for i in clashing if pairs[i][0] is None}
        if all(names[i] == name for i, name in longer.items()):
            twice = names[min(clashing)]
            raise UserError(
                f"two models would be called {twice!r}; name one yourself, as in other={places[max(clashing)]}"
            )
        names = [longer.get(i, name) for i, name in enumerate(names)]
    return dict(zip(names, places, strict=True))


def _split(model: str) -> tuple[str | None, str]:
    """Split `NAME=MODEL`; an existing path is not split."""
    name, equals, rest = model.partition("=")
    if not equals or Path(model).exists():
        return None, model
    if not name.isprintable() or name.strip() != name or not name or not rest:
        raise UserError(f"{model!r}: expected a model, or NAME=MODEL with a name to serve it under")
    return name, rest
