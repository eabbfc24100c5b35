"""What the two ranks of the measurement carry out."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

import torch

import collectives
from collectives.bench.core.groups import LOCALHOST, initialize
from collectives.bench.wire.ways import LIMIT_S, WAYS, Way, Wire, connected, without_bbr
from collectives.ranks.processes import commands

__all__ = ["OURS", "run_rank"]

_LABEL = "COLLECTIVES_HOST_MACHINE"

OURS: Final[Mapping[str, int]] = {"broadcast": 1, "all_reduce": 2}
"""Operations of ``host`` that move the bytes between the two ranks, and how often each byte crosses."""


class _Rank:
    """One rank: its ends of all connections, and its group; the first one sends.

    Args:
        rank: the rank that this process is.
        size: bytes to move.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._sent = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        self._bytes = self._sent.clone() if rank == 0 else torch.zeros_like(self._sent)
        self._numbers = torch.zeros(size // 4)
        self._file = os.memfd_create("collectives wire")
        if rank == 0:
            with open(self._file, "wb", closefd=False) as file:
                file.write(self._sent.numpy().data)
        self._server = socket.socket()
        without_bbr(self._server)
        self._server.bind((LOCALHOST, 0))
        self._server.listen()
        self._server.settimeout(LIMIT_S)
        self._calls: dict[str, Callable[[], object]] = {}

    def port(self) -> int:
        """Returns where the rank can be reached."""
        return int(self._server.getsockname()[1])

    def connect(self, port: int, store: int) -> None:
        """Makes the connections and the group.

        Args:
            port: of the second rank.
            store: the port of the parent's store.
        """
        view = self._bytes.numpy().data
        for name, way in WAYS.items():
            wire = Wire([self._end(way, port) for _ in range(way.connections)], view, self._file)
            self._calls[name] = partial(way.send if self._rank == 0 else way.receive, wire)
        os.environ[_LABEL] = f"machine {self._rank}"
        initialize(self._rank, 2, store, "host")
        self._calls["broadcast"] = partial(collectives.broadcast, self._bytes, 0)
        self._calls["all_reduce"] = partial(collectives.all_reduce, self._numbers)

    def _end(self, way: Way, port: int) -> socket.socket:
        if self._rank == 0:
            end = socket.socket()
            without_bbr(end)
            end.connect((LOCALHOST, port))
        else:
            end, _ = self._server.accept()  # in the order in which the other rank connects
            end.setblocking(True)
        return connected(way, end)

    def check(self, name: str) -> bool:
        """Moves the bytes once; returns whether they are right."""
        if self._rank == 1:
            self._bytes.zero_()
        self._numbers.fill_(1.0)
        self._calls[name]()
        if name == "all_reduce":
            return bool((self._numbers == 2).all())
        return torch.equal(self._bytes, self._sent)

    def move(self, name: str, times: int) -> tuple[int, int]:
        """Moves the bytes so often; returns the nanoseconds, and those of processors."""
        self._numbers.zero_()
        collectives.barrier()
        began, used = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(times):
            self._calls[name]()
        return time.perf_counter_ns() - began, time.process_time_ns() - used


def run_rank(rank: int, connection: Connection, size: int) -> None:
    """Body of a rank: carries out the steps that the parent names.

    Args:
        rank: the rank that this process is.
        connection: to the parent.
        size: bytes to move.
    """
    about = _Rank(rank, size)
    for step, *words in commands(connection):
        connection.send(getattr(about, step)(*words))
    collectives.destroy_process_group()
