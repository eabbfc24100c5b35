"""Several groups at once: parts of a group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.api.groups import decline_group, limit_of, local_turn, make_group, new_group
from collectives.api.world_state import default_group, get_process_group_ranks, is_member, record_of, world
from collectives.core.process_group import ProcessGroup
from collectives.registry.names import BackendConfig
from collectives.store.joining.group_rendezvous import join_group

__all__ = ["new_subgroups", "new_subgroups_by_enumeration", "split_group"]


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
        ValueError: the list is empty, or a rank is named twice.

    Example:
        With 2 ranks::

            mine, groups = collectives.new_subgroups_by_enumeration([[1, 0]])
            mine.size()  # 2
    """
    rank = default_group().rank()
    if not ranks_per_subgroup_list:
        raise ValueError(f"[rank {rank}] new_subgroups_by_enumeration: the list of groups is empty")
    seen: dict[int, Sequence[int]] = {}
    for ranks in ranks_per_subgroup_list:
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
        record = record_of(parent)
        where = f"[rank {parent.rank()}] split_group on {parent.describe()}"
        if not split_ranks:
            raise ValueError(f"{where}: split_ranks must be given, a list of lists of ranks of this group")
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
        mine = next((sorted(part) for part in split_ranks if parent.rank() in part), [])
        members = tuple(record.ranks[r] for r in mine)
        name = f"{record.name}.split"
        turn = local_turn(name)
        join_group(
            world.store,
            f"make/{name}{turn}",
            default_group().rank(),
            members,
            f"split {split_ranks} on {config!r}",
            limit,
            default_group().lost_ranks,
            record.ranks,
        )
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
