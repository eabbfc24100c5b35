"""How the ranks of a host group find each other through the group's store.

Every rank listens on a unix socket of its own, and they exchange where they run
(``store/joining/agreement.py``). Ranks of one place may share memory: the lowest of them, its leader, makes
it, and the others connect to it and attach it (``native/state/bootstrap.hpp``). Where all do that is all. A
rank that cannot attach says so in the store, and is a machine of its own.

On several machines, every rank then listens for connections, they exchange where, and the leaders connect.

Both ends of each connection, that of a unix socket too, prove that they know the group's key, which comes
from the job's secret and from what tells this group from all others. Without a secret, it comes from random
digits instead, which ranks exchange; ranks take no connection of another user then, and ranks on several
systems refuse to form a group.

A rank that fails says why in the store; nobody waits in vain. The death of a rank is noticed by those that it
was connected with, or that have read where it is while they wait for others: on its machine by the end of its
process, its connection or its socket, elsewhere because nothing listens there any more. They name it in the
store. A rank that dies before can only be missed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import collectives._native as _native
from collectives.backends._shared.exit_reasons import abort_reason
from collectives.backends.host import rendezvous_records as records
from collectives.backends.host.threads import agreed, remember, shares, wish
from collectives.backends.host.tuning_file import tuning_for
from collectives.core.types import nanoseconds
from collectives.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    GroupAbortedError,
    PeerLostError,
    ranks_in_words,
)
from collectives.secret import SECRET, WAY_OUT, derived_key
from collectives.store.encryption import check_libcrypto, encryption
from collectives.store.joining.agreement import Watch, blaming_lost, exchange, fail, told
from collectives.store.joining.known_listeners import KnownListeners
from collectives.store.process import own_user_only, system
from collectives.store.records import Checked, fetch, publish
from collectives.store.tcp.interfaces import choose_addresses
from collectives.store.tcp.listen import ports_to_try
from collectives.store.waiting import delete_keys, missing_text

_LABEL = "COLLECTIVES_HOST_MACHINE"
"""Variable that divides a machine further: ranks with different labels never share memory."""
_KEY = "host"
"""Prefix of the keys, below which a rank says why it fails."""
_APART = f"{_KEY}/apart"
"""There once a rank has found that it cannot attach its leader's memory; its number follows."""
_KEY_BYTES = 32
_SLICE_S = 0.1
"""How often a waiting rank answers signals and looks whether another one failed."""
_LEADER_LIMIT_S = 2.0
"""How long a leader that has closed a connection may take to say why, or to end."""
_LOOK_AGAIN_S = 0.002
_GRACE_S = 1.0
"""How much longer than the limit connecting may take where the last rank came just within it."""


def form(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    label: str,
    record: _native.OperationRecord,
    look: Callable[[], DistError | None] = lambda: None,
    threads: int | None = None,
) -> _native.HostGroup:
    """Returns this rank's group in the core, once all ranks have one; called by all ranks.

    Args:
        store: the group's own store.
        rank: this process's rank.
        size: number of ranks.
        timeout: how long to wait for the others.
        label: the group in words, for messages.
        record: gets its operations.
        look: returns the error for a rank that is known otherwise to have died; asked again and again.
        threads: of this rank, for long messages; ``None`` for the default.

    Raises:
        ValueError: ``threads``, or ``COLLECTIVES_THREADS``, is no number from 1 to 32.
        CollectiveTimeoutError: a rank did not come in time; the message names it.
        PeerLostError: a rank died after it had met others.
        GroupAbortedError: a rank for which the group was complete has aborted it since.
        DistNetworkError: ranks on different machines cannot reach each other, or the store failed, or there
            is no job secret and the kernel cannot tell the users apart.
        DistBackendError: there is not enough shared memory.
    """
    if size == 1:
        alone = [{**wish(threads), "system": ""}]
        return _native.HostGroup(
            _native.single_rank_membership(),
            label,
            nanoseconds(timeout),
            record,
            *agreed(alone),
            *shares(alone),
        )
    forming = _Forming(store, rank, size, timeout, label, look, threads)
    with forming.open:
        try:
            membership = forming.share_memory()
            if forming.several:
                forming.listen(membership)
            cores = forming.plan["cores"][rank]
            remember(cores)
            group = _native.HostGroup(
                membership, label, nanoseconds(timeout), record, forming.plan["threads"][rank], cores
            )
            if forming.several:
                forming.link(group)
        except GroupAbortedError:
            raise  # by a rank for which the group was complete already
        except DistError as error:
            raise forming.failure(error) from error
        except BaseException as error:
            forming.failure(DistBackendError(f"{type(error).__name__}: {error}", rank))  # for the others
            raise
        return group


