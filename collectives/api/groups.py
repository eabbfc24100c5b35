"""Groups of some of the world's ranks: made, split, shrunk, and as device meshes."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from collectives.api.coalescing import stop_deferring
from collectives.api.debug import checked
from collectives.api.init_method import close_store
from collectives.api.world_state import (
    NON_GROUP_MEMBER,
    default_group,
    get_process_group_ranks,
    group_record,
    is_member,
    register,
    world,
)
from collectives.core.forwarding import group_behind
from collectives.core.process_group import ProcessGroup
from collectives.errors import DistBackendError, DistNetworkError, GroupAbortedError
from collectives.logs import Log
from collectives.registry import backends as registry
from collectives.registry.by_device import ProcessGroupByDevice
from collectives.registry.names import Backend, BackendConfig, default_timeout
from collectives.store import HashStore, PrefixStore
from collectives.store.joining.agreement import join_group
from collectives.store.joining.meeting_place import Members
from collectives.store.joining.standby import MetWorld
from collectives.store.joining.world_rendezvous import KEYS
from collectives.time_limits import time_limit

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "DeviceMesh",
    "init_device_mesh",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "shrink_group",
    "split_group",
]

log = Log()

_DEFAULT_NAME = "0"


def make_group(
    config: BackendConfig,
    name: str,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta | None,
    *,
    desc: str,
    options: Any,
    device: torch.device | None,
    parent: ProcessGroup | None = None,
    base: Any = None,
) -> ProcessGroup:
    """Makes and registers a group; ``rank`` counts within it, ``ranks`` are global.

    Its store is part of ``base``, or else of the world's store. With a ``parent``, all its ranks take part:
    by :func:`decline_group`, where they do not become members.
    """
    store = PrefixStore(f"group/{name}", base or world.store)
    names = config.names()
    mixed = len(names) > 1

    def create(backend: str) -> ProcessGroup:
        return registry.create_group(
            backend,
            registry.GroupOptions(
                store=PrefixStore(backend, store) if mixed else store,
                rank=rank,
                size=len(ranks),
                timeout=limit_of(timeout, [backend]),
                group_name=name,
                group_desc=desc,
                global_ranks=tuple(ranks),
                device_id=device,
                pg_options=_options_of(backend, names, options),
                split_from=None if parent is None else _part_of_backend(parent, backend),
            ),
        )

    made: dict[str, ProcessGroup] = {}
    try:
        for backend in names:
            made[backend] = create(backend)
        by_device = {kind: made[backend] for kind, backend in config.get_device_backend_map().items()}
        _narrow(config, by_device)
        group = made[names[0]]
        if mixed:
            group = ProcessGroupByDevice(by_device, store)
        group = checked(group)
    except BaseException:
        abort_all(made.values())
        raise
    register(group, name, config, ranks)
    group._when_members_change(_follow_members, "" if world.default is None else world.store.scope)
    log.of(group).info("joined, with global ranks %s", list(ranks))
    return group


def _narrow(config: BackendConfig, by_device: Mapping[str, ProcessGroup]) -> None:
    """Leaves the device types out that the groups cannot serve here."""
    can = {kind: part.capabilities for kind, part in by_device.items()}
    config.narrow(
        [kind for kind, stated in can.items() if kind in stated.devices],
        {kind: stated.refusals[kind] for kind, stated in can.items() if kind in stated.refusals},
    )


def make_unformed(config: BackendConfig, limit: timedelta, options: Any) -> ProcessGroup:
    """Makes a default group that has no members yet.

    Args:
        config: of a backend that can take members.
        limit: time limit of its operations.
        options: options of the backend itself.
    """
    (backend,) = config.names()
    about = registry.GroupOptions(
        store=HashStore(),
        rank=0,
        size=1,
        timeout=limit,
        group_name=_DEFAULT_NAME,
        group_desc="default_pg",
        pg_options=options,
        unformed=True,
    )
    group = checked(registry.create_group(backend, about))
    _narrow(config, dict.fromkeys(config.get_device_backend_map(), group))
    return group


def register_unformed(group: ProcessGroup, config: BackendConfig) -> None:
    """Registers a default group that :func:`make_unformed` has made of the same configuration."""
    register(group, _DEFAULT_NAME, config, [0])
    group._when_members_change(_follow_members)


def _follow_members(group: ProcessGroup, members: Members) -> None:
    """Brings the world up to date once one of its groups has taken other members."""
    record = world.records.get(group)
    if record is None:  # it has ended
        return
    if group is not world.default:
        register(group, record.name, record.config, members.global_ranks)
        return
    group.set_global_ranks(range(members.size))
    ended = [other for other in world.records if other is not group]
    cause = GroupAbortedError(
        f"rank {group.rank()} of the default group reconfigured that, which ends all other groups; make them "
        "again with new_group"
    )
    for other in ended:
        other._break_for(cause)
    _end_groups(ended)
    register(group, record.name, record.config, range(members.size))
    if world.standby is not None and not world.standby.owns_store:  # else it serves these members' already
        close_store(world.standby)
    world.standby = MetWorld(group._place("reconfigure"), members.handles)
    world.begin(PrefixStore("world", members.store))
    log.of(group).info("reconfigured as rank %d of %d", group.rank(), group.size())


def decline_group(parent: ProcessGroup, config: BackendConfig, options: Any) -> None:
    """Takes part in making a group, on a rank of its parent that does not become a member; may block."""
    names = config.names()
    for backend in names:
        registry.decline_group(backend, _options_of(backend, names, options))
        part = _part_of_backend(parent, backend)
        if part is not None:
            part._decline_split()


def _options_of(backend: str, names: Sequence[str], options: Any) -> Any:
    """Returns the part of ``pg_options`` that is for one of the backends of a group."""
    return options.get(backend) if len(names) > 1 and options is not None else options


def _part_of_backend(group: ProcessGroup, backend: str) -> ProcessGroup | None:
    """Returns the group, or its part for a device type, that a backend made; ``None`` for no part."""
    made = group_record(group).config.get_device_backend_map()
    device = next((device for device, name in made.items() if name == backend), None)
    if device is None:
        return None
    whole = group._unchecked
    parts: Mapping[str, ProcessGroup] = getattr(whole, "groups", {device: whole})
    return parts.get(device)


def hashed_name(ranks: Sequence[int], more: str) -> str:
    return hashlib.sha1(f"{'_'.join(map(str, ranks))}{more}".encode(), usedforsecurity=False).hexdigest()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup:
    """Makes a group of some ranks; called by ALL ranks, in the same order; members wait for each other.

    Args:
        ranks: ranks of the members in the default group; ``None`` for all.
        timeout: time limit of the group's operations, and for its members to come; ``None`` for 30 minutes,
            and 10 of the part that is NCCL's.
        backend: as for :func:`init_process_group`; ``None`` for the default group's.
        pg_options: as for :func:`init_process_group`.
        use_local_synchronization: only members call; ranks that make several overlapping groups so must keep
            one order.
        group_desc: free text, which messages show.
        device_id: device that this process is bound to; ``None`` for the default group's.
        sort_ranks: number the members in the order of their global ranks, else in the order of ``ranks``.

    Returns:
        The group, to be given as ``group``; ``GroupMember.NON_GROUP_MEMBER`` on ranks that are not in it.

    Raises:
        ValueError: ``ranks`` are not different ranks of the default group, or there is no default group.
        CollectiveMismatchError: ranks make different groups at this place of the order.
        DistStoreError: members did not come in time; names them.
        PeerLostError: a member has died, and the default group's backend knows it.

    Example:
        With 2 ranks::

            alone = collectives.new_group([rank], use_local_synchronization=True)
            pair = collectives.new_group([0, 1])
            collectives.all_reduce(torch.ones(2), group=pair)
    """
    with world.lock:
        world.refuse_in_child("new_group")
        default = default_group()
        config = group_record(default).config if backend is None else BackendConfig(backend)
        members = _check_ranks(ranks, default, sort_ranks)
        limit = limit_of(timeout, config.names())
        check_usable(config, pg_options)
        device = _same_device(device_id)
        if use_local_synchronization:
            if default.rank() not in members:
                return NON_GROUP_MEMBER  # type: ignore[no-any-return]
            name = hashed_name(members, f"#{local_turn(repr(members))}")
        else:
            name = str(world.created)
            world.created += 1
        request = f"group {name} of ranks {list(members)} on {config!r}"
        callers = members if use_local_synchronization else range(default.size())
        _meet(name, members, request, limit, callers)
        parent = None if use_local_synchronization else default
        if default.rank() not in members:
            decline_group(default, config, pg_options)
            return NON_GROUP_MEMBER  # type: ignore[no-any-return]
        return make_group(
            config,
            name,
            members.index(default.rank()),
            members,
            timeout,
            desc=group_desc or "",
            options=pg_options,
            device=device,
            parent=parent,
        )


def _meet(
    name: str,
    members: Sequence[int],
    request: str,
    limit: timedelta,
    callers: Sequence[int],
    store: Any = None,
) -> None:
    """Waits for all members of a new group; arguments and errors as for :func:`join_group`."""
    default = default_group()
    lost = default.lost_ranks
    join_group(store or world.store, f"make/{name}", default.rank(), members, request, limit, lost, callers)


def limit_of(timeout: timedelta | None, backends: Sequence[str]) -> timedelta:
    """Returns the time limit that the user gives, else the longest of these backends."""
    return max(map(default_timeout, backends)) if timeout is None else time_limit(timeout)


def local_turn(key: str) -> int:
    """Counts the groups made without all ranks, under a key that their members share."""
    turn = world.local_turns.get(key, 0)
    world.local_turns[key] = turn + 1
    return turn


def _same_device(device_id: torch.device | None) -> torch.device | None:
    """Returns the device that a new group is bound to."""
    device = bound_device(device_id)
    if device is None or world.device is None or device == world.device:
        return device or world.device
    raise ValueError(
        f"[rank {default_group().rank()}] new_group: device_id is {device}, but the default group is bound "
        f"to {world.device}"
    )


def _check_ranks(ranks: Sequence[int] | None, default: ProcessGroup, sort: bool) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(default.size()))
    where = f"[rank {default.rank()}] new_group"
    try:
        # Names are made of them, which numbers of another type with the same value would change.
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError as error:
        raise TypeError(f"{where}: ranks must be a list of int, but is {ranks!r}") from error
    if sort:
        members = tuple(sorted(members))
    if not members:
        raise ValueError(f"{where}: ranks is empty, but a group has at least one rank")
    if len(set(members)) != len(members):
        raise ValueError(f"{where}: ranks must be different, but are {list(members)}")
    outside = [r for r in members if not 0 <= r < default.size()]
    if outside:
        raise ValueError(
            f"{where}: ranks has {outside}, but the ranks of the default group are 0 to {default.size() - 1}"
        )
    return members


def abort_all(groups: Iterable[ProcessGroup]) -> None:
    """Breaks groups that could not be made, or not be ended otherwise; that error is the one to raise."""
    groups = list(groups)
    for group in groups:
        group._begin_abort()
    for group in groups:
        with contextlib.suppress(Exception):
            group.abort()


def bound_device(device_id: torch.device | int | None) -> torch.device | None:
    if device_id is None:
        return None
    accelerator = torch.accelerator.current_accelerator()
    if isinstance(device_id, int):
        if accelerator is None:
            raise ValueError(
                f"device_id is {device_id}, but this machine has no accelerator; leave it out, or give a "
                "torch.device"
            )
        device_id = torch.device(accelerator.type, device_id)
    if not isinstance(device_id, torch.device):
        raise TypeError(f"device_id must be a torch.device or an int, but is {device_id!r}")
    if device_id.type == "cpu":
        return device_id
    if accelerator is None or device_id.type != accelerator.type:
        has = "no accelerator" if accelerator is None else f"the accelerator {accelerator}"
        raise ValueError(f"device_id is {device_id}, but this machine has {has}")
    if device_id.index is None:
        raise ValueError(f"device_id is {device_id}, but must have an index, such as '{device_id.type}:0'")
    if device_id.index >= torch.accelerator.device_count():
        raise ValueError(
            f"device_id is {device_id}, but there are {torch.accelerator.device_count()} devices"
        )
    return device_id


def check_usable(config: BackendConfig, options: Any) -> None:
    """Checks, before anything is sent, that groups of these backends can be made here with such options."""
    names = config.names()
    for name in names:
        reason = registry.why_unavailable(name)
        if reason is not None:
            raise DistBackendError(f"backend {name!r} is not available: {reason}")
    if len(names) == 1 or options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(
            f"pg_options of a group with several backends ({config!r}) must be a dict from backend name to "
            f"that backend's options, but are of type {type(options).__name__}"
        )
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(f"pg_options are for {unknown}, but the group's backends are {names}")


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Splits a group into groups of neighbouring ranks; called by ALL ranks of the default group.

    Args:
        group_size: number of ranks of each; must divide the size of ``group``. ``None`` for the number of
            CUDA devices.
        group: the group to split; ``None`` for the default group.
        timeout: as for :func:`new_group`.
        backend: as for :func:`new_group`.
        pg_options: as for :func:`new_group`.
        group_desc: as for :func:`new_group`.

    Returns:
        The group of this rank, and the list of all groups, in which those of other ranks are
        ``NON_GROUP_MEMBER``.

    Raises:
        ValueError: ``group_size`` is not positive or does not divide the number of ranks.

    Example:
        With 2 ranks::

            mine, both = collectives.new_subgroups(group_size=1)
            collectives.all_reduce(torch.ones(2), group=mine)  # this rank alone: [1.0, 1.0]
    """
    ranks = get_process_group_ranks(group)
    where = f"[rank {default_group().rank()}] new_subgroups"
    if group_size is None:
        if not torch.cuda.is_available():
            raise ValueError(f"{where}: group_size must be given, because there are no CUDA devices to count")
        group_size = torch.cuda.device_count()
    if group_size <= 0:
        raise ValueError(f"{where}: group_size must be positive, but is {group_size}")
    if len(ranks) % group_size:
        raise ValueError(
            f"{where}: group_size is {group_size}, which does not divide the {len(ranks)} ranks of the group"
        )
    return new_subgroups_by_enumeration(
        [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)],
        timeout,
        backend,
        pg_options,
        group_desc,
    )


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Makes several groups that share no rank; called by ALL ranks of the default group.

    Args:
        ranks_per_subgroup_list: for each group, the ranks of its members in the default group.
        timeout: as for :func:`new_group`.
        backend: as for :func:`new_group`.
        pg_options: as for :func:`new_group`.
        group_desc: as for :func:`new_group`.

    Returns:
        The group of this rank (``None`` where it is in none) and the list of all groups.

    Raises:
        ValueError: the list is empty, or a rank is named twice or is none of the default group's.

    Example:
        With 2 ranks::

            mine, groups = collectives.new_subgroups_by_enumeration([[1, 0]])
            mine.size()  # 2
    """
    default = default_group()
    rank = default.rank()
    if not ranks_per_subgroup_list:
        raise ValueError(f"[rank {rank}] new_subgroups_by_enumeration: the list of groups is empty")
    seen: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
        _check_ranks(ranks, default, sort=True)  # of all groups, before the first is made
        for r in ranks:
            if r in seen:
                raise ValueError(
                    f"[rank {rank}] new_subgroups_by_enumeration: rank {r} is in {list(seen[r])} and in "
                    f"{list(ranks)}"
                )
            seen[r] = ranks
    groups = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        for ranks in ranks_per_subgroup_list
    ]
    own: Any = next((group for group in groups if is_member(group)), None)
    return own, groups


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Splits a group into groups that share no rank; called by all ranks of ``parent_pg`` only.

    Args:
        parent_pg: the group to split; ``None`` for the default group.
        split_ranks: for each new group, ranks counted within ``parent_pg``; equal on all ranks.
        timeout: as for :func:`new_group`.
        pg_options: options of the backend itself.
        group_desc: free text; ``None`` for one made from the parent's.
        backend: the parts ``"<device>:<backend>,..."`` of the parent's backend to keep; ``None`` for all.

    Returns:
        The new group of this rank; ``None`` where it is in none.

    Raises:
        ValueError: ranks are not in the parent, or named twice; ``backend`` is not part of the parent's.
        CollectiveMismatchError: members ask for different groups.
        PeerLostError: a member has died, and the default group's backend knows it.

    Example:
        With 2 ranks::

            part = collectives.split_group(split_ranks=[[0], [1]])
            part.size()  # 1 on both
    """
    with world.lock:
        world.refuse_in_child("split_group")
        parent = default_group() if parent_pg is None else parent_pg
        record = group_record(parent)
        where = f"[rank {parent.rank()}] split_group on {parent.describe()}"
        if not split_ranks:
            raise ValueError(f"{where}: split_ranks must be given, a list of lists of ranks of this group")
        try:  # numbers of another type with the same values would make the ranks' requests differ
            split_ranks = [[operator.index(r) for r in part] for part in split_ranks]
        except TypeError as error:
            raise TypeError(
                f"{where}: split_ranks must be a list of lists of int, but is {split_ranks!r}"
            ) from error
        named = [r for part in split_ranks for r in part]
        if not all(split_ranks):
            raise ValueError(f"{where}: a group has at least one rank, but split_ranks is {split_ranks}")
        if len(set(named)) != len(named):
            raise ValueError(f"{where}: a rank is named twice in split_ranks {split_ranks}")
        if not all(0 <= r < parent.size() for r in named):
            raise ValueError(
                f"{where}: split_ranks is {split_ranks}, but the ranks are 0 to {parent.size() - 1}"
            )
        config = record.config if backend is None else _part_of(record.config, backend, where)
        limit = limit_of(timeout, config.names())
        check_usable(config, pg_options)
        mine = next((sorted(part) for part in split_ranks if parent.rank() in part), [])
        members = tuple(record.ranks[r] for r in mine)
        name = f"{record.name}.split"
        turn = local_turn(name)
        _meet(f"{name}{turn}", members, f"split {split_ranks} on {config!r}", limit, record.ranks)
        if not mine:
            decline_group(parent, config, pg_options)
            return None
        return make_group(
            config,
            f"{name}{turn}.{mine[0]}",
            mine.index(parent.rank()),
            members,
            timeout,
            desc=group_desc or f"{parent.group_desc}:split:{turn}",
            options=pg_options,
            device=world.device,
            parent=parent,
        )


