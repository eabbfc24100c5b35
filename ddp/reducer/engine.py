"""What the reducer asks of the autograd engine, in one place: most of it is private to torch.

A *task* is one run of the engine, started by ``backward()`` or ``torch.autograd.grad()``; tasks may be
nested.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from collectives.dynamo import Uncompiled

NO_TASK = -1
"""What :func:`current_task` returns outside of any task."""

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the task that this thread works for; numbers are not used again."""

_queue_callback: Callable[[Callable[[], None]], None]
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


_IDENTITY = operator.attrgetter("_cdata")
"""What tells the contents of a tensor, which ``torch.utils.swap_tensors`` exchanges, from others."""


class PassOwner(Protocol):
    """What follows the tasks that deliver gradients."""

    def output_hook(self, forward: Any) -> None:
        """Called when the gradient of an output of forward was computed."""

    def end_task(self, task: int) -> None:
        """Called when the task is complete; what is raised here, ``backward()`` raises."""

    def fail_task(self, task: int) -> None:
        """Called when an exception ended the task, before ``backward()`` raises it."""


class TaskGuard(Uncompiled):
    """Tells an owner, and keeps it alive until then, how the current task ends.

    The engine holds the guard: it calls :meth:`finished` at the end of the task, or drops the guard uncalled
    where the task failed.
    """

    __slots__ = ("_open", "_owner", "_task")

    def __init__(self, owner: PassOwner, task: int) -> None:
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


class GradientHooks(Uncompiled):
    """Hooks on parameters that are called when their gradients were accumulated; removed when it is deleted.

    Args:
        hooks: each parameter and its hook.
    """

    __slots__ = ("_handles", "_identities", "_parameters", "_places")

    def __init__(self, hooks: Iterable[tuple[torch.nn.Parameter, Callable[[torch.Tensor], None]]]) -> None:
        self._handles: list[Any] = []
        self._places: list[tuple[dict[int, Any], int]] = []
        self._parameters: list[Any] = []
        for parameter, hook in hooks:
            self._parameters.append(parameter)
            handle: Any = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            registered: Any = parameter._post_accumulate_grad_hooks
            self._places.append((registered, handle.id))
        self._identities = list(map(_IDENTITY, self._parameters))

    def reach_engine(self) -> bool:
        """Makes sure that the engine calls the hooks of parameters that were given other contents.

        ``torch.utils.swap_tensors`` leaves hooks with the object, and those it calls with the contents.

        Returns:
            Whether there were any.
        """
        if list(map(_IDENTITY, self._parameters)) == self._identities:
            return False
        for parameter in self._parameters:
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        self._identities = list(map(_IDENTITY, self._parameters))
        return True

    def __bool__(self) -> bool:
        return bool(self._handles)

    def come_last(self) -> None:
        """Puts these hooks after those that were registered since: what others change goes into the average.

        The engine calls hooks in their order. A later one would change a gradient while it is reduced.
        """
        for hooks, own in self._places:
            if len(hooks) > 1 and next(reversed(hooks)) != own and own in hooks:
                hooks[own] = hooks.pop(own)

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()


class OutputHook(Uncompiled):
    """A hook on an output of forward; tells an owner that its gradient was computed.

    Keeps the owner alive until the first pass over that output, for a module given up after forward; then, an
    old loss that somebody keeps does not hold on to it.

    Args:
        owner: who is told.
        forward: what it is told.
    """

    __slots__ = ("_forward", "_kept", "_owner")

    def __init__(self, owner: PassOwner, forward: Any) -> None:
        self._kept: PassOwner | None = owner
        self._owner = weakref.ref(owner)
        self._forward = forward

    def __call__(self, grad: torch.Tensor) -> None:  # noqa: ARG002
        """Called by the engine."""
        live = self._owner()
        if live is not None:
            live.output_hook(self._forward)
        self._kept = None


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
    """Returns whether ``backward()`` without ``inputs`` started the current task.

    Only that accumulates at every leaf of the graph, unlike ``torch.autograd.grad`` and
    ``torch.distributed.autograd.backward``. Called from a hook on a tensor; looks at the leaves below that
    tensor, up to the first where nothing will accumulate.
    """
    root: Any = torch._C._current_autograd_node()
    if root is None:
        return False
    seen: set[Any] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.next_functions:
            stack += [following for following, _ in node.next_functions]
        elif not will_accumulate(node):
            return False
    return True


COMPILED_ERROR = (
    "compiled autograd tells nobody when a backward pass ends, so that gradients would not be averaged; "
    "leave out torch._dynamo.config.compiled_autograd; torch.compile works without it"
)


def runs_compiled() -> bool:
    """Returns whether the current task runs as compiled autograd, instead of by the engine."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "in_compiled_autograd_region", False))


DIST_AUTOGRAD_ERROR = (
    "torch.distributed.autograd.backward() keeps gradients in its context, where they cannot be averaged; "
    "call loss.backward(), or run forward under no_sync() and average what get_gradients() returns"
)


def runs_dist_backward() -> bool:
    """Returns whether ``torch.distributed.autograd.backward`` is at work in this process."""
    agent: Any = getattr(torch._C, "_distributed_rpc", None)  # absent where torch was built without RPC
    if agent is None or not agent._is_current_rpc_agent_set():
        return False
    info = torch._C._distributed_autograd._get_debug_info()
    return int(info.get("num_current_backward_passes", 0)) > 0
