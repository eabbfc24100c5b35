"""The world: the default group, all groups made in it, and which rank is which in each of them."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from collectives.core.forwarding import group_behind
from collectives.core.process_group import ProcessGroup
from collectives.errors import GroupAbortedError
from collectives.forks import belongs_to_parent

if TYPE_CHECKING:
    from collectives.registry.names import BackendConfig
    from collectives.store.joining.meeting_place import MeetingPlace
    from collectives.store.joining.standby import MetWorld, Standby

__all__ = [
    "GroupMember",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "is_available",
    "is_initialized",
    "is_torchelastic_launched",
]

Group = ProcessGroup | None
"""The ranks that take part; ``None`` for the default group."""

NON_GROUP_MEMBER: Any = -100
"""What makers of groups return to ranks that are not in the group; ``GroupMember.NON_GROUP_MEMBER``."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What the world knows of a group that this process is a member of.

    Attributes:
        name: name, equal on all members and unique in the world.
        config: backend for each device type.
        ranks: ranks of the members in the default group, by group rank.
        index: group rank of each member, by rank in the default group.
    """

    name: str
    config: BackendConfig
    ranks: tuple[int, ...]
    index: dict[int, int]


class World:
    """The state of one process; there is one instance, :data:`world`.

    Attributes:
        default: the default group, ``None`` before ``init_process_group`` and after
            ``destroy_process_group``.
        records: all groups of this process, in order of creation.
        types: their classes.
        base: the store that all ranks reach.
        store: the world's own part of it.
        created: number of groups made with all ranks, the default group included, whether this process is a
            member or not.
        local_turns: number of groups made with members only, under a key that the members share.
        device: device that this process is bound to.
        known_to_torch: whether ``torch.distributed`` was told of this world.
        owns_store: whether the store was made here, for an address, and not given by the user.
        standby: who serves the store next, where the rank that does is left out.
        place: where other processes find this one, which is in no world and has been asked for a handle.
        pid: process that made the world; a forked child must not end the groups of its parent.
        lock: held while groups are made or ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Forgets everything; ends no group."""
        self.default: ProcessGroup | None = None
        self.records: dict[ProcessGroup, GroupRecord] = {}
        self.types: set[type] = set()
        self.base: Any = None
        self.store: Any = None
        self.created = 0
        self.local_turns: dict[str, int] = {}
        self.device: torch.device | None = None
        self.known_to_torch = False
        self.owns_store = False
        self.standby: Standby | MetWorld | None = None
        self.place: MeetingPlace | None = None
        self.pid = os.getpid()

    def begin(self, store: Any) -> None:
        """Counts groups anew, in a store that those who are members now have to themselves."""
        self.store = store
        self.created = 1
        self.local_turns = {}

    @property
    def inherited(self) -> bool:
        """Whether this is a child that was forked after the world was made, which has no part in it."""
        return self.pid != os.getpid()

    def refuse_in_child(self, function: str) -> None:
        """Raises :class:`~collectives.errors.GroupAbortedError` in such a child."""
        if self.default is not None and self.inherited:
            raise GroupAbortedError(
                f"[rank {self.default.rank()}] {function}: {belongs_to_parent('the default group')}, after "
                "destroy_process_group(), which ends nothing of the parent's"
            )


world = World()
"""The state of this process."""


class _WorldMeta(type):
    """Gives ``GroupMember.WORLD`` the value that it has now."""

    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; ``None`` where there is none."""
        return world.default


class GroupMember(metaclass=_WorldMeta):
    """Special groups: ``WORLD``, the default group, and ``NON_GROUP_MEMBER``, for ranks outside a group.

    Collectives on ``NON_GROUP_MEMBER`` warn and do nothing.
    """

    NON_GROUP_MEMBER: ClassVar[Any] = NON_GROUP_MEMBER


class group(metaclass=_WorldMeta):  # noqa: N801 - the name of torch.distributed
    """Older name of :class:`GroupMember`; holds ``WORLD`` only."""


def default_group() -> ProcessGroup:
    """Returns the default group.

    Raises:
        ValueError: there is none.
    """
    default = world.default
    if default is None:
        raise ValueError(f"there is no default process group; {way_to_world()}")
    return default


def way_to_world() -> str:
    """Returns how to get a default group where there is none, in words; torch may have one."""
    if not torch.distributed.is_initialized():
        return "call init_process_group first"
    has = f"torch.distributed was initialised with {torch.distributed.get_backend()!r}: "
    if group_behind(torch.distributed.group.WORLD) is None:
        return f'{has}call torch.distributed.init_process_group("collectives") instead'
    return (
        f"{has}pass group=torch.distributed.group.WORLD, or call its own function of this name "
        "(collectives.init_process_group would make a second world)"
    )


