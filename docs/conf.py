"""Configuration of Sphinx: ``sphinx-build -W -n docs docs/_build`` renders the documentation."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "collectives"
author = "The collectives developers"
release = installed_version("collectives")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"collectives {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
python_use_unqualified_type_names = True

# Names of other packages: the build needs no network, so nothing resolves them.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|np|numpy|datetime|collections|typing|types|argparse|enum|abc)\..*"),
]
