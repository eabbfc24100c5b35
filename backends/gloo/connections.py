"""The connections of a Gloo group: torch's group with its options, how its ranks meet, and its health."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_distributed

from collectives.backends._shared.exit_reasons import Departure, blamed, limit_reason
from collectives.backends._shared.health import Health
from collectives.backends._shared.operation import Operation
from collectives.backends.gloo.work import Messages
from collectives.core.arguments.option_records import refuse_unknown_options
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, GroupAbortedError
from collectives.forks import belongs_to_parent, call_in_forked_children
from collectives.registry.backends import GroupOptions
from collectives.store.joining.agreement import exchange, give_up
from collectives.store.prefix import PrefixStore
from collectives.store.records import as_bytes, as_text, read, written
from collectives.store.waiting import delete_keys
from collectives.threads import start_thread

_TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
"""Matches Gloo's messages about a limit that passed."""

_DISCONNECTED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|(read|write) error", re.IGNORECASE
)
"""Matches Gloo's messages about a connection that broke."""

_OWN_END = "Application timeout caused pair closure"
"""Part of Gloo's message where this rank closed the connections, because a limit passed."""

_ABORT_TAG = 2**31 - 2

_CONNECTING_SECONDS = 1.0
"""How long an end waits for connections that are made only to be closed."""

_never_ended: list[object] = []
"""Groups of torch that only their own threads could have ended."""


class Connections(Health):
    """torch's group, the messages over it, and the health of both.

    None of torch's own threads must be the one that ends its group: the end waits for them. One of them may
    run a callback that aborts the group, or be the last to let go of it.

    Args:
        options: what the group is made of.
        where: rank and group, to stand in front of a message.

    Attributes:
        inner: torch's group; ``None`` once it was let go of.
        threads: Gloo's threads.
        messages: the messages under way.

    Raises:
        TypeError: the user's options are of another type.
        DistBackendError: the ranks could not be connected, or differ in the number of interfaces.
    """

    inner: Any = None

    def __init__(self, options: GroupOptions, where: str) -> None:
        chosen = _gloo_options(options)
        super().__init__(options.store, options.rank, options.size, where)
        self.threads: int = chosen._threads
        self._contexts = max(1, len(chosen._devices))
        self._connected_by = options.store
        self._inherited = False
        self.messages = Messages(self, self.rank, self.size)
        call_in_forked_children(self, Connections.leave_to_parent)
        self.inner = _connect(options, chosen, self._contexts, where, self.lost_ranks)
        self.read_records()

    def check_usable(self, operation: Operation) -> Any:
        """Returns torch's group.

        Args:
            operation: what is to be done, for messages.

        Raises:
            DistBackendError: this group is broken or has ended; the class is that of the first cause.
        """
        inner = self.inner
        if self.over or inner is None:
            self.refuse(operation)
        return inner

    # ---- failures ------------------------------------------------------------------------------------------

    def failed(self, operation: Operation, error: Exception) -> DistError:
        """Returns what to raise for an error of Gloo; the first one breaks the group.

        Args:
            operation: what failed.
            error: what Gloo raised.
        """
        text = str(error)
        what = f"{self.where} {operation}:"
        if self.cause is None:
            with self.lock:
                if self.cause is None:
                    return self._break_by(operation, what, text)
        # Without the lock: torch's group may be going just now, which waits for the thread that calls this.
        # Without a GIL it goes on the thread that made it, at any time, with whatever that thread has locked.
        return _limit_passed(what, operation) if _TIMED_OUT.search(text) else self.stopped_error(operation)

    def _break_by(self, operation: Operation, what: str, text: str) -> DistError:
        """Returns the error for what Gloo says first; passed limits and lost connections break the group."""
        if _TIMED_OUT.search(text):
            expired = _limit_passed(what, operation)
            self.break_by(expired, Departure(self.rank, limit_reason(expired)))
            return expired
        if _OWN_END in text:
            other = "another operation of the group passed its limit"
            return GroupAbortedError(f"{what} did not finish, because {other}", **operation.about)
        if not _DISCONNECTED.search(text):
            return DistBackendError(f"{what} Gloo failed: {text}", **operation.about)
        self._close()
        found = self.find_lost()
        untold = "; Gloo does not tell which" if found is None else ""
        # without the source location in front of Gloo's message and the advice after it
        told = re.sub(r"^\[[^\]]*\]\s*", "", text).split(". ")[0].strip()
        broken = blamed(what, found, operation.about, f"{untold} ({told})")
        self.break_by(broken, found, elsewhere=True)
        return broken

    def break_by(self, *args: Any, **kwargs: Any) -> bool:
        """Breaks the group; who ends it meanwhile waits, as its connections must be closed before it goes."""
        with self.lock:
            return super().break_by(*args, **kwargs)

    def _stop(self, tell: Callable[[], None]) -> None:
        """Ends all operations between ranks, here and on the peers, after these were told."""
        try:
            tell()
        finally:
            self._close()
            if self.cause is not None:
                self.messages.abort(self.cause)

    def _close(self) -> None:
        """Closes the connections to all ranks; whoever waits on them, here or there, gets an error at once.

        Gloo has no call for it. But when a receive passes its time limit, Gloo closes every connection of its
        context; a receive that nobody will answer, with a limit of 1 ms, is such a call.

        Where connections are made on demand, Gloo makes each within that receive, and blocks until the other
        rank takes part. It must not close a context meanwhile: it would take the connection that comes into
        use after that, and end the process at its first event. So one thread for each makes them all first.
        Those that are not there in a moment close theirs when they come, as a rank may connect that has not
        been waiting yet.
        """
        if (inner := self.inner) is None:
            return
        peers = [peer for peer in range(self.size) if peer != self.rank]
        for context in range(self._contexts):
            tag = _ABORT_TAG - context
            if _connects_on_demand():
                _connect_and_close(inner, peers, tag)
            else:
                any(_let_expire(inner, peer, tag) for peer in peers)

    # ---- life ----------------------------------------------------------------------------------------------

    def leave_to_parent(self) -> None:
        """Forgets torch's group in a forked child; its end would wait for threads that are the parent's."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.inner))
        self.inner, self._inherited = None, True
        self.cause, self.left, self.over = None, belongs_to_parent("the group"), True

    def refuse_in_child(self, operation: Operation) -> None:
        """Raises where this is a child that was forked after the operation was issued.

        Args:
            operation: what the child waits for.

        Raises:
            GroupAbortedError: it is.
        """
        if self._inherited:
            self.refuse(operation)

    def shutdown(self) -> None:
        """Finishes the operations already issued, then closes the connections."""
        self.messages.wait_until_done()
        if self.end():
            if self.cause is None:
                self.publish(Departure(self.rank, None))
            self.messages.abort(GroupAbortedError(f"{self.where} {self.left}"))
            self.release()

    def release(self) -> None:
        """Ends torch's group; without a lock, because callbacks of its threads may wait for it."""
        self.messages.release()
        self._let_go()
        self.leave()

    def _delete_keys(self) -> None:
        """Deletes the addresses that the ranks have told each other, where the store can delete."""
        every = [(context, rank) for context in range(self._contexts) for rank in range(self.size)]
        delete_keys(self._connected_by, [f"gloo/{context}/{rank}" for context, rank in every])

    def _let_go(self) -> None:
        """Lets go of torch's group, which ends when its threads have run what is queued.

        Blocks until then, unless the calling thread is none of Python's, as Gloo's are.
        """
        held, self.inner = [self.inner], None
        if held[0] is None or not isinstance(threading.current_thread(), threading._DummyThread):
            held.clear()
            return
        with contextlib.suppress(DistBackendError):  # at the interpreter's end no thread begins
            start_thread(held.clear, "gloo end")
            return
        _never_ended.append(held)

    def __del__(self) -> None:
        self._let_go()


