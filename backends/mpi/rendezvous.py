"""Rendezvous at ``mpi://``: the processes that ``mpirun`` started find each other through MPI itself.

Rank and number of ranks are those of MPI's world. Rank 0 serves a :class:`~collectives.TCPStore` on a free
port and tells all others where, by a message of MPI. Where all ranks are on one machine it listens on
loopback, else on the interface that ``COLLECTIVES_SOCKET_IFNAME`` names, or that leads to the address of the
host's name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from collectives.backends.mpi.libmpi import Library, job_size_error, library
from collectives.core.types import default_pg_timeout
from collectives.errors import DistStoreError
from collectives.store import TCPStore, register_rendezvous_handler
from collectives.store.tcp.interfaces import choose_addresses

__all__ = ["handle_url"]

_TAG = 28_009
"""Of the message that tells where the store is; an odd one, because users' messages go that way, too."""

_MESSAGE_BYTES = 512
_NAP_SECONDS = 0.001

_abandoned: list[Any] = []
"""Requests of messages that MPI may still send, with their memory."""


def handle_url(url: str, timeout: timedelta = default_pg_timeout) -> Iterator[tuple[TCPStore, int, int]]:
    """Yields the store, rank and size of MPI's world; the handler of ``mpi://``.

    Args:
        url: ``mpi://``, with the rank and the world size that the caller believes in, if any, in the query.
        timeout: time limit for ranks to come; afterwards that of the store.

    Raises:
        ValueError: rank or world size are not those of MPI.
        DistStoreError: rank 0 did not tell in time where the store is.
        DistBackendError: there is no MPI.
    """
    given = dict(parse_qsl(urlsplit(url).query))
    unknown = given.keys() - {"rank", "world_size"}
    if unknown:
        raise ValueError(f"{url!r} has unknown parameters {sorted(unknown)}; there are rank and world_size")
    started = library()
    world = started.mpi.COMM_WORLD
    rank, size = int(world.Get_rank()), int(world.Get_size())
    if int(given.get("world_size", size)) != size:
        raise ValueError(
            f"world_size is {given['world_size']}, but {job_size_error(size, int(given['world_size']))}"
        )
    if int(given.get("rank", rank)) != rank:
        raise ValueError(f"rank is {given['rank']}, but MPI says that this process is rank {rank} of {size}")
    started.check_thread(f"[rank {rank}] rendezvous at mpi://:")
    if rank == 0:
        yield _serve(started, size, timeout), rank, size
    else:
        host, port = _receive_address(started, rank, timeout)
        yield TCPStore(host, port, size, is_master=False, timeout=timeout), rank, size
    raise RuntimeError("a process cannot meet the others at mpi:// again through the same rendezvous")


def _serve(started: Library, size: int, timeout: timedelta) -> TCPStore:
    alone = started.local_size >= size
    host = "127.0.0.1" if alone else choose_addresses(None, one_kernel=False).addresses[0]
    store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    text = json.dumps([host, store.port]).encode().ljust(_MESSAGE_BYTES)
    message = bytearray(text)
    world = started.mpi.COMM_WORLD
    with started.lock():
        requests = [world.Isend([message, started.mpi.BYTE], other, _TAG) for other in range(1, size)]
    _complete(started, requests, timeout, "ranks did not take the address of the store")
    return store


def _receive_address(started: Library, rank: int, timeout: timedelta) -> tuple[str, int]:
    message = bytearray(_MESSAGE_BYTES)
    with started.lock():
        request = started.mpi.COMM_WORLD.Irecv([message, started.mpi.BYTE], 0, _TAG)
    _complete(started, [request], timeout, f"[rank {rank}] rank 0 did not tell where the store is")
    host, port = json.loads(message)
    return host, port


def _complete(started: Library, requests: list[Any], timeout: timedelta, what: str) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    lock = started.lock()
    while True:
        with lock:
            if started.mpi.Request.Testall(requests):
                return
        if time.monotonic() > deadline:
            break
        time.sleep(_NAP_SECONDS)
    with lock:
        for request in requests:
            request.Cancel()
        if not started.mpi.Request.Testall(requests):  # few libraries cancel what is sent
            _abandoned.extend(requests)
    raise DistStoreError(
        f"{what} within {timeout.total_seconds():g} s; all processes that mpirun started must call "
        "init_process_group"
    )


register_rendezvous_handler("mpi", handle_url)
