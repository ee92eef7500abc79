"""The text of each token of a row, also while others are still masked."""

from __future__ import annotations

from collections.abc import Sequence

from imdm.data.tokenizers import special_ids
from imdm.writer import Writer

MOST = 100_000  # texts that are remembered
BROKEN = "\ufffd"  # what bytes that are no whole character are decoded to


class Pieces:
    """What each token adds to the text; of a row without masks the pieces together are its text.

    A token is read together with the one before it, since many tokenizers put the space between words there. Bytes of
    one character in several tokens are shown where the last of them is.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        ending = writer.model.config.ending
        self._closing = {special_ids(writer.tokenizer).end} | ({ending.pad} if ending is not None else set())
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int | None]) -> list[str | None]:
        """A piece for each id, empty for special tokens; None where it is None."""
        out: list[str | None] = []
        before: tuple[int, ...] = ()  # the last token that had text, and special ones after it
        begun: tuple[int, ...] = ()  # bytes of a character that is not whole yet
        for place, token in enumerate(ids):
            if token is None:
                out.append(None)
                before, begun = (), ()
                continue
            begun = (*begun, token)
            piece = self._decoded((*before, *begun))[len(self._decoded(before)) :]
            following = ids[place + 1] if place + 1 < len(ids) else None
            if piece.endswith(BROKEN) and following is not None and following not in self._closing:
                out.append("")
                continue
            out.append(piece)
            before, begun = (token,) if piece else (*before, token)[-4:], ()
        return out

    def text(self, ids: Sequence[int | None]) -> str:
        return "".join(piece or "" for piece in self.of(ids))

    def _decoded(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[ids] = self.writer.decode(list(ids))
        return self._known[ids]
