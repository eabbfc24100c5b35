"""How the ranks of a host group find each other through the group's store.

Rank 0 publishes the address of its unix socket and where it runs. Ranks that run there too connect to it and
attach its shared memory (``native/state/bootstrap.hpp``). Where all do, that is all.

The others publish their locations. Once every rank has connected or published one, rank 0 publishes a plan:
who may share memory with whom, and how many ranks each one's host runs. The lowest rank of each further
machine, its leader, does for its ranks what rank 0 did for its own; a rank that cannot attach is a machine
of its own. Then every rank listens for connections and publishes where, rank 0 publishes all addresses, and
the leaders connect. The last rank that reads the addresses deletes them.

Both ends of each connection, that of a unix socket too, prove that they know the group's key, which comes
from the job's secret and from what tells this group from all others. Without a secret, rank 0 publishes
random digits instead, ranks take no connection of another user, and ranks on several systems refuse to form
a group.

Whoever fails says why in the store; nobody waits in vain. The death of a rank is noticed by those that it was
connected with: on its machine by the end of its process or its connection, elsewhere because nothing listens
there any more. They name it in the store. A rank that dies before can only be missed.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import collectives._native as _native
from collectives.backends._shared.exit_reasons import abort_reason
from collectives.backends.host import rendezvous_records as records
from collectives.backends.host.admission import check_system, group_key, random_key
from collectives.backends.host.known_listeners import KnownListeners
from collectives.backends.host.network import listen, place
from collectives.backends.host.rendezvous_keys import READERS_S, RendezvousKeys, StoreLostError, await_readers
from collectives.backends.host.tuning_file import tuning_for
from collectives.core.types import nanoseconds
from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    ranks_in_words,
)
from collectives.secret import SECRET
from collectives.store.process import own_user_only, system
from collectives.store.records import Checked, error_of, record_of
from collectives.store.tcp.interfaces import choose_addresses
from collectives.store.waiting import delete_keys, wait_for_keys

__all__ = ["form"]

_ADDRESS = "host/address"
_SLICE_S = 0.1
"""How often a waiting rank answers signals and looks whether another one failed."""
_FIRST_SLICE_S = 0.002
"""How soon rank 0, which waits for connections, first looks for ranks that publish a location instead."""
_END_SHOWS_S = 0.2
"""How much later than that of its store the end of a process may show."""
_GRACE_S = 1.0
"""How much longer than rank 0 the others wait, so that they hear from it who did not come."""


def form(
    store: Any, rank: int, size: int, timeout: timedelta, label: str, record: _native.OperationRecord
) -> _native.HostGroup:
    """Returns this rank's group in the core, once all ranks have one; called by all ranks.

    Args:
        store: the group's own store.
        rank: this process's rank.
        size: number of ranks.
        timeout: how long to wait for the others.
        label: the group in words, for messages.
        record: gets its operations.

    Raises:
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank died after it had met others.
        GroupAbortedError: a rank for which the group was complete has aborted it since.
        DistNetworkError: ranks on different machines cannot reach each other, or the store failed, or there
            is no job secret and the kernel cannot tell the users apart.
        DistBackendError: there is not enough shared memory.
    """
    if size == 1:
        return _native.HostGroup(_native.single_rank_membership(), label, nanoseconds(timeout), record)
    attempt = _Attempt(store, rank, size, timeout, label)
    try:
        membership = attempt.invite() if rank == 0 else attempt.follow()
        group = _native.HostGroup(membership, label, nanoseconds(timeout), record)
        if attempt.several:
            attempt.link(group)
    except GroupAbortedError:
        raise  # by a rank for which the group was complete already
    except (DistError, StoreLostError) as error:
        raise attempt.failure(error) from error
    except BaseException as error:
        attempt.failure(DistBackendError(f"{type(error).__name__}: {error}", rank))  # for the others
        raise
    return group


def _new_address() -> str:
    """Returns a name for a unix socket that nobody has, and nobody else can guess."""
    return f"collectives-{secrets.token_hex(16)}"


def _unproved(rank: int) -> str:
    return (
        f"rank {rank} and this rank have not proved to each other that they are of one group: they differ "
        f"in the number of ranks or in the job's secret ({SECRET}), or another process has come as this "
        "rank, or somebody else writes to the store"
    )


class _Attempt:
    """One rank's side of forming a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, label: str) -> None:
        self.keys = RendezvousKeys(store, size)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.began = time.monotonic()
        self.deadline = self.began + timeout.total_seconds()
        self.label = label
        self.key = b""
        self.own_user_only = own_user_only()
        self.several = False
        self.tuning: dict[str, int] = {}
        self.members: _native.Membership | None = None
        self.plan: Checked | None = None
        self.elsewhere: dict[int, Checked] = {}
        self.heard: Checked | None = None
        self.listeners = KnownListeners()

    # ---- who shares memory with whom -------------------------------------------------------------------

    def invite(self) -> _native.Membership:
        """Rank 0: makes the memory of its machine and hands it to all who can attach it."""
        address, published = _new_address(), random_key()
        self.key = group_key(self.keys.scope_of(address), published)
        host = _native.BootstrapLeader(address, list(range(self.size)), self.size, self.key)
        self.tuning = tuning_for(self.size)
        invitation = {"place": place(), "system": system(), "address": address, "key": published}
        self.keys.set(_ADDRESS, invitation)
        self.keys.name_after(address)  # not before, as nobody would find a failure there
        locations = self._gather(host)
        self.several = bool(locations)
        if locations:
            self._publish_plan(host.members, locations)
        membership = self._share(host)
        delete_keys(self.keys.store, [_ADDRESS] if self.several else [_ADDRESS, self.keys.name("elsewhere")])
        return membership

    def follow(self) -> _native.Membership:
        """Any other rank: attaches the memory of its machine's leader, or makes it where it leads."""
        try:
            came = wait_for_keys(self.keys.store, [_ADDRESS], timedelta(seconds=self._left()))
        except Exception as error:
            raise StoreLostError(str(error)) from error
        if not came:
            raise CollectiveTimeoutError(
                f"[rank {self.rank}] {self.label}: rank 0 did not publish its address within {self.timeout}",
                0,
                missing_ranks=[0],
            )
        first = self.keys.get(_ADDRESS, records.invitation)
        if "failed" in first:
            self.heard = first["failed"]
            raise error_of(self.heard)
        self.key = group_key(self.keys.name_after(first["address"]), first["key"])
        own = place()
        if own == first["place"]:
            membership = self._join(0, first["address"])
            if membership is not None:
                return membership
            own = f"{own} rank {self.rank} alone"
        check_system(first["system"])
        self.several = True
        return self._find_machine(own)

    def _find_machine(self, own: str) -> _native.Membership:
        """A rank that does not share memory with rank 0: finds its machine."""
        self.keys.announce("elsewhere", {"rank": self.rank, "place": own, "system": system()})
        self.deadline += _GRACE_S
        self._await([self.keys.name("plan")], [0], "did not say who shares memory with whom")
        plan = self._get_plan()
        self.tuning = plan["tuning"]
        members = next(one for one in plan["machines"] if self.rank in one)
        if members[0] != self.rank:
            key = self.keys.name("leader", members[0])
            self._await([key], members[:1], "did not publish its address")
            membership = self._join(members[0], self.keys.get(key, records.address))
            if membership is not None:
                return membership
            self.keys.announce("apart", {"rank": self.rank})
            members = [self.rank]
        address = _new_address()
        host = _native.BootstrapLeader(address, members, self.size, self.key)
        if len(members) > 1:
            self.keys.set_own(self.keys.name("leader", self.rank), address)
            self._until(lambda: self._still_missing(host, "apart", self._apart), "did not come")
        return self._share(host)

    def _gather(self, host: _native.BootstrapLeader) -> dict[int, Checked]:
        """Rank 0: returns the locations of those who do not share its memory, once all have come."""
        self._until(lambda: self._still_missing(host, "elsewhere", self._location), "did not come")
        return {rank: self.elsewhere[rank] for rank in sorted(set(range(self.size)) - set(host.members))}

    def _still_missing(
        self, host: _native.BootstrapLeader, name: str, check: Callable[[Any], Checked]
    ) -> list[int]:
        """Waits a moment for guests, then goes on without those who announced that they do not attach."""
        waited = time.monotonic() - self.began
        missing = host.accept(min(max(waited / 4, _FIRST_SLICE_S), _SLICE_S))
        announced = self.keys.new(name, check) if missing else []
        for record in announced:
            self.elsewhere[record["rank"]] = record
            if record["rank"] in missing:
                host.exclude(record["rank"])
        return host.accept(0.0) if announced else missing

    def _publish_plan(self, own: list[int], locations: dict[int, Checked]) -> None:
        machines: dict[str, list[int]] = {}
        for rank, location in locations.items():
            machines.setdefault(location["place"], []).append(rank)
        here = system()
        systems = [locations[rank]["system"] if rank in locations else here for rank in range(self.size)]
        plan = records.new_plan([own, *machines.values()], systems, self.tuning)
        self.keys.set(self.keys.name("plan"), plan)

    def _share(self, host: _native.BootstrapLeader) -> _native.Membership:
        """A leader: makes the memory, hands it to its guests, and waits until they have attached it."""
        host.set_tuning(self.tuning, self.size)
        host.share(self.several, self._left())
        self._until(lambda: host.await_attached(_SLICE_S), "did not attach the shared memory")
        membership = host.release(self._left())
        if self.several:
            self._register(membership, self.rank)
        return membership

    def _join(self, leader: int, address: str) -> _native.Membership | None:
        """Attaches the memory of a leader; ``None`` where that is not possible from here."""
        try:
            guest = _native.BootstrapFollower(address, leader, self.rank, self.size, self.key, self._left())
        except PeerLostError as error:
            raise DistNetworkError(
                f"cannot join rank {leader}, which has died, or whose address in the store is left over from "
                f"another run: {error}",
                leader,
            ) from error
        except DistBackendError:  # another user, who gets no descriptor from us and gives us none
            return None
        self.deadline += _GRACE_S
        proved = False
        try:
            self._until(lambda: [] if guest.proved(_SLICE_S) else [leader], "did not answer", connected=True)
            proved = True
            self._until(
                lambda: [] if guest.answered(_SLICE_S) else [leader], "did not answer", connected=True
            )
            self.several = guest.attach(self._left())
            self._until(
                lambda: [] if guest.answered(_SLICE_S) else [leader],
                "did not say that all are attached",
                connected=True,
            )
            membership = guest.await_release(self._left())
        except PeerLostError as error:
            if error.rank >= 0:  # from elsewhere
                raise
            self._lose_leader(guest, leader, proved)
            raise PeerLostError(f"rank {leader} has died while the group was formed", leader) from error
        if self.several:
            self._register(membership, leader)
        return membership

    def _lose_leader(self, guest: _native.BootstrapFollower, leader: int, proved: bool) -> None:
        """Returns once the leader, who has closed the connection, is dead; raises what it says otherwise."""
        end = time.monotonic() + READERS_S
        while not guest.leader_ended:
            with contextlib.suppress(StoreLostError):
                self._check_failures()
            if time.monotonic() >= end:
                text = f"rank {leader} has closed its connection while the group was formed, and not said why"
                raise DistNetworkError(text if proved else _unproved(leader), leader)
            time.sleep(_FIRST_SLICE_S)

    # ---- who reaches whom ------------------------------------------------------------------------------

    def _register(self, membership: _native.Membership, leader: int) -> None:
        """Learns where the ranks of all machines listen, and lets them know where this one does."""
        self.members = membership
        self._await([self.keys.name("plan")], [0], "did not say who shares memory with whom")
        plan = self._get_plan()
        chosen = choose_addresses(self.keys.store, plan["one_system"])
        listeners = listen(chosen.addresses, self.size)
        mine = {"leader": leader, "host": socket.gethostname(), "places": listeners.places}
        # The last reader deletes that of rank 0: others look whether it still listens.
        publish = self.keys.set_own if self.rank else self.keys.set
        publish(self.keys.name("listener", self.rank), mine)
        if self.rank == 0:
            keys = [self.keys.name("listener", r) for r in range(self.size)]
            self._await(keys, range(self.size), "did not register")
            ranks = self.keys.get_all(keys, self._listener)
            self._check_interfaces(ranks)
            self.keys.set(self.keys.name("addresses"), records.address_book(ranks))
        else:
            self._await(
                [self.keys.name("addresses")],
                [0],
                "did not publish the addresses of all ranks",
                lambda: self._watch_rank_0(leader),
            )
        world = self.keys.get(self.keys.name("addresses"), partial(records.addresses, size=self.size))
        self.keys.delete_own()
        if self.keys.asked.add(self.keys.name("readers"), 1) == self.size:
            names = ("elsewhere", "apart", "plan", "listener/0", "addresses", "readers")
            delete_keys(self.keys.store, map(self.keys.name, names))
        machines, places = world["machines"], world["places"]
        self.listeners.places = {leader: places[leader] for leader, *_ in machines}
        membership.span(
            machines,
            world["hosts"],
            listeners,
            places,
            self.key,
            self.own_user_only,
            chosen.chosen,
            plan["ranks_on_host"][self.rank],
        )

    def _check_interfaces(self, ranks: list[dict[str, Any]]) -> None:
        for rank, one in enumerate(ranks):
            if len(one["places"]) != len(ranks[0]["places"]):
                raise DistNetworkError(
                    f"rank {rank} on {one['host']!r} offers {len(one['places'])} network addresses and "
                    f"rank 0 on {ranks[0]['host']!r} {len(ranks[0]['places'])}; "
                    "COLLECTIVES_SOCKET_IFNAME must name equally many interfaces on all ranks",
                    rank,
                )

    def _watch_rank_0(self, leader: int) -> None:
        """Tries whether rank 0 still listens, where this rank does not see its process."""
        known = self.listeners.places
        if leader != 0 and 0 not in known and self.keys.asked.check([self.keys.name("listener", 0)]):
            known[0] = self.keys.get(self.keys.name("listener", 0), self._listener)["places"]
        self.listeners.check([0], self.began)

    def link(self, group: _native.HostGroup) -> None:
        """Waits until this machine's leader is connected with all others."""

        def missing() -> list[int]:
            ranks = group.connect(_SLICE_S)
            self.listeners.check(ranks, self.began)
            return ranks

        self.members = None  # the group has taken it
        self.began = time.monotonic()
        try:
            self._until(
                missing,
                "could not be connected",
                lambda: (
                    f"{group.connection_error() or 'no answer'}. Let firewalls pass TCP between machines, "
                    "or name the interface that reaches the others in COLLECTIVES_SOCKET_IFNAME on each"
                ),
            )
        except BaseException as error:
            reason: DistError = abort_reason(f"rank {self.rank} could not link up", self.rank)
            if isinstance(error, DistError) and not isinstance(error, CollectiveTimeoutError):
                reason = error if error.rank not in {-1, self.rank} else reason  # what another rank has told
            group.fail(reason)  # those who have linked up learn it by their first operation
            group.shutdown(False)
            raise

    # ---- the store -------------------------------------------------------------------------------------

    def _get_plan(self) -> Checked:
        if self.plan is None:
            self.plan = self.keys.get(self.keys.name("plan"), partial(records.plan, size=self.size))
        return self.plan

    def _location(self, record: Any) -> Checked:
        return records.location(record, self.size)

    def _apart(self, record: Any) -> Checked:
        return records.apart(record, self.size)

    def _listener(self, record: Any) -> Checked:
        return records.listener(record, self.size)

    # ---- waiting and failing ---------------------------------------------------------------------------

    def _await(
        self, keys: list[str], owners: Sequence[int], what: str, look: Callable[[], None] | None = None
    ) -> None:
        """Waits for keys that other ranks set; calls ``look`` now and then."""

        def missing() -> list[int]:
            try:
                self.keys.store.wait(keys, timedelta(seconds=_SLICE_S))
            except Exception:  # noqa: BLE001 - too early, or the store has gone, as the next question tells
                if look is not None:
                    look()
                return list(owners)  # some of them
            return []

        def who() -> list[int]:
            here = self.keys.asked.check
            return [rank for key, rank in zip(keys, owners, strict=True) if not here([key])]

        self.began = time.monotonic()
        self._until(missing, what, who=who)

    def _until(
        self,
        missing: Callable[[], list[int]],
        what: str,
        why: Callable[[], str] | None = None,
        *,
        who: Callable[[], list[int]] | None = None,
        connected: bool = False,
    ) -> None:
        """Repeats ``missing`` until it returns no rank.

        Args:
            missing: waits a moment; returns who has not come.
            what: what those did not do, in words.
            why: says more.
            who: returns more exactly who has not come; asked once, when the time is up.
            connected: ``missing`` watches a connection that tells of failures too, so that the store is
                allowed to fail before that says whose death it was.
        """
        while ranks := missing():
            try:
                self._check_failures()
            except StoreLostError:
                if not connected:
                    raise
            if time.monotonic() >= self.deadline:
                if who is not None and not (ranks := who()):
                    return  # the last ones came just now
                raise CollectiveTimeoutError(
                    f"[rank {self.rank}] {self.label}: {ranks_in_words(ranks)} {what} within {self.timeout}"
                    + (f": {why()}" if why else ""),
                    ranks[0],
                    missing_ranks=ranks,
                )

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), _SLICE_S)

    def _check_failures(self) -> None:
        """Raises where another rank has published its failure, or has ended on this machine."""
        for rank in self.members.ended if self.members else ():
            raise PeerLostError(f"rank {rank} has died while the group was formed", rank)
        if record := self._published_failure():
            raise error_of(record)

    def _published_failure(self) -> Checked | None:
        """Returns the record of the failure that a rank has published."""
        if not self.keys.prefix or not self.keys.asked.check([self.keys.name("failed")]):
            return self.heard
        return self.keys.get(self.keys.name("failed"), records.failure)

    def failure(self, error: DistError | StoreLostError) -> DistError:
        """Returns the first failure that was published, or else this one, once the others have read it.

        It is not raised here: an exception in a frame of its own traceback would keep descriptors open until
        the next garbage collection.
        """
        published = None
        # The store may have gone with the rank that kept it.
        with contextlib.suppress(StoreLostError, DistStoreError):
            published = self._published_failure()
        record = published or self._record(error)
        with contextlib.suppress(StoreLostError):
            if self.keys.prefix and not published:
                self.keys.set(self.keys.name("failed"), record)
            elif self.rank == 0 and not published:
                self.keys.set(_ADDRESS, {"failed": record})
            if published or self.keys.prefix or self.rank == 0:
                await_readers(self.keys.asked, self.keys.name("failure read"), self.size, error_of(record))
        return error_of(record)

    def _record(self, error: DistError | StoreLostError) -> Checked:
        """Returns why this rank fails, which is at fault itself where no other rank is known to be."""
        at_fault = -1 if isinstance(error, (PeerLostError, StoreLostError)) else self.rank
        if isinstance(error, StoreLostError):
            error = self._without_store(error)
        record = record_of(error)
        if not str(error).startswith("[rank"):
            record["text"] = f"[rank {self.rank}] {self.label}: {error}"
        return {**record, "rank": at_fault} if error.rank < 0 else record

    def _without_store(self, error: StoreLostError) -> DistError:
        """Returns the error of a store that failed; names the rank that died where that shows."""
        end = time.monotonic() + _END_SHOWS_S
        while self.members and not self.members.ended and time.monotonic() < end:
            time.sleep(_FIRST_SLICE_S)
        if self.members and self.members.ended:
            lost = self.members.ended[0]
            text = f"rank {lost} has died while the group was formed, and the store with it: {error}"
            return PeerLostError(text, lost)
        text = f"the store failed while the group was formed; whoever kept it may have died: {error}"
        return DistNetworkError(text)
