"""Shows operations of our groups to the dispatch modes of torch, and to hooks, as those of its own backends.

torch's C++ groups issue each operation by an operator (``c10d::allreduce_``), which ``TorchDispatchMode``
objects see: ``CommDebugMode``, for one, counts them. The operators' kernels call the hooks of a group, and
so fill torch's flight recorder. A group in Python is called directly, past them. While a mode is active, or
the group has hooks, the methods of our groups therefore call those of the C++ class that they override, which
call the operators; their kernels come back to the group, with the modes set aside.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d
from torch.utils import _python_dispatch as dispatch

from collectives.core.arguments.option_records import REDUCE_OP_CODES
from collectives.core.operations import METHODS
from collectives.torch_bridge.work import TorchWork

_LOCAL = threading.local()
"""``inside``: whether this thread carries out an operation that was issued by its operator; ``work`` and
``kept``: what it came to, for those who get a holder of it."""
_depth = torch._C._len_torch_dispatch_stack
_NO_FLAG = not hasattr(dispatch, "_is_in_torch_dispatch_mode")
_look = _NO_FLAG
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()  # a group may be collected while another is given hooks


def possible() -> bool:
    """Returns whether a thread may have a mode active, or a group hooks; costs next to nothing."""
    return _look or dispatch._is_in_torch_dispatch_mode


def show_to_hooks(group: Any, wanted: bool) -> None:
    """Has a group issue all operations by their operators, or no longer.

    Args:
        group: the group.
        wanted: whether it has hooks.
    """
    with _lock:
        group.hooked = wanted
        if not wanted:
            _hooked.discard(group)
        elif group not in _hooked:
            _hooked.add(group)
            weakref.finalize(group, _count).atexit = False
    _count()


def _count() -> None:
    global _look
    with _lock:
        _look = _NO_FLAG or bool(list(_hooked))  # whose length counts those that are being collected


def _base(*names: str) -> Callable[..., Any]:
    """Returns a caller of the first of these methods that torch's class has.

    A call of a C++ method comes back to the Python method that overrides it, unless it stands in a function
    of the same name on the same object: pybind11 takes that for the override's call of its base.
    """
    name = next(name for name in names if hasattr(c10d.ProcessGroup, name))
    method = getattr(c10d.ProcessGroup, name)

    def call(self: Any, *args: Any) -> Any:
        return method(self, *args)

    call.__code__ = call.__code__.replace(co_name=name)
    return call


def _milliseconds(options: Any) -> int:
    milliseconds: int = round(options.timeout.total_seconds() * 1000)
    return milliseconds


def _all_to_all(group: Any, *args: Any) -> Any:
    *given, options = args if len(args) == 5 else (*args, c10d.AllToAllOptions())
    output, given_input, *splits = given
    return _work(
        torch.ops.c10d.alltoall_base_(
            output, given_input, group.boxed(), *splits, options.asyncOp, _milliseconds(options)
        )
    )


def _recv_anysource(group: Any, tensors: Any, tag: int) -> Any:
    return _work(torch.ops.c10d.recv_any_source_(tensors, group.boxed(), tag))


def _gather_coalesced(group: Any, outputs: Any, inputs: Any, options: Any = None) -> Any:
    asynchronous = options is not None and options.asyncOp
    operator = torch.ops.c10d.allgather_into_tensor_coalesced_
    return _work(operator(outputs, inputs, group.boxed(), asynchronous))


def _scatter_coalesced(group: Any, outputs: Any, inputs: Any, options: Any = None) -> Any:
    """Shows sums only before torch 2.15: Python cannot make the operator's argument for another reduction."""
    options = c10d.ReduceScatterOptions() if options is None else options
    if hasattr(options.reduceOp, "boxed"):
        op = options.reduceOp.boxed()
    elif options.reduceOp.op == c10d.ReduceOp.SUM:
        op = torch.classes.c10d.ReduceOp()
    else:
        return None
    operator = torch.ops.c10d.reduce_scatter_tensor_coalesced_
    return _work(operator(outputs, inputs, group.boxed(), op, options.asyncOp, _milliseconds(options)))


def _work(result: Any) -> Any:
    return torch_dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


