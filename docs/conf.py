"""Sphinx configuration; ``make docs`` builds with every warning an error."""

from __future__ import annotations

import asynccoll

project = "asynccoll"
author = "asynccoll contributors"
copyright = "asynccoll contributors"
version = release = asynccoll.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_theme = "furo"
html_title = f"asynccoll {release}"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
nitpicky = False  # torch's types have no inventory to link to offline
