"""Connections to a TCP store's server: how a client gets one, which servers it trusts, how it keeps a few."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import collectives._native as _native
from collectives.errors import DistNetworkError, DistStoreError
from collectives.forks import call_in_forked_children
from collectives.logs import Log
from collectives.secret import SECRET, WAY_OUT
from collectives.store.encryption import ENCRYPTION, Encryption, check_libcrypto
from collectives.store.tcp.wire import MAGIC, REFUSAL_KEY, TURNED_AWAY, Command, text, u32

log = Log()

PROOF_WANTED = b"auth"
"""What a server that asks for a proof answers to a client that sends a request instead."""
_NO_ROOM = "the store's server has no room for another connection; raise `ulimit -n` where the server runs"
_SET_THE_SAME = f"set {SECRET}, or {SECRET}_FILE, and {ENCRYPTION} to the same for all processes of the job"
_DIFFERENT = f"it does not know this job's secret: its process has none, or another one; {_SET_THE_SAME}"
_HUNG_UP = (
    "it closed the connection before both had proved this job's secret: its process has none or another "
    f"one, or ends; {_SET_THE_SAME}"
)


class UnprovedError(ConnectionError):
    """The server has not shown that it is to be trusted."""


def prove(connection: _native.StoreSocketConnection, key: bytes, encrypts: bool, deadline: float) -> None:
    """Proves that this process knows the key, and has the server prove it.

    Args:
        connection: a connection on which nothing has been sent.
        key: what both ends know.
        encrypts: whether what follows is encrypted; both ends must want the same.
        deadline: until when, by ``time.monotonic()``.

    Raises:
        ConnectionRefusedError: the server cannot keep the connection.
        UnprovedError: the server closed the connection, or it broke, or the server does not know the key.
        NoStoreError: the server wants to encrypt and this process does not, or the other way round.
        OSError: the connection broke, or time ran out.
    """
    try:
        proved = connection.prove(key, encrypts, deadline)
    except TimeoutError as error:
        raise TimeoutError("no answer to the proof of the job's secret, as of a TCPStore of torch") from error
    except ConnectionError as error:
        raise UnprovedError(
            f"the connection broke before both had proved this job's secret ({_reason(error)}): its process "
            f"has ended, or has no secret, or the network resets connections; {_SET_THE_SAME}"
        ) from error
    if proved == "turned away":
        raise ConnectionRefusedError(_NO_ROOM)  # not its words: it has proved nothing
    if proved == "differ":
        this, other = ("encrypts", "does not") if encrypts else ("does not encrypt", "does")
        raise NoStoreError(
            f"this process {this} its connection with the store's server, and that {other}, or has no "
            f"libcrypto; set {ENCRYPTION} to the same for all processes of the job"
        )
    if proved != "both":
        raise UnprovedError(_HUNG_UP if proved == "ended" else _DIFFERENT)


# ---- getting a connection ----------------------------------------------------------------------------------

_FIRST_RETRY_S = 0.01
_LONGEST_RETRY_S = 1.0
_LAST_TRY_S = 0.05
"""How long before the limit the last try begins."""
_GONE_S = 1.0
"""How long a client that has been connected before tries where nobody listens any more."""
_SILENT_S = 10.0
"""How long a client tries to connect before it says so, once."""
ANSWER_S = 10.0
"""How long a freshly connected server may take to answer the first ping before the next try."""
_REASON_BYTES = 1024
_UNPROVED_S = 0.5
"""How long a server may break handshakes off: one that is about to end does it, too."""


class NoStoreError(DistNetworkError):
    """There is no server, or none to be trusted, however often one tries."""


@dataclass(frozen=True)
class Trust:
    """Which servers a client trusts.

    Attributes:
        key: what both ends prove that they know; ``None`` without a proof.
        own_user_only: whether only servers of this user on this machine are trusted.
        encryption: which connections are encrypted, where there is a key.
    """

    key: bytes | None = None
    own_user_only: bool = False
    encryption: Encryption = Encryption.BETWEEN_MACHINES


class Connection(_native.StoreSocketConnection):
    """One socket to the server, used by one thread at a time.

    The exchanges are the core's (``collectives/_native.pyi``); deadlines are moments of ``time.monotonic()``.
    """

    def __init__(self, sock: socket.socket, name: bytes) -> None:
        """Takes over a connected socket.

        Args:
            sock: the socket.
            name: bytes of the connection's first ping, by which our server knows it.
        """
        super().__init__(sock.fileno())
        self._socket = sock
        self.name = name

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def abort(self) -> None:
        """Ends an exchange that another thread is in; that thread gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class LocalConnection(_native.StoreLocalConnection):
    """To a server of this process, without a socket; not for requests that wait."""

    def __init__(self, server: _native.StoreServer) -> None:
        """Greets the server.

        Args:
            server: where the requests go, as long as others keep it.

        Raises:
            ConnectionResetError: it has ended.
        """
        super().__init__(server)
        self.name = u32(random.getrandbits(32))
        self.exchange(_greeting(self.name), "u", math.inf)

    def close(self) -> None:
        """Does nothing: it ends with its last reference."""

    def abort(self) -> None:
        """Does nothing: no exchange waits."""


