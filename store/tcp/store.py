"""A store served over TCP, compatible with torch's in both roles."""

from __future__ import annotations

import math
import operator
import os
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store as TorchStore

import collectives._native as _native
from collectives.errors import DistNetworkError, DistStoreError
from collectives.secret import SECRET, derived_key
from collectives.store.base import DEFAULT_TIMEOUT, Store
from collectives.store.encryption import ENCRYPTION, encryption
from collectives.store.process import own_user_only
from collectives.store.tcp.client import LEAST_CONNECT_S, Client, Trust, is_of_this_machine
from collectives.store.tcp.listen import adopt_listener, is_loopback, open_listeners
from collectives.store.tcp.wire import (
    INIT_KEY,
    KEY_PREFIX,
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    READY,
    SERVER_KEY,
    STOP_WAITING,
    WAIT_CANCELED,
    Command,
)

_GRACE_S = 5.0
"""Seconds that a server may take, beyond the limit of a call, to answer that the call is over.

A machine whose cores are taken, by others or by its own host, lets a process run seconds late.
"""
_LOOK_S = 0.5
"""How often a client that waits at another server than ours looks whether a key has come."""
_KEYS_PROBED = 64
_MOST_VARIABLE = "COLLECTIVES_STORE_BYTES"
_DEFAULT_BYTES = 2**30
_LEAST_BYTES = 2**20
_DECIMAL = re.compile(rb"-?[0-9]{1,19}")
_requests = _native.store_requests
_timeout_of = TorchStore.timeout.fget  # type: ignore[attr-defined] # of its C++ half


class _RefusedError(Exception):
    """The server hung up on a request, as it must on one that it cannot carry out."""


class _Server:
    """A native server in this process, with the port that it listens on."""

    def __init__(self, host: str, port: int, listen_fd: int | None, trust: Trust) -> None:
        most = max_server_bytes()
        sockets = open_listeners(host, port) if listen_fd is None else [adopt_listener(listen_fd, port)]
        self.address, self.port = sockets[0].getsockname()[:2]
        self.loopback_only = is_loopback(self.address)
        self.trust = trust
        self.native = _native.StoreServer(
            [sock.detach() for sock in sockets],
            most,
            trust.key or b"",
            trust.own_user_only,
            int(trust.encryption),
        )


_shared_lock = threading.Lock()
_shared_servers: weakref.WeakValueDictionary[int, _Server] = weakref.WeakValueDictionary()


