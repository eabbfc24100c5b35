"""Shows operations of our groups to the dispatch modes of torch, as those of its own backends are.

torch's C++ groups issue each operation by an operator (``c10d::allreduce_``), which ``TorchDispatchMode``
objects see: ``CommDebugMode``, for one, counts them. A group in Python is called directly, past them. While
such a mode is active, the methods of our groups therefore call those of the C++ class that they override,
which call the operators; their kernels come back to the group, with the modes set aside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d
from torch.utils import _python_dispatch as dispatch

from collectives.core.arguments.option_records import REDUCE_OP_CODES
from collectives.core.operations import OPERATIONS
from collectives.torch_bridge.work import TorchWork

_LOCAL = threading.local()
_depth = torch._C._len_torch_dispatch_stack
_ALWAYS = not hasattr(dispatch, "_is_in_torch_dispatch_mode")


def possible() -> bool:
    """Returns whether some thread may have a mode active; costs next to nothing."""
    return _ALWAYS or dispatch._is_in_torch_dispatch_mode


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
    """Shows sums only: Python cannot make the operator's argument for another reduction."""
    options = c10d.ReduceScatterOptions() if options is None else options
    if options.reduceOp.op != c10d.ReduceOp.SUM:
        return None
    operator = torch.ops.c10d.reduce_scatter_tensor_coalesced_
    total = torch.classes.c10d.ReduceOp()
    return _work(operator(outputs, inputs, group.boxed(), total, options.asyncOp, _milliseconds(options)))


def _work(result: Any) -> Any:
    return torch_dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


_METHODS: dict[str, Callable[..., Any]] = {
    **{one.methods[0]: _base(*one.methods) for one in OPERATIONS if one.methods},
    **{name: _base(name) for name in ("allgather_coalesced", "send", "recv")},
    # not by the base, whose C++ code looks for an override under a second name, too, and finds it
    "all_to_all_single": _all_to_all,
    "recv_anysource": _recv_anysource,
    "all_gather_single_coalesced": _gather_coalesced,
    "reduce_scatter_single_coalesced": _scatter_coalesced,
}
"""What issues each method's operation by its operator."""


def issue_by_operator(group: Any, name: str, *args: Any) -> TorchWork | None:
    """Issues an operation by its operator, if a mode of this thread is to see it.

    Reductions that have a factor are not shown: the operators do not carry it.

    Args:
        group: the group.
        name: name of its method.
        *args: the method's arguments in torch's form; last an option record, ``None`` for it, or a tag.

    Returns:
        The Work; ``None`` with nothing done where no mode is active, or this is the operator's own call.
    """
    if not _depth() or getattr(_LOCAL, "inside", False):
        return None
    options = args[-1]
    if options is None:
        args = args[:-1]
    elif type(options) is not int and not _plain(options):
        return None
    _LOCAL.inside, _LOCAL.work = True, None
    try:
        returned: TorchWork | None = _METHODS[name](group, *args)
        noted: TorchWork | None = _LOCAL.work
        return noted or returned
    finally:
        _LOCAL.inside, _LOCAL.work = False, None


def keep_work(work: Any) -> Any:
    """Keeps the Work that was made for :func:`issue_by_operator`, and returns it.

    What comes back through C++ is a holder, which lacks ``_source_rank()``.

    Args:
        work: what a kernel, or a method of the group's ``Backend``, returns to C++.
    """
    if isinstance(work, TorchWork) and getattr(_LOCAL, "inside", False):
        _LOCAL.work = work
    return work


def _plain(options: Any) -> bool:
    """Returns whether an option record is one of torch's, and its reduction one that an operator takes."""
    op = getattr(options, "reduceOp", None)
    return type(options).__module__.startswith("torch.") and (op is None or hash(op) in REDUCE_OP_CODES)