class Connector:
    """Makes connections to one server.

    Args:
        host: name or address to connect to; empty or a wildcard means this machine.
        port: port of the server.
        shown_as: ``host:port`` as error messages name it.
        trust: which servers are trusted.
    """

    def __init__(self, host: str, port: int, shown_as: str, trust: Trust) -> None:
        self._host = "localhost" if host in {"", "0.0.0.0", "::"} else host  # noqa: S104
        self._port = port
        self._shown_as = shown_as
        self._trust = trust

    def connect(self, timeout: float, *, again: bool = False) -> Connection:
        """Returns a connection; tries again until there is one.

        Args:
            timeout: seconds to keep trying.
            again: whether there has been one before.

        Raises:
            NoStoreError: there is none in that time, or what answers is not to be trusted.
        """
        start = time.monotonic()
        delay = _FIRST_RETRY_S
        attempts = 0
        end = start + timeout
        told = timeout <= _SILENT_S
        unproved = ""  # the text alone, since an error that this frame knew would be in a cycle
        unproved_since = 0.0
        answered = ""
        while True:
            attempts += 1
            try:
                return self.connect_once(end)
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    raise NoStoreError(
                        f"no further connection to the store server at {self._shown_as} can be made: "
                        f"{error.strerror}; raise the limit of open files (ulimit -n), or close some"
                    ) from error
                if not isinstance(error, (UnprovedError, TimeoutError)):
                    unproved = ""
                elif isinstance(error, UnprovedError):
                    unproved_since = unproved_since if unproved else time.monotonic()
                    unproved = str(error)
                reason = _reason(error)
                if not isinstance(error, TimeoutError):
                    answered = reason
                elif answered:  # which says more, as of a server that has no room
                    reason += f"; before: {answered}"
                if again and isinstance(error, ConnectionRefusedError):
                    # A server that was there and listens no more has ended.
                    end = min(end, start + _GONE_S)
                # A server that has not started yet, a name that is not known yet, a full backlog: try again.
                # The jitter keeps many ranks that were started together from connecting together.
                pause = delay * random.uniform(0.5, 1.0)  # noqa: S311
                now = time.monotonic()
                left = end - _LAST_TRY_S - now
                if unproved and (left <= 0 or now >= unproved_since + _UNPROVED_S):
                    raise NoStoreError(
                        f"the store server at {self._shown_as} is not trusted: {unproved}"
                    ) from error
                if left <= 0:
                    raise NoStoreError(
                        f"no store server answers at {self._shown_as}: gave up after "
                        f"{time.monotonic() - start:.1f} s (limit {timeout:g} s) and "
                        f"{attempts} attempt{'s' if attempts > 1 else ''}, the last one: "
                        f"{reason}. Does the process that runs the server (rank 0, or torchrun's "
                        "agent) run? Do MASTER_ADDR and MASTER_PORT name its machine and port on all ranks, "
                        "and does no firewall stand between?"
                    ) from error
                if not told and time.monotonic() - start >= _SILENT_S:
                    told = True
                    log.warning(
                        "no store server answers at %s since %g s (%s); this process tries for %g s. Rank 0 "
                        "serves the store there, or torchrun's agent where that is MASTER_ADDR:MASTER_PORT",
                        self._shown_as,
                        _SILENT_S,
                        reason,
                        timeout,
                    )
            time.sleep(min(pause, left))
            delay = min(2 * delay, _LONGEST_RETRY_S)

    def connect_once(self, deadline: float) -> Connection:
        """Returns a connection at the first try, or raises :class:`OSError` or as :meth:`connect` does."""
        try:
            addresses = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise ValueError(f"{self._host!r} cannot be the name of a machine: {error}") from error
        if self._trust.own_user_only:
            known, addresses = addresses, [one for one in addresses if is_of_this_machine(str(one[4][0]))]
            if known and not addresses:
                raise NoStoreError(
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
        answer_by = min(deadline, time.monotonic() + ANSWER_S)
        sock.settimeout(_remaining(answer_by))
        sock.connect(address)
        if sock.getsockname() == sock.getpeername():
            # Linux may connect a socket to itself while nobody listens on a port of the ephemeral range.
            raise ConnectionRefusedError("nobody listens there")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setblocking(True)  # the core keeps time limits
        nonce = u32(random.getrandbits(32))
        connection = Connection(sock, nonce)
        leaves = not _native.within_machine(sock.fileno())
        if self._trust.key is not None:
            encrypts = self._trust.encryption.encrypts(leaves)
            if encrypts:
                check_libcrypto()
            prove(connection, self._trust.key, encrypts, answer_by)
        elif leaves and self._trust.encryption is Encryption.ON:
            raise NoStoreError(
                f"{ENCRYPTION}=on, and torchrun's agent on another machine serves the store at "
                f"{self._shown_as}, in clear; have rank 0 serve it (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for "
                f"torchrun on all nodes), or unset {ENCRYPTION}: without it, tensors are encrypted between "
                "machines as well"
            )
        connection.send(_greeting(nonce), answer_by)
        try:
            answer = connection.receive(4, answer_by)
        except TimeoutError as error:
            raise TimeoutError(
                "what listens there does not answer: another service, or a stopped one"
            ) from error
        if answer == PROOF_WANTED != nonce:
            raise NoStoreError(
                f"the store server at {self._shown_as} takes only processes that know its job's secret, and "
                f"this one has none: set {SECRET}, or {SECRET}_FILE, as it is there"
            )
        if answer != nonce:
            _raise_turned_away(connection, answer, answer_by)
            raise NoStoreError(
                f"what listens at {self._shown_as} is no store server: it answered {answer!r}. "
                "Is MASTER_PORT the port of another service?"
            )
        if self._trust.own_user_only and (where := _native.peer_process(sock.fileno())) != "of this user":
            raise UnprovedError(
                f"without a job secret its process must be one of user {os.geteuid()} on this machine, but "
                f"as far as the kernel says, it is {where}; {WAY_OUT}"
            )
        return connection


def _greeting(nonce: bytes) -> bytes:
    """Returns the first requests of a connection, whose only reply is the nonce."""
    return bytes([Command.VALIDATE]) + u32(MAGIC) + bytes([Command.PING]) + nonce


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


def is_of_this_machine(address: str) -> bool:
    """Tells whether this machine has a network address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:  # a kernel without IPv6 has no such sockets
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address.partition("%")[0], 0))
    except OSError as error:
        return error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
    return True


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# ---- keeping connections -----------------------------------------------------------------------------------

_open: set[Client] = set()
"""Clients that nobody has closed.

Garbage collection ends whatever it finds beside a store, even where the store stays because C++ code holds it
(:mod:`collectives.store.keep_alive`). So it must not find connections: they live until they are closed.
"""

_IDLE_KEPT = 2
LEAST_CONNECT_S = 2.0
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
        connection = self._connector.connect(max(timeout, LEAST_CONNECT_S), again=True)
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
        why = str(error) if str(error) == _native.FORGED else self._why_refused(connection)
        broke = f"the connection to the store server at {self._shown_as} broke"
        if why == _native.FORGED:
            self._failure = self._failure or f"{broke}: {why}"
        elif why:
            raise DistStoreError(
                f"{operation}: the store server at {self._shown_as} refused the request: {why}"
            ) from error
        self._failure = self._failure or (
            f"{broke} ({error}); "
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