def is_member(group: Any) -> bool:
    """Returns whether ``group`` is a group of this process, or ``None``; ``False`` for ``NON_GROUP_MEMBER``.

    A group of ``torch.distributed`` that one of this package carries out counts, too.

    Raises:
        TypeError: it is something else.
    """
    if group is None or type(group) in world.types:  # isinstance of an abstract class takes 0.1 us and more
        return True
    if group_behind(group) is not None:
        return True
    if isinstance(group, int) and group == NON_GROUP_MEMBER:
        return False
    where = "" if world.default is None else f"[rank {_own_rank()}] "
    raise TypeError(
        f"{where}group must be a collectives.ProcessGroup, but is {group!r} of type "
        f"{type(group).__module__}.{type(group).__qualname__}; of torch's groups, those of "
        'torch.distributed.init_process_group("collectives") are taken'
    )


def own_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group of this package to use, the default one for ``None``; ``None`` on a non-member."""
    if group is None:
        return world.default or default_group()
    if type(group) in world.types:
        return group
    return group_behind(group) if is_member(group) else None


def member_group(group: ProcessGroup | None, operation: str, depth: int = 3) -> ProcessGroup | None:
    """Returns the group to use, as :func:`own_group` does, and warns on a non-member.

    The warning points at the caller of the function that calls this, or ``depth - 3`` frames above.
    """
    target = own_group(group)
    if target is None:
        warnings.warn(
            f"{operation} on global rank {_own_rank()} does nothing, because this rank is not in the given "
            "group",
            stacklevel=depth,
        )
    return target


def _own_rank() -> int:
    return -1 if world.default is None else world.default.rank()


def group_record(group: ProcessGroup) -> GroupRecord:
    """Returns the record of a group.

    Raises:
        ValueError: it was not made by this world.
    """
    record = world.records.get(group)
    if record is None:
        raise ValueError(
            f"[rank {_own_rank()}] {group!r} is not registered here: it was destroyed, or made without "
            "init_process_group "
            "and new_group; name its ranks by group_src and group_dst"
        )
    return record


def group_rank(
    group: ProcessGroup, operation: str, global_rank: int | None, own_rank: int | None, name: str
) -> int:
    """Returns the group rank that a user gave as a global rank or as a group rank.

    Args:
        group: the group.
        operation: name of the user function, for messages.
        global_rank: the rank in the default group.
        own_rank: the rank within the group.
        name: name of the first argument, ``"src"`` or ``"dst"``; the second has ``group_`` before it.

    Raises:
        ValueError: both or none are given, or the global rank is not in the group.
    """
    if own_rank is None and global_rank is not None and group is world.default:
        return global_rank
    if own_rank is not None:
        if global_rank is not None:
            raise ValueError(
                f"[rank {group.rank()}] {operation}: give {name} or group_{name}, not both "
                f"({name}={global_rank}, group_{name}={own_rank})"
            )
        return own_rank
    if global_rank is None:
        raise ValueError(f"[rank {group.rank()}] {operation}: give {name} or group_{name}")
    record = group_record(group)
    found = record.index.get(global_rank)
    if found is None:
        raise ValueError(
            f"[rank {group.rank()}] {operation} on {group.describe()}: {name} is global rank {global_rank}, "
            f"but the group has the global ranks {list(record.ranks)}"
            + ("" if name == "global_rank" else f"; group_{name} names a rank within the group")
        )
    return found


def root_rank(
    group: ProcessGroup, operation: str, global_rank: int | None, own_rank: int | None, name: str
) -> int:
    """Returns the group rank of a root as :func:`group_rank`; without both, of global rank 0."""
    unnamed = global_rank is None and own_rank is None
    return group_rank(group, operation, 0 if unnamed else global_rank, own_rank, name)


def world_rank(group: ProcessGroup, rank: int) -> int:
    """Returns a group's rank as one of the default group; as it is where no world made the group."""
    return get_global_rank(group, rank) if group in world.records else rank


# ---- what users ask ----------------------------------------------------------------------------------------


def is_available() -> bool:
    """Returns whether this package can be used in this process.

    Returns:
        ``True``: it works wherever it can be imported.
    """
    return True


def is_initialized() -> bool:
    """Returns whether there is a default group.

    Returns:
        ``True`` between :func:`init_process_group` and :func:`destroy_process_group`.
    """
    return world.default is not None


