"""Connections to a TCP store's server."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import collectives._native as _native
from collectives.errors import DistNetworkError, DistStoreError
from collectives.forks import call_in_forked_children
from collectives.store.tcp.connector import Connection, Connector, LocalConnection, Trust
from collectives.store.tcp.wire import REFUSAL_KEY, Command, text

__all__ = ["Client", "Connection", "Trust"]

_open: set[Client] = set()
"""Clients that nobody has closed.

Garbage collection ends whatever it finds beside a store, even where the store stays because C++ code holds it
(:mod:`collectives.store.keep_alive`). So it must not find connections: they live until they are closed.
"""

_IDLE_KEPT = 2
_LEAST_CONNECT_S = 2.0
"""How long another connection is tried for whatever the limit of the call."""
_REASON_S = 2.0
"""How long a server that has hung up may take to say why."""


class Client:
    """A few connections to one server, made when needed, so that threads do not wait for each other.

    They stay until :meth:`close`. They are made again in a process forked from this one: sockets must not be
    shared. A connection that breaks makes the client unusable, because a server found at the address later
    has lost the data. In the server's own process, requests that do not wait need no socket.

    Attributes:
        server: the server, where it runs in this process; ``None`` elsewhere, and once it is closed.
    """

    def __init__(
        self,
        host: str,
        port: int,
        shown_as: str,
        trust: Trust,
        timeout: float,
        server: _native.StoreServer | None = None,
    ) -> None:
        """Connects for the first time.

        Args:
            host: name or address to connect to; empty or a wildcard means this machine.
            port: port of the server.
            shown_as: ``host:port`` as error messages name it.
            trust: which servers are trusted.
            timeout: seconds to keep trying.
            server: the server, where it runs in this process.
        """
        self._connector = Connector(host, port, shown_as, trust)
        self._shown_as = shown_as
        self._lock = threading.RLock()
        self.server = server
        self._idle: list[Connection] = []
        self._idle_local: list[LocalConnection] = []
        self._connections: set[Connection | LocalConnection] = set()
        self._failure: str | None = None
        self._idle.append(self._connector.connect(timeout))
        self._connections.update(self._idle)
        call_in_forked_children(self, Client._after_fork)
        _open.add(self)

    @contextlib.contextmanager
    def connection(
        self, operation: str, timeout: float, *, waits: bool = False
    ) -> Iterator[Connection | LocalConnection]:
        """Lends a connection for one exchange of requests and replies.

        An exchange that is left by an exception has replies outstanding, so its connection is closed.

        Args:
            operation: name for error messages.
            timeout: seconds that making another connection may take.
            waits: whether a request in it waits for others.

        Raises:
            DistStoreError: the server ended the connection because it refuses what was asked.
            DistNetworkError: the connection broke, or the server did not answer in time.
        """
        connection = self._take(operation, timeout, waits)
        try:
            yield connection
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, OSError):
                self._raise_broken(operation, connection, error)
            raise
        with self._lock:
            self._put_back(connection, isinstance(connection, LocalConnection))

    def at_once(
        self, operation: str, form: str, fields: tuple[Any, ...], replies: str, limit: float
    ) -> list[Any] | None:
        """Returns the replies to requests that the server answers at once.

        A short way round :meth:`connection`, without its lock: Python's methods of lists and sets are single
        steps.

        Args:
            operation: name for error messages.
            form: of the fields of the requests.
            fields: of what the server carries out.
            replies: which replies there will be.
            limit: seconds until the server must have answered.

        Returns:
            The replies; ``None``, with nothing carried out, where :meth:`connection` is needed.

        Raises:
            DistStoreError: as :meth:`connection`.
            DistNetworkError: as :meth:`connection`.
            ValueError: a field cannot be; nothing is sent.
        """
        connection: Connection | LocalConnection
        is_local = self.server is not None
        try:
            connection = (self._idle_local if is_local else self._idle).pop()
        except IndexError:
            return None
        # By now close() has seen the connection in use, or this sees its failure.
        if self._failure is not None:
            self._drop(connection)
            return None
        try:
            found = connection.ask(form, fields, replies, limit)
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, OSError):
                self._raise_broken(operation, connection, error)
            raise
        self._put_back(connection, is_local)
        return found

    def close(self) -> None:
        """Closes all connections; calls that use one in another thread raise. Idempotent."""
        _open.discard(self)
        with self._lock:
            self._failure = self._failure or f"the store on {self._shown_as} was closed in this process"
            self.server = None
            idle: set[Connection | LocalConnection] = {*self._idle, *self._idle_local}
            self._idle, self._idle_local = [], []
            for connection in self._connections.difference(idle):
                connection.abort()
        for connection in idle:
            self._drop(connection)

    def __del__(self) -> None:  # at the end of the interpreter
        for connection in getattr(self, "_idle", ()):
            connection.close()

    def _take(self, operation: str, timeout: float, waits: bool) -> Connection | LocalConnection:
        connection: Connection | LocalConnection
        with self._lock:
            self._raise_failure(operation)
            server = None if waits else self.server
            # at_once() takes them without the lock, so that it is not enough to have seen one.
            with contextlib.suppress(IndexError):
                return (self._idle if server is None else self._idle_local).pop()
            if server is not None:
                connection = LocalConnection(server)
                self._connections.add(connection)
                return connection
        connection = self._connector.connect(max(timeout, _LEAST_CONNECT_S), again=True)
        try:
            with self._lock:
                self._raise_failure(operation)  # close() could not end what was not here yet
                self._connections.add(connection)
        except DistNetworkError:
            connection.close()
            raise
        return connection

    def _raise_failure(self, operation: str) -> None:
        if self._failure is not None:
            raise DistNetworkError(f"{operation}: {self._failure}")

    def _put_back(self, connection: Any, is_local: bool) -> None:
        """Puts a connection aside for the next exchange, unless there are enough, or after a failure."""
        idle: list[Any] = self._idle_local if is_local else self._idle
        if self._failure is None and len(idle) < _IDLE_KEPT:
            idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: Connection | LocalConnection) -> None:
        self._connections.discard(connection)
        connection.close()

    def _raise_broken(
        self, operation: str, connection: Connection | LocalConnection, error: OSError
    ) -> NoReturn:
        if isinstance(error, TimeoutError):
            raise DistNetworkError(
                f"{operation}: the store server at {self._shown_as} did not answer in time; is its "
                "process (rank 0, or torchrun's agent) stopped, or its machine unreachable?"
            ) from error
        if refusal := self._why_refused(connection):
            raise DistStoreError(
                f"{operation}: the store server at {self._shown_as} refused the request: {refusal}"
            ) from error
        self._failure = self._failure or (
            f"the connection to the store server at {self._shown_as} broke ({error}); "
            "the process that runs it (rank 0, or torchrun's agent) has ended or closed its store"
        )
        raise DistNetworkError(f"{operation}: {self._failure}") from error

    def _why_refused(self, connection: Connection | LocalConnection) -> str:
        """Returns what the server says of a connection that has ended; empty if it is gone, or is torch's."""
        deadline = time.monotonic() + _REASON_S
        if self._failure is not None:
            return ""
        try:
            asking = self._connector.connect_once(deadline)
            try:
                request = bytes([Command.GET]) + text(REFUSAL_KEY + connection.name)
                (why,) = asking.exchange(request, "v", deadline)
                return bytes(why).decode(errors="replace")
            finally:
                asking.close()
        except (OSError, DistNetworkError):
            return ""

    def _after_fork(self) -> None:
        """Forgets the parent's connections; the lock may have been held by a thread that is not here."""
        self._lock = threading.RLock()
        for connection in self._connections:
            connection.close()
        self.server = None
        self._idle = []
        self._idle_local = []
        self._connections = set()
