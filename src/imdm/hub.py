"""Model hubs that cannot be reached: told in seconds, where `transformers` would try again for a minute and a half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 5  # in which a hub must answer


@contextmanager
def hub_for(place: str | Path) -> Iterator[None]:
    """Inside this block a hub is asked for `place` once at most: where it does not answer, only its cache is read.
    Nothing is done for what is here."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(place).exists() or _answers():
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers() -> bool:
    """Whatever it says."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # no network, no such host, no time: the library it asks by has changed before
        return False
    return True