def is_torchelastic_launched() -> bool:
    """Returns whether an elastic launcher such as ``torchrun`` started this process.

    Returns:
        Whether ``TORCHELASTIC_RUN_ID``, which such a launcher sets, is in the environment.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_rank(group: ProcessGroup | None = None) -> int:
    """Returns this process's rank in a group.

    Args:
        group: the group asked about; ``None`` for the default group.

    Returns:
        The rank, from 0; -1 where this process is not in the group.

    Raises:
        ValueError: ``group`` is ``None`` and there is no default group.
        TypeError: ``group`` is no process group.
    """
    if not is_member(group):
        return -1
    return (default_group() if group is None else group).rank()


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Returns the number of ranks of a group.

    Args:
        group: the group asked about; ``None`` for the default group.

    Returns:
        The number; -1 where this process is not in the group.

    Raises:
        ValueError: ``group`` is ``None`` and there is no default group.
        TypeError: ``group`` is no process group.
    """
    if not is_member(group):
        return -1
    return (default_group() if group is None else group).size()


def get_group_rank(group: ProcessGroup, global_rank: int) -> int:
    """Returns the rank within a group of a rank of the default group.

    Args:
        group: the group, of which this process is a member.
        global_rank: a rank of the default group.

    Returns:
        The rank within the group, from 0.

    Raises:
        ValueError: the rank or this process is not in the group (not checked for the default group), or the
            group was not made by :func:`new_group`.
        TypeError: ``group`` is no process group.
    """
    if group is world.default:
        return global_rank
    _member_record(group, "get_group_rank")
    return group_rank(group, "get_group_rank", global_rank, None, "global_rank")


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    """Returns the rank in the default group of a rank of a group.

    Args:
        group: the group, of which this process is a member.
        group_rank: a rank within it.

    Returns:
        The rank in the default group.

    Raises:
        ValueError: the group has no such rank, this process is not in it, or it was not made by
            :func:`new_group`.
        TypeError: ``group`` is no process group.
    """
    if group is world.default:
        return group_rank
    ranks = _member_record(group, "get_global_rank").ranks
    if not 0 <= group_rank < len(ranks):
        raise ValueError(
            f"[rank {group.rank()}] get_global_rank on {group.describe()}: group_rank is {group_rank}, but "
            "the ranks of "
            f"this group are 0 to {len(ranks) - 1}"
        )
    return ranks[group_rank]


def get_process_group_ranks(group: ProcessGroup | None) -> list[int]:
    """Returns the members of a group as ranks of the default group.

    Args:
        group: the group asked about; ``None`` for the default group.

    Returns:
        The ranks, in the order of the members' ranks within the group.

    Raises:
        ValueError: this process is not in the group, it was not made by :func:`new_group`, or it is ``None``
            and there is no default group.
        TypeError: ``group`` is no process group.
    """
    return list(_member_record(group, "get_process_group_ranks").ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Returns the backend of a group.

    Args:
        group: the group asked about; ``None`` for the default group.

    Returns:
        Its name, such as ``"host"``; ``"cpu:host,cuda:nccl"`` where device types have different ones.

    Raises:
        ValueError: this process is not in the group, it was not made by :func:`new_group`, or it is ``None``
            and there is no default group.
        TypeError: ``group`` is no process group.
    """
    return _member_record(group, "get_backend").config.name()


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Returns the backend of a group for each device type.

    Args:
        group: the group asked about; ``None`` for the default group.

    Returns:
        Pairs of device type and backend, such as ``"cpu:host"``, by commas.

    Raises:
        ValueError: this process is not in the group, it was not made by :func:`new_group`, or it is ``None``
            and there is no default group.
        TypeError: ``group`` is no process group.
    """
    return str(_member_record(group, "get_backend_config").config)


def get_pg_count() -> int:
    """Returns the number of groups that all ranks made in this world so far.

    Returns:
        The number, with the default group and those that have ended; 0 where there is no default group.
    """
    return world.created


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Returns this process's rank on its machine.

    Args:
        fallback_rank: returned where ``LOCAL_RANK`` is not set.

    Returns:
        What ``LOCAL_RANK`` says, which launchers set.

    Raises:
        RuntimeError: ``LOCAL_RANK`` is not set and there is no fallback.
        ValueError: ``LOCAL_RANK`` is no number.
    """
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        return int(text)
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not in the environment; start the process by a launcher such as torchrun, or pass "
        "fallback_rank"
    )


def _member_record(group: ProcessGroup | None, operation: str) -> GroupRecord:
    if not is_member(group):
        raise ValueError(f"[rank {_own_rank()}] {operation}: this rank is not in the given group")
    return group_record(default_group() if group is None else group)


def register(group: ProcessGroup, name: str, config: BackendConfig, ranks: Sequence[int]) -> None:
    """Adds a group to the world."""
    ranks = tuple(ranks)
    world.types.add(type(group))
    world.records[group] = GroupRecord(name, config, ranks, {g: i for i, g in enumerate(ranks)})
