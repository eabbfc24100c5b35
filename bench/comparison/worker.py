"""The side of a comparison that runs on every rank: opens the peers and times batches of their calls."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as torch_dist

import collectives
from collectives.backends.nccl import providers
from collectives.bench.comparison import operations
from collectives.bench.comparison.operations import ADD, OPERATIONS, Operation, input_values, wanted_values
from collectives.bench.comparison.options import Options, stride
from collectives.bench.comparison.peers import (
    TORCH,
    TORCH_NCCL,
    Bind,
    add_zero,
    group_peer,
    mpi_peer,
    nccl_version,
    open_torch,
    split_name,
    why_mpi_refuses,
    why_not,
    why_torch_refuses,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.machine import mpi_version
from collectives.bench.core.ranks import Placement, SpinBarrier
from collectives.ranks.processes import commands

LIMIT = "limit"
"""Name of the peer that communicates nothing: ``tensor.add_(0)`` on all ranks at the same time."""

LATE_S = 0.001
"""How long one rank comes after the others to a barrier that must hold them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What every rank tells the parent first, when its peers and tensors are there.

    Attributes:
        refused: reasons of what cannot be measured, by peer and operation.
        versions: of the software behind peers, by peer.
    """

    refused: dict[tuple[str, str], str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class Batch:
    """A command: a few calls of one peer at one operation and size.

    Attributes:
        peer: its name.
        operation: name of the operation.
        count: elements of the array.
        cold_calls: calls on rewritten buffers in rotation, timed one by one.
        hot_calls: calls on one buffer, timed one by one.
        loop_calls: calls on that buffer that are timed together; none where it is 0.
    """

    peer: str
    operation: str
    count: int
    cold_calls: int
    hot_calls: int
    loop_calls: int = 0


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One rank's durations in nanoseconds, and how many elements were wrong on it.

    Attributes:
        cold_ns: each cold call.
        hot_ns: each hot call.
        loop_ns: the loop, divided by its calls; empty where there was none.
        cold_wrong: wrong elements of the cold calls.
        hot_wrong: wrong elements of the hot calls' buffer after them all.
        crossings_ns: for one more barrier in which a rank was late, when this rank came and when it left, on
            the machine's clock; empty for other operations.
        host_ns: of each hot call, until it returned; empty where the device is done by then.
    """

    cold_ns: list[int]
    hot_ns: list[int]
    loop_ns: list[int]
    cold_wrong: int
    hot_wrong: int
    crossings_ns: list[tuple[int, int]] = field(default_factory=list)
    host_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Values:
    """What a rank gives, and what it must get; ``None`` where the operation does not say."""

    given: torch.Tensor
    wanted: torch.Tensor | None

    def count_wrong(self, result: torch.Tensor) -> int:
        """Returns how many elements of a result are wrong."""
        return 0 if self.wanted is None else operations.count_wrong(result, self.wanted)


