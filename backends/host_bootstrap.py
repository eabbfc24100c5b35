"""How the ranks of a host group find each other through the group's store.

Rank 0 publishes the address of its unix socket; the other ranks connect to it and attach its shared
memory (``native/transport/bootstrap.hpp``). Whoever fails says why in the store; nobody waits in vain.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from collectives import _native
from collectives.backends.host_tuning import tuning_for
from collectives.errors import CollectiveTimeoutError, DistError, DistNetworkError

__all__ = ["join"]

_ADDRESS = "host/address"
_FAILED = "host/failed/"
_SLICE_S = 0.1
"""How often a waiting rank answers signals and looks whether another one failed."""
_GRACE_S = 1.0
"""How much longer than rank 0 the others wait, so that they hear from it who did not come."""


def join(store: Any, rank: int, size: int, timeout: timedelta, label: str) -> _native.Membership:
    """Returns this rank's place in the group's shared memory, once all ranks have one; called by all ranks.

    Args:
        store: the group's own store.
        rank: this process's rank.
        size: number of ranks.
        timeout: how long to wait for the others.
        label: the group in words, for messages.

    Raises:
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        DistNetworkError: a rank runs on another machine.
        DistBackendError: there is not enough shared memory.
    """
    if size == 1:
        return _native.alone()
    attempt = _Attempt(store, rank, size, timeout, label)
    return attempt.invite() if rank == 0 else attempt.follow()


class _Attempt:
    """One rank's side of forming a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, label: str) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.label = label
        self.failed_key = _FAILED

    def invite(self) -> _native.Membership:
        """Rank 0: makes the memory and hands it to all others."""
        host = _native.BootstrapHost(self.size)
        host.set_tuning(tuning_for(self.size), self.size)
        self._name_failures_after(host.address)
        self.store.set(_ADDRESS, f"{_machine()}\n{socket.gethostname()}\n{host.address}")
        try:
            self._until(lambda: host.accept(_SLICE_S), "did not come")
            host.share(self._left())
            self._until(lambda: host.await_attached(_SLICE_S), "did not attach the shared memory")
        except DistError as error:
            self._tell(str(error))
            raise
        with contextlib.suppress(
            Exception
        ):  # not every store can delete; a group of its own prefix needs no tidying
            self.store.delete_key(_ADDRESS)
        return host.release(self._left())

    def follow(self) -> _native.Membership:
        """Any other rank: attaches the memory that rank 0 made."""
        try:
            self.store.wait([_ADDRESS], timedelta(seconds=self._left()))
        except Exception as error:
            raise CollectiveTimeoutError(
                f"[rank {self.rank}] {self.label}: rank 0 did not publish its address within {self.timeout}"
            ) from error
        machine, host_name, address = self.store.get(_ADDRESS).decode().split("\n")
        self._name_failures_after(address)
        if machine != _machine():
            self._fail(
                f"rank {self.rank} runs on {socket.gethostname()!r} and rank 0 on {host_name!r} (or they "
                "are in containers with separate networks) and cannot share memory; use backend 'gloo'"
            )
        try:
            guest = _native.BootstrapGuest(address, self.rank, self.size, self._left())
            self.deadline += _GRACE_S
            self._until(lambda: [] if guest.answered(_SLICE_S) else [0], "did not answer")
            guest.attach(self._left())
            self._until(lambda: [] if guest.answered(_SLICE_S) else [0], "did not say that all are attached")
            return guest.await_release(self._left())
        except CollectiveTimeoutError:
            raise
        except DistError as error:
            self._raise_cause(error)

    def _until(self, missing: Callable[[], list[int]], what: str) -> None:
        """Repeats ``missing`` until it returns no rank."""
        while ranks := missing():
            self._check_failures()
            if time.monotonic() >= self.deadline:
                names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                raise CollectiveTimeoutError(
                    f"[rank {self.rank}] {self.label}: {names} {what} within {self.timeout}"
                )

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), _SLICE_S)

    def _name_failures_after(self, address: str) -> None:
        self.failed_key = _FAILED + address.split(" ", maxsplit=1)[0]

    def _tell(self, reason: str) -> None:
        with contextlib.suppress(Exception):  # the store may be what failed; the reason is raised here anyway
            self.store.set(self.failed_key, reason)

    def _check_failures(self) -> None:
        if self.store.check([self.failed_key]):
            raise DistNetworkError(self.store.get(self.failed_key).decode())

    def _fail(self, reason: str) -> NoReturn:
        text = f"[rank {self.rank}] {self.label}: {reason}"
        self._tell(text)
        raise DistNetworkError(text)

    def _raise_cause(self, error: DistError) -> NoReturn:
        """Raises another rank's failure where there is one, which is the cause of this rank's."""
        if isinstance(error, DistNetworkError) and error.args[0].startswith("[rank"):
            raise error
        cause = None
        with contextlib.suppress(Exception):  # the store may have gone with rank 0
            if self.store.check([self.failed_key]):
                cause = self.store.get(self.failed_key).decode()
        if cause is not None:
            raise type(error)(cause) from error
        self._tell(f"[rank {self.rank}] {self.label}: {error}")
        raise type(error)(
            f"[rank {self.rank}] {self.label}: cannot join rank 0, which has died, or whose address in the "
            f"store is left over from another run: {error}"
        ) from error


def _machine() -> str:
    """Returns what tells machines apart, as far as attaching goes: the boot and the network name space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()
