"""The side of a comparison that runs on every rank: opens the peers and times batches of their calls."""

from __future__ import annotations

import gc
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
from collectives.bench.comparison.operations import OPERATIONS, Operation, input_values, wanted_values
from collectives.bench.comparison.options import Options, stride
from collectives.bench.comparison.peers import (
    TORCH,
    TORCH_NCCL,
    Bind,
    group_peer,
    inexactness,
    mpi_peer,
    nccl_version,
    open_group,
    open_torch,
    split_name,
    why_mpi_refuses,
    why_not,
    why_torch_refuses,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.machine import mpi_version
from collectives.bench.core.ranks import Placement, SpinBarrier, without_collection
from collectives.ranks.processes import commands


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


@dataclass(slots=True)
class BatchResult:
    """One rank's durations in nanoseconds, and how many elements were wrong on it.

    Attributes:
        cold_ns: each cold call.
        hot_ns: each hot call.
        loop_ns: the loop, divided by its calls; empty where there was none.
        host_ns: of each hot call, until it returned; empty where the device is done by then.
        cold_wrong: wrong elements of the cold calls.
        hot_wrong: wrong elements of the hot calls' buffer after them all.
    """

    cold_ns: list[int] = field(default_factory=list)
    hot_ns: list[int] = field(default_factory=list)
    loop_ns: list[int] = field(default_factory=list)
    host_ns: list[int] = field(default_factory=list)
    cold_wrong: int = 0
    hot_wrong: int = 0


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
        self, rank: int, size: int, options: Options, barrier: Callable[[], None], peers: Mapping[str, Bind]
    ) -> None:
        self._rank, self._size = rank, size
        self._options = options
        device = DEVICES[options.device]
        self._barrier = device.starting(barrier)
        self._finish = device.completing(_nothing) if device.runs_behind else None
        self._peers = peers
        self._dtype = getattr(torch, options.dtype)
        self._prepared: tuple[str, int] | None = None
        self._given = torch.empty(0, dtype=self._dtype, device=device.kind)
        self._wanted: torch.Tensor | None = None  # the operation may not say
        largest = options.largest_bytes(size) // options.item_bytes
        self._hot = [self._given.new_empty(largest) for _ in range(options.buffers())]
        self._arena = torch.zeros(options.arena_bytes(size), dtype=torch.uint8, device=device.kind)
        self._offset = 0  # where the next buffer of the rotation begins

    def run(self, batch: Batch) -> BatchResult:
        """Runs a batch; called by all ranks with the same batch, blocks until this rank is done."""
        operation = OPERATIONS[batch.operation]
        self._prepare(operation, batch.count)
        result = BatchResult()
        with without_collection():
            self._run_cold(operation, batch, result)
            self._run_hot(operation, batch, result)
        return result

    def _prepare(self, operation: Operation, count: int) -> None:
        """Computes this rank's input and what its output must be, unless the last batch had the same."""
        if self._prepared == (operation.name, count):
            return
        place = self._given.device
        self._given, self._wanted = self._given.new_empty(0), None  # old and new at once would be twice
        what = (operation, self._options.redop, self._dtype, count, self._rank, self._size)
        self._given = input_values(*what).to(place)
        wanted = wanted_values(*what)
        self._wanted = None if wanted is None else wanted.to(place)
        self._prepared = (operation.name, count)

    def _run_cold(self, operation: Operation, batch: Batch, found: BatchResult) -> None:
        tolerance = inexactness(batch.peer)
        if tolerance and batch.count:
            largest = float(self._given.abs().max())
            tolerance *= largest * (1 if self._options.redop == "avg" else self._size)
        while len(found.cold_ns) < batch.cold_calls:
            buffers = self._rotate(batch.count, batch.cold_calls - len(found.cold_ns))
            pairs = [self._pair(operation, batch.count, buffer) for buffer in buffers]
            for given, result in pairs:
                if given is not result:
                    result.zero_()
                given.copy_(self._given)
            calls = [self._bind(operation, batch, given, result) for given, result in pairs]
            found.cold_ns += [self._timed(operation, call)[1] for call in calls]
            for given, result in pairs:
                if self._wanted is not None:
                    found.cold_wrong += operations.count_wrong(result, self._wanted, tolerance)
                if given is not result:
                    found.cold_wrong += operations.count_wrong(given, self._given)

    def _run_hot(self, operation: Operation, batch: Batch, found: BatchResult) -> None:
        given, result = self._pair(operation, batch.count, self._hot)
        wanted = self._wanted
        given.copy_(self._given)
        if operation.reduces and operation.in_place:  # a value that stays as it is over any number of calls
            rest = torch.full_like(self._given, operations.resting(self._options.redop))
            given.copy_(rest)
            wanted = None if wanted is None else rest
        call = self._bind(operation, batch, given, result)
        times = [self._timed(operation, call) for _ in range(batch.hot_calls)]
        found.hot_ns += [whole for _, whole in times]
        if self._finish is not None:
            found.host_ns += [returned for returned, _ in times]
        if batch.loop_calls:
            self._barrier()
            begin = time.perf_counter_ns()
            for _ in range(batch.loop_calls):
                call()
            if self._finish is not None:
                self._finish()
            took = time.perf_counter_ns() - begin
            found.loop_ns.append(took // batch.loop_calls // (2 if operation.halved else 1))
        if wanted is not None and (times or batch.loop_calls):
            found.hot_wrong = operations.count_wrong(result, wanted)

    def _timed(self, operation: Operation, call: Callable[[], object]) -> tuple[int, int]:
        """Returns how long a call took until it returned, and until the device was done with it."""
        finish = self._finish
        self._barrier()
        begin = time.perf_counter_ns()
        call()
        returned = done = time.perf_counter_ns()
        if finish is not None:
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
    ready = Ready({}, {})
    for name in options.backends or ():
        if name.startswith(TORCH):
            peer = open_torch(name, options.redop)
            ask = partial(why_torch_refuses, peer, dtype=dtype, device=device)
            if name == TORCH_NCCL:
                ready.versions[name] = nccl_version()
        else:
            backend, algorithm = split_name(name)
            group = open_group(backend, algorithm)
            peer = group_peer(group, op, algorithm)
            ask = partial(why_not, group, dtype=dtype, op=op, device=device, algorithm=algorithm)
            if backend in {"nccl", "mpi"}:
                ready.versions[name] = providers.describe() if backend == "nccl" else mpi_version()
        reasons = {word: ask(OPERATIONS[word]) for word in options.operations}
        ready.refused.update({(name, word): why for word, why in reasons.items() if why is not None})
        if None in reasons.values():
            peers[name] = peer
    return peers, ready
