"""The search for thresholds of the host backend that suit a machine.

The program is :mod:`collectives.bench.tune`.
"""

from __future__ import annotations

__all__: list[str] = []
