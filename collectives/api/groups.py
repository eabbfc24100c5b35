"""Makes groups of some of the world's ranks: ``new_group``, and what all ways to a group share."""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.api.debug import checked
from collectives.api.world_state import (
    NON_GROUP_MEMBER,
    default_group,
    record_of,
    register,
    world,
)
from collectives.core.arguments.validation import seconds
from collectives.core.process_group import ProcessGroup
from collectives.errors import DistBackendError
from collectives.logs import Log
from collectives.registry import backends as registry
from collectives.registry.by_device import ProcessGroupByDevice
from collectives.registry.names import BackendConfig, default_timeout
from collectives.store import PrefixStore
from collectives.store.joining.group_rendezvous import join_group

__all__ = [
    "new_group",
]

log = Log()


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
        can = {kind: part.capabilities for kind, part in by_device.items()}
        config.narrow(
            [kind for kind, stated in can.items() if kind in stated.devices],
            {kind: stated.refusals[kind] for kind, stated in can.items() if kind in stated.refusals},
        )
        group = made[names[0]]
        if mixed:
            group = ProcessGroupByDevice(by_device, store)
        group = checked(group)
    except BaseException:
        abort_all(made.values())
        raise
    register(group, name, config, ranks)
    log.of(group).info("joined, with global ranks %s", list(ranks))
    return group


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
    made = record_of(group).config.get_device_backend_map()
    device = next((device for device, name in made.items() if name == backend), None)
    if device is None:
        return None
    whole = getattr(group, "inner", group)  # of one that checks its operations
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
        config = record_of(default).config if backend is None else BackendConfig(backend)
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
        join_group(
            world.store, f"make/{name}", default.rank(), members, request, limit, default.lost_ranks, callers
        )
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


def limit_of(timeout: timedelta | None, backends: Sequence[str]) -> timedelta:
    """Returns the time limit that the user gives, else the longest of these backends."""
    limit = max(map(default_timeout, backends)) if timeout is None else timeout
    seconds(limit)
    return limit


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
        raise ValueError(f"device_id is {device_id}, but the accelerator of this machine is {accelerator}")
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