def _part_of(config: BackendConfig, backend: str, where: str) -> BackendConfig:
    part = BackendConfig(backend)
    whole = config.get_device_backend_map()
    for device, name in part.get_device_backend_map().items():
        if whole.get(device) != name:
            raise ValueError(f"{where}: backend asks for {name} on {device}, but this group has {config!r}")
    return part


SHRINK_DEFAULT = 0
"""For :func:`shrink_group`: another group than the default one goes on beside the new one."""

SHRINK_ABORT = 1
"""For :func:`shrink_group`: the group is aborted first, as where a rank has died in an operation of it."""


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any | None = None,
) -> ProcessGroup:
    """Makes a group without some ranks of a group; called by all remaining ranks, and by no other.

    Where the default group shrinks, the new one takes its place, ranks count anew, and all other groups are
    aborted. If the rank that served the store is left out, the first of the others serves a new one, empty.
    Another group can shrink only while the store is there.

    Args:
        ranks_to_exclude: ranks of the group that are left out, such as those that have died.
        group: the group; ``None`` for the default group.
        shrink_flags: :data:`SHRINK_DEFAULT` or :data:`SHRINK_ABORT`.
        pg_options: as for :func:`init_process_group`.

    Returns:
        The new group, with the ranks that are left in their order, and the time limit of the old one.

    Raises:
        TypeError: the ranks are no list of int.
        ValueError: they are none, all, named twice or not in the group, or the flags are unknown.
        RuntimeError: this rank is among them.
        DistStoreError: a rank that is left did not come in time; names it.
        PeerLostError: a rank that is left is known to have died; exclude it, too.
        DistNetworkError: the store went with a rank that is not excluded, or serves another group only.
    """
    with world.lock:
        world.refuse_in_child("shrink_group")
        old, default = (default_group() if group is None else group), default_group()
        record = group_record(old)
        _check(old, ranks_to_exclude, shrink_flags)
        check_usable(record.config, pg_options)
        members = [rank for place, rank in enumerate(record.ranks) if place not in ranks_to_exclude]
        if shrink_flags == SHRINK_ABORT:
            abort_all([old])
        turn = local_turn(f"{record.name}.shrunk to {members}")
        # The members are part of the name: what a failed call left in the store concerns its members only.
        name = f"{record.name}.shrunk.{hashed_name(members, '')[:8]}.{turn}"
        request = f"group {name} of ranks {members} on {record.config!r}"
        here, replaces, standby = default.rank(), old is default, world.standby
        store, moved = world.store, None
        if replaces and standby is not None and standby.leaves_with(members):
            moved = standby.next_store(here, members, old.timeout, default.lost_ranks)
            store = PrefixStore(KEYS, moved, scope=f"{store.scope}next")
        try:
            _meet(name, members, request, old.timeout, members, store)
        except DistNetworkError as error:
            if replaces:
                raise
            raise DistNetworkError(
                f"[rank {here}] shrink_group on {old.describe()}: the store is gone; shrink the default "
                "group first, which serves a new one, and make this group in it"
            ) from error
        made = make_group(
            record.config,
            name,
            members.index(here),
            range(len(members)) if replaces else members,
            old.timeout,
            desc=old.group_desc,
            options=pg_options,
            device=world.device,
            base=store,
        )
        made._succeed(old)
        if replaces:
            _replace_world(made, PrefixStore(f"after/{name}", store), moved)
            if standby is not None:
                standby.go_on(members)
        return made


