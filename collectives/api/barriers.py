"""Barriers: ranks wait for each other, with the names and meanings of ``torch.distributed``."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch

from collectives.api.world_state import member_group, world
from collectives.core.arguments.validation import fail, seconds
from collectives.core.operations import BARRIER
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work, finish

__all__ = [
    "barrier",
    "monitored_barrier",
]


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Blocks until every rank of the group has called it; with ``async_op=True``, the Work does.

    Args:
        group: the ranks that take part; ``None`` for the default group.
        async_op: whether to return at once, with a Work that is done when every rank has called this.
        device_ids: number of the accelerator's device to use, as a list of one; ``None`` for the device that
            ``init_process_group`` was given, where the group serves it.
        timeout: time limit; ``None`` takes the group's.

    Returns:
        The Work with ``async_op=True``, else ``None``; ``None`` on a rank that is not in the group, too.

    Raises:
        TypeError: ``device_ids`` is no list of one int, or ``timeout`` no timedelta.
        ValueError: ``timeout`` is not positive.
        DistBackendError: a rank died (``PeerLostError``), or did not come in time
            (``CollectiveTimeoutError``). With ``async_op=True`` it is raised by ``Work.wait()``.
    """
    target = member_group(group, "barrier")
    if target is None:
        return None
    bound = world.device
    if bound is not None and (bound.type == "cpu" or bound.type not in target.capabilities.devices):
        bound = None
    if timeout is None and device_ids is None and bound is None:
        work = target.fast_collective(BARRIER.opcode, async_op=async_op)
        if work is not None:
            return finish(work, async_op)
    _check_timeout(target, "barrier", timeout)
    if device_ids is not None:
        if not isinstance(device_ids, list) or len(device_ids) != 1 or not isinstance(device_ids[0], int):
            fail(target, "barrier", f"device_ids must be a list of one int, but is {device_ids!r}", TypeError)
        accelerator = torch.accelerator.current_accelerator()
        bound = torch.device(accelerator.type if accelerator else "cpu", device_ids[0])
    return finish(target.call(BARRIER, timeout=timeout, async_op=async_op, device=bound), async_op)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Barrier that names the ranks which did not come; blocks. For every backend.

    All ranks come to the same outcome: that of the first to see a rank dead or its limit passed.

    Args:
        group: the ranks that take part; ``None`` for the default group.
        timeout: time limit; ``None`` takes the group's.
        wait_all_ranks: ``False`` reports the first missing rank, ``True`` lists all.

    Raises:
        CollectiveTimeoutError: ranks did not come in time; the message names them on every rank. The group
            stays usable.
        PeerLostError: a rank died, whether it had come or not; raised at once, for ``wait_all_ranks`` too.
        DistNetworkError: the group's store failed.
        DistBackendError: the group was made without a store.

    Example:
        With 2 ranks::

            from datetime import timedelta

            try:
                collectives.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
            except collectives.CollectiveTimeoutError as error:
                print(error)  # names the ranks that are missing
    """
    target = member_group(group, "monitored_barrier")
    if target is None:
        return
    if isinstance(timeout, (int, float)):
        warnings.warn(f"timeout is {timeout!r}, taken as seconds; give a datetime.timedelta", stacklevel=2)
        timeout = timedelta(seconds=timeout)
    _check_timeout(target, "monitored_barrier", timeout)
    target.monitored_barrier(timeout, wait_all_ranks)


def _check_timeout(group: ProcessGroup, operation: str, timeout: timedelta | None) -> None:
    if timeout is not None:
        try:
            seconds(timeout)
        except (TypeError, ValueError) as error:
            fail(group, operation, str(error), type(error))
