"""Profiler events of operations, named as torch names those of its own backends (``gloo:all_reduce``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from collectives.work import Work

__all__ = ["enabled", "flat", "observed"]

enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Returns whether a profiler records on this thread."""


def flat(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)


def observed(name: str, inputs: Sequence[Any], background: bool, issue: Callable[[], Work]) -> Work:
    """Issues an operation under an event that ends when the operation does.

    An event that shows shapes can only end on the thread where it began; one that ends with the operation,
    on whichever thread, cannot show them. So operations that the caller waits for show shapes, others do not.

    Args:
        name: name of the event.
        inputs: tensors, or lists of them, whose shapes the event shows.
        background: whether the caller goes on before the operation is done.
        issue: issues the operation.
    """
    if background:
        record = torch.ops.profiler._record_function_enter_new(name, None)
        try:
            work = issue()
        except BaseException:
            torch.ops.profiler._record_function_exit._RecordFunction(record)
            raise
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, work.get_future())
        return work
    with _RecordFunctionFast(name, list(flat(inputs)), {}):
        work = issue()
        with contextlib.suppress(Exception):  # the caller's own wait() raises it
            work.wait()
        return work
