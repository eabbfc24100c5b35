"""The side of the all-reduce measurement that runs on every rank: makes the peers and plays turns of them."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

import collectives
from collectives.bench import patterns
from collectives.bench.groups import initialize
from collectives.bench.lockstep import Lockstep
from collectives.bench.machine import bind_to_core
from collectives.bench.ranks import commands

__all__ = ["LIMIT", "Player", "Turn", "TurnResult", "Workload", "memory_bytes", "play", "serve"]

LIMIT = "limit"
"""Name of the peer that communicates nothing: ``tensor.add_(0)`` on all ranks at the same time."""

ARENA_MIN_BYTES = 64 << 20
"""Memory that buffers rotate through: beyond the caches of a core on today's machines."""

SLICE_GAP_BYTES = 4096 + 64
"""Distance between two buffers: another page, and another set of the first-level cache."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is reduced.

    Attributes:
        dtype: name of the data type.
        redop: name of the reduction.
        in_place: whether the rewritten buffer is reduced itself, or a copy of it, made within the time.
        max_bytes: size of the largest tensor.
        backends: names of the peers to make groups of.
        limit: whether the peer :data:`LIMIT` is wanted too.
        imports: modules to import first, which register further backends.
        bind: whether each rank, with all its threads, stays on a core of its own.
    """

    dtype: str
    redop: str
    in_place: bool
    max_bytes: int
    backends: tuple[str, ...]
    limit: bool = False
    imports: tuple[str, ...] = ()
    bind: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A command: a few calls of one peer.

    Attributes:
        peer: its name.
        count: elements of the tensors.
        cold_calls: calls on rewritten buffers in rotation, timed one by one.
        hot_calls: calls on one buffer, timed one by one.
        loop_calls: calls on that buffer that are timed together; none where it is 0.
    """

    peer: str
    count: int
    cold_calls: int
    hot_calls: int
    loop_calls: int = 0


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One rank's durations in nanoseconds, and how many elements were wrong on it.

    Attributes:
        cold_ns: each cold call.
        hot_ns: each hot call.
        loop_ns: the loop, divided by its calls; empty where there was none.
        cold_wrong: wrong elements of the cold calls.
        hot_wrong: wrong elements of the hot calls' buffer after them all.
    """

    cold_ns: list[int]
    hot_ns: list[int]
    loop_ns: list[int]
    cold_wrong: int
    hot_wrong: int


