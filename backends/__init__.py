"""The backends: modules that make process groups of one kind each.

Nobody imports them by hand: :mod:`collectives.registry.backends` loads the one that is asked for by name.
"""

from __future__ import annotations

if __name__ != "collectives.backends":
    raise ImportError("this folder is the package collectives.backends; import it by that name")

__all__: list[str] = []
