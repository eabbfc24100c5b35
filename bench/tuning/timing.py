"""Groups of the host backend that differ in nothing but thresholds, and the times of operations on them."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch

from collectives import ReduceOp
from collectives.backends.host import ProcessGroupHost, tuning_file
from collectives.bench.comparison.operations import OPERATIONS, rounded_count
from collectives.bench.comparison.peers import group_peer
from collectives.bench.core.barrier import SpinBarrier, barrier_memory
from collectives.bench.core.groups import LOCALHOST, TIMEOUT, parent_store
from collectives.ranks.processes import SpawnedRanks, commands
from collectives.store import PrefixStore, TCPStore

__all__ = ["Probe", "TimedGroups"]

ROTATION_BYTES = 64 << 20
"""Memory that tensors of a megabyte and more rotate through, beyond the caches, as gradients do."""

ROTATION_MIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """What is timed.

    Attributes:
        operation: name of a measured operation.
        size_bytes: its size.
    """

    operation: str
    size_bytes: int


class TimedGroups:
    """Ranks with groups of different thresholds; a context manager that leaves nothing behind.

    Args:
        ranks: number of ranks.

    Raises:
        RankFailedError: a rank failed; also from every method.
    """

    def __init__(self, ranks: int) -> None:
        self._size = ranks
        self._made = 0
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-tune-")))
            self._store = parent_store()
            memory = stack.enter_context(barrier_memory(ranks))
            started = SpawnedRanks(ranks, _run_worker, (ranks, self._store.port, memory))
            self._ranks = stack.enter_context(started)
            self._stack = stack.pop_all()

    def __enter__(self) -> TimedGroups:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def make(self, values: Mapping[str, int]) -> int:
        """Forms a group with these thresholds and returns its number."""
        self._made += 1
        file = tuning_file.save({self._size: values}, self._folder / f"{self._made}.json")
        self._ranks.ask(("make", self._made, str(file)))
        return self._made

    def drop(self, number: int) -> None:
        """Ends a group."""
        self._ranks.ask(("drop", number))

    def time_us(self, number: int, probe: Probe, calls: int) -> float:
        """Returns the median of so many calls on a group, each the slowest rank's time, in microseconds."""
        by_rank: list[list[int]] = self._ranks.ask(("time_ns", number, probe, calls))
        return float(statistics.median(max(call) for call in zip(*by_rank, strict=True))) / 1e3


class _Worker:
    """What a rank does as :class:`TimedGroups` says; methods are named there."""

    def __init__(self, rank: int, ranks: int, port: int, memory: str) -> None:
        self._place = (rank, ranks)
        self._store = TCPStore(LOCALHOST, port, is_master=False, timeout=TIMEOUT)
        self._barrier = SpinBarrier(memory, rank, ranks)
        self._groups: dict[int, ProcessGroupHost] = {}
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._calls = 0

    def make(self, number: int, file: str) -> None:
        """Forms a group; rank 0 reads its thresholds from the file."""
        os.environ[tuning_file.VARIABLE] = file
        own = PrefixStore(f"tune/{number}", self._store)
        self._groups[number] = ProcessGroupHost(own, *self._place, TIMEOUT, group_name="tune")

    def drop(self, number: int) -> None:
        """Ends a group."""
        self._groups.pop(number).shutdown()

    def time_ns(self, number: int, probe: Probe, calls: int) -> list[int]:
        """Returns the durations of calls on the next tensors in rotation."""
        operation = OPERATIONS[probe.operation]
        count = rounded_count(operation, probe.size_bytes, 4, self._place[1])
        peer = group_peer(self._groups[number], ReduceOp.SUM, None)
        took = []
        for _ in range(calls):
            given = result = self._next_buffer(operation.input_count(count, *self._place))
            if not operation.in_place:
                result = self._next_buffer(operation.output_count(count, *self._place))
            call = peer(operation, given, result)
            self._barrier()
            begin = time.perf_counter_ns()
            call()
            took.append(time.perf_counter_ns() - begin)
        return took

    def _next_buffer(self, count: int) -> torch.Tensor:
        if count not in self._buffers:
            copies = ROTATION_BYTES // (4 * count) if 4 * count >= ROTATION_MIN_BYTES else 1
            self._buffers[count] = [torch.full((count,), 0.0) for _ in range(max(copies, 1))]
        self._calls += 1
        buffers = self._buffers[count]
        return buffers[self._calls % len(buffers)]

    def close(self) -> None:
        """Ends all groups."""
        for group in self._groups.values():
            group.shutdown()
        self._barrier.close()


def _run_worker(rank: int, connection: Connection, ranks: int, port: int, memory: str) -> None:
    torch.set_num_threads(1)
    worker = _Worker(rank, ranks, port, memory)
    for method, *arguments in commands(connection):
        connection.send(getattr(worker, method)(*arguments))
    worker.close()
