"""A self-contained collective communication runtime for PyTorch tensors.

Inside: the names that users import, each from the module that defines it; what they call is in ``api``. Not
here: backends and training, which are packages of their own (:mod:`collectives.backends`, ``ddp``).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING

# Python started inside a checkout finds this folder before an installed package; the compiled core is then
# found where it is installed.
__path__ = extend_path(__path__, __name__)

from collectives.api.coalescing import (
    _coalescing_manager,
    _CoalescingManager,
)
from collectives.api.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    scatter,
)
from collectives.api.debug import (
    DebugLevel,
    breakpoint,  # noqa: A004 - the name of torch.distributed
    dump_flight_record,
    flight_record,
    get_debug_level,
    prometheus_text,
    set_debug_level,
    set_debug_level_from_env,
)
from collectives.api.deprecated import (
    _all_gather_base,
    _make_nccl_premul_sum,
    _reduce_scatter_base,
    all_gather_coalesced,
    all_reduce_coalesced,
    reduce_op,
)
from collectives.api.groups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    DeviceMesh,
    init_device_mesh,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from collectives.api.init_and_destroy import destroy_process_group, init_process_group
from collectives.api.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from collectives.api.p2p import (
    P2POp,
    batch_isend_irecv,
    irecv,
    isend,
    recv,
    send,
)
from collectives.api.reductions import (
    all_reduce,
    all_reduce_into_tensor,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from collectives.api.world_state import (
    GroupMember,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_initialized,
    is_torchelastic_launched,
)
from collectives.core.process_group import (
    ProcessGroup,
)
from collectives.core.profiling import record_comm
from collectives.core.types import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    GroupName,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    default_pg_timeout,
    make_premul_sum,
)
from collectives.core.work import (
    Work,
    WorkResult,
)
from collectives.dynamo import leave_names_uncompiled
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
from collectives.registry.names import (
    Backend,
    BackendConfig,
    DistributedBackendOptions,
    get_default_backend_for_device,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
    supports_complex,
)
from collectives.store import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    register_rendezvous_handler,
    rendezvous,
)
from collectives.torch_bridge import register as _register_with_torch

if TYPE_CHECKING:
    from collectives.backends.gloo import ProcessGroupGloo
    from collectives.backends.mpi import ProcessGroupMPI
    from collectives.backends.nccl import ProcessGroupNCCL
    from collectives.ranks.launching import launch
    from collectives.ranks.processes import RankFailedError
    from collectives.torch_bridge.shared_world import register_world_with_torch
else:
    _LOADED_ON_DEMAND = {
        "ProcessGroupGloo": "collectives.backends.gloo",
        "ProcessGroupMPI": "collectives.backends.mpi",
        "ProcessGroupNCCL": "collectives.backends.nccl",
        "RankFailedError": "collectives.ranks.processes",
        "launch": "collectives.ranks.launching",
        "register_world_with_torch": "collectives.torch_bridge.shared_world",
    }

    def __getattr__(name: str) -> object:
        """Loads what few programs need when it is asked for: of the backends' classes, one at most."""
        if name in _LOADED_ON_DEMAND:
            return getattr(import_module(_LOADED_ON_DEMAND[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistributedBackendOptions",
    "FileStore",
    "GatherOptions",
    "GroupAbortedError",
    "GroupMember",
    "GroupName",
    "HashStore",
    "P2POp",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupMPI",
    "ProcessGroupNCCL",
    "QueueEmptyError",
    "RankFailedError",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "TCPStore",
    "UnsupportedOperationError",
    "Work",
    "WorkResult",
    "_CoalescingManager",
    "_all_gather_base",
    "_coalescing_manager",
    "_make_nccl_premul_sum",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "dump_flight_record",
    "flight_record",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "launch",
    "make_premul_sum",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "prometheus_text",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "register_world_with_torch",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "split_group",
    "supports_complex",
]

leave_names_uncompiled(globals())
_register_with_torch()
