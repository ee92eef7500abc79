"""The text of each token of a row, also while others are still masked."""

from __future__ import annotations

from collections.abc import Sequence

from imdm.data.tokenizers import special_ids
from imdm.writer import Writer

MOST = 100_000  # texts in the cache
BROKEN = "\ufffd"  # decoding of incomplete characters
OPEN = 3  # the most bytes of an incomplete character, and so of tokens that hold them


class Pieces:
    """What each token adds to the text; of a row without masks the pieces together are its text.

    A token is decoded together with the one before it, since many tokenizers need it for the space between words. A
    character whose bytes are in several tokens is shown at the last of them.
    """

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        ending = writer.model.config.ending
        self._closing = {special_ids(writer.tokenizer).end} | ({ending.pad} if ending is not None else set())
        self._silent = set(writer.tokenizer.all_special_ids) - self._closing
        self._cache: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int | None]) -> list[str | None]:
        """A piece for each id, empty for special tokens; None where it is None."""
        out: list[str | None] = []
        before: tuple[int, ...] = ()  # the last token that had text, and special ones after it
        begun: tuple[int, ...] = ()  # bytes of an incomplete character
        earlier = 0  # characters of `before` and `begun` that are in earlier pieces
        for place, token in enumerate(ids):
            if token is None:
                out.append(None)
                before, begun, earlier = (), (), 0
                continue
            following = ids[place + 1] if place + 1 < len(ids) else None
            if token in self._silent and following is not None and following not in self._closing:
                out.append("")
                continue
            begun = (*begun, token)
            piece = self._decoded((*before, *begun))[earlier:]
            if not piece.endswith(BROKEN) or following is None or following in self._closing:
                out.append(piece)
                before, begun = (token,) if piece else (*before, token)[-4:], ()
                earlier = len(self._decoded(before))
            elif len(begun) <= OPEN:
                out.append("")
            else:  # all but the last is final
                out.append(piece[:-1])
                before, begun = (), begun[-OPEN:]
                earlier = max(0, len(self._decoded(begun)) - 1)
        return out

    def text(self, ids: Sequence[int | None]) -> str:
        return "".join(piece or "" for piece in self.of(ids))

    def _decoded(self, ids: tuple[int, ...]) -> str:
        text = self._cache.get(ids)
        if text is None:
            if len(self._cache) >= MOST:
                self._cache.clear()
            text = self._cache[ids] = self.writer.decode(list(ids))
        return text
