"""How a client of a TCP store gets a connection: addresses, retries, proof, greeting, and their errors."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import socket
import time
from dataclasses import dataclass

import collectives._native as _native
from collectives.errors import DistNetworkError
from collectives.logs import Log
from collectives.secret import SECRET, WAY_OUT
from collectives.store.tcp.proof import PROOF_WANTED, UnprovedError, prove
from collectives.store.tcp.wire import MAGIC, TURNED_AWAY, Command, u32

__all__ = [
    "ANSWER_S",
    "Connection",
    "Connector",
    "LocalConnection",
    "NoStoreError",
    "Trust",
    "is_of_this_machine",
]

log = Log()

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
    """

    key: bytes | None = None
    own_user_only: bool = False


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
                        f"{_reason(error)}. Does the process that runs the server (rank 0, or torchrun's "
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
                        _reason(error),
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
        if self._trust.key is not None:
            prove(connection, self._trust.key, answer_by)
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
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.partition("%")[0], 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
