"""Profiler events of operations, named as torch names those of its own backends (``gloo:all_reduce``)."""

from __future__ import annotations

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


def observed(name: str, inputs: Sequence[Any], issue: Callable[[], Work]) -> Work:
    """Issues an operation under an event that ends when the operation does.

    Args:
        name: name of the event.
        inputs: tensors, or lists of them, whose shapes the event shows.
        issue: issues the operation.
    """
    event = _RecordFunctionFast(name, list(flat(inputs)), {})
    event.__enter__()
    try:
        work = issue()
    except BaseException:
        event.__exit__(None, None, None)
        raise
    if work.is_completed():
        event.__exit__(None, None, None)
    else:
        work.get_future().then(lambda _: event.__exit__(None, None, None))
    return work
