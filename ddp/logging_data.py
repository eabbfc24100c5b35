"""Facts about a wrapped module, under the names that torch gives them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from collectives import ProcessGroup
from collectives.ddp.module.sync_batch_norm import SyncBatchNorm
from collectives.ddp.reducer.reducer import Reducer
from collectives.ddp.reducer.timing import IterationClock, Mark

__all__ = ["construction_in_words", "logging_data"]


_SWITCHES = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")

_OPTIONS = (
    "init_sync", "forward_sync_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph",
    "skip_all_reduce_unused_params", "batched_grad_copy", "mixed_precision", "device_ids", "output_device",
)  # fmt: skip


class _Model(Protocol):
    """What is asked of a DistributedDataParallel, besides the options."""

    module: nn.Module
    process_group: ProcessGroup
    reducer: Reducer
    device_ids: Any
    output_device: Any
    is_multi_device_module: bool
    _comm_hooks: list[tuple[Any, object]]


def construction_in_words(ddp: _Model) -> str:
    """Returns the line that is logged when a module was wrapped: what it consists of, and every option."""
    reducer = ddp.reducer
    parameters = reducer.gradients.parameters
    sizes = reducer.initial_bucket_bytes
    frozen = sum(not parameter.requires_grad for parameter in ddp.module.parameters())
    parts = f"{len(parameters)} parameters of {_dtypes(parameters)}, {_nbytes(parameters)} bytes"
    return (
        f"DistributedDataParallel({type(ddp.module).__name__}) of {parts}, in {len(sizes)} buckets of "
        f"{sizes} bytes on {_joined(dict.fromkeys(p.device for p in parameters))}, with caps of "
        f"{list(reducer.gradients.limits)} bytes; {sum(1 for _ in ddp.module.buffers())} buffers, {frozen} "
        f"parameters frozen; {_joined(f'{option}={getattr(ddp, option)}' for option in _OPTIONS)}"
    )


def logging_data(ddp: _Model) -> dict[str, Any]:
    """Returns the facts that are known; sizes are in bytes, lists are joined by commas, as in torch.

    Data types have the names that torch gives them here: ``float``, ``double``, ``c10::Half``, ...

    Times are in nanoseconds, of the last iteration that was sampled and, as ``avg_``, of all of them: each of
    the first ten and then one of a hundred. They are absent, and their averages zero, before the first one.

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
        "dtypes": _dtypes(parameters, _CPP_NAMES),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": _nbytes(parameters),
        "unused_parameter_size": reducer.unused.unused_bytes,
        "bucket_cap_bytes": reducer.gradients.limits[-1],
        "bucket_sizes": _joined(reducer.initial_bucket_bytes),
        "has_rebuilt_buckets": int(rebuilt),
        "num_buckets_reduced": len(buckets),
        **{name: int(getattr(ddp, name)) for name in _SWITCHES},
        "can_set_static_graph": reducer.passes > 0 and reducer.unused.is_constant,
        "comm_hook": _joined(getattr(hook, "__qualname__", repr(hook)) for hook, _ in ddp._comm_hooks),
        "prev_iteration_grad_ready_order_indices": _joined(reducer.ready_order),
        **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
        **_times(reducer.clock),
        **group._settings(),
    }
    if rebuilt:
        data["rebuilt_bucket_sizes"] = _joined(b.nbytes for b in buckets)
        data["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, b.indices)) for b in buckets)
    return data


_ENVIRONMENT = (
    "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG", "GLOO_DEVICE_TRANSPORT",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT",
)  # fmt: skip
"""Environment variables that are shown as they are."""

_PLAIN: Mapping[str, str] = {}

_CPP_NAMES = {
    "float16": "c10::Half", "bfloat16": "c10::BFloat16", "float32": "float", "float64": "double",
    "complex64": "c10::complex<float>", "complex128": "c10::complex<double>",
}  # fmt: skip
"""Names of data types in C++."""

_FIELDS = {
    "forward": "forward_compute_time",
    "backward": "backward_compute_time",
    "communication": "backward_comm_time",
    "overlap": "backward_compute_comm_overlap_time",
    "exposed": "backward_exposed_comm_time",
}
"""Names of the times; torch has all but the last."""

_MOMENTS = {
    Mark.FORWARD_BEGIN: "forward_compute_time_start",
    Mark.BACKWARD_BEGIN: "backward_compute_time_start",
    Mark.BACKWARD_END: "backward_compute_time_end",
    Mark.COMMUNICATION_BEGIN: "backward_comm_time_start",
    Mark.COMMUNICATION_END: "backward_comm_time_end",
}


def _times(clock: IterationClock) -> dict[str, int]:
    """Returns times and moments of the last sampled iteration, and the averages over all, in nanoseconds."""
    averages = clock.averages()
    data = {f"avg_{name}": getattr(averages, field) for field, name in _FIELDS.items()}
    latest = clock.latest()
    if latest is not None:
        times, at = latest
        data |= {name: getattr(times, field) for field, name in _FIELDS.items()}
        data |= {name: at[mark] for mark, name in _MOMENTS.items()}
    return data


def _dtypes(parameters: Iterable[torch.Tensor], other_names: Mapping[str, str] = _PLAIN) -> str:
    names = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
    return _joined(sorted(other_names.get(name, name) for name in names))


def _nbytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))
