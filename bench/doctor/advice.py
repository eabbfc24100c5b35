"""The end of ``collectives doctor``: which backend to use for what on this machine, and what to install."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

import collectives
from collectives.bench.core.machine import usable_cores
from collectives.bench.core.records import Skipped
from collectives.secret import SECRET

__all__ = ["advise", "estimate_all_reduce"]

BUDGET_S = 1.0
"""About how long the all-reduces of one backend are repeated."""

COUNT = (1 << 20) // 4
"""Elements of the float32 tensor: 1 MiB."""

LEAST_CALLS = 5


def estimate_all_reduce() -> float:
    """Returns the median time of an all-reduce of 1 MiB in seconds, that of the slowest rank.

    Called by all ranks of the default group; takes about a second.
    """
    tensor = torch.zeros(COUNT)
    times = []
    stop = torch.zeros(1)
    end = time.perf_counter() + BUDGET_S
    while not stop.item():
        for _ in range(LEAST_CALLS):
            start = time.perf_counter()
            collectives.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        stop[0] = time.perf_counter() > end
        collectives.broadcast(stop, 0)  # rank 0 decides, so that all ranks make the same calls
    median = torch.tensor([statistics.median(times[LEAST_CALLS:] or times)], dtype=torch.float64)
    collectives.all_reduce(median, op=collectives.ReduceOp.MAX)
    return median.item()


def advise(seconds: Mapping[str, float], skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yields lines of advice.

    Args:
        seconds: by backend that works here, the time of an all-reduce of 1 MiB between two ranks.
        skipped: backends that cannot be used here.
    """
    yield "Which backend for what:"
    yield from _of_cpu_tensors(seconds)
    reasons = {entry.peer: entry.reason for entry in skipped}
    if "nccl" in reasons:
        yield f"  CUDA tensors: none here; nccl {reasons['nccl']}"
    elif "nccl" in seconds:
        yield '  CUDA tensors: nccl, the only one that uses NVLink; "collectives" takes it by itself'
    if "mpi" in seconds:
        yield "  ranks that mpirun starts: mpi, which needs no address and no store"
    yield f"  ranks on this machine: up to {usable_cores()}, a core for each; more take turns"
    # The command gives its own ranks a secret, so that it cannot tell whether the user has one.
    yield "  several machines: host, with the same secret on all of them, made by"
    yield f"    export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
    lines = list(_to_copy(skipped))
    if lines:
        yield "Lines to copy for what is missing:"
        yield from lines


def _of_cpu_tensors(seconds: Mapping[str, float]) -> Iterator[str]:
    """Yields what serves tensors on the CPU, and how quick each backend was."""
    if not seconds:
        yield "  CPU tensors: no backend works here; see the checks that failed"
        return
    ranked = sorted(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ranked)
    best = "host" if "host" in seconds else ranked[0]
    if best == ranked[0]:
        why = "the quickest here"
    else:
        why = f"it finds dead ranks and ranks out of step; {ranked[0]} was quicker at this size"
    name = '"collectives" under torch.distributed' if best == "host" else "host failed"
    yield f"  CPU tensors: {best} ({name}), {why}"
    yield f"    all-reduce of 1 MiB, 2 ranks, estimated within {BUDGET_S:g} s each: {times}"


def _to_copy(skipped: Sequence[Skipped]) -> Iterator[str]:
    """Yields commands and settings, each with what it is for."""
    for entry in skipped:
        if entry.install:
            yield f"  {entry.install}  # {entry.peer}"
    if "OMP_NUM_THREADS" not in os.environ:
        yield "  export OMP_NUM_THREADS=1  # torch starts a thread for each core on every rank without it"
