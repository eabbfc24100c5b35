"""Facts about a wrapped module, under the names that torch gives them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from collectives.ddp.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from collectives.ddp.distributed import DistributedDataParallel

__all__ = ["logging_data"]


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Returns the facts that are known; sizes are in bytes, lists are joined by commas as in torch.

    Among them ``can_set_static_graph``: whether all synchronised passes so far, at least one, used the
    parameters alike.

    Args:
        ddp: the module.
    """
    reducer = ddp.reducer
    group = ddp.process_group
    parameters, buckets = reducer.gradients.parameters, reducer.gradients.buckets
    rebuilt = reducer.has_rebuilt_buckets
    data: dict[str, Any] = {
        "world_size": group.size(),
        "rank": group.rank(),
        "backend_name": group.name(),
        "module_name": type(ddp.module).__name__,
        "iteration": reducer.passes,
        "device_ids": _joined(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(
            any(isinstance(m, (SyncBatchNorm, nn.SyncBatchNorm)) for m in ddp.module.modules())
        ),
        "dtypes": _joined(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "unused_parameter_size": reducer.unused_bytes,
        "bucket_cap_bytes": reducer.gradients.limits[-1],
        "bucket_sizes": _joined(reducer.initial_bucket_bytes),
        "has_rebuilt_buckets": int(rebuilt),
        "num_buckets_reduced": len(buckets),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": reducer.passes > 0 and reducer.same_usage,
        "comm_hook": _joined(getattr(hook, "__qualname__", repr(hook)) for hook, _ in ddp._comm_hooks),
        "prev_iteration_grad_ready_order_indices": _joined(reducer.ready_order),
        "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
        "master_port": os.environ.get("MASTER_PORT", "N/A"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "N/A"),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
    }
    if rebuilt:
        data["rebuilt_bucket_sizes"] = _joined(b.nbytes for b in buckets)
        data["rebuilt_per_bucket_param_indices"] = "; ".join(_joined(b.indices) for b in buckets)
    return data


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))
