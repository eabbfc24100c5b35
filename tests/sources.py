"""The package's modules as they lie in the checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "collectives": "collectives",
    "store": "collectives.store",
    "backends": "collectives.backends",
    "ddp": "collectives.ddp",
    "bench": "collectives.bench",
}
"""The package that each top-level folder is."""


def modules() -> dict[str, Path]:
    """Returns the files of all modules by name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found