class Player:
    """Plays turns on one rank.

    Args:
        rank: the rank that this process is.
        size: number of ranks.
        workload: what is reduced.
        barrier: lets all ranks go at the same time.
        calls: by name of the peer, a function that reduces a tensor in place over all ranks and blocks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        workload: Workload,
        barrier: Callable[[], None],
        calls: dict[str, Callable[[torch.Tensor], object]],
    ) -> None:
        self._workload = workload
        self._barrier = barrier
        self._calls = calls
        self._dtype = getattr(torch, workload.dtype)
        count = workload.max_bytes // self._dtype.itemsize
        self._source = patterns.source(workload.redop, self._dtype, count, rank, size)
        self._expected = patterns.expected(workload.redop, self._dtype, count, size)
        self._hot = torch.empty_like(self._source)
        # Two of the largest always fit.
        self._arena = torch.zeros(max(2 * _stride(workload.max_bytes), ARENA_MIN_BYTES), dtype=torch.uint8)
        self._offset = 0  # where the next buffer of the rotation begins

    def play(self, turn: Turn) -> TurnResult:
        """Runs a turn; called by all ranks with the same turn, blocks until this rank is done."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            cold_ns, cold_wrong = self._play_cold(turn)
            hot_ns, loop_ns, hot_wrong = self._play_hot(turn)
        finally:
            if enabled:
                gc.enable()
        return TurnResult(cold_ns, hot_ns, loop_ns, cold_wrong, hot_wrong)

    def _play_cold(self, turn: Turn) -> tuple[list[int], int]:
        call = self._calls[turn.peer]
        source = self._source[: turn.count]
        wanted = source if turn.peer == LIMIT else self._expected[: turn.count]
        durations: list[int] = []
        wrong = 0
        while len(durations) < turn.cold_calls:
            buffers = self._rotate(turn.count, turn.cold_calls - len(durations))
            if self._workload.in_place:
                results = buffers
                for buffer in buffers:
                    buffer.copy_(source)
                durations += [self._timed(call, buffer) for buffer in buffers]
            else:
                results, inputs = buffers[::2], buffers[1::2]
                for i, buffer in enumerate(inputs):
                    buffer.copy_(source)
                    results[i].zero_()
                durations += [
                    self._timed_copy(call, output, given)
                    for output, given in zip(results, inputs, strict=True)
                ]
                wrong += sum(patterns.count_wrong(given, source) for given in inputs)
            wrong += sum(patterns.count_wrong(result, wanted) for result in results)
        return durations, wrong

    def _play_hot(self, turn: Turn) -> tuple[list[int], list[int], int]:
        call = self._calls[turn.peer]
        rest = patterns.resting(self._workload.redop)
        buffer = self._hot[: turn.count].fill_(rest)
        loop: list[int] = []
        if self._workload.in_place:
            durations = [self._timed(call, buffer) for _ in range(turn.hot_calls)]
        else:
            given = self._rotate(turn.count, 1)[0].fill_(rest)
            durations = [self._timed_copy(call, buffer, given) for _ in range(turn.hot_calls)]
        if turn.loop_calls:
            calls = range(turn.loop_calls)
            self._barrier()
            begin = time.perf_counter_ns()
            for _ in calls:
                call(buffer)
            loop.append((time.perf_counter_ns() - begin) // turn.loop_calls)
        return durations, loop, patterns.count_wrong(buffer, torch.full_like(buffer, rest))

    def _timed(self, call: Callable[[torch.Tensor], object], buffer: torch.Tensor) -> int:
        self._barrier()
        begin = time.perf_counter_ns()
        call(buffer)
        return time.perf_counter_ns() - begin

    def _timed_copy(
        self, call: Callable[[torch.Tensor], object], output: torch.Tensor, given: torch.Tensor
    ) -> int:
        self._barrier()
        begin = time.perf_counter_ns()
        output.copy_(given)
        call(output)
        return time.perf_counter_ns() - begin

    def _rotate(self, count: int, calls: int) -> list[torch.Tensor]:
        """Returns buffers for so many calls, or for fewer where memory ends; two for a call out of place."""
        size_bytes = count * self._dtype.itemsize
        stride = _stride(size_bytes)
        each = 1 if self._workload.in_place else 2
        number = min(calls, self._arena.numel() // stride // each) * each
        if self._offset + number * stride > self._arena.numel():
            self._offset = 0
        begin = self._offset
        self._offset += number * stride
        return [
            self._arena[begin + i * stride : begin + i * stride + size_bytes].view(self._dtype)
            for i in range(number)
        ]


def memory_bytes(max_bytes: int) -> int:
    """Returns the memory of each rank's tensors, where the largest message has so many bytes."""
    return 3 * max_bytes + max(2 * _stride(max_bytes), ARENA_MIN_BYTES)


def _stride(size_bytes: int) -> int:
    """Returns the distance between the beginnings of two buffers; each begins at a cache line."""
    return -(-size_bytes // 64) * 64 + SLICE_GAP_BYTES


def play(rank: int, connection: Connection, size: int, workload: Workload, board: str, port: int) -> None:
    """Body of a rank: sends what it cannot measure and why, then the result of every turn it is told to play.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        size: number of ranks.
        workload: what is reduced.
        board: path of the memory for :class:`~collectives.bench.lockstep.Lockstep`.
        port: of the parent's store.
    """
    torch.set_num_threads(1)
    if workload.bind:
        bind_to_core(rank)
    for module in workload.imports:
        importlib.import_module(module)
    if workload.backends:
        initialize(rank, size, port, workload.backends[0])
    calls, refused = _peers(workload)
    serve(connection, rank, size, workload, board, calls, refused)
    if workload.backends:
        collectives.destroy_process_group()


def serve(
    connection: Connection,
    rank: int,
    size: int,
    workload: Workload,
    board: str,
    calls: dict[str, Callable[[torch.Tensor], object]],
    refused: dict[str, str],
) -> None:
    """Sends the peers that cannot be measured, with reasons, and then plays turns until the parent closes.

    Args:
        connection: to the parent.
        rank: the rank that this process is.
        size: number of ranks.
        workload: what is reduced.
        board: path of the memory for :class:`~collectives.bench.lockstep.Lockstep`.
        calls: functions of the peers that can be measured, as in :class:`Player`.
        refused: reasons by the names of the others.
    """
    connection.send(refused)
    if not calls:
        return
    barrier = Lockstep(board, rank, size)
    player = Player(rank, size, workload, barrier, calls)
    gc.collect()
    for turn in commands(connection):
        connection.send(player.play(turn))
    barrier.close()


def _peers(workload: Workload) -> tuple[dict[str, Callable[[torch.Tensor], object]], dict[str, str]]:
    """Returns the peers' functions, and the reasons of those that cannot do what is asked."""
    op = getattr(collectives.ReduceOp, workload.redop.upper())
    dtype = getattr(torch, workload.dtype)
    calls: dict[str, Callable[[torch.Tensor], object]] = {}
    refused: dict[str, str] = {}
    for name in workload.backends:
        group = collectives.new_group(backend=name)
        reason = group.capabilities.why_not("all_reduce", device="cpu", dtype=dtype, op=op)
        if reason is None:
            calls[name] = _reducer(op, group)
        else:
            refused[name] = reason
    if workload.limit:
        try:
            torch.zeros(1, dtype=dtype).add_(0)
        except RuntimeError:
            refused[LIMIT] = f"tensor.add_(0) is not defined for {dtype}"
        else:
            calls[LIMIT] = lambda tensor: tensor.add_(0)
    return calls, refused


def _reducer(op: collectives.ReduceOp, group: collectives.ProcessGroup) -> Callable[[torch.Tensor], object]:
    all_reduce = collectives.all_reduce

    def call(tensor: torch.Tensor) -> None:
        all_reduce(tensor, op, group)

    return call