def _limit_passed(what: str, operation: Operation) -> CollectiveTimeoutError:
    """Returns the error of an operation, named by ``what`` with rank and group, that passed its limit."""
    return CollectiveTimeoutError(
        f"{what} passed its time limit of {operation.timeout.total_seconds():g} s. Gloo does not tell which "
        "rank is missing; monitored_barrier() in front of it names the rank",
        **operation.about,
    )


def _connect_and_close(group: Any, peers: Sequence[int], tag: int) -> None:
    connected: list[int] = []
    threads: list[threading.Thread] = []
    late = threading.Event()

    def connect(peer: int) -> None:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag)
            connected.append(peer)
            if late.is_set():
                _let_expire(group, peer, tag)

    with contextlib.suppress(DistBackendError):  # without threads, connections end with the process
        threads += [start_thread(partial(connect, peer), "gloo connect") for peer in peers]
    deadline = time.monotonic() + _CONNECTING_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late.set()
    any(_let_expire(group, peer, tag) for peer in list(connected))


def _let_expire(group: Any, peer: int, tag: int) -> bool:
    """Lets a receive pass its limit; returns whether it did, and thereby closed a context."""
    nothing = torch.empty(1, dtype=torch.uint8)
    try:
        group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return _TIMED_OUT.search(str(error)) is not None
    return False


# ---- options -------------------------------------------------------------------------------------------


def option_names() -> tuple[str, ...]:
    """Returns the names of the options, which are those of torch."""
    return ("_threads", "_devices")


def _gloo_options(options: GroupOptions) -> Any:
    """Returns the options of torch's group: those that the user gave, completed.

    Raises:
        TypeError: the user gave something else.
    """
    kind: Any = torch_distributed.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    given = options.pg_options
    if isinstance(given, Mapping):
        where = f"[rank {options.rank}] pg_options of the gloo backend:"
        refuse_unknown_options(given, option_names(), where)
        given = _from_fields(kind(), given, where)
    if given is not None and not isinstance(given, kind):
        raise TypeError(
            f"[rank {options.rank}] pg_options of the gloo backend must be a "
            f"torch.distributed.ProcessGroupGloo._Options, but is {given!r} of type "
            f"{type(given).__name__}"
        )
    made = kind()
    if given is not None:  # the user's, who may give it to another group, too
        made._threads, made._devices = given._threads, list(given._devices)
    made._timeout = options.timeout
    if not made._devices:
        made._devices = [_device(name) for name in _interfaces()]
    return made


