"""What C++ finds of our groups: a ``Backend`` that communicates, or kernels of the ``c10d::`` operators.

Since the middle of 2026 torch lets Python code make a ``torch.distributed.Backend``. torch's own kernels,
and whatever else looks up the backend of a group in C++ (recorders, hooks), then find one that hands every
call on to the group.

Before, torch's own kernels find none. An operator has kernels by the kind of its tensors, the same for all
groups of a process. Ours stand before those, at the dispatch key ``BackendSelect``, and hand the groups of
other backends on. They are there while a group of ours is: the way through Python costs the other groups some
microseconds for every operation.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import library as operators
from torch._C import _distributed_c10d as c10d

from collectives.core import types as ours
from collectives.core.operations import BARRIER, METHODS
from collectives.dynamo import leave_uncompiled
from collectives.errors import UnsupportedOperationError
from collectives.torch_bridge import dispatch_modes
from collectives.torch_bridge.group import TorchGroup
from collectives.torch_bridge.work import TorchWork, hold_for_cpp

_BEFORE = torch._C.DispatchKey.BackendSelect
_META = torch._C.DispatchKey.Meta
_libraries: list[operators.Library] = []
_users = 0
_lock = threading.RLock()  # a group may be collected, and so released, while another is made


def _limit(milliseconds: int) -> timedelta | None:
    return timedelta(milliseconds=milliseconds) if milliseconds > 0 else None


def _op(script: Any) -> ours.ReduceOp:
    """Returns the reduction of a kernel's argument; it tells its kind only."""
    kind = c10d.ReduceOp.RedOpType(script.op())
    if kind == c10d.ReduceOp.PREMUL_SUM:
        raise UnsupportedOperationError(
            "PREMUL_SUM cannot be called through the torch.ops.c10d operators, which hide its factor; "
            "use the functions of torch.distributed"
        )
    return ours.ReduceOp.of(kind)


_OPERATORS = {
    **{f"{names[-1]}_": names[0] for names in METHODS if names != BARRIER.methods},
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
}
"""The operators, and the methods of a group that carry them out."""

_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "timeout": ("timeout", _limit),
    "async_op": ("asyncOp", bool),
    "reduce_op": ("reduceOp", _op),
    "root_rank": ("rootRank", int),
    "root_tensor": ("rootTensor", int),
    "device_ids": ("device_ids", list),
}
"""Arguments of operators that are fields of an option record."""


# ---- the kernels -------------------------------------------------------------------------------------------


class _Options(ours.Options):
    """The fields of whatever record an operator's method takes."""


def _carry_out(group: TorchGroup, name: str, method: str, arguments: dict[str, Any]) -> TorchWork | None:
    """Carries out an operator on one of our groups.

    Args:
        group: the group.
        name: the operator.
        method: the method of the group.
        arguments: the operator's other arguments, by name.
    """
    if arguments.pop("sparse_indices", None) is not None:
        raise UnsupportedOperationError(
            f"[rank {group.rank()}] all_reduce on {group!r}: sparse_indices are not taken; give the sparse "
            "tensor itself"
        )
    if name in {"barrier", "monitored_barrier_"}:
        del arguments["tensor"]
    if name == "monitored_barrier_":
        group.monitored_barrier(_limit(arguments["timeout"]), arguments["wait_all_ranks"])
        return None
    options = _Options()
    fields = [field for field in _FIELDS if field in arguments]
    for field in fields:
        to, convert = _FIELDS[field]
        setattr(options, to, convert(arguments.pop(field)))
    work: TorchWork = dispatch_modes.carry_out(
        group, method, *arguments.values(), *([options] if fields else [])
    )
    return work


def _group(where: Any) -> Any:
    """Returns the group of an operator's argument: the object, or its name."""
    if isinstance(where, str):
        return c10d._resolve_process_group(where)  # type: ignore[arg-type]
    return torch_dist.ProcessGroup.unbox(where)


@leave_uncompiled
def _kernel(operator: Any, place: int, run: Callable[[Any, list[Any]], Any]) -> Callable[..., Any]:
    """Returns the kernel of an operator for all groups.

    Args:
        operator: the operator.
        place: where among its arguments the group is.
        run: carries it out for one of our groups, given that and the other arguments.
    """
    # the dispatcher leaves out trailing arguments that have their default values
    arguments_of = operator._schema.arguments
    defaults = [argument.default_value for argument in arguments_of]

    def kernel(keys: Any, *given: Any) -> Any:
        key = keys.remove(_BEFORE).highestPriorityTypeId()
        if key != _META:
            arguments = [*given, *defaults[len(given) :]]
            group = _group(arguments.pop(place))
            if isinstance(group, TorchGroup):
                return run(group, arguments)
        # with the GIL released, unlike a call of the kernel that get_kernel() of torch returns: threads of
        # other backends take the GIL to let go of tensors, while they hold locks that the kernel wants
        return operator._op_dk(key, *given)

    return kernel


