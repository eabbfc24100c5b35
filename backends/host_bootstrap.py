"""How the ranks of a host group find each other through the group's store.

Words. A *machine* is a set of ranks that proved by attaching to one segment that they share memory; its
lowest rank is its *leader*.

Rank 0 publishes the address of its unix socket and where it runs; ranks that run there too connect to it and
attach its shared memory (``native/transport/bootstrap.hpp``). Where all do, that is all.

The others leave a *card* that says where they run. Once every rank has connected or left a card, rank 0
publishes a plan: who may share memory with whom. The leader of each further machine does for its ranks what
rank 0 did for its own; a rank that cannot attach is a machine of its own. Then every rank listens for
connections and registers, rank 0 publishes everybody's addresses with the group's secret, and the leaders
connect.

Whoever fails says why in the store; nobody waits in vain.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from collectives import _native
from collectives.backends.host_network import choose_addresses
from collectives.backends.host_tuning import tuning_for
from collectives.errors import CollectiveTimeoutError, DistBackendError, DistError, DistNetworkError

__all__ = ["form"]

_ADDRESS = "host/address"
_LABEL = "COLLECTIVES_HOST_MACHINE"
_SLICE_S = 0.1
"""How often a waiting rank answers signals and looks whether another one failed."""
_POLL_S = 0.005
_GRACE_S = 1.0
"""How much longer than rank 0 the others wait, so that they hear from it who did not come."""


def form(store: Any, rank: int, size: int, timeout: timedelta, label: str) -> _native.HostGroup:
    """Returns this rank's group in the core, once all ranks have one; called by all ranks.

    Args:
        store: the group's own store.
        rank: this process's rank.
        size: number of ranks.
        timeout: how long to wait for the others.
        label: the group in words, for messages.

    Raises:
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        DistNetworkError: ranks on different machines cannot reach each other.
        DistBackendError: there is not enough shared memory.
    """
    limit_ns = timeout // timedelta(microseconds=1) * 1000
    if size == 1:
        return _native.HostGroup(_native.alone(), label, limit_ns)
    attempt = _Attempt(store, rank, size, timeout, label)
    membership = attempt.invite() if rank == 0 else attempt.follow()
    group = _native.HostGroup(membership, label, limit_ns)
    if attempt.several:
        try:
            attempt.link(group)
        except BaseException:
            group.shutdown(False)
            raise
    return group


class _Attempt:
    """One rank's side of forming a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, label: str) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.label = label
        self.prefix = ""
        self.several = False
        self.tuning: dict[str, int] = {}

    # ---- who shares memory with whom -------------------------------------------------------------------

    def invite(self) -> _native.Membership:
        """Rank 0: makes the memory of its machine and hands it to all who can attach it."""
        host = _native.BootstrapHost(list(range(self.size)), self.size)
        self.tuning = tuning_for(self.size)
        self._name_keys_after(host.address)
        self._set(_ADDRESS, {"place": _place(), "address": host.address})
        try:
            cards = self._gather(host)
            self.several = bool(cards)
            if cards:
                self._publish_plan(host.members, cards)
            membership = self._share(host)
        except DistError as error:
            self._tell(str(error))
            raise
        self._forget(_ADDRESS)
        return membership

    def follow(self) -> _native.Membership:
        """Any other rank: attaches the memory of its machine's leader, or makes it where it leads."""
        try:
            self.store.wait([_ADDRESS], timedelta(seconds=self._left()))
        except Exception as error:
            raise CollectiveTimeoutError(
                f"[rank {self.rank}] {self.label}: rank 0 did not publish its address within {self.timeout}"
            ) from error
        first = self._get(_ADDRESS)
        self._name_keys_after(first["address"])
        place = _place()
        try:
            if place == first["place"]:
                membership = self._join(0, first["address"])
                if membership is not None:
                    return membership
                place = f"{place} rank {self.rank} alone"
            self.several = True
            return self._settle(place)
        except CollectiveTimeoutError:
            raise
        except DistError as error:
            self._raise_cause(error)

    def _settle(self, place: str) -> _native.Membership:
        """A rank that does not share memory with rank 0: finds its machine."""
        self._set(self._key("card", self.rank), {"place": place, "system": _system()})
        self.deadline += _GRACE_S
        self._await([self._key("plan")], [0], "did not say who shares memory with whom")
        plan = self._get(self._key("plan"))
        self.tuning = plan["tuning"]
        members = next(one for one in plan["machines"] if self.rank in one)
        if members[0] != self.rank:
            key = self._key("leader", members[0])
            self._await([key], members[:1], "did not publish its address")
            membership = self._join(members[0], self._get(key))
            if membership is not None:
                return membership
            self._set(self._key("apart", self.rank), True)
            members = [self.rank]
        host = _native.BootstrapHost(members, self.size)
        if len(members) > 1:
            self._set(self._key("leader", self.rank), host.address)
            self._until(lambda: self._still_missing(host, "apart"), "did not come")
        return self._share(host)

    def _gather(self, host: _native.BootstrapHost) -> dict[int, dict[str, str]]:
        """Rank 0: returns the cards of those who do not share its memory, once all have come."""
        self._until(lambda: self._still_missing(host, "card"), "did not come")
        elsewhere = sorted(set(range(self.size)) - set(host.members))
        return {rank: self._get(self._key("card", rank)) for rank in elsewhere}

    def _still_missing(self, host: _native.BootstrapHost, sign: str) -> list[int]:
        """Waits a moment for guests, then goes on without those who left a sign that they cannot attach."""
        for rank in host.accept(_SLICE_S):
            if self.store.check([self._key(sign, rank)]):
                host.exclude(rank)
        return host.accept(0.0)

    def _publish_plan(self, own: list[int], cards: dict[int, dict[str, str]]) -> None:
        machines: dict[str, list[int]] = {}
        for rank, card in cards.items():
            machines.setdefault(card["place"], []).append(rank)
        # Where loopback reaches everyone. Any other address does too.
        one_system = all(card["system"] == _system() for card in cards.values())
        plan = {
            "machines": [own, *machines.values()],
            "one_system": one_system,
            "tuning": self.tuning,  # ranks that took different ways would wait for each other for ever
        }
        self._set(self._key("plan"), plan)

    def _share(self, host: _native.BootstrapHost) -> _native.Membership:
        """A leader: makes the memory, hands it to its guests, and waits until they have attached it."""
        host.set_tuning(self.tuning, self.size)
        host.share(self.several, self._left())
        self._until(lambda: host.await_attached(_SLICE_S), "did not attach the shared memory")
        leader = self.rank
        membership = host.release(self._left())
        if self.several:
            self._span(membership, leader)
        return membership

    def _join(self, leader: int, address: str) -> _native.Membership | None:
        """Attaches the memory of a leader; ``None`` where that is not possible from here."""
        try:
            guest = _native.BootstrapGuest(address, self.rank, self.size, self._left())
        except DistBackendError:  # another user, who gets no descriptor from us and gives us none
            return None
        self.deadline += _GRACE_S
        self._until(lambda: [] if guest.answered(_SLICE_S) else [leader], "did not answer")
        self.several = guest.attach(self._left())
        self._until(lambda: [] if guest.answered(_SLICE_S) else [leader], "did not say that all are attached")
        membership = guest.await_release(self._left())
        if self.several:
            self._span(membership, leader)
        return membership

    # ---- who reaches whom ------------------------------------------------------------------------------

    def _span(self, membership: _native.Membership, leader: int) -> None:
        """Learns where the ranks of all machines listen, and lets them know where this one does."""
        self._await([self._key("plan")], [0], "did not say who shares memory with whom")
        chosen = choose_addresses(self.store, self._get(self._key("plan"))["one_system"])
        listeners = _native.HostListeners(chosen.addresses, min(max(4 * self.size, 64), 4096))
        mine = {"leader": leader, "host": socket.gethostname(), "places": listeners.places}
        self._set(self._key("rank", self.rank), mine)
        if self.rank == 0:
            self._await(
                [self._key("rank", r) for r in range(self.size)], range(self.size), "did not register"
            )
            ranks = [self._get(self._key("rank", r)) for r in range(self.size)]
            self._check_lanes(ranks)
            self._set(self._key("world"), {"ranks": ranks, "secret": secrets.token_hex(16)})
        else:
            self._await([self._key("world")], [0], "did not publish the addresses of all ranks")
        world = self._get(self._key("world"))
        machines: dict[int, list[int]] = {}
        for rank, one in enumerate(world["ranks"]):
            machines.setdefault(one["leader"], []).append(rank)
        membership.span(
            list(machines.values()),
            [world["ranks"][first]["host"] for first in machines],
            listeners,
            [[(address, port) for address, port in one["places"]] for one in world["ranks"]],
            world["secret"],
            chosen.chosen,
        )

    def _check_lanes(self, ranks: list[dict[str, Any]]) -> None:
        for rank, one in enumerate(ranks):
            if len(one["places"]) != len(ranks[0]["places"]):
                self._fail(
                    f"rank {rank} on {one['host']!r} offers {len(one['places'])} network addresses and "
                    f"rank 0 on {ranks[0]['host']!r} {len(ranks[0]['places'])}; "
                    "COLLECTIVES_SOCKET_IFNAME must name equally many interfaces on all ranks"
                )

    def link(self, group: _native.HostGroup) -> None:
        """Waits until this machine's leader is connected with all others."""
        try:
            self._until(
                lambda: group.link(_SLICE_S),
                "could not be connected",
                lambda: (
                    f"{group.trouble() or 'no answer'}. Let firewalls pass TCP between the machines, or name "
                    "the network interface that reaches the others in COLLECTIVES_SOCKET_IFNAME on each"
                ),
            )
        except DistError as error:
            self._tell(str(error))
            raise

    # ---- the store -------------------------------------------------------------------------------------

    def _name_keys_after(self, address: str) -> None:
        """Gives this attempt its own keys, so that nothing left by another one is taken for its own."""
        self.prefix = "host/" + address.split(" ", maxsplit=1)[0]

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"{self.prefix}/{name}" + ("" if rank is None else f"/{rank}")

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def _forget(self, key: str) -> None:
        # Not every store can delete; a group of its own prefix needs no tidying.
        with contextlib.suppress(Exception):
            self.store.delete_key(key)

    # ---- waiting and failing ---------------------------------------------------------------------------

    def _await(self, keys: list[str], owners: Sequence[int], what: str) -> None:
        """Waits for keys that other ranks set."""

        def missing() -> list[int]:
            end = time.monotonic() + _SLICE_S
            while not self.store.check(keys):
                if time.monotonic() >= end:
                    return [
                        owner for key, owner in zip(keys, owners, strict=True) if not self.store.check([key])
                    ]
                time.sleep(_POLL_S)
            return []

        self._until(missing, what)

    def _until(
        self, missing: Callable[[], list[int]], what: str, why: Callable[[], str] | None = None
    ) -> None:
        """Repeats ``missing`` until it returns no rank."""
        while ranks := missing():
            self._check_failures()
            if time.monotonic() >= self.deadline:
                names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                raise CollectiveTimeoutError(
                    f"[rank {self.rank}] {self.label}: {names} {what} within {self.timeout}"
                    + (f": {why()}" if why else "")
                )

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), _SLICE_S)

    def _tell(self, reason: str) -> None:
        with contextlib.suppress(Exception):  # the store may be what failed; the reason is raised here anyway
            self.store.set(self._key("failed"), reason)

    def _check_failures(self) -> None:
        if self.store.check([self._key("failed")]):
            raise DistNetworkError(self.store.get(self._key("failed")).decode())

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
            if self.store.check([self._key("failed")]):
                cause = self.store.get(self._key("failed")).decode()
        if cause is not None:
            raise type(error)(cause) from error
        self._tell(f"[rank {self.rank}] {self.label}: {error}")
        raise type(error)(
            f"[rank {self.rank}] {self.label}: cannot join rank 0, which has died, or whose address in the "
            f"store is left over from another run: {error}"
        ) from error


def _place() -> str:
    """Returns what tells machines apart, as far as attaching goes: the boot and the network name space.

    ``COLLECTIVES_HOST_MACHINE`` divides it further: ranks with different labels never share memory.
    """
    label = os.environ.get(_LABEL, "")
    return f"{_system()} {label}" if label else _system()


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()
