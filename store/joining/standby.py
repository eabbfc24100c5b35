"""Who serves a world's store next, once the rank that serves it is left out.

Every other rank listens on a socket that nobody accepts from, and all learn the addresses when the world
begins. That takes no thread. When ranks go on without the one that serves the store, the first of them serves
a new one on its socket, empty and with the same demands on its clients. Nothing has to be asked for that: all
who go on know who is left out.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from collectives.errors import DistError, DistNetworkError, DistStoreError, PeerLostError
from collectives.forks import call_in_forked_children
from collectives.store.records import Checked, demand, fields
from collectives.store.tcp import TCPStore
from collectives.store.tcp.client import UnprovedError
from collectives.store.tcp.interfaces import choose_addresses
from collectives.store.tcp.listen import is_loopback, open_listeners
from collectives.store.waiting import root_of

_FIRST_LIMIT_S = 0.2
_LONGEST_LIMIT_S = 2.0
"""How long connecting to the next server is tried before it is asked whether that rank is lost."""


class Standby:
    """This rank's part, and what it knows of the others'.

    Attributes:
        server: the rank that serves the world's store; -1 where none does, so that the store stays.
    """

    def __init__(self, store: Any) -> None:
        """Listens where the store is a :class:`~collectives.TCPStore` that another process serves.

        Args:
            store: the world's store, which may have prefixes.
        """
        store = root_of(store)
        self.server = -1
        self._scope = ""
        self._addresses: list[list[Any]] = []
        self._served: TCPStore | None = None
        self._listener: socket.socket | None = None
        self.serves = isinstance(store, TCPStore) and store.is_master
        if isinstance(store, TCPStore) and not store.is_master and not store.is_of_agent:
            # One that cannot listen serves no store; another rank will.
            with contextlib.suppress(DistNetworkError):
                self._listener = _listen(store)
        call_in_forked_children(self, Standby._close_listener)

    def offer(self) -> dict[str, Any]:
        """Returns what the others are told: whether this rank serves the store, and where it would."""
        place = [] if self._listener is None else list(self._listener.getsockname()[:2])
        return {"serves": self.serves, "standby": place}

    def learn(self, scope: str, server: int, addresses: list[list[Any]]) -> None:
        """Takes what all ranks have offered.

        Args:
            scope: of the world's store; both ends of a connection to the next one prove it.
            server: the rank that serves the store; -1 for none.
            addresses: where each rank would serve; nothing where it would not.
        """
        self._scope, self.server, self._addresses = scope, server, addresses
        if server < 0:
            self._close_listener()

    def leaves_with(self, ranks: Sequence[int]) -> bool:
        """Returns whether the store is served by a rank that is not among these."""
        return self.server >= 0 and self.server not in ranks

    def next_store(
        self, rank: int, ranks: Sequence[int], timeout: timedelta, lost_ranks: Callable[[], Sequence[int]]
    ) -> TCPStore:
        """Returns the store of those who go on: called by all of them, with the same ranks.

        Args:
            rank: this rank.
            ranks: all who go on.
            timeout: time limit for the one who serves, and of the store.
            lost_ranks: which ranks are known to have died; asked again and again.

        Raises:
            PeerLostError: the one who would serve has died.
            DistStoreError: it did not serve in time, or none of them can.
            DistNetworkError: it is not to be trusted, or cannot be reached.
        """
        server = self._next_server(ranks)
        if server < 0:
            raise DistStoreError(
                f"[rank {rank}] the store went with rank {self.server}, and none of the ranks {list(ranks)} "
                "has a port on which it could serve another; start all ranks again",
                self.server,
            )
        host, port = self._addresses[server]
        store = partial(_NextStore, self._scope, host, port, wait_for_workers=False)
        if server != rank:
            return _connect(rank, server, store, timeout, lost_ranks)
        if self._served is None and self._listener is not None:
            self._served = store(is_master=True, timeout=timeout, master_listen_fd=self._listener.detach())
        if self._served is None:
            raise DistStoreError(f"[rank {rank}] the standby of the store has been closed", rank)
        return self._served

    def go_on(self, ranks: Sequence[int]) -> None:
        """Counts ranks anew, once those who go on have a world of their own."""
        if self.server >= 0:
            server = self.server if self.server in ranks else self._next_server(ranks)
            self.server = ranks.index(server)
            self._addresses = [self._addresses[rank] for rank in ranks]

    def close(self) -> None:
        """Closes the socket, and the store that this rank serves in its stead; idempotent."""
        self._close_listener()
        if self._served is not None:
            self._served.close()

    def _next_server(self, ranks: Sequence[int]) -> int:
        return next((rank for rank in ranks if self._addresses[rank]), -1)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class _NextStore(TCPStore):
    """A store whose server and clients prove to each other that they are of one world, and which place it is.

    Args:
        scope: of the world's store.
        host: name or address of the server.
        port: its port.
        options: further arguments of :class:`~collectives.TCPStore`.
    """

    def __init__(self, scope: str, host: str, port: int, **options: Any) -> None:
        self._purpose = f"store {scope}{host}:{port}"
        super().__init__(host, port, **options)


def offer(record: Any) -> Checked:
    """Checks what a rank offers."""
    found = fields(record, serves=bool, standby=list)
    _demand_address(found["standby"])
    return found


def succession(record: Any, size: int) -> Checked:
    """Checks ``server``, who serves the store or -1, and ``addresses``, where each rank would."""
    found = fields(record, server=int, addresses=list)
    demand(-1 <= found["server"] < size, f"the server {found['server']}")
    count = size if found["server"] >= 0 else 0
    demand(len(found["addresses"]) == count, f"{len(found['addresses'])} addresses of {size} ranks")
    for address in found["addresses"]:
        _demand_address(address)
    return found


def _demand_address(address: Any) -> None:
    right = isinstance(address, list) and [type(part) for part in address] in ([], [str, int])
    demand(right and (not address or 0 < address[1] < 2**16), f"the address {address!r}")


def _listen(store: TCPStore) -> socket.socket:
    """Returns a socket that listens where those who reach the store's server reach this process."""
    if is_loopback(store.host):
        host = "localhost"
    else:
        try:
            host = choose_addresses(store, one_kernel=False).addresses[0]
        except DistNetworkError:  # a machine without a network
            host = "localhost"
    first, *others = open_listeners(host, 0)
    for other in others:
        other.close()
    return first


def _connect(
    rank: int,
    server: int,
    store: Callable[..., TCPStore],
    timeout: timedelta,
    lost_ranks: Callable[[], Sequence[int]],
) -> TCPStore:
    end = time.monotonic() + timeout.total_seconds()
    limit = _FIRST_LIMIT_S
    while True:
        left = max(end - time.monotonic(), 0.001)
        try:
            connected = store(timeout=timedelta(seconds=min(limit, left)))
        except DistNetworkError as error:
            failed: DistError = error
            cause = error.__cause__
        else:
            connected.set_timeout(timeout)
            return connected
        # It has listened since the world began.
        refused = isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED
        if refused or server in lost_ranks():
            raise PeerLostError(
                f"[rank {rank}] rank {server}, which was to serve the store of the ranks that are left, has "
                "died or left, too; exclude it as well",
                server,
            ) from failed
        if not isinstance(cause, OSError) or isinstance(cause, UnprovedError):
            raise failed
        if time.monotonic() >= end:
            raise DistStoreError(
                f"[rank {rank}] rank {server} did not serve the store of the ranks that are left within "
                f"{timeout.total_seconds():g} s; all of them must call this",
                server,
                missing_ranks=[server],
            ) from failed
        limit = min(2 * limit, _LONGEST_LIMIT_S)
