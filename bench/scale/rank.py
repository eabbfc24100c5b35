"""A rank of a world that is measured: forms it, uses it, and tells how long that took and what it holds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

import collectives
from collectives.bench.core.groups import TIMEOUT
from collectives.bench.core.namespaces import enter_as_rank
from collectives.bench.scale.counted_store import CountedStore
from collectives.bench.scale.growth import World
from collectives.bench.scale.holdings import Holdings, holdings
from collectives.errors import DistError
from collectives.ranks.processes import commands
from collectives.store import TCPStore

__all__ = ["Named", "Plan", "Step", "body", "victim_of"]

_LABEL = "COLLECTIVES_HOST_MACHINE"
_LAST_MOMENT_S = 0.3
"""How long the rank that dies lets the others begin to wait."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The world that ranks form.

    Attributes:
        world: machines and ranks.
        host: address of the store that the parent serves.
        port: its port.
        namespaces: the network of each rank; empty where labels make machines of one.
    """

    world: World
    host: str
    port: int
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What a step took on a rank, and what it held afterwards.

    Attributes:
        calls_ns: how long each of its calls took.
        requests: to the store.
        keys: that those named.
        holdings: what the rank then held.
        right: whether results were right.
    """

    calls_ns: tuple[int, ...]
    requests: int
    keys: int
    holdings: Holdings
    right: bool = True


@dataclass(frozen=True, slots=True)
class Named:
    """How a rank learnt of a death.

    Attributes:
        at_ns: when, on the clock that all ranks of a machine share; of the rank that dies, when it does.
        rank: the rank that the error named; -1 where there was none, or it named nobody.
    """

    at_ns: int
    rank: int


def victim_of(world: World) -> int:
    """Returns the rank that dies at the end: the leader of the last machine."""
    return (world.machines - 1) * world.local


class _Rank:
    """The steps, by the names of the parent's commands.

    Args:
        rank: the rank that this process is.
        plan: the world.
    """

    def __init__(self, rank: int, plan: Plan) -> None:
        self._rank = rank
        self._plan = plan
        self._size = plan.world.size
        self._groups: list[Any] = []
        self._store: CountedStore | None = None

    def idle(self) -> Step:
        """Nothing: what the process holds before."""
        return self._timed(lambda: None)

    def form(self) -> Step:
        """The world."""
        world = self._plan.world
        if self._plan.namespaces:
            enter_as_rank(self._plan.namespaces, self._rank)
        else:
            os.environ[_LABEL] = f"machine {self._rank // world.local}"
        return self._timed(self._init)

    def _init(self) -> None:
        store = TCPStore(self._plan.host, self._plan.port, is_master=False, timeout=TIMEOUT)
        self._store = CountedStore("scale", store)
        collectives.init_process_group(
            "host", store=self._store, rank=self._rank, world_size=self._size, timeout=TIMEOUT
        )

    def groups(self, number: int) -> Step:
        """So many groups of all ranks."""
        return self._timed(self._new_group, times=number)

    def _new_group(self) -> None:
        self._groups.append(collectives.new_group(timeout=TIMEOUT))

    def destroy(self) -> Step:
        """The end of these groups, in the reverse order."""
        return self._timed(self._destroy_last, times=len(self._groups))

    def _destroy_last(self) -> None:
        collectives.destroy_process_group(self._groups.pop())

    def barrier(self, times: int) -> Step:
        """Barriers, after one that is not timed."""
        collectives.barrier()
        return self._timed(collectives.barrier, times=times)

    def all_reduce(self, size_bytes: int, times: int) -> Step:
        """All-reduces of float32, after one that is not timed."""
        tensor = torch.empty(max(size_bytes // 4, 1))
        wanted = float(self._size * (self._size + 1) // 2)
        self._reduce(tensor)
        step = self._timed(lambda: self._reduce(tensor), times=times)
        return replace(step, right=bool((tensor == wanted).all()))

    def _reduce(self, tensor: torch.Tensor) -> None:
        tensor.fill_(float(self._rank + 1))
        collectives.all_reduce(tensor)

    def message(self, times: int) -> Step:
        """Messages of 8 bytes to the same rank of the next machine, after one that is not timed."""
        shift = self._plan.world.local if self._plan.world.machines > 1 else 1
        after, before = (self._rank + shift) % self._size, (self._rank - shift) % self._size
        sent, got = torch.tensor([float(self._rank)] * 2), torch.empty(2)
        both = [
            collectives.P2POp(collectives.isend, sent, after),
            collectives.P2POp(collectives.irecv, got, before),
        ]

        def exchange() -> None:
            for work in collectives.batch_isend_irecv(both):
                work.wait()

        exchange()
        step = self._timed(exchange, times=times)
        return replace(step, right=got.tolist() == [float(before)] * 2)

    def await_death(self) -> Named:
        """A barrier that a rank does not come to, because it dies."""
        named = -1
        try:
            collectives.barrier()
        except DistError as error:
            named = error.rank
        at_ns = time.monotonic_ns()
        with contextlib.suppress(DistError):
            collectives.destroy_process_group()
        return Named(at_ns, named)

    def _timed(self, call: Callable[[], object], times: int = 1) -> Step:
        calls_ns = []
        for _ in range(times):
            began = time.perf_counter_ns()
            call()
            calls_ns.append(time.perf_counter_ns() - began)
        requests, keys = (0, 0) if self._store is None else self._store.take()
        return Step(tuple(calls_ns), requests, keys, holdings())


def body(rank: int, connection: Connection, plan: Plan) -> None:
    """Body of a rank: carries out commands, each the name of a step and its arguments."""
    torch.set_num_threads(1)
    steps = _Rank(rank, plan)
    for name, arguments in commands(connection):
        if name == "await_death" and rank == victim_of(plan.world):
            _die(connection)
        connection.send(getattr(steps, name)(*arguments))


def _die(connection: Connection) -> None:
    time.sleep(_LAST_MOMENT_S)
    connection.send(Named(time.monotonic_ns(), -1))
    os.kill(os.getpid(), signal.SIGKILL)
