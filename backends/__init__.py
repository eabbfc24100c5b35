"""The backends: modules that make process groups of one kind each.

Nobody imports them by hand: :mod:`collectives.registry.backends` loads the one that is asked for by name.
"""

from __future__ import annotations

__all__: list[str] = []
