"""NCCL as its providers, CuPy and pynccl, give it: how it is found, its interface, codes and settings.

Not here: streams, groups and works, which are in :mod:`collectives.backends.nccl`.
"""

from __future__ import annotations