class TCPStore(Store):
    """A store whose data one process serves over TCP; all others connect to it.

    The server runs in a native thread without the GIL: a process that is busy in Python delays no other.
    Server and client speak the protocol of :class:`torch.distributed.TCPStore`, so that either may be
    torch's.

    The server ends with the last store object of its process that uses it (the one made with
    ``is_master=True``, its clones, and those that share it by ``multi_tenant``); clients then get
    :class:`~collectives.DistNetworkError`.

    **Access.** Where the job has a secret (``COLLECTIVES_SECRET``), server and clients prove to each other
    that they know it, before any request, and encrypt what follows where it leaves the machine
    (``COLLECTIVES_ENCRYPTION``). Without one, both must be processes of one user on one machine.

    **Limits.** The server holds at most 1 GiB for its clients: keys, values, requests that are not complete,
    replies that are not read. ``COLLECTIVES_STORE_BYTES`` in the environment of its process changes that. A
    value may grow to a sixteenth of it, a reply to a quarter; one request sets values of at most 8 MiB, and
    carries at most 256 MiB and 131072 keys. The last sixteenth is for values of up to 4096 bytes. A call that
    would pass a limit raises :class:`~collectives.DistStoreError` with the limit and changes nothing, and
    everybody goes on. A client that does not read its replies waits alone. The server leaves a quarter of the
    descriptors that its process may open, 128 at most, to the application (``ulimit -n``), and turns clients
    away beyond that.

    Args:
        host_name: name or address of the machine that runs the server, as clients connect to it. The server
            listens on loopback only for ``localhost`` and loopback addresses, on exactly the address if it is
            one of this machine, and on all interfaces for any other name or address, as torch does.
        port: port of the server; 0 lets the server choose (see :attr:`port`).
        world_size: number of users of the store, this one and the server's included; ``None`` (or a negative
            number) if it is not fixed.
        is_master: run the server in this process.
        timeout: limit for connecting, for ``wait_for_workers``, and default of waiting calls.
        wait_for_workers: with a fixed ``world_size``, let the master wait here until all users have
            connected.
        multi_tenant: share the server that this process already runs on the same port, if there is one.
        master_listen_fd: descriptor of a socket bound to ``port`` (any if ``port`` is 0) that the server
            takes over.
        use_libuv: accepted for torch's sake, and what :attr:`libuvBackend` returns; our server is always
            driven by events (epoll, without the library libuv).

    Raises:
        DistNetworkError: the port is in use, or no server answers, or only one that is not to be trusted; or
            there is no secret, and the kernel cannot tell this user from others.
        DistStoreError: not all workers came in time.
    """

    _purpose = "store"
    """What the key is for by which server and clients recognise each other."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        super().__init__(timeout)
        if not isinstance(host_name, str):
            raise TypeError(f"host_name must be a str, not {type(host_name).__name__}: {host_name!r}")
        port = operator.index(port)
        if not 0 <= port < 2**16:
            raise ValueError(f"port must be from 0 to 65535, is {port}")
        if world_size == 0:
            raise ValueError("TCPStore world size cannot be 0; None means that it is not fixed")
        self._host = host_name
        self._use_libuv = bool(use_libuv)
        self._server = (
            _start_server(host_name, port, multi_tenant, master_listen_fd, _trust(self._purpose))
            if is_master
            else None
        )
        if self._server is not None:
            self._trust = self._server.trust
        elif is_of_agent(port):
            # torch's, which cannot prove anything; what ranks read there, they prove
            self._trust = Trust(encryption=encryption())
        else:
            self._trust = _trust(self._purpose)
        self._port = port if self._server is None else self._server.port
        self._ours: bool | None = None if self._server is None else True
        self._has_queues = self._ours
        try:
            self._client = self._make_client()
        except BaseException:
            if self._server is not None and not multi_tenant:
                self._server.native.stop()  # which the exception holds, and so its socket
            raise
        if wait_for_workers and world_size is not None and world_size > 0:
            self._wait_for_workers(world_size)

    @property
    def host(self) -> str:
        """Name of the server's machine, as given."""
        return self._host

    @property
    def port(self) -> int:
        """Port of the server; the real one where 0 was asked for."""
        return self._port

    @property
    def is_master(self) -> bool:
        """Whether this process serves the store, and this object keeps the server."""
        return self._server is not None

    @property
    def is_of_agent(self) -> bool:
        """Whether torchrun's agent serves the store."""
        return self._server is None and is_of_agent(self._port)

    @property
    def libuvBackend(self) -> bool:
        """What ``use_libuv`` was; both choose the same server."""
        return self._use_libuv

    def close(self) -> None:
        """Closes the connections, and the server if no other store of this process uses it; idempotent."""
        self._client.close()
        self._server = None

    def _release(self) -> None:
        if hasattr(self, "_client"):  # unless the constructor failed
            self.close()

    def __repr__(self) -> str:
        role = "client" if self._server is None else "server"
        return f"TCPStore({self._address()}, {role})"

    def _clone(self) -> TCPStore:
        copy = TCPStore.__new__(TCPStore)
        Store.__init__(copy, self.timeout)
        copy._host, copy._port, copy._server = self._host, self._port, self._server
        copy._trust, copy._ours, copy._has_queues = self._trust, self._ours, self._has_queues
        copy._client = copy._make_client(LEAST_CONNECT_S)  # though the limit for missing keys may be none
        return copy

    def _address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    def _make_client(self, least: float = 0.0) -> Client:
        # The server's own process need not resolve the name, which may lead through a router and back.
        host = self._host if self._server is None else self._server.address
        native = self._server.native if self._server is not None and self._server.native.running else None
        limit = max(least, self._seconds(None))
        return Client(host, self._port, self._address(), self._trust, limit, native)

    def _wait_for_workers(self, world_size: int) -> None:
        limit = self._seconds(None)
        deadline = time.monotonic() + limit
        count = self._count(INIT_KEY, 1)
        # There is no wait for a counter in the protocol, and torch's clients count themselves in likewise.
        pause = 0.001
        while self._server is not None and count < world_size:
            if time.monotonic() > deadline:
                raise DistStoreError(
                    f"Timed out after {limit:g} seconds waiting for clients. {count}/{world_size} clients "
                    f"joined {self!r}.{refusals(self)} Do all ranks run, with the same MASTER_ADDR and "
                    "MASTER_PORT, and can they reach this machine?"
                )
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
            count = self._count(INIT_KEY, 0)

    # Requests. Those without a reply of their own are followed by a ping, so that they are carried out, and
    # seen by everybody, when the call returns.

    def _set(self, key: str, value: bytes) -> None:
        self._ask("set", "bkvbu", (Command.SET, key, _value(key, value), Command.PING, 0), "u")

    def _append(self, key: str, value: bytes) -> None:
        self._ask("append", "bkvbu", (Command.APPEND, key, _value(key, value), Command.PING, 0), "u")

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        for key, value in pairs:
            _value(key, value)
        self._ask("multi_set", "bPbu", (Command.MULTI_SET, pairs, Command.PING, 0), "u")

    def _queue_push(self, key: str, value: bytes) -> None:
        self._demand_queues()
        fields = (Command.QUEUE_PUSH, key, _value(key, value), Command.PING, 0)
        self._ask("queue_push", "bkvbu", fields, "u")

    def _add(self, key: str, amount: int) -> int:
        if self._is_of_ours():
            try:
                return int(self._ask("add", "bkn", (Command.ADD, key, amount), "n")[0])
            except DistStoreError:  # which has changed nothing
                (value,) = self._ask("add", "bk", (Command.GET, key), "v")
                if not value or _is_counter(value, amount):
                    raise  # as a server that is full
                self._raise_not_a_counter(key, amount, value)
        return self._count(_stored(key), amount)

    def _is_of_ours(self) -> bool:
        """Returns whether the server is ours, which says why it refuses a request."""
        if self._ours is None:
            # One key at a time: one of torch's servers hangs up on who gets what is not there.
            there = self._ask("add", "bnv", (Command.CHECK, 1, SERVER_KEY), "b")[0]
            self._ours = there == READY
        return self._ours

    def _demand_queues(self) -> None:
        """Raises where the server has no queues."""
        if self._has_queues is None:
            length = _requests("bv", Command.QUEUE_LEN, SERVER_KEY)
            self._has_queues = self._is_of_ours() or self._unless_refused("queue_len", length) is not None
        if not self._has_queues:
            raise NotImplementedError(
                f"the server at {self._address()} has no queues, as torch's TCPStore with use_libuv=False"
            )

    def _count(self, stored_key: bytes, amount: int) -> int:
        total = self._unless_refused("add", _requests("bvn", Command.ADD, stored_key, amount))
        if total is None:
            key = stored_key.removeprefix(KEY_PREFIX).decode(errors="surrogateescape")
            (value,) = self._ask("add", "bv", (Command.GET, stored_key), "v")
            if _is_counter(value, amount):
                raise DistNetworkError(f"add: the connection to the server at {self._address()} broke")
            self._raise_not_a_counter(key, amount, value)
        return total

    def _unless_refused(self, operation: str, request: bytes) -> int | None:
        """Returns the number that answers a request; ``None`` where a server of torch hangs up on it.

        That is all that it can do about what it cannot carry out.
        """
        try:
            with self._client.connection(operation, self._seconds(None)) as connection:
                try:
                    return int(connection.exchange(request, "n", self._answer_by())[0])
                except ConnectionResetError:
                    raise _RefusedError from None
        except _RefusedError:
            self._num_keys()  # raises if the server is gone
            return None

    def _check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", "bK", (Command.CHECK, keys), "b")[0] == READY)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        fields = (Command.COMPARE_SET, key, _value(key, expected), _value(key, desired))
        return bytes(self._ask("compare_set", "bkvv", fields, "v")[0])

    def _delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", "bk", (Command.DELETE_KEY, key), "n")[0] > 0)

    def _num_keys(self) -> int:
        return int(self._ask("num_keys", "b", (Command.GETNUMKEYS,), "n")[0])

    def _queue_len(self, key: str) -> int:
        self._demand_queues()
        return int(self._ask("queue_len", "bk", (Command.QUEUE_LEN, key), "n")[0])

    def _list_keys(self) -> list[str]:
        (stored,) = self._ask("list_keys", "b", (Command.LIST_KEYS,), "l")
        return [
            key.removeprefix(KEY_PREFIX).decode(errors="surrogateescape")
            for key in stored
            if key.startswith(KEY_PREFIX)
        ]

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        form = "v" * len(keys)
        end = time.monotonic() + limit
        if self._is_of_ours():
            # Values that are there take one round trip; those of a request with a missing key are left alone.
            fields = (Command.CHECK, keys, Command.MULTI_GET, keys)
            there, *values = self._ask("get", "bKbK", fields, "b" + form, limit)
            if there == READY:
                return values
        elif self._check(keys):  # torch's server without libuv hangs up on who gets what is not there
            return self._ask("get", "bK", (Command.MULTI_GET, keys), form, limit)
        request = _requests("bK", Command.MULTI_GET, keys)
        with self._client.connection("get", end - time.monotonic(), waits=True) as connection:
            self._await_keys(connection, "get", keys, limit, end)
            return connection.exchange(request, form, max(end, time.monotonic()) + _GRACE_S)

    def _wait(self, keys: list[str], limit: float) -> None:
        end = time.monotonic() + limit
        if self._ask("wait", "bK", (Command.CHECK, keys), "b", limit)[0] == READY:
            return
        self._is_of_ours()  # before a connection is taken: to ask would take another
        with self._client.connection("wait", end - time.monotonic(), waits=True) as connection:
            self._await_keys(connection, "wait", keys, limit, end)

    def _queue_pop(self, key: str, limit: float | None) -> bytes:
        self._demand_queues()
        request = _requests("bk", Command.QUEUE_POP, key)
        end = time.monotonic() + (limit or 0.0)
        with self._client.connection("queue_pop", limit or 0.0) as connection:
            value = self._popped(connection, request, end)
        if value is None and limit is not None:
            with self._client.connection("queue_pop", end - time.monotonic(), waits=True) as connection:
                while value is None:
                    # Another client may be quicker after the wait, in which case it is waited again.
                    self._await_keys(connection, "queue_pop", [key], limit, end)
                    value = self._popped(connection, request, end)
        if value is None:
            self._raise_queue_empty(key)
        return value

    def _popped(self, connection: _native.StoreConnection, request: bytes, end: float) -> bytes | None:
        deadline = max(end, time.monotonic()) + _GRACE_S
        (length,) = connection.exchange(request, "n", deadline)
        return bytes(connection.replies("v", deadline)[0]) if length > 0 else None

    def _barrier(self, key: str, world_size: int, limit: float) -> None:
        request = _requests("bkn", Command.BARRIER, key, world_size)
        with self._client.connection("barrier", limit, waits=True) as connection:
            connection.send(request, time.monotonic() + limit + _GRACE_S)
            if self._answered(connection, limit):
                return
        self._raise_barrier_timeout(key, self._withdraw(key) + 1, world_size, limit)

    # Exchanges.

    def _answer_by(self) -> float:
        """Returns when a request that the server answers at once must have been answered."""
        return time.monotonic() + self._seconds(None) + _GRACE_S

    def _ask(
        self,
        operation: str,
        form: str,
        fields: tuple[Any, ...],
        replies: str,
        most: float = math.inf,
    ) -> list[Any]:
        """Returns the replies to requests that the server answers at once.

        Args:
            operation: name for error messages.
            form: of the fields, as of ``store_requests`` in the core.
            fields: of all requests.
            replies: a letter for each reply.
            most: the limit of the call, where that is shorter than that of the store.
        """
        limit = min(_timeout_of(self).total_seconds(), most)
        limit = limit + _GRACE_S if limit > 0 else _GRACE_S
        found = self._client.at_once(operation, form, fields, replies, limit)
        if found is not None:
            return found
        with self._client.connection(operation, limit) as connection:
            return connection.ask(form, fields, replies, limit)

    def _await_keys(
        self,
        connection: _native.StoreConnection,
        operation: str,
        keys: list[str],
        limit: float,
        end: float,
    ) -> None:
        """Returns when all keys are there; raises the error of ``operation`` if they are not by ``end``."""
        request = _requests("bK", Command.WAIT, keys)
        # torch's server without libuv wakes nobody for a compare_set.
        longest = math.inf if self._is_of_ours() else _LOOK_S
        while True:
            connection.send(request, end + _GRACE_S)
            self._answered(connection, min(end - time.monotonic(), longest))
            # torch's server keeps a client that it woke for a queue on its list, and wakes it early later on.
            # Cancelling takes it off; the check costs no more than that.
            canceled = _requests("bbK", Command.CANCEL_WAIT, Command.CHECK, keys)
            if connection.exchange(canceled, "bb", max(end, time.monotonic()) + _GRACE_S)[1] == READY:
                return
            if time.monotonic() > end:
                break
        probed = keys[:_KEYS_PROBED]
        checks = b"".join(_requests("bK", Command.CHECK, [key]) for key in probed)
        answers = connection.exchange(checks, "b" * len(probed), time.monotonic() + _GRACE_S)
        missing = [key for key, answer in zip(probed, answers, strict=True) if answer != READY]
        self._raise_timeout(operation, missing or probed, limit)

    def _answered(self, connection: _native.StoreConnection, limit: float) -> bool:
        """Waits for the answer to a WAIT or BARRIER; cancels it when the time is up."""
        answer: int | None = None
        try:
            (answer,) = connection.replies("b", time.monotonic() + max(limit, 0.001))
        except TimeoutError:
            deadline = time.monotonic() + _GRACE_S
            (answer,) = connection.exchange(_requests("b", Command.CANCEL_WAIT), "b", deadline)
            if answer == STOP_WAITING:  # it was under way already
                if connection.replies("b", deadline)[0] == WAIT_CANCELED:
                    return True
                answer = None
            elif answer == WAIT_CANCELED:
                return False
        if answer != STOP_WAITING:
            raise ConnectionResetError(f"the server broke the protocol: it answered a wait with {answer}")
        return True

    def _withdraw(self, key: str) -> int:
        """Takes this caller out of a barrier that it has cancelled; returns how many are left in it."""
        if not self._is_of_ours():
            return self._count(_stored(key), -1)
        (count,) = self._ask("barrier", "bk", (Command.GET, key), "v")
        # The server has taken this caller out of it, unless somebody has set the key to something else.
        return int(count) if _DECIMAL.fullmatch(count) else 0