def _from_fields(record: Any, given: Mapping[str, Any], where: str) -> Any:
    """Returns torch's record with some of its fields set."""
    name = ""
    try:
        for name in given:
            setattr(record, name, given[name])
    except TypeError as error:
        raise TypeError(f"{where} {name} cannot be {given[name]!r}: {error}") from error
    return record


def _connects_on_demand() -> bool:
    """Returns whether ``TORCH_GLOO_LAZY_INIT`` asks to connect two ranks only when they first need it."""
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").strip().lower() in {"1", "t", "true", "y", "yes"}


def _interfaces() -> Iterator[str | None]:
    names = os.environ.get("COLLECTIVES_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    yield from chosen or (None,)


def _device(interface: str | None) -> Any:
    kind = torch_distributed.ProcessGroupGloo
    try:
        if interface is None:
            return kind.create_default_device(lazy_init=_connects_on_demand())
        return kind.create_device(interface=interface, lazy_init=_connects_on_demand())
    except RuntimeError as error:
        raise DistBackendError(
            f"Gloo cannot use the network interface {interface or 'of the host name'!r}: {error}; set "
            "COLLECTIVES_SOCKET_IFNAME to one that is up, such as lo on a single machine"
        ) from error


# ---- how ranks meet ------------------------------------------------------------------------------------


class _ProvedStore(PrefixStore):
    """A part of a store in which every value carries a proof where the job has a secret.

    Gloo writes addresses into it. It has no other way to find out whose they are.
    """

    def has_extended_api(self) -> bool:
        """Returns that several keys are several requests."""
        return False

    def _set(self, key: str, value: bytes) -> None:
        super()._set(key, written(self, key, value.hex()).encode())

    def _get(self, key: str, limit: float) -> bytes:
        return read(self, key, super()._get(key, limit), as_bytes)

    def _multi_get(self, keys: list[str], limit: float) -> list[bytes]:
        return [self._get(key, limit) for key in keys]

    def _multi_set(self, pairs: list[tuple[str, bytes]]) -> None:
        for key, value in pairs:
            self._set(key, value)

    def _clone(self) -> PrefixStore:
        return _ProvedStore(self._prefix, self._store.clone(), self.scope.removesuffix("/"))


def _connect(
    options: GroupOptions, chosen: Any, devices: int, where: str, lost_ranks: Callable[[], Collection[int]]
) -> Any:
    """Returns torch's group; called by all its ranks, blocks until all of them are connected.

    Gloo's call returns when this rank is connected. Were it to leave then, ranks that still connect to each
    other would find its connection closed and fail.

    Args:
        options: what the group is made of.
        chosen: torch's options.
        devices: number of devices of this rank.
        where: rank and group, to stand in front of a message.
        lost_ranks: which ranks are known to have died; asked again and again.

    Raises:
        DistBackendError: the ranks could not be connected, or differ in the number of devices.
    """
    rank, size = options.rank, options.size

    def failed(what: object) -> str:
        return (
            f"the ranks could not be connected by Gloo: {what}; look whether all {size} ranks run, whether "
            "the store is not one of an earlier run, and whether COLLECTIVES_SOCKET_IFNAME names an "
            "interface that they share"
        )

    meet = partial(
        exchange,
        options.store,
        rank=rank,
        ranks=range(size),
        limit=options.timeout,
        where=where,
        lost_ranks=lost_ranks,
    )
    on_demand = _connects_on_demand()
    try:
        mine = f"{devices}{' on demand' if on_demand else ''}"
        meet("devices", record=mine, check=as_text, combine=_check_devices)
        try:
            made = torch_distributed.ProcessGroupGloo(_ProvedStore("gloo", options.store), rank, size, chosen)
        except (RuntimeError, TimeoutError) as error:
            if not on_demand:  # else nobody asks
                why = failed(f"rank {rank} failed with: {error}")
                give_up(options.store, "connected", DistBackendError(why))
            raise
        if not on_demand:
            meet("connected")
    except DistBackendError:
        raise
    except (RuntimeError, TimeoutError) as error:
        details = error.details() if isinstance(error, DistError) else {}
        text = failed(str(error).removeprefix(f"{where} "))
        raise DistBackendError(f"{where} {text}", **details) from error
    return made


def _check_devices(published: Sequence[str]) -> None:
    """Raises where ranks would connect in different ways: Gloo would wait for what the others do not do."""
    for rank, other in enumerate(published):
        if other != published[0]:
            raise DistBackendError(
                "all ranks must use the same number of network interfaces and connect at the same time, but "
                f"rank 0 has {_in_words(published[0])}, and rank {rank} {_in_words(other)}; "
                "set COLLECTIVES_SOCKET_IFNAME (or GLOO_SOCKET_IFNAME) to as many names, and "
                "TORCH_GLOO_LAZY_INIT to the same value, on every rank"
            )


def _in_words(published: str) -> str:
    count, _, when = published.partition(" ")
    plural = "" if count == "1" else "s"
    return f"{count} interface{plural}, connected {when or 'at once'}"
