"""The ``torch.distributed.Backend`` of a group, for those versions of torch that let Python code make one.

torch's own kernels of the ``c10d::`` operators, and whatever else looks up the backend of a group in C++
(recorders, hooks), then find one that communicates, and :mod:`collectives.torch_bridge.operators` is not
needed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch._C import _distributed_c10d as c10d

from collectives.core.operations import OPERATIONS
from collectives.dynamo import leave_uncompiled
from collectives.torch_bridge.dispatch_modes import keep_work
from collectives.torch_bridge.group import TorchGroup

_METHODS = {
    name: name
    for name in (
        *(name for operation in OPERATIONS for name in operation.methods[:1]),
        "_enable_collectives_timing", "_get_sequence_number_for_group", "_register_on_completion_hook",
        "_set_default_timeout", "_set_sequence_number_for_group", "_wait_for_pending_works", "abort",
        "all_gather_single_coalesced", "allgather_coalesced", "allocate_tensor", "end_coalescing",
        "gather_single", "getBackendName", "get_reconfigure_handle", "name", "new_window", "reconfigure",
        "recv", "recv_anysource", "reduce_scatter_single_coalesced", "send", "set_timeout", "shrink",
        "shutdown", "start_coalescing", "supports_tensor_alloc",
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


@functools.cache
@leave_uncompiled
def _backend_class() -> Callable[[TorchGroup], Any]:
    """Returns the class; it cannot be defined where torch has no constructor for its base."""

    class TorchBackend(c10d.Backend):
        """Hands every call on to the group that it belongs to, which keeps it alive."""

        supports_splitting = False
        supports_shrinking = False
        supports_reconfigure = False
        supports_window = False
        _supports_time_estimate = False

        def __init__(self, group: TorchGroup) -> None:
            super().__init__(group.rank(), group.size())
            self._group = weakref.ref(group)

        @property
        def supports_coalescing(self) -> bool:
            return _alive(self._group).supports_coalescing

        @property
        def options(self) -> Any:
            return _alive(self._group).options

    for name, of_group in _METHODS.items():
        setattr(TorchBackend, name, _forward(of_group))
    return TorchBackend


@leave_uncompiled
def _forward(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return keep_work(getattr(_alive(self._group), name)(*args, **kwargs))

    call.__name__ = name
    return call


def _alive(reference: weakref.ref[TorchGroup]) -> TorchGroup:
    group = reference()
    if group is None:
        raise RuntimeError("the process group of this backend no longer exists")
    return group