class Worker:
    """Times batches on one rank.

    Args:
        rank: the rank that this process is.
        size: number of ranks.
        options: what is measured.
        barrier: lets all ranks go at the same time.
        peers: the peers by name.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        options: Options,
        barrier: Callable[[], None],
        peers: Mapping[str, Bind],
    ) -> None:
        self._rank, self._size = rank, size
        self._options = options
        self._device = DEVICES[options.device]
        self._barrier = self._device.starting(barrier)
        self._peers = peers
        self._dtype = getattr(torch, options.dtype)
        self._prepared: tuple[str, int] | None = None
        place = self._device.kind
        self._nothing = torch.empty(0, dtype=self._dtype, device=place)
        self._values = _Values(self._nothing, None)
        self._full = self._nothing  # a whole array of known values, for the memory limit
        largest = options.largest_bytes(size) // options.item_bytes
        self._hot = [torch.empty(largest, dtype=self._dtype, device=place) for _ in range(options.buffers())]
        self._arena = torch.zeros(options.arena_bytes(size), dtype=torch.uint8, device=place)
        self._offset = 0  # where the next buffer of the rotation begins
        self._crossings = 0

    def run(self, batch: Batch) -> BatchResult:
        """Runs a batch; called by all ranks with the same batch, blocks until this rank is done."""
        self._prepare(OPERATIONS[batch.operation], batch.count)
        if batch.peer == LIMIT:
            return self._run(ADD, batch, _Values(self._full, self._full))
        return self._run(OPERATIONS[batch.operation], batch, self._values)

    def _run(self, operation: Operation, batch: Batch, values: _Values) -> BatchResult:
        enabled = gc.isenabled()
        gc.disable()
        try:
            cold_ns, cold_wrong = self._run_cold(operation, batch, values)
            hot_ns, host_ns, loop_ns, hot_wrong = self._run_hot(operation, batch, values)
            crossings = self._cross_late(batch) if operation.name == "barrier" else []
        finally:
            if enabled:
                gc.enable()
        return BatchResult(cold_ns, hot_ns, loop_ns, cold_wrong, hot_wrong, crossings, host_ns)

    def _prepare(self, operation: Operation, count: int) -> None:
        """Computes this rank's input and what its output must be, unless the last batch had the same."""
        if self._prepared == (operation.name, count):
            return
        self._prepared = None
        self._full = self._nothing
        self._values = _Values(self._nothing, None)  # the old and the new at once would be twice as much
        what = (operation, self._options.redop, self._dtype, count, self._rank, self._size)
        given, wanted = input_values(*what), wanted_values(*what)
        place = self._device.kind
        self._values = _Values(given.to(place), None if wanted is None else wanted.to(place))
        whole = [each for each in (self._values.given, self._values.wanted) if each is not None]
        whole = [each for each in whole if each.numel() == count]
        self._full = whole[0] if whole else input_values(ADD, *what[1:]).to(place)
        self._prepared = (operation.name, count)

    def _run_cold(self, operation: Operation, batch: Batch, values: _Values) -> tuple[list[int], int]:
        durations: list[int] = []
        wrong = 0
        while len(durations) < batch.cold_calls:
            buffers = self._rotate(batch.count, batch.cold_calls - len(durations))
            pairs = [self._pair(operation, batch.count, buffer) for buffer in buffers]
            for given, result in pairs:
                if given is not result:
                    result.zero_()
                given.copy_(values.given)
            calls = [
                self._device.completing(self._bind(operation, batch, given, result))
                for given, result in pairs
            ]
            durations += [self._timed(operation, call) for call in calls]
            for given, result in pairs:
                wrong += values.count_wrong(result)
                if given is not result:
                    wrong += operations.count_wrong(given, values.given)
        return durations, wrong

    def _run_hot(
        self, operation: Operation, batch: Batch, values: _Values
    ) -> tuple[list[int], list[int], list[int], int]:
        given, result = self._pair(operation, batch.count, self._hot)
        if operation.reduces and operation.in_place:  # a value that stays as it is over any number of calls
            rest = torch.full_like(values.given, operations.resting(self._options.redop))
            values = _Values(rest, None if values.wanted is None else rest)
        given.copy_(values.given)
        call = self._bind(operation, batch, given, result)
        complete = self._device.completing(call)
        host: list[int] = []
        if self._device.runs_behind:
            both = [self._timed_in_parts(operation, call) for _ in range(batch.hot_calls)]
            durations, host = [whole for _, whole in both], [returned for returned, _ in both]
        else:
            durations = [self._timed(operation, complete) for _ in range(batch.hot_calls)]
        loop: list[int] = []
        if batch.loop_calls:
            calls = range(batch.loop_calls - 1)
            self._barrier()
            begin = time.perf_counter_ns()
            for _ in calls:
                call()
            complete()
            took = time.perf_counter_ns() - begin
            loop.append(took // batch.loop_calls // (2 if operation.halved else 1))
        called = batch.hot_calls or batch.loop_calls
        return durations, host, loop, values.count_wrong(result) if called else 0

    def _cross_late(self, batch: Batch) -> list[tuple[int, int]]:
        """Passes the barrier once more with one rank late; returns when this rank came and left."""
        bound = self._peers[batch.peer](OPERATIONS["barrier"], self._nothing, self._nothing)
        call = self._device.completing(bound)
        late = self._crossings % self._size
        self._crossings += 1
        self._barrier()
        if self._rank == late:
            time.sleep(LATE_S)
        came = time.perf_counter_ns()  # of the machine: the ranks' readings can be compared
        call()
        return [(came, time.perf_counter_ns())]

    def _timed(self, operation: Operation, call: Callable[[], object]) -> int:
        self._barrier()
        begin = time.perf_counter_ns()
        call()
        took = time.perf_counter_ns() - begin
        return took // 2 if operation.halved else took

    def _timed_in_parts(self, operation: Operation, call: Callable[[], object]) -> tuple[int, int]:
        """Returns how long a call took until it returned, and until the device was done with it."""
        finish = self._device.completing(_nothing)
        self._barrier()
        begin = time.perf_counter_ns()
        call()
        returned = time.perf_counter_ns()
        finish()
        done = time.perf_counter_ns()
        halves = 2 if operation.halved else 1
        return (returned - begin) // halves, (done - begin) // halves

    def _bind(
        self, operation: Operation, batch: Batch, given: torch.Tensor, result: torch.Tensor
    ) -> Callable[[], object]:
        if operation.in_place and given is not result:  # out of place: the copy is part of the call
            return partial(_copy_and_call, self._peers[batch.peer](operation, result, result), given, result)
        return self._peers[batch.peer](operation, given, result)

    def _pair(
        self, operation: Operation, count: int, buffers: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a call's input and output, the same where it works in place."""
        if operation.in_place and (self._options.in_place or not operation.reduces):
            return (buffers[0][:count],) * 2
        what = (count, self._rank, self._size)
        return buffers[0][: operation.input_count(*what)], buffers[1][: operation.output_count(*what)]

    def _rotate(self, count: int, calls: int) -> list[list[torch.Tensor]]:
        """Returns the buffers of so many calls, or of fewer where memory ends."""
        size_bytes = count * self._dtype.itemsize
        gap = stride(size_bytes)
        each = self._options.buffers()
        number = min(calls, self._arena.numel() // gap // each) * each
        if self._offset + number * gap > self._arena.numel():
            self._offset = 0
        begin = self._offset
        self._offset += number * gap
        buffers = [
            self._arena[begin + i * gap : begin + i * gap + size_bytes].view(self._dtype)
            for i in range(number)
        ]
        return [buffers[i : i + each] for i in range(0, number, each)]


def _nothing() -> None:
    pass


def _copy_and_call(call: Callable[[], object], given: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(given)
    call()


def run_worker(rank: int, connection: Connection, placement: Placement, options: Options) -> None:
    """Body of a rank: sends what it cannot measure and why, then the result of every batch it is told to run.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        placement: where it is.
        options: what is measured, with the peers to open.
    """
    placement.take(rank)
    if options.provider is not None:
        os.environ[providers.PROVIDER_VARIABLE] = options.provider
    names = options.backends or ()
    ours = [name for name in names if not name.startswith(TORCH)]
    if ours:
        placement.initialize(rank, split_name(ours[0])[0])
    if len(ours) < len(names):
        placement.initialize_torch(rank, "gloo")  # it only makes others
    _serve(rank, connection, placement, options, *_peers(options))
    if ours:
        collectives.destroy_process_group()
    if len(ours) < len(names):
        torch_dist.destroy_process_group()


def run_mpi4py(rank: int, connection: Connection, placement: Placement, options: Options) -> None:
    """Body of a rank of plain mpi4py under ``mpirun``; arguments as of :func:`run_worker`.

    Raises:
        RuntimeError: ``mpirun`` and mpi4py are not of one MPI.
    """
    import mpi4py

    mpi4py.rc.threads = False  # MPI's fastest mode
    from mpi4py import MPI

    placement.take(rank)
    world = MPI.COMM_WORLD
    if world.Get_size() != placement.size:
        raise RuntimeError(
            f"mpirun was to start {placement.size} ranks, but mpi4py sees {world.Get_size()}; not of one MPI"
        )
    (peer,) = options.backends or ()
    dtype = getattr(torch, options.dtype)
    refused = {
        (peer, name): reason
        for name in options.operations
        if (reason := why_mpi_refuses(MPI, OPERATIONS[name], dtype, options.redop)) is not None
    }
    all_refused = len(refused) == len(options.operations)
    peers = {} if all_refused else {peer: mpi_peer(MPI, world, options.redop)}
    _serve(rank, connection, placement, options, peers, Ready(refused, {peer: mpi_version()}))


def _serve(
    rank: int,
    connection: Connection,
    placement: Placement,
    options: Options,
    peers: Mapping[str, Bind],
    ready: Ready,
) -> None:
    """Sends the ready once all is ready, and then runs batches until the parent closes."""
    if not peers:
        connection.send(ready)
        return
    barrier = SpinBarrier(placement.memory, rank, placement.size)
    worker = Worker(rank, placement.size, options, barrier, peers)
    gc.collect()
    connection.send(ready)  # from now on nothing here disturbs other peers
    for batch in commands(connection):
        connection.send(worker.run(batch))
    barrier.close()


def _peers(options: Options) -> tuple[dict[str, Bind], Ready]:
    """Returns the peers that can do at least one operation, and what is to be said of all."""
    op = getattr(collectives.ReduceOp, options.redop.upper())
    dtype, device = getattr(torch, options.dtype), options.device
    peers: dict[str, Bind] = {}
    refused: dict[tuple[str, str], str] = {}
    versions: dict[str, str] = {}
    for name in options.backends or ():
        if name.startswith(TORCH):
            peer = open_torch(name, options.redop)
            ask = partial(why_torch_refuses, peer, dtype=dtype, device=device)
            if name == TORCH_NCCL:
                versions[name] = nccl_version()
        else:
            backend, algorithm = split_name(name)
            group = collectives.new_group(backend=backend)
            peer = group_peer(group, op, algorithm)
            ask = partial(why_not, group, dtype=dtype, op=op, device=device, algorithm=algorithm)
            if backend in {"nccl", "mpi"}:
                versions[name] = providers.describe() if backend == "nccl" else mpi_version()
        reasons = {word: ask(OPERATIONS[word]) for word in options.operations}
        refused |= {(name, word): reason for word, reason in reasons.items() if reason is not None}
        if None in reasons.values():
            peers[name] = peer
    if options.limit:
        try:
            torch.zeros(1, dtype=dtype, device=device).add_(0)
        except RuntimeError:
            reason = f"tensor.add_(0) is not defined for {dtype}"
            refused |= {(LIMIT, word): reason for word in options.operations}
        else:
            peers[LIMIT] = add_zero
    return peers, Ready(refused, versions)
