"""NCCL as its providers, CuPy and pynccl, give it: one interface, its codes, settings and calls.

Not here: streams, groups and works, which are in :mod:`collectives.backends.nccl`.
"""

from __future__ import annotations

__all__: list[str] = []
