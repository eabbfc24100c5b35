"""The groups of the world that data parallel training uses: the default one, and parts of a group."""

from __future__ import annotations

import torch

import collectives
from collectives import ProcessGroup
from collectives.api.groups import group_beside_torch
from collectives.core.forwarding import group_behind


def resolve_group(group: object) -> ProcessGroup:
    """Returns ``group``, the group within it where it is one of torch's, the default group for ``None``.

    One of torch's own over Gloo gets one of ours beside it, which all its ranks make here.

    Raises:
        TypeError: ``group`` is no process group of this package.
        ValueError: it is ``None`` and there is no default group.
    """
    if group is None:
        default = default_group_or_none(make=True)
        if default is None:
            raise ValueError(f"there is no default process group; {_way_out()}, or pass process_group")
        return default
    ours = group_behind(group) or group_beside_torch(group, make=True)
    if ours is None:
        raise TypeError(
            f"process_group must be a collectives.ProcessGroup, or one of torch over Gloo, but is {group!r} "
            f"of type {type(group).__module__}.{type(group).__name__}; {_way_out()}, or make one with "
            "collectives.new_group()"
        )
    return ours


def _way_out() -> str:
    """Returns what makes a default group of this package, in words."""
    if torch.distributed.is_initialized():
        backend = torch.distributed.get_backend()
        return (
            f"torch.distributed was initialised with {backend!r}: call "
            'torch.distributed.init_process_group("collectives") instead'
        )
    return "call collectives.init_process_group() first"


def default_group_or_none(*, make: bool = False) -> ProcessGroup | None:
    """Returns the default group, or torch's as :func:`resolve_group`; ``None`` without.

    Args:
        make: whether to make what stands for one of torch's own; called by all ranks then.
    """
    group: object = collectives.GroupMember.WORLD
    if group is None and torch.distributed.is_initialized():
        group = torch.distributed.group.WORLD
    return group_behind(group) or group_beside_torch(group, make=make)


def subgroup_of_machine(*, torch_world: bool) -> object:
    """Returns the group of neighbouring ranks, as many as there are CUDA devices; called by all ranks.

    Args:
        torch_world: whether it is made of torch's default group, instead of ours.

    Raises:
        ValueError: there are no CUDA devices to count.
    """
    if torch_world:
        return torch.distributed.new_subgroups()[0]  # type: ignore[no-untyped-call]
    return collectives.new_subgroups()[0]


def is_outside(group: object) -> bool:
    """Returns whether ``group`` is what ranks outside of a group got when it was made."""
    return isinstance(group, int) and group == collectives.GroupMember.NON_GROUP_MEMBER


def neighbours(group: ProcessGroup, size: int) -> ProcessGroup:
    """Returns a new group of this rank and its neighbours; called by all ranks of ``group``.

    Args:
        group: a group of the world.
        size: number of ranks, which divides that of ``group``.
    """
    parts = [list(range(first, first + size)) for first in range(0, group.size(), size)]
    return resolve_group(collectives.split_group(group, parts))
