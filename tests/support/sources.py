"""The package's modules as they lie in the checkout, and the folders that tests import from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SUPPORT = ("ranks", "interpreters", "stores", "groups", "training")
IMPORTED_FROM = tuple(
    ROOT / folder for folder in ("tests", "tests/support", *(f"tests/support/{name}" for name in _SUPPORT))
)
"""The folders that ``pythonpath`` in pyproject.toml names, for processes that tests start."""
PYTHONPATH = os.pathsep.join(map(str, IMPORTED_FROM))
"""The environment variable that gives a process these folders."""
SAFE_PATH = ["-P"] if sys.version_info >= (3, 11) else []
"""The interpreter's option that keeps a script's folder from ``sys.path``, where it has one."""
FOLDERS = {
    "collectives": "collectives",
    "store": "collectives.store",
    "backends": "collectives.backends",
    "ddp": "collectives.ddp",
    "bench": "collectives.bench",
}
"""The package that each top-level folder is."""
BESIDE = ROOT / "collectives" / "torch_bridge" / "entry-points" / "collectives_registration"
"""A package of its own, which torch loads by entry point without an import of ``collectives``."""


def modules() -> dict[str, Path]:
    """Returns the files of all modules by name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            top, name = (BESIDE, BESIDE.name) if BESIDE in path.parents else (ROOT / folder, package)
            parts = path.relative_to(top).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found