def _replace_world(made: ProcessGroup, store: Any, moved: Any) -> None:
    """Ends all groups but the one that was just made, which becomes the default group.

    Args:
        made: the group.
        store: what becomes the world's store.
        moved: the new base of it, if it has one.
    """
    _end_groups([group for group in world.records if group is not made])
    world.default = made
    made._when_members_change(_follow_members)  # of whatever world
    if moved is not None:
        if world.owns_store:
            close_store(world.base)
        world.base, world.owns_store = moved, True
    # Names of groups are counted by the members that are left, and apart from those of the old world.
    world.begin(store)


def _end_groups(groups: Iterable[ProcessGroup]) -> None:
    """Aborts and forgets groups of a world that has changed."""
    for ended in groups:
        stop_deferring(ended)
        del world.records[ended]
        abort_all([ended])
        ended._leave_place()


def _check(group: ProcessGroup, excluded: list[int], flags: int) -> None:
    where = f"[rank {group.rank()}] shrink_group on {group.describe()}"
    if not isinstance(excluded, list):
        raise TypeError(f"{where}: ranks_to_exclude must be a list of int, but is {excluded!r}")
    for rank in excluded:
        if not isinstance(rank, int):
            raise TypeError(f"{where}: ranks_to_exclude must be a list of int, but is {excluded!r}")
        if not 0 <= rank < group.size():
            raise ValueError(
                f"{where}: ranks_to_exclude has {rank}, but the ranks are 0 to {group.size() - 1}"
            )
    if len(set(excluded)) != len(excluded):
        raise ValueError(f"{where}: ranks_to_exclude names a rank twice: {excluded}")
    if not 0 < len(excluded) < group.size():
        raise ValueError(
            f"{where}: ranks_to_exclude must be some of the {group.size()} ranks, but not all: {excluded}"
        )
    if flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(
            f"{where}: shrink_flags is {flags!r}, but must be SHRINK_DEFAULT (0) or SHRINK_ABORT (1)"
        )
    if group.rank() in excluded:
        raise RuntimeError(
            f"{where}: this rank is in ranks_to_exclude {excluded}; only those that are left call this"
        )


