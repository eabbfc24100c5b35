"""What the reducer asks of the autograd engine, in one place: most of it is private to torch.

A *task* is one run of the engine, started by ``backward()`` or ``torch.autograd.grad()``; tasks may be
nested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

__all__ = [
    "NO_TASK",
    "TaskGuard",
    "TaskOwner",
    "accumulator",
    "current_task",
    "runs_backward",
    "will_accumulate",
]

NO_TASK = -1
"""What :func:`current_task` returns outside of any task."""

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the task that this thread works for; numbers are not used again."""

_queue_callback: Callable[[Callable[[], None]], None]
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class TaskOwner(Protocol):
    """Who wants to know how a task ends."""

    def end_task(self, task: int) -> None:
        """Called when the task is complete; what is raised here, ``backward()`` raises."""

    def fail_task(self, task: int) -> None:
        """Called when an exception ended the task, before ``backward()`` raises it."""


class TaskGuard:
    """Tells an owner, and keeps it alive until then, how the current task ends.

    The engine holds the guard: it calls :meth:`finished` at the end of the task, or drops the guard uncalled
    where the task failed.
    """

    __slots__ = ("_open", "_owner", "_task")

    def __init__(self, owner: TaskOwner, task: int) -> None:
        self._owner = owner
        self._task = task
        self._open = False
        _queue_callback(self.finished)
        self._open = True

    def finished(self) -> None:
        """Called by the engine."""
        self._open = False
        self._owner.end_task(self._task)

    def __del__(self) -> None:
        if self._open:
            self._owner.fail_task(self._task)


def accumulator(parameter: torch.nn.Parameter) -> Any:
    """Returns the node of the graph that accumulates the gradient of ``parameter``."""
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn
    return node.next_functions[0][0]  # type: ignore[union-attr]


def will_accumulate(node: Any) -> bool:
    """Returns whether the current task will run a node from :func:`accumulator`.

    Never so in ``torch.autograd.grad``, which does not accumulate.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # raised where torch.autograd.grad asks for this very parameter
        return False


def runs_backward() -> bool:
    """Returns whether ``backward()`` without ``inputs`` started the current task, as the call stack tells.

    False on the engine's own threads, which work for devices other than the CPU.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.grad.__code__:
            return False
        if frame.f_code is torch.autograd.backward.__code__:
            inputs = frame.f_locals.get("inputs")
            return inputs is None or (isinstance(inputs, tuple) and not inputs)
        frame = frame.f_back
    return False
