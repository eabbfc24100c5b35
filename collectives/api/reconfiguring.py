"""The world takes other members while its processes live: it grows, heals, splits, merges with another."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from collectives.api.groups import abort_all, check_usable, limit_of, make_unformed, register_unformed
from collectives.api.init_and_destroy import end_at_exit
from collectives.api.objects import all_gather_object, broadcast_object_list
from collectives.api.world_state import default_group, is_member, world
from collectives.core.forwarding import group_behind
from collectives.core.process_group import ProcessGroup
from collectives.errors import (
    CollectiveTimeoutError,
    DistError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    UnsupportedOperationError,
)
from collectives.registry import backends as registry
from collectives.registry.names import Backend, BackendConfig
from collectives.store.joining.agreement import at
from collectives.store.joining.meeting_place import MeetingPlace, id_of
from collectives.store.joining.newcomers import Newcomer, Newcomers
from collectives.store.records import error_of, record_of
from collectives.time_limits import left_until

__all__ = ["admit_newcomers", "get_reconfigure_handle", "join_world", "reconfigure_world"]


def get_reconfigure_handle(group: ProcessGroup | None = None) -> str:
    """Returns the text by which this process is named to :func:`reconfigure_world`.

    A process that is in no world gets one, too. It listens from then on, at the address from which it reaches
    the world's store, or that ``COLLECTIVES_SOCKET_IFNAME`` names. The handle stays the same as long as the
    group or the process lives, and holds no secret; pass it on by any store, file or service. A process that
    joins a world by :func:`join_world` has another one there.

    Args:
        group: the group, to be named to its :meth:`~collectives.ProcessGroup.reconfigure`; ``None`` for the
            world.

    Returns:
        The handle.

    Raises:
        UnsupportedOperationError: the group's backend cannot change its members.
        DistNetworkError: the system refuses to listen, or there is no job secret and the kernel cannot tell
            users apart.
        TypeError: ``group`` is no process group.

    Example:
        With any number of ranks::

            handles = [None] * collectives.get_world_size()
            collectives.all_gather_object(handles, collectives.get_reconfigure_handle())
    """
    with world.lock:
        world.refuse_in_child("get_reconfigure_handle")
        if group is None and world.default is None:
            return _own_place().handle
        if not is_member(group):
            raise ValueError("get_reconfigure_handle: this process is not in the given group")
        return (default_group() if group is None else _ours(group)).reconfigure_handle()


def reconfigure_world(
    uuid: int | str,
    handles: Sequence[str] | AbstractSet[str],
    backend: str | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
) -> ProcessGroup:
    """Gives the world other members; called by all of them, those who stay and those who come, and blocks.

    The world may be idle, broken or in the middle of operations, which raise on all its ranks, with an error
    that says who reconfigures it. Where this process has no world, it gets one. Worlds grow, shrink, split
    (each part with handles and a ``uuid`` of its own), and merge in this way, and a new process takes the
    place of one that died, on whatever machine: where that is another one, all need the job's secret. Who
    leaves does not call this, and ends its world by :func:`destroy_process_group`.

    The default group stays the same object; ranks are the positions of the handles. All other groups end, and
    their operations say so; make them again. The world's store is a new one, empty, which the first member
    serves; the store that the world began with stays open. A call that fails leaves the world broken, and
    another one with a new ``uuid`` mends it.

    Args:
        uuid: identifies the new set of members; the same for all, and never used before.
        handles: of all members, of their :func:`get_reconfigure_handle`, in one order. A set is sorted.
        backend: of the world that this process gets where it has none: ``host``, or ``round_robin`` over it;
            ``None`` for ``host``. The same for all members.
        timeout: time limit for the members to come and to be connected, and of the operations of a world
            that this process gets; ``None`` for that of the world, and 30 minutes without one.
        pg_options: options of the backend of that world.

    Returns:
        The default group.

    Raises:
        ValueError: a text is no handle, one comes twice, or this process's is missing.
        DistBackendError: ``uuid`` was already used, or a handle is not proved by the job's secret.
        PeerLostError: a new member has died; ``rank`` is its position.
        CollectiveTimeoutError: a new member did not come in time; names it.
        CollectiveMismatchError: members were given different handles, or have different backends.
        GroupAbortedError: the others have gone on without this process.
        UnsupportedOperationError: the world's backend cannot change its members.

    Example:
        With any number of ranks, where rank 0 chooses the uuid::

            handles = [None] * collectives.get_world_size()
            collectives.all_gather_object(handles, collectives.get_reconfigure_handle())
            collectives.reconfigure_world("anew", handles)  # whoever joins would stand here, too
    """
    with world.lock:
        world.refuse_in_child("reconfigure_world")
        if world.default is not None:
            world.default.reconfigure(uuid, handles, timeout)
            return world.default
        names = backend or "host"
        limit = limit_of(timeout, [names])
        return _begin_world(uuid, handles, names, limit, pg_options, limit)


def join_world(
    store: Any,
    backend: str | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
) -> ProcessGroup:
    """Joins a world whose members call :func:`admit_newcomers`; called by a process without one, and blocks.

    Args:
        store: a store that the members give to that function, such as one that the program serves, and that
            outlives them.
        backend: as for :func:`reconfigure_world`.
        timeout: time limit for the members to let this process in, and of the operations of the world;
            ``None`` for 30 minutes.
        pg_options: as for :func:`reconfigure_world`.

    Returns:
        The default group, in which this process is one of the last ranks.

    Raises:
        ValueError: this process has a world.
        DistStoreError: nobody let it in within the limit.
        CollectiveMismatchError: the members' world is over another backend, compares calls where this process
            would not, or runs another version; it is as it was.
        DistError: as :func:`reconfigure_world`.
    """
    names = backend or "host"
    limit = limit_of(timeout, [names])
    end = time.monotonic() + limit.total_seconds()
    with world.lock:
        _demand_no_world()
        kind = _kind_of(names, limit, pg_options)
        place = MeetingPlace(alone=True)

    def begin(uuid: str, handles: list[str], is_over: Callable[[], DistError | None]) -> ProcessGroup:
        with world.lock:
            _demand_no_world()
            return _begin_world(uuid, handles, names, limit, pg_options, left_until(end), place, is_over)

    with contextlib.ExitStack() as failing:
        failing.callback(place.end)  # members that wait for this process go on without it
        group = _join(Newcomer(store, place.handle, kind), begin, limit, end)
        failing.pop_all()
    return group


def _join(
    newcomer: Newcomer,
    begin: Callable[[str, list[str], Callable[[], DistError | None]], ProcessGroup],
    limit: timedelta,
    end: float,
) -> ProcessGroup:
    """Begins the world once members invite this process, again and again while they fail.

    Args:
        newcomer: tells when.
        begin: meets them, as :func:`_begin_world` does, by identifier and handles, and unless that is over.
        limit: how long to wait in all, for messages.
        end: when that has passed, by ``time.monotonic()``.
    """
    failed: DistError | None = None
    try:
        while invitation := newcomer.next_invitation(end):
            try:
                return begin(invitation["uuid"], invitation["handles"], newcomer.disinvited)
            except (PeerLostError, CollectiveTimeoutError, GroupAbortedError) as error:  # noqa: PERF203
                failed = error  # members go on without whom it names, and perhaps without this process
    finally:
        newcomer.leave()
    raise DistStoreError(
        f"join_world: no members have let this process in within {limit.total_seconds():g} s; all of them "
        "must call admit_newcomers with the same store"
    ) from failed


def _demand_no_world() -> None:
    world.refuse_in_child("join_world")
    if world.default is not None:
        raise ValueError(
            f"[rank {world.default.rank()}] join_world: this process has a world already; members call "
            "admit_newcomers"
        )


def admit_newcomers(store: Any, timeout: timedelta | None = None) -> int:
    """Lets processes in that have called :func:`join_world`; called by all members of the world, and blocks.

    Costs one small broadcast where nobody waits, so that it may be called between any two steps of a
    training. Otherwise the world is reconfigured as by :func:`reconfigure_world`: members keep their order,
    and newcomers follow. Members and newcomers that die meanwhile, or do not come in time, are left out.
    Newcomers that do not answer within two seconds, would form another world, or have announced what is no
    handle, are passed over; a later call lets in those that wait on.

    Args:
        store: a store that the newcomers reach; rank 0 looks there, and others once something has failed.
        timeout: time limit for all to be connected; ``None`` for that of the world.

    Returns:
        How many newcomers are members now; where it is none since all were lost meanwhile, the world has
        changed all the same, as its ``generation`` tells.

    Raises:
        DistStoreError: rank 0 found the store unusable; on all members, and the world is as it was.
        DistNetworkError: rank 0 could not reach the store, or a member not listen; likewise.
        GroupAbortedError: the others have gone on without this process, such as one that was stopped.
        DistError: as :func:`reconfigure_world`, where this process is the one that is left out, or the error
            names nobody.
    """
    default = default_group()
    default._demand_reconfigures("admit_newcomers")
    newcomers, first = Newcomers(store, default._kind()), default.rank() == 0
    count = 0
    found: list[tuple[str, int]] = []
    error: DistError | None = None
    if first:
        try:
            count, found = newcomers.waiting(default.timeout.total_seconds() / 4)
            if not found:
                newcomers.settle(count)
        except Exception as failure:  # noqa: BLE001 - which all members raise
            error = _of_rank(0, failure)
    about = torch.tensor([-1 if error else len(found), secrets.randbits(62)])
    default.broadcast(about).wait()
    waiting, digits = map(int, about)
    if not waiting:
        return 0
    name = f"{digits:x}"
    members: list[Any] = [None] * default.size()
    plan: list[Any] = [None]
    try:
        all_gather_object(members, _handle_or_error(default))
        if first:
            plan = [_plan(newcomers, name, count, members, found, error)]
        broadcast_object_list(plan, src=0)
    except DistError as failure:  # which not all members need to have
        plan = [newcomers.plan_of(name, failure)]
    if "error" in plan[0]:
        raise at(default.where(), error_of(plan[0]["error"])) from error
    return _admit(newcomers, name, plan[0]["count"], plan[0]["left"], timeout)


def _handle_or_error(default: ProcessGroup) -> Any:
    """Returns this process's handle, or the record of why it has none."""
    try:
        return default.reconfigure_handle()
    except Exception as failure:  # noqa: BLE001 - which all members raise
        return record_of(_of_rank(default.rank(), failure))


