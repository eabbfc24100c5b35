"""``init_process_group`` and ``destroy_process_group``: the world's beginning and end."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch

from collectives.api.coalescing import stop_deferring
from collectives.api.groups import abort_all, bound_device, check_usable, hashed_name, limit_of, make_group
from collectives.api.init_method import (
    check_arguments,
    choose_init_method,
    close_store,
    join_default_group,
)
from collectives.api.world_state import (
    default_group,
    group_record,
    is_member,
    world,
)
from collectives.core.forwarding import group_behind
from collectives.core.process_group import ProcessGroup
from collectives.logs import Log
from collectives.registry.names import Backend, BackendConfig
from collectives.store.joining.world_rendezvous import leave_world, wait_for_leavers

__all__ = ["destroy_process_group", "init_process_group"]

log = Log()

_exit_hooked = False

_LOOK_IN_TORCH = ("ignite.distributed", "torchmetrics")
"""Packages that go on with one rank, without a word, where ``torch.distributed`` has no world."""

_LEAVERS_LIMIT = timedelta(seconds=5)
"""How long the end of the world waits on rank 0, which serves the store, for ranks that still read it."""


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",  # noqa: ARG001 - ignored, as torch.distributed documents
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    _ranks: list[int] | None = None,
) -> None:
    """Makes the default group of all ranks; called by all ranks, blocks until all have come.

    Either a store with rank and world size, or an address from which all three are found. May be called again
    after :func:`destroy_process_group`, also on the same store. A call that fails leaves nothing behind and
    may be repeated.

    Args:
        backend: name, or ``"<device>:<backend>,..."``; ``None`` for the default backend of ``device_id``'s
            type, and without one for that of the CPU (``"host"``; torch.distributed takes ``"gloo"``) and of
            the accelerator, where there is one.
        init_method: ``"env://"``, ``"tcp://host:port"``, ``"file:///path"``, or ``"mpi://"`` under
            ``mpirun``. ``None`` for ``env://``, or for ``mpi://`` with the backend ``mpi`` where variables of
            ``env://`` are missing.
        timeout: time limit for ranks to come and of the group's operations; ``None`` for 30 minutes, and
            10 of the part that is NCCL's.
        world_size: number of ranks.
        rank: this process's rank.
        store: any ``torch.distributed.Store``, the same on all ranks.
        group_name: ignored; kept because ``torch.distributed`` has it.
        pg_options: options of the backend itself; with several backends a dict from their names to those of
            each.
        device_id: device that this process is bound to; an int counts devices of the accelerator.
        _ranks: global ranks from which the group's name is derived; for internal use, as torch's.

    Raises:
        ValueError: there is a default group already, or arguments contradict each other or those of other
            ranks.
        DistStoreError: ranks did not come in time; names them.
        DistBackendError: the backend cannot be used here; names the command that would mend it.

    Example:
        In a script that ``torchrun`` starts, which names the address, the rank and their number::

            collectives.init_process_group("host")
            tensor = torch.ones(2)
            collectives.all_reduce(tensor)
            collectives.destroy_process_group()
    """
    with world.lock:
        if world.default is not None:
            raise ValueError(
                f"[rank {world.default.rank()}] there is a default process group already "
                f"({world.default.describe()}); call destroy_process_group before a second init_process_group"
            )
        rank, world_size = check_arguments(init_method, store, rank, world_size)
        device = bound_device(device_id)
        if backend is None and device is not None:
            backend = Backend.default_device_backend_map.get(device.type)
        config = BackendConfig(Backend.UNDEFINED if backend is None else backend)
        limit = limit_of(timeout, config.names())
        check_usable(config, pg_options)
        try:
            url = choose_init_method(config, init_method, rank, world_size) if store is None else ""
            base, rank, world_size, joined, world.standby = join_default_group(
                store, url, rank, world_size, limit, repr(config)
            )
            world.begin(joined)
            world.base = base
            world.owns_store = store is None
            world.device = device
            world.pid = os.getpid()
            name = hashed_name(_ranks, "") if _ranks else "0"
            ranks = range(world_size)
            world.default = make_group(
                config, name, rank, ranks, timeout, desc="default_pg", options=pg_options, device=device
            )
        except BaseException:
            if world.owns_store:
                close_store(world.base)
            close_store(world.standby)
            world.clear()
            raise
    end_at_exit()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Ends a group, or the world with all groups; called by all members. Without a world, does nothing.

    Operations that were issued are finished first. With ``group=None``, groups end in the reverse order of
    their creation, the same on all ranks; then rank 0 waits a few seconds for ranks that still use the store
    that it serves, apart from those that are known to have died. Where
    :func:`collectives.register_world_with_torch` was called, the world of ``torch.distributed`` ends first.

    Args:
        group: the group; ``None`` or the default group for all.

    Raises:
        ValueError: the group was not made by this world, or has been destroyed.
    """
    with world.lock:
        if not is_member(group) or (group is None and world.default is None):
            return
        if world.inherited and (group is None or group is world.default):
            world.clear()  # it is the parent's, as is the key in the store that says that this rank left
            return
        if group is not None and group is not world.default:
            group_record(group)
            stop_deferring(group)
            del world.records[group]
            group._leave_place()
            try:
                group.shutdown()
            except BaseException:
                abort_all([group])
                raise
            return
        _end_world(gracefully=True)