@leave_uncompiled
def _runner(operator: Any, name: str, method: str) -> Callable[[Any, list[Any]], Any]:
    """Returns what carries an operator out on one of our groups, with the result in the operator's form."""
    names = [argument.name for argument in operator._schema.arguments if argument.name != "process_group"]
    returns = len(operator._schema.returns)

    def runner(group: TorchGroup, arguments: list[Any]) -> Any:
        work = _carry_out(group, name, method, dict(zip(names, arguments, strict=True)))
        if work is None:
            return None
        boxed = work.boxed()
        return boxed if returns == 1 else (arguments[0], boxed)

    return runner


@leave_uncompiled
def _batch_p2p(group: TorchGroup, arguments: list[Any]) -> list[torch.Tensor]:
    """A batch of sends and receives, for which torch's kernel would need a C++ backend."""
    outputs = []
    with group.batch() as whole:
        for operation, peer, tag, tensor in zip(*arguments, strict=True):
            if operation == "isend":
                group.send([tensor], peer, tag)
                outputs.append(torch.empty(0, dtype=tensor.dtype))
            elif operation == "irecv":
                group.recv([tensor], peer, tag)
                outputs.append(tensor)
            else:
                raise ValueError(f"operations of a batch are isend and irecv, but one is {operation!r}")
    work = hold_for_cpp(whole[0])
    for output in outputs:
        c10d._register_work(output, work)
    return outputs


def acquire() -> None:
    """Puts the kernels in place for one more group."""
    global _users
    with _lock:
        if not _libraries:
            _install()
        _users += 1


def release() -> None:
    """Puts torch's own kernels back in place with the last group."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            for library in _libraries:
                library._destroy()  # type: ignore[no-untyped-call]
            _libraries.clear()


def _install() -> None:
    library: Any = operators.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, method in _OPERATORS.items():
        operator = getattr(torch.ops.c10d, name).default
        place = [argument.name for argument in operator._schema.arguments].index("process_group")
        kernel = _kernel(operator, place, _runner(operator, name, method))
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    functional: Any = operators.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    if hasattr(torch.ops._c10d_functional, "batch_p2p_ops"):
        kernel = _kernel(torch.ops._c10d_functional.batch_p2p_ops.default, 4, _batch_p2p)
        functional.impl("batch_p2p_ops", kernel, "BackendSelect", with_keyset=True)
    _libraries.extend((library, functional))


# ---- the backend -------------------------------------------------------------------------------------------

_METHODS = {
    name: name
    for name in (
        *_OPERATORS.values(), "_enable_collectives_timing", "_get_sequence_number_for_group",
        "_set_default_timeout", "_set_sequence_number_for_group",
        "_wait_for_pending_works", "abort", "allocate_tensor", "end_coalescing", "gather_single",
        "getBackendName", "get_error", "get_reconfigure_handle", "name", "new_window", "rank", "reconfigure",
        "registerAbortHook", "set_timeout", "shrink", "shutdown", "size", "start_coalescing",
        "supports_tensor_alloc", "unregisterAbortHook",
    )
} | {"monitored_barrier": "monitoredBarrier", "allreduce_sparse": "allreduce"}  # fmt: skip
"""Methods that C++ looks for in a backend, and those of the group that carry them out."""


@functools.cache
def can_be_made() -> bool:
    """Returns whether torch lets Python code subclass ``Backend``, which it does since the middle of 2026."""

    class Probe(c10d.Backend):
        pass

    try:
        Probe(0, 1)
    except TypeError:
        return False
    return True


def attach(group: TorchGroup) -> None:
    """Makes the backend of a group and registers it there, for all devices that the group serves."""
    backend = _backend_class()(group)
    kind = c10d.ProcessGroup.BackendType.CUSTOM
    base: Any = c10d.ProcessGroup
    for device in group._device_types:
        base._register_backend(group, device, kind, backend)
    base._set_default_backend(group, kind)
    group.shows_factors = True


@functools.cache
@leave_uncompiled
def _backend_class() -> Callable[[TorchGroup], Any]:
    """Returns the class; it cannot be defined where torch has no constructor for its base."""

    class TorchBackend(c10d.Backend):
        """Hands every call on to the group that it belongs to, which keeps it alive."""

        supports_splitting = False
        supports_shrinking = False
        supports_window = False
        _supports_time_estimate = False

        def __init__(self, group: TorchGroup) -> None:
            super().__init__(group.rank(), group.size())
            self._group = weakref.ref(group)

        @property
        def supports_coalescing(self) -> bool:
            return _alive(self._group).supports_coalescing

        @property
        def supports_reconfigure(self) -> bool:
            return _alive(self._group).supports_reconfigure

        @property
        def options(self) -> Any:
            return _alive(self._group).options

    for name, of_group in _METHODS.items():
        setattr(TorchBackend, name, _forward(of_group))
    return TorchBackend


@leave_uncompiled
def _forward(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch_modes.carry_out(_alive(self._group), name, *args, **kwargs)

    call.__name__ = name
    return call


def _alive(reference: weakref.ref[TorchGroup]) -> TorchGroup:
    group = reference()
    if group is None:
        raise RuntimeError("the process group of this backend no longer exists")
    return group