def _plan(
    newcomers: Newcomers,
    name: str,
    count: int,
    members: list[Any],
    found: list[tuple[str, int]],
    error: DistError | None,
) -> dict[str, Any]:
    """Returns what rank 0 tells the others to do, once it is published and newcomers are invited.

    Args:
        newcomers: those who may be.
        name: of this call of all members.
        count: how many numbers of newcomers this deals with.
        members: of each its handle, or why it has none.
        found: handles and numbers of newcomers.
        error: what rank 0 has failed with.
    """
    try:
        if error is not None:
            raise error
        for one in members:
            if not isinstance(one, str):
                raise error_of(one)
        known = {id_of(one) for one in members}
        new = [(handle, number) for handle, number in found if id_of(handle) not in known]
        left = [*((handle, 0) for handle in members), *new]
        plan = {"count": count, "left": left}
        newcomers.propose(name, plan)
        newcomers.invite(f"{name}.0", [handle for handle, _ in left], [number for _, number in new])
    except Exception as failure:  # noqa: BLE001 - which all members raise
        with contextlib.suppress(Exception):  # so that nobody follows it who does not hear of this
            newcomers.forget(name, 0)
        return {"error": record_of(_of_rank(0, failure))}
    return plan


def _admit(
    newcomers: Newcomers, name: str, count: int, left: list[tuple[str, int]], timeout: timedelta | None
) -> int:
    """Reconfigures the world, again and again without those that are lost meanwhile.

    Args:
        newcomers: where they are invited.
        name: of this call of all members.
        count: how many numbers of newcomers this deals with.
        left: handles, with the numbers of newcomers; zero for members.
        timeout: of :func:`admit_newcomers`.

    Raises:
        GroupAbortedError: the others have gone on without this process, such as one that was stopped.
    """
    own = default_group().reconfigure_handle()
    for attempt in itertools.count():
        is_over: Callable[[], DistError | None] = _is_not_over
        handles = [handle for handle, _ in left]
        numbers = [number for _, number in left if number]
        if attempt and own == handles[0]:
            newcomers.claim(name, attempt, own)
            with contextlib.suppress(Exception):  # then the newcomers do not come in time
                newcomers.invite(f"{name}.{attempt}", handles, numbers)
        elif attempt:
            is_over = partial(newcomers.claimed_by_others, name, attempt, handles[0])
        try:
            _change_members(f"{name}.{attempt}", handles, timeout, is_over)
        except (PeerLostError, CollectiveTimeoutError) as error:
            lost = {error.rank, *error.missing_ranks} - {-1}
            if not lost or handles.index(own) in lost:
                raise
            left = [one for place, one in enumerate(left) if place not in lost]
            continue
        if own == handles[0]:
            with contextlib.suppress(Exception):  # then they are asked again, in vain
                newcomers.settle(count)
                newcomers.forget(name, attempt)
        return len(numbers)
    raise AssertionError  # the loop has no end