def _end_world(*, gracefully: bool) -> None:
    """Ends all groups and forgets them; raises the first error after all have ended.

    An interrupt of the user breaks what has not ended yet, and keeps rank 0 from waiting for the others.
    """
    default, groups, store = default_group(), list(world.records), world.store
    owned, standby = (world.base if world.owns_store else None), world.standby
    first: BaseException | None = None
    has_server = owned is not None or (standby is not None and standby.owns_store)
    serves = has_server and default.rank() == (0 if standby is None else max(standby.server, 0))
    lost = {record.ranks[r] for group, record in world.records.items() if serves for r in group.lost_ranks()}
    if gracefully:
        _warn_of_unseen_world()
    world.clear()
    try:
        if (
            gracefully
            and torch.distributed.is_initialized()
            and group_behind(torch.distributed.group.WORLD) is default
        ):
            torch.distributed.destroy_process_group()
        if not gracefully:
            for group in groups:
                group._begin_abort()
        while groups:
            stop_deferring(groups[-1])
            try:
                if gracefully:
                    groups[-1].shutdown()
                else:
                    groups[-1].abort()
            except Exception as error:  # noqa: BLE001 - raised below, after the other groups ended
                first = first or error
                abort_all(groups[-1:])
            if groups[-1] is not default:
                groups[-1]._leave_place()
            del groups[-1]
        leave_world(store, default.rank())
        if serves:
            wait_for_leavers(store, {*range(default.size())} - {default.rank()} - lost, _LEAVERS_LIMIT)
    except BaseException:
        abort_all(reversed(groups))
        leave_world(store, default.rank())
        raise
    finally:
        default._leave_place()
        close_store(owned)
        close_store(standby)
    if first is not None:
        raise first


def _warn_of_unseen_world() -> None:
    """Says that packages were loaded which looked for this world in ``torch.distributed``, in vain."""
    default = default_group()
    if world.known_to_torch or torch.distributed.is_initialized() or default.size() == 1:
        return
    if default.rank() == 0 and (loaded := [name for name in _LOOK_IN_TORCH if name in sys.modules]):
        log.of(default).warning(
            "%s looks for ranks in torch.distributed, which does not know this world: without a group of "
            "its own, its results are those of each rank alone; call collectives.register_world_with_torch() "
            "after init_process_group",
            " and ".join(loaded),
        )


def end_at_exit() -> None:
    """Has the world ended where the process ends and the user has not."""
    global _exit_hooked
    if not _exit_hooked:
        atexit.register(_at_exit)
        _exit_hooked = True


def _at_exit() -> None:
    """Breaks what the user forgot to destroy, so that no peer waits for a process that is gone."""
    if world.default is None or world.inherited:
        return
    ended = log.of(world.default)
    ended.warning(
        "the process ends with %d process group(s) open; call collectives.destroy_process_group() on all "
        "ranks",
        len(world.records),
    )
    try:
        _end_world(gracefully=False)
    except Exception as error:  # noqa: BLE001 - nobody is left to handle it
        ended.warning("closing them failed: %s", error)
