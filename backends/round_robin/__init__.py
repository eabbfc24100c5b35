"""Several groups as one: successive collectives go to successive groups.

Inside: the process group, its options, its Works. Not here: the lanes, which may be groups of any backend.
"""

from __future__ import annotations

from collectives.backends.round_robin.group import (
    ProcessGroupRoundRobin,
    RoundRobinOptions,
    capabilities,
    create,
    decline,
    option_names,
    round_robin_process_groups,
)

__all__ = [
    "ProcessGroupRoundRobin",
    "RoundRobinOptions",
    "capabilities",
    "create",
    "decline",
    "option_names",
    "round_robin_process_groups",
]