def _change_members(
    uuid: str, handles: list[str], timeout: timedelta | None, is_over: Callable[[], DistError | None]
) -> None:
    """Gives the world other members, unless that is over; see :func:`reconfigure_world`."""
    with world.lock:
        world.refuse_in_child("admit_newcomers")
        default_group()._reconfigure(uuid, handles, timeout, is_over)


def _is_not_over() -> DistError | None:
    return None


def _of_rank(rank: int, failure: Exception) -> DistError:
    """Returns what one rank has failed with, for all members."""
    if isinstance(failure, DistError):
        return failure
    return DistStoreError(f"{type(failure).__name__}: {failure}", rank)


def _own_place() -> MeetingPlace:
    """Returns where others find this process, which is in no world."""
    if world.place is None or world.pid != os.getpid():
        world.place, world.pid = MeetingPlace(), os.getpid()
    return world.place


def _ours(group: ProcessGroup) -> ProcessGroup:
    """Returns the group of this package that a group is, or that carries out torch's."""
    found = group_behind(group)
    return group if found is None else found


def _begin_world(
    uuid: int | str,
    handles: Sequence[str] | AbstractSet[str],
    backend: str,
    limit: timedelta,
    options: Any,
    meeting_limit: timedelta,
    place: MeetingPlace | None = None,
    is_over: Callable[[], DistError | None] = lambda: None,
) -> ProcessGroup:
    """Makes the world of a process that has none.

    Args:
        uuid: see :func:`reconfigure_world`, like the next two.
        handles: likewise.
        backend: likewise.
        limit: time limit of operations.
        options: options of the backend.
        meeting_limit: time limit for the members to come and to be connected.
        place: where the others find this process, unless by its own handle; the group's from now on, unless
            this fails.
        is_over: returns the error where they are known not to come; asked again and again.
    """
    group, config = _unformed(backend, limit, options)
    if world.pid != os.getpid():
        world.place = None  # of the process that this one was forked from
    world.pid = os.getpid()
    world.default = group
    register_unformed(group, config)
    try:
        group._meeting_place = place or _own_place()
        group._reconfigure(uuid, handles, meeting_limit, is_over)
    except BaseException:
        group._meeting_place = None
        abort_all([group])
        own = world.place
        world.clear()
        world.place = own  # so that the handle stays
        raise
    world.place = None  # the group has its own from now on, and another handle is refused
    end_at_exit()
    return group


def _unformed(backend: str, limit: timedelta, options: Any) -> tuple[ProcessGroup, BackendConfig]:
    """Returns a default group without members, and of which backend it is.

    Args:
        backend: see :func:`reconfigure_world`.
        limit: time limit of operations.
        options: options of the backend.
    """
    config = BackendConfig(Backend(backend))
    names = config.names()
    if len(names) > 1 or not registry.backend_spec(names[0]).reconfigures:
        raise UnsupportedOperationError(
            f"reconfigure_world: a world over {backend} cannot change its members; take host, or round_robin "
            "over it"
        )
    check_usable(config, options)
    return make_unformed(config, limit, options), config


def _kind_of(backend: str, limit: timedelta, options: Any) -> str:
    """Returns what a world of this process would be, in words; arguments as for :func:`_unformed`."""
    group, _ = _unformed(backend, limit, options)
    try:
        return group._kind()
    finally:
        abort_all([group])