def _trust(purpose: str) -> Trust:
    """Returns who may come in, and where this process may go, by the environment."""
    return Trust(derived_key(purpose), own_user_only(), encryption())


def elsewhere(store: TCPStore) -> str:
    """Returns in words that the address of this process's server is none of this machine, or nothing."""
    literal = store.host.replace(".", "").isdecimal() or ":" in store.host  # a name may take long to look up
    if store.is_master and literal and not is_of_this_machine(store.host):
        return ", which is no address of rank 0's machine"
    return ""


def refusals(store: Any) -> str:
    """Returns whom the server of a store of this process has turned away, in sentences; empty for nobody."""
    server = store._server if isinstance(store, TCPStore) else None
    if server is None:
        return ""
    sentences = ""
    count, last = server.native.forged
    if count:
        sentences += (
            f" It has ended {_connections(count, last)}of clients that know the secret: {_native.FORGED}."
        )
    count, last = server.native.refused
    if not count:
        return sentences
    if server.trust.key:
        why = f"without a proof of this job's secret, or with another {ENCRYPTION}"
    else:
        why = "of other users or machines, or with a job secret, which this process does not have"
    return (
        f"{sentences} It has refused {_connections(count, last)}{why}; set {SECRET}, or "
        f"{SECRET}_FILE, to the same for all processes of the job."
    )