_METHODS: dict[str, Callable[..., Any]] = {
    **{names[0]: _base(*names) for names in METHODS},
    **{name: _base(name) for name in ("send", "recv")},
    # not by the base, whose C++ code looks for an override under a second name, too, and finds it
    "all_to_all_single": _all_to_all,
    "recv_anysource": _recv_anysource,
    "all_gather_single_coalesced": _gather_coalesced,
    "reduce_scatter_single_coalesced": _scatter_coalesced,
}
"""What issues each method's operation by its operator."""


def issue_by_operator(group: Any, name: str, *args: Any) -> TorchWork | None:
    """Issues an operation by its operator, if a mode of this thread or a hook of the group is to see it.

    Reductions that have a factor are shown where the operators' kernels are torch's: ours do not see it.

    Args:
        group: the group.
        name: name of its method.
        *args: the method's arguments in torch's form; last an option record, ``None`` for it, or a tag.

    Returns:
        The Work; ``None`` with nothing done where nobody is to see it, or this is the operator's own call.
    """
    if not (group.hooked or _depth()) or getattr(_LOCAL, "inside", False):
        return None
    options = args[-1]
    if options is None:
        args = args[:-1]
    elif type(options) is not int and not _plain(options, group.shows_factors):
        return carry_out(group, name, *args) if group.hooked else None
    _LOCAL.inside, _LOCAL.work = True, None
    try:
        returned: TorchWork | None = _METHODS[name](group, *args)
        noted: TorchWork | None = _LOCAL.work
        done = noted or returned
    except (TypeError, NotImplementedError) as error:
        if not group.hooked or not _of_torch(error):
            raise
        done = None
    finally:
        _LOCAL.inside, _LOCAL.work = False, None
    return carry_out(group, name, *args) if done is None and group.hooked else done


def issue_in_other_form(
    group: Any, names: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]
) -> TorchWork | None:
    """Issues an operation that is not called with an option record, if a hook of the group is to see it.

    torch's overload brings the arguments into the form with a record and calls the group's method again.

    Args:
        group: the group.
        names: names of its method, of which torch's class has one.
        args: the arguments.
        named: the same by name.

    Returns:
        The Work; ``None`` with nothing done where no hook is to see it.
    """
    if not group.hooked or getattr(_LOCAL, "inside", False):
        return None
    method = getattr(c10d.ProcessGroup, next(name for name in names if hasattr(c10d.ProcessGroup, name)))
    _LOCAL.kept = None
    try:
        returned: TorchWork = method(group, *args, **named)
        kept: TorchWork | None = _LOCAL.kept
        return kept or returned
    except TypeError as error:
        if not _of_torch(error):
            raise
    finally:
        del _LOCAL.kept
    work: TorchWork = carry_out(group, names[0], *args, **named)
    return work


def _of_torch(error: TypeError | NotImplementedError) -> bool:
    """Returns whether torch has no overload, or no kernel, for arguments; ours may take them, or say why."""
    return "incompatible function arguments" in str(error) or "c10d::" in str(error)


def carry_out(group: Any, name: str, *args: Any, **named: Any) -> Any:
    """Calls a method for an operator's kernel, or for torch's ``Backend``, and returns what it returns.

    All operations of a group with hooks come here. What comes back through C++ is a holder, which lacks
    ``_source_rank()``. So the Work itself is kept for those who called the operator.
    """
    outer, began = getattr(_LOCAL, "inside", False), time.monotonic_ns()
    _LOCAL.inside = True
    try:
        result = getattr(group, name)(*args, **named)
    finally:
        _LOCAL.inside = outer
    if group.hooked and name in _METHODS:
        group._note_issued(name, began, result)
    if outer and isinstance(result, TorchWork):
        _LOCAL.work = result
        if hasattr(_LOCAL, "kept"):
            _LOCAL.kept = result
    return result


def _plain(options: Any, factors: bool) -> bool:
    """Returns whether an option record is one of torch's, and its reduction one that an operator takes."""
    op = getattr(options, "reduceOp", None)
    taken = op is None or factors or hash(op) in REDUCE_OP_CODES
    return type(options).__module__.startswith("torch.") and taken
