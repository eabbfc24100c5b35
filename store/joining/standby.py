"""Who serves a world's store next, once the rank that serves it is left out.

Every other rank listens on a socket that nobody accepts from, and all learn the addresses when the world
begins. That takes no thread. When ranks go on without the one that serves the store, the first of them serves
a new one on its socket, empty and with the same demands on its clients. Nothing has to be asked for that: all
who go on know who is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from collectives.errors import DistError, DistNetworkError, DistStoreError, PeerLostError
from collectives.store.joining.meeting_place import Listener, MeetingPlace, PlacedStore, connect
from collectives.store.records import Checked, demand, fields
from collectives.store.tcp import TCPStore
from collectives.store.tcp.interfaces import choose_addresses
from collectives.store.tcp.listen import is_loopback
from collectives.store.waiting import root_of


class Standby:
    """This rank's part, and what it knows of the others'.

    Attributes:
        server: the rank that serves the world's store; -1 where none does, so that the store stays.
        owns_store: whether the world's store ends with this.
    """

    owns_store = False

    def __init__(self, store: Any) -> None:
        """Listens where the store is a :class:`~collectives.TCPStore` that another process serves.

        Args:
            store: the world's store, which may have prefixes.
        """
        store = root_of(store)
        self.server = -1
        self._scope = ""
        self._addresses: list[list[Any]] = []
        self._listener: Listener | None = None
        self.serves = isinstance(store, TCPStore) and store.is_master
        if isinstance(store, TCPStore) and not store.is_master and not store.is_of_agent:
            # One that cannot listen serves no store; another rank will.
            with contextlib.suppress(DistNetworkError):
                self._listener = _listen(store)

    def offer(self) -> dict[str, Any]:
        """Returns what the others are told: whether this rank serves the store, and where it would."""
        return {"serves": self.serves, "standby": [] if self._listener is None else self._listener.address}

    def learn(self, scope: str, server: int, addresses: list[list[Any]]) -> None:
        """Takes what all ranks have offered.

        Args:
            scope: of the world's store; both ends of a connection to the next one prove it.
            server: the rank that serves the store; -1 for none.
            addresses: where each rank would serve; nothing where it would not.
        """
        self._scope, self.server, self._addresses = scope, server, addresses
        if server < 0:
            self.close()

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
        where, purpose = f"[rank {rank}]", f"store {self._scope}{host}:{port}"
        if server != rank:
            return connect(
                partial(PlacedStore, purpose, host, port),
                timeout,
                lambda: server in lost_ranks(),
                lambda: _gone(where, server),
                lambda: _late(where, server, timeout),
            )
        served = None if self._listener is None else self._listener.serve(purpose, timeout)
        if served is None:
            raise DistStoreError(f"{where} the standby of the store has been closed", rank)
        return served

    def go_on(self, ranks: Sequence[int]) -> None:
        """Counts ranks anew, once those who go on have a world of their own."""
        if self.server >= 0:
            server = self.server if self.server in ranks else self._next_server(ranks)
            self.server = ranks.index(server)
            self._addresses = [self._addresses[rank] for rank in ranks]

    def close(self) -> None:
        """Closes the socket, and the store that this rank serves in its stead; idempotent."""
        if self._listener is not None:
            self._listener.close()

    def _next_server(self, ranks: Sequence[int]) -> int:
        return next((rank for rank in ranks if self._addresses[rank]), -1)


class MetWorld:
    """Who serves the store next of a world whose members have met by their handles; as :class:`Standby`.

    Args:
        place: where this process is found.
        handles: of all members, by rank; the first serves the store.
    """

    owns_store = True

    def __init__(self, place: MeetingPlace, handles: Sequence[str]) -> None:
        self.server = 0
        self._place = place
        self._handles = list(handles)

    def leaves_with(self, ranks: Sequence[int]) -> bool:
        """Returns whether the store is served by a rank that is not among these."""
        return self.server not in ranks

    def next_store(
        self, rank: int, ranks: Sequence[int], timeout: timedelta, lost_ranks: Callable[[], Sequence[int]]
    ) -> TCPStore:
        """Returns the store of those who go on; as :meth:`Standby.next_store`."""
        where = f"[rank {rank}]"
        server = ranks[0]
        return self._place.store_at(
            self._handles[server],
            timeout,
            where,
            lambda: server in lost_ranks(),
            lambda: _gone(where, server),
            lambda: _late(where, server, timeout),
        )

    def go_on(self, ranks: Sequence[int]) -> None:
        """Counts ranks anew, once those who go on have a world of their own."""
        self.server = ranks.index(self.server) if self.server in ranks else 0
        self._handles = [self._handles[rank] for rank in ranks]

    def close(self) -> None:
        """Forgets what this process serves for the world; idempotent."""
        self._place.close()


def _gone(where: str, server: int) -> DistError:
    return PeerLostError(
        f"{where} rank {server}, which was to serve the store of the ranks that are left, has died or left, "
        "too; exclude it as well",
        server,
    )


def _late(where: str, server: int, timeout: timedelta) -> DistError:
    return DistStoreError(
        f"{where} rank {server} did not serve the store of the ranks that are left within "
        f"{timeout.total_seconds():g} s; all of them must call this",
        server,
        missing_ranks=[server],
    )


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


def _listen(store: TCPStore) -> Listener:
    """Listens where those who reach the store's server reach this process."""
    if is_loopback(store.host):
        return Listener("localhost")
    try:
        return Listener(choose_addresses(store, one_kernel=False).addresses[0])
    except DistNetworkError:  # a machine without a network
        return Listener("localhost")
