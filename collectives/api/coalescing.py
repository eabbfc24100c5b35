"""Several collectives issued as one.

Inside :func:`_coalescing_manager`, calls of ``all_reduce``, ``all_gather_single`` and
``reduce_scatter_single`` by the same thread on the same group are deferred; at its end each run of calls of
one function is issued by one call of the group.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from collectives.api.world_state import own_group
from collectives.core.arguments.validation import checked_call
from collectives.core.operations import (
    ALL_GATHER_INTO_TENSOR,
    ALL_REDUCE,
    ALL_REDUCE_COALESCED,
    REDUCE_SCATTER_TENSOR,
    Operation,
)
from collectives.core.process_group import ProcessGroup
from collectives.core.types import AllgatherOptions, ReduceOp, ReduceScatterOptions
from collectives.core.work import CoalescedWork, Work

__all__ = ["_CoalescingManager", "_coalescing_manager"]


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A deferred call."""

    operation: Operation
    op: ReduceOp
    output: torch.Tensor
    input: torch.Tensor | None


pending: dict[tuple[int, ProcessGroup], list[_Deferred]] = {}
"""Deferred calls by thread and group; empty outside of every manager."""


class _CoalescingManager:
    """What ``with _coalescing_manager(...) as cm`` gives; ``cm.wait()`` waits for all calls."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def append(self, work: Work | None = None) -> None:
        """Adds an operation to wait for."""
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Blocks until all operations are done; raises the first error after all have ended."""
        CoalescedWork(self.works).wait()


class DeferredWork(Work):
    """What an asynchronous call returns inside the manager: nothing runs yet, so every use is an error."""

    def _refuse(self, timeout: timedelta | None = None) -> Any:  # noqa: ARG002 - as wait() has it
        """Raises :class:`RuntimeError`."""
        raise RuntimeError("this call is part of _coalescing_manager; wait on the manager, after its end")

    wait = is_completed = exception = result = get_future = _refuse


DEFERRED = frozenset({ALL_REDUCE, ALL_GATHER_INTO_TENSOR, REDUCE_SCATTER_TENSOR})
"""What is deferred inside a manager."""


def defer(
    group: ProcessGroup,
    operation: Operation,
    op: ReduceOp,
    output: torch.Tensor,
    input: torch.Tensor | None = None,
) -> bool:
    """Defers a call inside a manager of this group; returns whether it did."""
    calls = pending.get((threading.get_ident(), group))
    if calls is None:
        return False
    checked_call(group, operation, output, input, op=op)  # what is wrong raises before anything is sent
    calls.append(_Deferred(operation, op, output, input))
    return True


def stop_deferring(group: ProcessGroup) -> None:
    """Defers no more calls of a group that ends; those deferred before raise at the end of their block."""
    for key in list(pending):  # other threads may open a manager meanwhile
        if key[1] is group:
            pending.pop(key, None)


@contextlib.contextmanager
def _coalescing_manager(
    group: ProcessGroup | None = None, device: torch.device | None = None, async_ops: bool = False
) -> Generator[_CoalescingManager]:
    """Issues the collectives called inside as few calls of the group; outputs are complete after it.

    Covers ``all_reduce``, ``all_gather_single`` and ``reduce_scatter_single`` and their other names; every
    other function runs at once. All ranks make the same calls. Where the body raises, none of them is issued.

    Args:
        group: the group; ``None`` for the default group.
        device: device of the tensors; checked against the group.
        async_ops: ``False`` blocks at the end until all are done; ``True`` leaves that to ``cm.wait()``.

    Yields:
        The manager, whose ``wait()`` blocks until all calls are done and raises the first error.

    Raises:
        ValueError: a manager of this group is open in this thread, the group does not serve ``device``, or
            there is no default group.
        TypeError: ``group`` is no process group.
        DistBackendError: as of the functions called, at the end of the block.

    Example:
        With 2 ranks::

            tensors = [torch.ones(2), torch.ones(3)]
            with collectives._coalescing_manager():
                for tensor in tensors:
                    collectives.all_reduce(tensor)
            tensors[1].tolist()  # [2.0, 2.0, 2.0]
    """
    target = own_group(group)
    if target is None:
        yield _CoalescingManager()  # the calls inside warn
        return
    if device is not None and torch.device(device).type not in target.capabilities.devices:
        raise ValueError(
            f"[rank {target.rank()}] _coalescing_manager: {target.describe()} does not take tensors on "
            f"{device}, only on "
            f"{', '.join(sorted(target.capabilities.devices))}"
        )
    key = (threading.get_ident(), target)
    if key in pending:
        raise ValueError(
            f"[rank {target.rank()}] _coalescing_manager of {target.describe()} is open in this thread "
            "already"
        )
    calls = pending[key] = []
    manager = _CoalescingManager()
    try:
        yield manager
    finally:
        pending.pop(key, None)
    for first, run in _runs(calls):
        manager.append(_issue(target, first, run, async_ops))
    if not async_ops:
        manager.wait()


def _runs(calls: list[_Deferred]) -> list[tuple[_Deferred, list[_Deferred]]]:
    """Returns runs of calls of one function and reduction; the order of all calls is kept."""
    runs: list[tuple[_Deferred, list[_Deferred]]] = []
    for call in calls:
        if runs and (runs[-1][0].operation, runs[-1][0].op) == (call.operation, call.op):
            runs[-1][1].append(call)
        else:
            runs.append((call, [call]))
    return runs


def _issue(group: ProcessGroup, first: _Deferred, run: list[_Deferred], async_ops: bool) -> Work:
    outputs = [call.output for call in run]
    if first.operation is ALL_REDUCE:
        return group.call(ALL_REDUCE_COALESCED, outputs, op=first.op, async_op=async_ops)
    inputs: list[Any] = [call.input for call in run]
    if first.operation is ALL_GATHER_INTO_TENSOR:
        return group.all_gather_single_coalesced(outputs, inputs, AllgatherOptions(asyncOp=async_ops))
    options = ReduceScatterOptions(asyncOp=async_ops, reduceOp=first.op)
    return group.reduce_scatter_single_coalesced(outputs, inputs, options)
