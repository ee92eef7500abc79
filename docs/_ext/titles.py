"""A document with several headings of the first level is one page with one title: the others become its sections."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class OneTitle(SphinxTransform):
    default_priority = 1

    def apply(self, **options: object) -> None:
        first, *others = [part for part in self.document.children if isinstance(part, nodes.section)]
        for other in others:
            self.document.remove(other)
            first += other


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(OneTitle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
