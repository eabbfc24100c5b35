"""The ranks that try thresholds of the host backend: groups that differ in nothing else, and timed turns."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import torch

import collectives._native as _native
from collectives.backends.host import ProcessGroupHost
from collectives.backends.host import thresholds as host_tuning
from collectives.bench.core.barrier import SpinBarrier, create_barrier_memory
from collectives.bench.core.groups import TIMEOUT, parent_store
from collectives.ranks.processes import SpawnedRanks, commands
from collectives.store import PrefixStore, TCPStore

__all__ = ["Probe", "Rig"]

ROTATION_BYTES = 64 << 20
"""Memory that tensors of a megabyte and more rotate through, beyond the caches, as gradients do."""

ROTATION_MIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """What is timed.

    Attributes:
        operation: name of a collective of the core.
        size_bytes: size of the larger tensor.
    """

    operation: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Make:
    """A command: form the group of this number; rank 0 reads its thresholds from the file."""

    number: int
    file: str


@dataclass(frozen=True, slots=True)
class _Drop:
    """A command: end the group of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """A command: time calls of a probe on the group of this number; answered by their nanoseconds."""

    number: int
    probe: Probe
    calls: int


class Rig:
    """Ranks with groups of different thresholds; a context manager that leaves nothing behind.

    Args:
        ranks: number of ranks.

    Raises:
        RankFailedError: a rank failed; also from every method.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._groups = 0
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-tune-")))
            self._store = parent_store()
            descriptor, board = create_barrier_memory(ranks)
            stack.callback(os.close, descriptor)
            self._team = stack.enter_context(SpawnedRanks(ranks, _serve, (ranks, self._store.port, board)))
            self._stack = stack.pop_all()

    def __enter__(self) -> Rig:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def make(self, thresholds: Mapping[str, int]) -> int:
        """Forms a group with these thresholds and returns its number."""
        self._groups += 1
        file = host_tuning.save({self._ranks: thresholds}, self._folder / f"{self._groups}.json")
        self._team.ask(_Make(self._groups, str(file)))
        return self._groups

    def drop(self, number: int) -> None:
        """Ends a group."""
        self._team.ask(_Drop(number))

    def time_us(self, number: int, probe: Probe, calls: int) -> float:
        """Returns the median of so many calls on a group, each the slowest rank's time, in microseconds."""
        by_rank: list[list[int]] = self._team.ask(_Turn(number, probe, calls))
        return float(statistics.median(max(call) for call in zip(*by_rank, strict=True))) / 1e3


def _serve(rank: int, connection: Connection, ranks: int, port: int, board: str) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    barrier = SpinBarrier(board, rank, ranks)
    groups: dict[int, ProcessGroupHost] = {}
    operands = _Operands(ranks)
    for command in commands(connection):
        answer: list[int] | None = None
        if isinstance(command, _Make):
            os.environ[host_tuning.VARIABLE] = command.file
            own = PrefixStore(f"tune/{command.number}", store)
            groups[command.number] = ProcessGroupHost(own, rank, ranks, TIMEOUT, group_name="tune")
        elif isinstance(command, _Drop):
            groups.pop(command.number).shutdown()
        else:
            call = operands.call(groups[command.number], command.probe)
            answer = [_timed(call, barrier) for _ in range(command.calls)]
        connection.send(answer)
    for group in groups.values():
        group.shutdown()
    barrier.close()


def _timed(call: Callable[[], object], barrier: SpinBarrier) -> int:
    barrier()
    begin = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - begin


class _Operands:
    """Tensors for probes, made once.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._turns = 0

    def call(self, group: ProcessGroupHost, probe: Probe) -> Callable[[], object]:
        """Returns a function that makes one call of the probe, on the next tensors in rotation."""
        opcode = _native.COLLECTIVES[probe.operation]
        whole = self._of(-(-probe.size_bytes // (4 * self._ranks)) * self._ranks)
        parts = self._of(whole[0].numel() // self._ranks)

        def run() -> None:
            self._turns += 1
            large, part = whole[self._turns % len(whole)], parts[self._turns % len(parts)]
            operands: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {
                "barrier": (None, None),
                "all_gather": (large, part),
                "reduce_scatter": (part, large),
            }
            if group.fast_collective(opcode, *operands.get(probe.operation, (large, None))) is None:
                raise RuntimeError(f"{probe} did not take the fast path into the core")

        return run

    def _of(self, count: int) -> list[torch.Tensor]:
        if count not in self._tensors:
            copies = ROTATION_BYTES // (4 * count) if 4 * count >= ROTATION_MIN_BYTES else 1
            self._tensors[count] = [torch.full((count,), 0.0) for _ in range(max(copies, 1))]
        return self._tensors[count]