_beside_torch: WeakKeyDictionary[object, ProcessGroup] = WeakKeyDictionary()


def group_beside_torch(group: object, *, make: bool) -> ProcessGroup | None:
    """Returns our gloo group beside one of torch's; ``None`` where torch's is not over Gloo.

    Args:
        group: a ``torch.distributed.ProcessGroup``, not of this package.
        make: whether to make it if there is none yet; called by all its ranks, blocks until they are
            connected. It has connections of its own, over the same devices: what breaks our group must not
            break the program's.
    """
    if not isinstance(group, torch.distributed.ProcessGroup):
        return None
    made = _beside_torch.get(group)
    if made is None and make:
        theirs: Any = group
        parts = [theirs._get_backend(device) for device in theirs._device_types if device.type == "cpu"]
        if not parts or parts[0].name() != Backend.GLOO:
            return None
        options = getattr(parts[0], "wrapped_pg", parts[0]).options  # of what compares its operations
        members = torch.distributed.get_process_group_ranks(group)
        scope = f"torch's gloo group {group.group_name} of {members}"
        made = registry.create_group(
            Backend.GLOO,
            registry.GroupOptions(
                store=PrefixStore("collectives", theirs.get_group_store(), scope=scope),
                rank=group.rank(),
                size=group.size(),
                timeout=options._timeout,
                group_name=group.group_name,
                group_desc=group.group_desc,
                global_ranks=tuple(members),
                pg_options={"_threads": options._threads, "_devices": options._devices},
            ),
        )
        if any(theirs._get_backend(one).name() != Backend.GLOO for one in theirs._device_types):
            made = ProcessGroupByDevice({"cpu": made}, made.get_group_store())  # others are not Gloo's there
        _beside_torch[group] = made
    return made


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: Mapping[int | str, object] | None = None,
) -> DeviceMesh:
    """Makes torch's mesh over the world of ``torch.distributed``; called by all ranks, and blocks for them.

    A mesh looks its groups up in ``torch.distributed``. So the program begins with
    ``torch.distributed.init_process_group("collectives")``, or tells torch of its world by
    :func:`collectives.register_world_with_torch`; the functions of this package take the groups of that
    world, too.

    Args:
        device_type: type of the devices, such as ``"cpu"``.
        mesh_shape: number of ranks along each dimension; the same on all ranks, as are the others.
        mesh_dim_names: names of the dimensions.
        backend_override: by dimension, or its name: the backend of its groups, their options as ``new_group``
            takes them, or a pair of both.

    Returns:
        The mesh.

    Raises:
        ValueError: the default group of ``torch.distributed`` is none of this package.
    """
    if not torch.distributed.is_initialized():
        _refuse("which is not initialised", "first, or collectives.register_world_with_torch()")
    if group_behind(torch.distributed.group.WORLD) is None:
        _refuse(f"which was initialised with {torch.distributed.get_backend()!r}", "instead")
    overrides: dict[Any, Any] | None = None
    if backend_override is not None:
        overrides = {dimension: _override(given) for dimension, given in backend_override.items()}
    return device_mesh.init_device_mesh(
        device_type, mesh_shape, mesh_dim_names=mesh_dim_names, backend_override=overrides
    )


class _Options(dict[str, Any]):
    """Options of a group by their names, in the form that torch's mesh takes."""

    _timeout = None


def _override(given: object) -> Any:
    """Returns backend and options of a mesh's dimension, of which one may be ``None``."""
    if isinstance(given, str):
        return given, None
    backend, options = given if isinstance(given, tuple) else (None, given)
    return backend, _Options(options) if isinstance(options, Mapping) else options


def _refuse(state: str, when: str) -> NoReturn:
    raise ValueError(
        f"device meshes run on the world of torch.distributed, {state}: call "
        f'torch.distributed.init_process_group("collectives") {when}'
    )
