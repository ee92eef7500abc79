"""The command that serves: a page, and an HTTP service for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from imdm.cli.app import STOPPED, app, device, say
from imdm.cli.early import called, located
from imdm.core.errors import UserError
from imdm.shipped import DEFAULT, TEACHER

if TYPE_CHECKING:
    import torch

    from imdm.writer import Writer


@app.command()
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
    batch: Annotated[
        int | None, typer.Option(show_default="64", help="Sequences in one network evaluation, at most.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(show_default="256", help="Sequences running or waiting, at most; then 429.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(show_default="120", help="Time limit of a request; then 504.")
    ] = None,
    grace: Annotated[
        float | None, typer.Option(show_default="10", help="Seconds to finish requests when stopped.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(show_default="128", help="Requests at a time, at most; then 429.")
    ] = None,
    body: Annotated[
        int | None, typer.Option(show_default="1048576", help="Bytes of a request, at most; then 413.")
    ] = None,
    prompt: Annotated[int | None, typer.Option(show_default="32768", help="Characters of a prompt, at most.")] = None,
    tokens: Annotated[
        int | None, typer.Option(show_default="65536", help="Tokens of a request, at most: prompts × n × max_tokens.")
    ] = None,
    steps: Annotated[int | None, typer.Option(show_default="1000", help="Steps of a request, at most.")] = None,
) -> None:
    """Serve models: a web page, and OpenAI's completions API. Ctrl-C ends it."""
    if api_key is None and "IMDM_API_KEY" in os.environ:
        api_key = os.environ["IMDM_API_KEY"]  # an empty key is an error, not the choice of none
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UserError("the API key is empty or has characters that no header can hold, such as a space at its end")
    if api_key is not None:
        sys.argv = [word.replace(api_key, "…") for word in sys.argv]  # it would be in a traceback's file
    STOPPED.append("stopped")
    chosen = named(models or (DEFAULT, TEACHER))
    needed = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if needed:
        raise UserError(f"imdm serve needs {' and '.join(needed)}: pip install 'imdm[serve]'")
    limits = {"batch": batch, "queue": queue, "seconds": seconds, "grace": grace, "clients": clients, "body": body}
    limits |= {"prompt": prompt, "tokens": tokens, "steps": steps}
    from imdm.serving import Engine, Settings
    from imdm.serving.guard import LOCAL, is_local, name_of
    from imdm.serving.listening import listen
    from imdm.serving.server import address, serve

    listening = listen(host, port)
    for name in allow_host or ():
        if not name or name_of(name) != name.lower():
            raise UserError(f"--allow-host {name}: give a name alone, such as texts.example, without scheme and port")
    bound = listening.getsockname()[0]
    local = is_local(bound)
    settings = Settings(
        **{name: value for name, value in limits.items() if value is not None},
        api_key=api_key,
        hosts=tuple(dict.fromkeys((*LOCAL, host.lower(), bound))) if local else None,
        allowed=tuple(name.lower() for name in allow_host) if allow_host else None,
    )
    here = device()
    if not local and api_key is None:
        say("anyone who can reach this machine can use the service; --api-key (or IMDM_API_KEY) sets a key")
    if here.type == "cuda":
        say("getting ready, which takes a minute or so on a GPU")
    serve(
        Engine(_loaded(chosen, here), settings),
        listening,
        lambda: say(f"{', '.join(chosen)} on {address(listening)} (Ctrl-C ends it)"),
    )


def _loaded(chosen: dict[str, str], device: torch.device) -> dict[str, Writer]:
    """Writers by the names under which they are served."""
    from imdm.writer import load

    return {name: load(place, device, fast=device.type == "cuda") for name, place in chosen.items()}


def named(models: Iterable[str]) -> dict[str, str]:
    """Models by the names under which they are served: the NAME of `NAME=MODEL`, or the result of `called`; if names
    clash, with more of each path."""
    asked = [_split(model) for model in models]
    places = [located(model) or model for _, model in asked]
    names, parts = [name or called(model) for name, model in asked], 1
    while clashing := {i for i, name in enumerate(names) if names.count(name) > 1}:
        parts += 1
        longer = {i: called(asked[i][1], parts) for i in clashing if asked[i][0] is None}
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
