"""Connections to a TCP store's server."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import collectives._native as _native
from collectives.errors import DistNetworkError, DistStoreError
from collectives.forks import call_in_forked_children
from collectives.logs import Log
from collectives.secret import SECRET, WAY_OUT
from collectives.store.tcp.proof import PROOF_WANTED, UnprovedError, prove
from collectives.store.tcp.wire import MAGIC, REFUSAL_KEY, TURNED_AWAY, Command, text, u32

__all__ = ["Client", "Connection", "Trust"]

log = Log()

_open: set[Client] = set()
"""Clients that nobody has closed.

Garbage collection ends whatever it finds beside a store, even where the store stays because C++ code holds it
(:mod:`collectives.store.keep_alive`). So it must not find connections: they live until they are closed.
"""

_IDLE_KEPT = 2
_FIRST_RETRY_S = 0.01
_LONGEST_RETRY_S = 1.0
_LAST_TRY_S = 0.05
"""How long before the limit the last try begins."""
_GONE_S = 1.0
"""How long a client that has been connected before tries where nobody listens any more."""
_SILENT_S = 10.0
"""How long a client tries to connect before it says so, once."""
_ANSWER_S = 10.0
"""How long a freshly connected server may take to answer the first ping before the next try."""
_REASON_S = 2.0
"""How long a server that has hung up may take to say why."""
_REASON_BYTES = 1024
_UNPROVED_S = 2.0
"""How long a server may break handshakes off: one that is about to end does it, too."""


@dataclass(frozen=True)
class Trust:
    """Which servers a client trusts.

    Attributes:
        key: what both ends prove that they know; ``None`` without a proof.
        own_user_only: whether only servers of this user on this machine are trusted.
    """

    key: bytes | None = None
    own_user_only: bool = False


class Connection:
    """One socket to the server, used by one thread at a time."""

    def __init__(self, sock: socket.socket, name: bytes) -> None:
        """Takes over a connected socket.

        Args:
            sock: the socket.
            name: bytes of the connection's first ping, by which our server knows it.
        """
        self._socket = sock
        self.name = name

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def abort(self) -> None:
        """Ends an exchange that another thread is in; that thread gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes, deadline: float) -> None:
        """Sends all of ``data``; raises :class:`TimeoutError` or another :class:`OSError`."""
        self._socket.settimeout(_remaining(deadline))
        self._socket.sendall(data)

    def receive(self, size: int, deadline: float) -> bytes:
        """Returns the next ``size`` bytes; raises :class:`TimeoutError` or another :class:`OSError`."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._socket.settimeout(_remaining(deadline))
            count = self._socket.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the server closed the connection")
            view = view[count:]
        return bytes(data)

    def receive_byte(self, deadline: float) -> int:
        """Returns the next byte as a number."""
        return self.receive(1, deadline)[0]

    def receive_i64(self, deadline: float) -> int:
        """Returns the next signed 64-bit integer."""
        number: int = struct.unpack("<q", self.receive(8, deadline))[0]
        return number

    def receive_text(self, deadline: float) -> bytes:
        """Returns the next value: its length comes first."""
        (size,) = struct.unpack("<Q", self.receive(8, deadline))
        if size > 2**40:
            raise ConnectionResetError(f"the server announced a value of {size} bytes, which cannot be")
        return self.receive(size, deadline)


class Client:
    """A few connections to one server, made when needed, so that threads do not wait for each other.

    They stay until :meth:`close`. They are made again in a process forked from this one: sockets must not be
    shared. A connection that breaks makes the client unusable, because a server found at the address later
    has lost the data.
    """

    def __init__(self, host: str, port: int, shown_as: str, trust: Trust, timeout: float) -> None:
        """Connects for the first time.

        Args:
            host: name or address to connect to; empty or a wildcard means this machine.
            port: port of the server.
            shown_as: ``host:port`` as error messages name it.
            trust: which servers are trusted.
            timeout: seconds to keep trying.
        """
        self._host = "localhost" if host in {"", "0.0.0.0", "::"} else host  # noqa: S104
        self._port = port
        self._shown_as = shown_as
        self._trust = trust
        self._lock = threading.RLock()
        self._idle: list[Connection] = []
        self._in_use: set[Connection] = set()
        self._failure: str | None = None
        self._idle.append(self._connect(timeout))
        call_in_forked_children(self, Client._after_fork)
        _open.add(self)

    @contextlib.contextmanager
    def connection(self, operation: str, timeout: float) -> Iterator[Connection]:
        """Lends a connection for one exchange of requests and replies.

        An exchange that is left by an exception has replies outstanding, so its connection is closed.

        Args:
            operation: name for error messages.
            timeout: seconds that making another connection may take.

        Raises:
            DistStoreError: the server ended the connection because it refuses what was asked.
            DistNetworkError: the connection broke, or the server did not answer in time.
        """
        connection = self._take(operation, timeout)
        try:
            yield connection
        except BaseException as error:
            with self._lock:
                self._in_use.discard(connection)
            connection.close()
            if isinstance(error, TimeoutError):
                raise DistNetworkError(
                    f"{operation}: the store server at {self._shown_as} did not answer in time; is its "
                    "process (rank 0, or torchrun's agent) stopped, or its machine unreachable?"
                ) from error
            if isinstance(error, OSError):
                if refusal := self._why_refused(connection):
                    raise DistStoreError(
                        f"{operation}: the store server at {self._shown_as} refused the request: {refusal}"
                    ) from error
                self._failure = self._failure or (
                    f"the connection to the store server at {self._shown_as} broke ({error}); "
                    "the process that runs it (rank 0, or torchrun's agent) has ended or closed its store"
                )
                raise DistNetworkError(f"{operation}: {self._failure}") from error
            raise
        with self._lock:
            self._in_use.discard(connection)
            keep = len(self._idle) < _IDLE_KEPT and self._failure is None
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def close(self) -> None:
        """Closes all connections; calls that use one in another thread raise. Idempotent."""
        _open.discard(self)
        with self._lock:
            self._failure = self._failure or f"the store on {self._shown_as} was closed in this process"
            idle, self._idle = self._idle, []
            for connection in self._in_use:
                connection.abort()
        for connection in idle:
            connection.close()

    def __del__(self) -> None:  # at the end of the interpreter
        for connection in getattr(self, "_idle", ()):
            connection.close()

    def _take(self, operation: str, timeout: float) -> Connection:
        with self._lock:
            if self._failure is not None:
                raise DistNetworkError(f"{operation}: {self._failure}")
            if self._idle:
                connection = self._idle.pop()
                self._in_use.add(connection)
                return connection
        connection = self._connect(max(timeout, _ANSWER_S), again=True)
        with self._lock:
            self._in_use.add(connection)
        return connection

    def _why_refused(self, connection: Connection) -> str:
        """Returns what the server says of a connection that has ended; empty if it is gone, or is torch's."""
        deadline = time.monotonic() + _REASON_S
        if self._failure is not None:
            return ""
        try:
            asking = self._connect_once(deadline)
            try:
                asking.send(bytes([Command.GET]) + text(REFUSAL_KEY + connection.name), deadline)
                return asking.receive_text(deadline).decode(errors="replace")
            finally:
                asking.close()
        except (OSError, DistNetworkError):
            return ""

    def _connect(self, timeout: float, *, again: bool = False) -> Connection:
        start = time.monotonic()
        delay = _FIRST_RETRY_S
        attempts = 0
        end = start + timeout
        told = timeout <= _SILENT_S
        while True:
            attempts += 1
            try:
                return self._connect_once(end)
            except OSError as error:
                if isinstance(error, UnprovedError):
                    end = min(end, time.monotonic() + _UNPROVED_S)
                elif again and isinstance(error, ConnectionRefusedError):
                    # A server that was there and listens no more has ended.
                    end = min(end, start + _GONE_S)
                # A server that has not started yet, a name that is not known yet, a full backlog: try again.
                # The jitter keeps many ranks that were started together from connecting together.
                pause = delay * random.uniform(0.5, 1.0)  # noqa: S311
                left = end - _LAST_TRY_S - time.monotonic()
                if left <= 0:
                    if isinstance(error, UnprovedError):
                        raise DistNetworkError(
                            f"the store server at {self._shown_as} is not trusted: {error}"
                        ) from error
                    raise DistNetworkError(
                        f"no store server answers at {self._shown_as}: gave up after "
                        f"{time.monotonic() - start:.1f} s (limit {timeout:g} s) and "
                        f"{attempts} attempts, the last one: {_reason(error)}. Does the process that runs "
                        "the server (rank 0, or torchrun's agent) run? Do MASTER_ADDR and MASTER_PORT name "
                        "its machine and port on all ranks, and does no firewall stand between?"
                    ) from error
                if not told and time.monotonic() - start >= _SILENT_S:
                    told = True
                    log.warning(
                        "no store server answers at %s since %g s (%s); this process tries for %g s. Rank 0 "
                        "serves the store there, or torchrun's agent where that is MASTER_ADDR:MASTER_PORT",
                        self._shown_as,
                        _SILENT_S,
                        _reason(error),
                        timeout,
                    )
            time.sleep(min(pause, left))
            delay = min(2 * delay, _LONGEST_RETRY_S)

    def _connect_once(self, deadline: float) -> Connection:
        try:
            addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise ValueError(f"{self._host!r} cannot be the name of a machine: {error}") from error
        if self._trust.own_user_only:
            known, addresses = addresses, [one for one in addresses if _is_of_this_machine(str(one[4][0]))]
            if known and not addresses:
                raise DistNetworkError(
                    f"the store server at {self._shown_as} is on another machine, and this process has "
                    f"no job secret; {WAY_OUT}"
                )
        errors: list[OSError] = []
        try:
            for family, kind, protocol, _, address in addresses:
                sock = None
                try:
                    sock = socket.socket(family, kind, protocol)
                    return self._greet(sock, address, deadline)
                except OSError as error:
                    errors.append(error)
                    if sock is not None:
                        sock.close()
                except BaseException:
                    if sock is not None:
                        sock.close()
                    raise
            raise errors[-1] if errors else OSError(f"{self._host!r} has no address")
        finally:
            errors.clear()  # one that this frame knew would be in a cycle, with the client and its store

    def _greet(self, sock: socket.socket, address: tuple[object, ...], deadline: float) -> Connection:
        answer_by = min(deadline, time.monotonic() + _ANSWER_S)
        sock.settimeout(_remaining(answer_by))
        sock.connect(address)
        if sock.getsockname() == sock.getpeername():
            # Linux may connect a socket to itself while nobody listens on a port of the ephemeral range.
            raise ConnectionRefusedError("nobody listens there")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonce = u32(random.getrandbits(32))
        connection = Connection(sock, nonce)
        if self._trust.key is not None:
            prove(connection, self._trust.key, answer_by)
        connection.send(bytes([Command.VALIDATE]) + u32(MAGIC) + bytes([Command.PING]) + nonce, answer_by)
        answer = connection.receive(4, answer_by)
        if answer == PROOF_WANTED != nonce:
            raise DistNetworkError(
                f"the store server at {self._shown_as} takes only processes that know its job's secret, and "
                f"this one has none: set {SECRET}, or {SECRET}_FILE, as it is there"
            )
        if answer != nonce:
            _raise_turned_away(connection, answer, answer_by)
            raise DistNetworkError(
                f"what listens at {self._shown_as} is no store server: it answered {answer!r}. "
                "Is MASTER_PORT the port of another service?"
            )
        if self._trust.own_user_only and (where := _native.peer_process(sock.fileno())) != "of this user":
            raise UnprovedError(
                f"without a job secret its process must be one of user {os.geteuid()} on this machine, but "
                f"as far as the kernel says, it is {where}; {WAY_OUT}"
            )
        return connection

    def _after_fork(self) -> None:
        """Forgets the parent's connections; the lock may have been held by a thread that is not here."""
        self._lock = threading.RLock()
        for connection in (*self._idle, *self._in_use):
            connection.close()
        self._idle = []
        self._in_use = set()


def _raise_turned_away(connection: Connection, start: bytes, deadline: float) -> None:
    """Raises an error that says why a server of ours cannot keep a connection, if that is what it sends."""
    if not TURNED_AWAY.startswith(start):
        return
    said = bytearray(start)
    with contextlib.suppress(ConnectionResetError):
        while len(said) < _REASON_BYTES:
            said += connection.receive(1, deadline)
    if said.startswith(TURNED_AWAY):
        raise ConnectionRefusedError(said.removeprefix(TURNED_AWAY).decode(errors="replace"))


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return min(remaining, 1e6)


def _is_of_this_machine(address: str) -> bool:
    """Tells whether this machine has a network address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.partition("%")[0], 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