def group_key(attempt: str, published: str) -> bytes:
    """Returns the key of a group, which no other one has, whatever lies in the store.

    Args:
        attempt: what tells this group, and this attempt to form it, from all others: its scope, and the
            address of a rank.
        published: that rank's random digits, where there is no secret.
    """
    purpose = f"mesh {attempt}"
    text = purpose.encode(errors="surrogateescape")
    return derived_key(purpose) or hmac.digest(bytes.fromhex(published), text, hashlib.sha256)


class _Forming:
    """One rank's side of forming a group."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        label: str,
        look: Callable[[], DistError | None],
        threads: int | None,
    ) -> None:
        self.store = store
        self.threads = threads
        self.look = look
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout.total_seconds()
        self.where = f"[rank {rank}] {label}:"
        self.own_user_only = False
        self.several = False
        self.plan: Checked = {}
        self.leaders: dict[int, int] = {}
        self.known = KnownListeners(rank)
        # Where others wait for this rank: closed when it has failed and said why, however long somebody keeps
        # the exception, whose frames keep their objects.
        self.open = ExitStack()

    # ---- who shares memory with whom -------------------------------------------------------------------

    def share_memory(self) -> _native.Membership:
        """Attaches the memory of this machine's leader, or makes it where this rank leads."""
        self.own_user_only = own_user_only()
        # A name that nobody has, and nobody else can guess.
        address = f"collectives-{secrets.token_hex(16)}"
        digits = "" if derived_key("mesh") else secrets.token_hex(_KEY_BYTES)
        others = [rank for rank in range(self.size) if rank != self.rank]
        key = group_key(self._scope() + address, digits)
        host = _native.BootstrapLeader(address, [self.rank, *others], self.size, key)
        self.open.enter_context(closing(host))
        mine = {
            "place": _machine_id(),
            "system": system(),
            "address": address,
            "key": digits,
            "encryption": int(encryption()),
            # The same thresholds for all: ranks that took different ways would wait for ever.
            "tuning": tuning_for(self.size) if self.rank == 0 else {},
            **wish(self.threads),
        }

        def watch(others: Mapping[int, Checked]) -> DistError | None:
            neighbours = [rank for rank, one in others.items() if one["place"] == mine["place"]]
            return next(
                (_lost(rank) for rank in neighbours if socket_has_gone(others[rank]["address"])), None
            )

        plan = self._meet("places", mine, records.location, records.new_plan, records.plan, watch)
        if plan["encrypts"]:
            check_libcrypto()
        if not plan["one_system"] and self.own_user_only:
            raise DistNetworkError(f"the ranks run on different machines and have no job secret; {WAY_OUT}")
        self.plan = plan
        self.leaders = {rank: members[0] for members in plan["machines"] for rank in members}
        self.several = len(plan["machines"]) > 1
        self.deadline += _GRACE_S
        members = next(one for one in plan["machines"] if self.rank in one)
        if members[0] != self.rank:
            membership = self._follow(members[0])
            if membership is not None:
                return membership
            with self._asking():
                publish(self.store, f"{_APART}/{self.rank}", None)
                self.store.set(_APART, "")
            self.leaders[self.rank] = self.rank
            self.several = True
            members = [self.rank]
        for rank in {*others}.difference(members):
            host.exclude(rank)
        return self._lead(host)

    def _lead(self, host: _native.BootstrapLeader) -> _native.Membership:
        """A leader: makes the memory, hands it to its followers, and waits until they have attached it."""
        members = host.members
        self._until(lambda: self._accept(host), "did not connect with the leader of its machine")
        self.several = self.several or host.members != members
        host.set_tuning(self.plan["tuning"], self.size, max(self.plan["threads"]))
        host.share(self.several, self._left())
        self._until(lambda: host.await_attached(_SLICE_S), "did not attach the shared memory")
        return host.release(self._left())

    def _accept(self, host: _native.BootstrapLeader) -> list[int]:
        """Waits a moment for followers; goes on without those who cannot attach."""
        missing = host.accept(_SLICE_S)
        if self._exclude_apart(host, missing):
            missing = host.accept(0.0)
        gone = [rank for rank in missing if socket_has_gone(self.plan["addresses"][rank])]
        if self._exclude_apart(host, gone):  # who goes apart says so, then closes its socket
            return host.accept(0.0)
        if gone:
            self._raise_lost(gone[0])
        return missing

    def _exclude_apart(self, host: _native.BootstrapLeader, ranks: list[int]) -> bool:
        """Goes on without those of these ranks that have said that they cannot attach, if any."""
        with self._asking():
            here = bool(ranks) and self.store.check([_APART])
            apart = [rank for rank in ranks if here and self.store.check([f"{_APART}/{rank}"])]
            for rank in apart:
                fetch(self.store, f"{_APART}/{rank}", lambda record: record)
        for rank in apart:
            delete_keys(self.store, [f"{_APART}/{rank}"])
            host.exclude(rank)
        return bool(apart)

    def _follow(self, leader: int) -> _native.Membership | None:
        """Attaches the memory of a leader; ``None`` where that is not possible from here."""
        plan = self.plan
        machine = next(number for number, one in enumerate(plan["machines"]) if one[0] == leader)
        address = plan["addresses"][leader]
        key = group_key(self._scope() + address, plan["keys"][machine])
        try:
            guest = _native.BootstrapFollower(address, leader, self.rank, self.size, key, self._left())
        except PeerLostError:
            self._raise_lost(leader)
        except DistBackendError:  # another user, who gets no descriptor from us and gives us none
            return None
        self.open.enter_context(closing(guest))
        proved = False
        try:
            self._until(lambda: [] if guest.proved(_SLICE_S) else [leader], "did not answer")
            proved = True
            self._until(lambda: [] if guest.answered(_SLICE_S) else [leader], "did not answer")
            self.several = guest.attach(self._left())
            self._until(
                lambda: [] if guest.answered(_SLICE_S) else [leader], "did not say that all are attached"
            )
            return guest.await_release(self._left())
        except PeerLostError as error:
            if error.rank < 0:  # else from elsewhere
                self._await_end(guest, leader, proved)
                self._raise_lost(leader, ended=True)
            raise

    def _await_end(self, guest: _native.BootstrapFollower, leader: int, proved: bool) -> None:
        """Returns once the leader, who has closed the connection, is dead; raises what it says otherwise."""
        end = time.monotonic() + _LEADER_LIMIT_S
        while not guest.leader_ended:
            self._raise_told()
            if time.monotonic() >= end:
                raise DistNetworkError(
                    f"rank {leader} has closed its connection while the group was formed, and not said why"
                    if proved
                    else f"rank {leader} and this rank have not proved to each other that they are of one "
                    f"group: they differ in the number of ranks or in the job's secret ({SECRET}), or "
                    "another process has come as this rank, or somebody else writes to the store",
                    leader,
                )
            time.sleep(_LOOK_AGAIN_S)

    # ---- who reaches whom ------------------------------------------------------------------------------

    def listen(self, membership: _native.Membership) -> None:
        """Listens for the ranks of other machines, and learns where the ranks of all machines do."""
        chosen = choose_addresses(self.store, self.plan["one_system"])
        backlog = min(max(4 * self.size, 64), 4096)
        listeners = self.open.enter_context(
            closing(_native.HostListeners(chosen.addresses, backlog, ports_to_try()))
        )
        mine = {
            "leader": self.leaders[self.rank],
            "host": socket.gethostname(),
            "places": listeners.places,
        }
        check = partial(records.listener, size=self.size)
        began = time.monotonic()

        def watch(others: Mapping[int, Checked]) -> DistError | None:
            self.known.places = {
                rank: one["places"] for rank, one in others.items() if one["leader"] != mine["leader"]
            }
            try:
                self.known.check([*others], began)
            except PeerLostError as error:
                return error.with_traceback(None)  # which would keep descriptors open
            return None

        world = self._meet(
            "listeners",
            mine,
            check,
            records.address_book,
            records.addresses,
            watch,
            lambda: membership.ended,
        )
        if self.rank == 0:
            delete_keys(self.store, [_APART])
        machines, places = world["machines"], world["places"]
        self.known.places = {leader: places[leader] for leader, *_ in machines}
        membership.span(
            machines,
            world["hosts"],
            listeners,
            places,
            group_key(self._scope() + self.plan["addresses"][0], self.plan["keys"][0]),
            self.own_user_only,
            self.plan["encrypts"],
            chosen.chosen,
            self.plan["ranks_on_host"][self.rank],
        )

    def link(self, group: _native.HostGroup) -> None:
        """Waits until this machine's leader is connected with all others."""
        began = time.monotonic()

        def missing() -> list[int]:
            ranks = group.connect(_SLICE_S)
            self.known.check(ranks, began)
            return ranks

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

    # ---- waiting and failing ---------------------------------------------------------------------------

    def _scope(self) -> str:
        return f"{getattr(self.store, 'scope', '')}{_KEY}/"

    def _asking(self) -> AbstractContextManager[None]:
        """Around what asks the store outside of an exchange; an error of the store is not this rank's."""
        return blaming_lost((), tuple, self._why, self.where)

    def _meet(
        self,
        name: str,
        record: Checked,
        check: Callable[[Any], Any],
        combine: Callable[[list[Any]], Any],
        read: Callable[..., Checked],
        watch: Watch,
        lost_ranks: Callable[[], Collection[int]] = tuple,
    ) -> Checked:
        found: Checked = exchange(
            self.store,
            f"{_KEY}/{name}",
            self.rank,
            range(self.size),
            timedelta(seconds=self._left()),
            self.where,
            record=record,
            check=check,
            combine=combine,
            read=partial(read, size=self.size),
            why=self._why,
            lost_ranks=lost_ranks,
            look=self._told,
            watch=watch,
        )
        return found

    def _why(self, ranks: Sequence[int], died: bool) -> DistError:
        if died:
            return _lost(ranks[0])
        return CollectiveTimeoutError(missing_text(ranks, self.timeout), ranks[0], missing_ranks=ranks)

    def _until(
        self, missing: Callable[[], list[int]], what: str, why: Callable[[], str] | None = None
    ) -> None:
        """Repeats ``missing``, which waits a moment, until it returns no rank.

        Args:
            missing: returns who has not come.
            what: what those did not do, in words.
            why: says more.
        """
        while ranks := missing():
            self._raise_told()
            if time.monotonic() >= self.deadline:
                raise CollectiveTimeoutError(
                    f"{ranks_in_words(ranks)} {what} within {self.timeout.total_seconds():g} s"
                    + (f": {why()}" if why else ""),
                    ranks[0],
                    missing_ranks=ranks,
                )

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), _SLICE_S)

    def _told(self) -> DistError | None:
        """Returns why another rank fails, if it has said so or is known to have died."""
        return told(self.store, _KEY) or self.look()

    def _raise_told(self) -> None:
        """Raises where another rank fails."""
        error = self._told()
        if error is not None:
            try:
                raise error
            finally:
                del error  # else this frame would be in a cycle with it

    def _raise_lost(self, rank: int, ended: bool = False) -> NoReturn:
        """Raises for a rank that has gone, by what it said if it did.

        Args:
            rank: who has gone.
            ended: its process has. A rank that only stopped listening may live and have failed for want of
                the store, where it could not say so.
        """
        self._raise_told()
        if not ended:
            with self._asking():
                self.store.check([_KEY])
        raise _lost(rank)

    def failure(self, error: DistError) -> DistError:
        """Returns the first failure that a rank has told, or else this one, once the others have read it.

        It is another object, not raised here: an exception in a frame of its own traceback would keep
        descriptors open until the next garbage collection.
        """
        text = str(error)
        # Of an exchange, which all have heard, unless the store has failed this rank alone.
        if text.startswith(self.where) and not isinstance(error, DistNetworkError):
            return type(error)(text, **error.details())
        if not text.startswith("[rank"):  # of this rank, which is at fault where no other is known to be
            named = self.rank if error.rank < 0 and not isinstance(error, PeerLostError) else error.rank
            error = type(error)(f"{self.where} {text}", **{**error.details(), "rank": named})
        return fail(self.store, _KEY, self.size, error)


def _lost(rank: int) -> PeerLostError:
    return PeerLostError(f"rank {rank} has died while the group was formed", rank)


def _machine_id() -> str:
    """Returns this machine's identity for sharing memory: boot, network name space and label."""
    label = os.environ.get(_LABEL, "")
    return f"{system()} {label}" if label else system()


def socket_has_gone(name: str) -> bool:
    """Returns whether nobody listens on a unix socket of this machine any more."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex(f"\0{name}") == errno.ECONNREFUSED
    return False
