"""How many threads of a rank copy and reduce data in large collectives.

The default is torch's number of threads, limited to the cores available to the rank: ranks tell each other on
which cores they run, and those that run on one share it. A rank that is bound to cores of its own has them
for itself. The smallest share that a rank has in any group is the limit in all its groups, because small
groups of a large job are busy at the same time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import collectives._native as _native
from collectives.core.arguments.option_records import BackendOptions
from collectives.store.process import kernel_of
from collectives.threads import granted_cores

VARIABLE = "COLLECTIVES_THREADS"
"""Environment variable with the number; unset or empty: the default."""

MOST: int = _native.MOST_THREADS

_SLACK = 1e-6
"""For shares that are sums of fractions."""

_smallest_share: int | None = None
"""Cores that this process has for itself in the group in which they are fewest, so far."""


@dataclass(frozen=True, slots=True)
class HostOptions(BackendOptions):
    """Options of the host backend, given as ``pg_options``; may differ between ranks.

    Attributes:
        threads: threads of this rank that copy and reduce data in large collectives, from 1 to 32, its own
            among them; ``None`` leaves it to ``COLLECTIVES_THREADS``, and that to torch and the cores.
    """

    threads: int | None = None

    _backend = "host"
    _shown = "HostOptions"


def wish(threads: int | None) -> dict[str, Any]:
    """Returns what a rank tells the others: threads, whether the user chose them, and the rank's cores.

    Args:
        threads: what the user said of a group; ``None`` for nothing.

    Raises:
        ValueError: that, or ``COLLECTIVES_THREADS``, is no number from 1 to 32.
    """
    text = os.environ.get(VARIABLE, "")
    chosen = threads is not None or text != ""
    if threads is not None:
        if type(threads) is not int or not 0 < threads <= MOST:
            raise ValueError(f"threads must be an int from 1 to {MOST}, but is {threads!r}")
    elif text:
        threads = int(text) if text.isdecimal() else 0
        if not 0 < threads <= MOST:
            raise ValueError(
                f"{VARIABLE} must be a number from 1 to {MOST}, but is {text!r}; unset it for the default"
            )
    else:
        threads = min(torch.get_num_threads(), MOST, _smallest_share or MOST)
    cores = os.sched_getaffinity(0)
    return {
        "threads": threads,
        "chosen": chosen,
        "cores": f"{sum(1 << core for core in cores):x}",
        "granted": max(1, int(granted_cores(len(cores)))),
    }


def shares(ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns how many cores each rank has for itself, at least 1.

    Args:
        ranks: what each tells of itself: :func:`wish`, and its ``system``.
    """
    here = Counter(one["system"] for one in ranks)  # a container has its share of time
    kernels = [kernel_of(one["system"]) for one in ranks]
    cores = [
        [core for core, bit in enumerate(reversed(f"{int(one['cores'], 16):b}")) if bit == "1"]
        for one in ranks
    ]
    users = Counter((kernel, core) for kernel, mine in zip(kernels, cores, strict=True) for core in mine)
    found = []
    for one, kernel, mine in zip(ranks, kernels, cores, strict=True):
        own = sum(1 / users[kernel, core] for core in mine)
        found.append(max(1, int(min(own, one["granted"] / here[one["system"]]) + _SLACK)))
    return found


def agreed(ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns how many threads each rank has.

    Args:
        ranks: see :func:`shares`.
    """
    return [
        one["threads"] if one["chosen"] else min(one["threads"], share)
        for one, share in zip(ranks, shares(ranks), strict=True)
    ]


def remember(share: int) -> None:
    """Notes how many cores this rank has for itself in a group."""
    global _smallest_share
    _smallest_share = share if _smallest_share is None else min(share, _smallest_share)
