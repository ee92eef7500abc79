"""A quick check whether a model hub can be reached: `transformers` would retry for a minute and a half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 5  # in which a hub must answer


@contextmanager
def hub_for(place: str | Path) -> Iterator[None]:
    """Inside this block the hub is contacted at most once for `place`: if it does not respond, only the cache is used.
    No effect for local paths."""
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
    """Whether the hub responds, with any status."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # no network, no such host, timeout; the HTTP library may change
        return False
    return True
