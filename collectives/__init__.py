"""A self-contained collective communication runtime for PyTorch tensors."""

from __future__ import annotations

from pkgutil import extend_path

# Python started inside a checkout finds this folder before the installed package; what lies beside it in
# a checkout (store, backends, ddp, bench, the compiled core) are then found where they are installed.
__path__ = extend_path(__path__, __name__)

from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    QueueEmptyError,
    UnsupportedOperationError,
)
from collectives.process_group import ProcessGroup
from collectives.types import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    default_pg_timeout,
)
from collectives.work import Work

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "GatherOptions",
    "GroupAbortedError",
    "PeerLostError",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "UnsupportedOperationError",
    "Work",
    "default_pg_timeout",
]
