"""``shrink_group``: goes on with the ranks that are left."""

from __future__ import annotations

from typing import Any

from collectives.api.coalescing import drop_deferred
from collectives.api.groups import abort_all, check_usable, local_turn, make_group
from collectives.api.init_method import close_store
from collectives.api.world_state import default_group, record_of, world
from collectives.core.process_group import ProcessGroup
from collectives.errors import DistNetworkError
from collectives.store import PrefixStore
from collectives.store.joining.group_rendezvous import join_group
from collectives.store.joining.world_rendezvous import KEYS

__all__ = ["SHRINK_ABORT", "SHRINK_DEFAULT", "shrink_group"]

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
    """Makes a group of a group's ranks without some; called by all that are left, and by them only.

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
        record = record_of(old)
        _check(old, ranks_to_exclude, shrink_flags)
        check_usable(record.config, pg_options)
        members = [rank for place, rank in enumerate(record.ranks) if place not in ranks_to_exclude]
        if shrink_flags == SHRINK_ABORT:
            abort_all([old])
        name = f"{record.name}.shrunk"
        name += str(local_turn(f"{name} to {members}"))
        request = f"group {name} of ranks {members} on {record.config!r}"
        here, replaces, standby = default.rank(), old is default, world.standby
        store, moved = world.store, None
        if replaces and standby is not None and standby.leaves_with(members):
            moved = standby.next_store(here, members, old.timeout, default.lost_ranks)
            store = PrefixStore(KEYS, moved)
        try:
            join_group(
                store, f"make/{name}", here, members, request, old.timeout, default.lost_ranks, members
            )
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
    for ended in [group for group in world.records if group is not made]:
        drop_deferred(ended)
        del world.records[ended]
        abort_all([ended])
    world.default = made
    if moved is not None:
        if world.owns_store:
            close_store(world.base)
        world.base, world.owns_store = moved, True
    # Names of groups are counted by the members that are left, and apart from those of the old world.
    world.store = store
    world.created, world.local_turns = 1, {}


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
