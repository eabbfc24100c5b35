"""Configuration of Sphinx: ``sphinx-build -W -n docs docs/_build`` renders the documentation."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version as installed_version
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

project = "collectives"
author = "The collectives developers"
release = installed_version("torch-collectives")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"collectives {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_mock_imports = ["accelerate", "ignite", "lightning", "pytorch_lightning", "torchft"]
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
    (
        "py:.*",
        r"(torch|np|numpy|datetime|collections|typing|types|argparse|enum|abc|pathlib|accelerate|lightning)\..*",
    ),
]


def find(name: str) -> Any:
    """Returns the object of a dotted name, or ``None`` where there is none."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        return found
    return None


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Resolves a name by the object that it has: public names are aliases of those in the modules.

    An object that exists but has no entry becomes plain text; only names of nothing remain warnings.
    """
    if node["refdomain"] != "py":
        return None
    target = node["reftarget"]
    module, cls = node.get("py:module") or "", node.get("py:class") or ""
    # A docstring may use a short name of its own module, of which Sphinx does not tell.
    places = [
        module,
        f"{module}.{cls}",
        *sorted(name for name in sys.modules if name.startswith("collectives")),
    ]
    for name in (target, *(f"{place}.{target}" for place in places)):
        found = find(name) if name.startswith("collectives.") else None
        if found is None:
            continue
        own = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
        for entry, where in env.get_domain("py").objects.items():
            if entry in {name, own} or (callable(found) and find(entry) is found):
                return make_refnode(app.builder, node["refdoc"], where.docname, where.node_id, [text])
        return text
    return None


def setup(app: Sphinx) -> None:
    """Registers the resolver."""
    app.connect("missing-reference", resolve)
