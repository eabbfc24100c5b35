"""The collectives by their numbers in the native core, for the fast path."""

from __future__ import annotations

from collectives._native import COLLECTIVES

__all__ = [
    "ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BARRIER", "BROADCAST", "GATHER", "REDUCE", "REDUCE_SCATTER",
    "SCATTER",
]  # fmt: skip

ALL_GATHER = COLLECTIVES["all_gather"]
ALL_REDUCE = COLLECTIVES["all_reduce"]
ALL_TO_ALL = COLLECTIVES["all_to_all"]
BARRIER = COLLECTIVES["barrier"]
BROADCAST = COLLECTIVES["broadcast"]
GATHER = COLLECTIVES["gather"]
REDUCE = COLLECTIVES["reduce"]
REDUCE_SCATTER = COLLECTIVES["reduce_scatter"]
SCATTER = COLLECTIVES["scatter"]
