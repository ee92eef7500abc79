"""Links to files of the repository beside the documents: files are copied into the site; folders and pages are not."""

from __future__ import annotations

from pathlib import Path

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[2]
PAGES = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
"""Where the site has what these files of the repository say."""


class Outside(SphinxTransform):
    """A file that has a page of the site leads there; of a folder the name stays, and the link goes."""

    default_priority = 1

    def apply(self, **options: object) -> None:
        here = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            place = (here / link["reftarget"]).resolve()
            if place.parent == ROOT and place.name in PAGES:
                link["reftarget"] = PAGES[place.name]
            elif place.is_dir():
                link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(Outside)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
