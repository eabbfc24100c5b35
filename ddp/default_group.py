"""The group that data parallel training uses where the user names none."""

from __future__ import annotations

import collectives
from collectives import ProcessGroup

__all__ = ["default_group_or_none", "resolve_group"]


def resolve_group(group: object) -> ProcessGroup:
    """Returns ``group``, the group within it where it is one of torch's, the default group for ``None``.

    Raises:
        TypeError: ``group`` is no process group of this package.
        ValueError: it is ``None`` and there is no default group.
    """
    if group is None:
        group = collectives.GroupMember.WORLD
        if group is None:
            raise ValueError(
                "there is no default process group; call collectives.init_process_group() first, or pass "
                "process_group"
            )
    inner = getattr(group, "inner", None)  # a group of ours within torch.distributed
    if isinstance(inner, ProcessGroup) and not isinstance(group, ProcessGroup):
        return inner
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"process_group must be a collectives.ProcessGroup, but is {group!r} of type "
            f"{type(group).__module__}.{type(group).__name__}; make one with collectives.new_group()"
        )
    return group


def default_group_or_none() -> ProcessGroup | None:
    """Returns the default group, ``None`` where there is none."""
    group = collectives.GroupMember.WORLD
    return group if isinstance(group, ProcessGroup) else None