def _connections(count: int, last: str) -> str:
    """Returns so many connections, and from where the last one came, in words before others."""
    known = f"{'the last one ' if count > 1 else ''}from {last}, " if last else ""
    return f"{count} connection{'s' if count > 1 else ''}, {known}"


def is_of_agent(port: int | str | None) -> bool:
    """Returns whether torchrun's agent serves its store on a port; its machine may have several names."""
    agents = os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    return agents == (str(port), "True")


def _start_server(
    host: str, port: int, multi_tenant: bool, listen_fd: int | None, trust: Trust
) -> _Server | None:
    try:
        if not multi_tenant:
            return _Server(host, port, listen_fd, trust)
        with _shared_lock:
            server = _shared_servers.get(port) if listen_fd is None else None
            inherited = server is not None and not server.native.running  # in a forked child
            if server is None or inherited or (server.loopback_only and not is_loopback(host)):
                server = _Server(host, port, listen_fd, trust)
                _shared_servers[server.port] = server
            return server
    except DistNetworkError:
        # Under torchrun the agent has the port, and serves the store for all ranks.
        if is_of_agent(port):
            return None
        raise


def _stored(key: str) -> bytes:
    stored = KEY_PREFIX + key.encode(errors="surrogateescape")
    if len(stored) > MAX_KEY_BYTES:
        raise ValueError(
            f"a key of a TCPStore may have {MAX_KEY_BYTES - 1} bytes, this one has {len(stored) - 1}: "
            f"{key[:32]!r}..."
        )
    return stored


def _value(key: str, value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(
            f"a value of a TCPStore may have {MAX_VALUE_BYTES} bytes, that for key {key!r} has {len(value)}; "
            "append() it in parts, or send it with a collective"
        )
    return value


def _is_counter(value: bytes, amount: int) -> bool:
    """Tells whether a server can add to the value of a key that is there."""
    return _DECIMAL.fullmatch(value) is not None and -(2**63) <= int(value) + amount < 2**63


def max_server_bytes() -> int:
    """Returns the limit for a server that is started now, in bytes.

    Raises:
        ValueError: the environment gives none that can be.
    """
    text = os.environ.get(_MOST_VARIABLE, "").strip() or str(_DEFAULT_BYTES)
    if not (text.isascii() and text.isdecimal()) or not _LEAST_BYTES <= int(text) < 2**62:
        raise ValueError(
            f"{_MOST_VARIABLE} is the number of bytes that the server of a TCPStore may hold, from "
            f"{_LEAST_BYTES} to {2**62 - 1}, not {text!r}"
        )
    return int(text)
