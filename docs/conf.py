"""The documentation site: `make docs` builds it into docs/_build/html, which opens from `file://` with no network."""

from __future__ import annotations

import sys
from pathlib import Path

from imdm import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "imdm"
author = "the imdm contributors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "mathml", "commands", "outside", "titles"]
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
default_role = "code"  # docstrings have one backtick around code

html_theme = "furo"
html_title = f"imdm {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # it would fetch pages, which `file://` does not allow
html_theme_options = {"navigation_with_keys": True}
