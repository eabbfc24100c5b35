"""What a wrapped module tells of itself: facts under the names that torch gives them, and its times.

The times of sampled iterations are those of forward, backward and communication, and how much of that was
overlapped. Section 3.2.3 of PyTorch Distributed (VLDB 2020): communication overlaps with the backward
computation until the last gradient is ready; the rest of it is exposed.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from collectives import ProcessGroup
from collectives.ddp.module.sync_batch_norm import SyncBatchNorm
from collectives.logs import Log

_log = Log(__name__)

ALWAYS_SAMPLED = 10
"""Iterations at the beginning that are all timed."""

SAMPLE_RATE = 100
"""After those, one of so many is timed, where the user names no number."""

STATISTICS_LEVEL = 5
"""Level of the logger ``collectives`` for the times of single iterations; the debug level DETAIL with
``TORCH_CPP_LOG_LEVEL=INFO`` lets it through."""

_EPOCH_NS = time.time_ns() - time.perf_counter_ns()


class Mark(enum.Enum):
    """Moments of an iteration."""

    FORWARD_BEGIN = enum.auto()
    FORWARD_END = enum.auto()
    BACKWARD_BEGIN = enum.auto()
    COMMUNICATION_BEGIN = enum.auto()
    BACKWARD_END = enum.auto()
    """The last gradient is there."""
    COMMUNICATION_END = enum.auto()
    """All averages are there."""


class IterationClock:
    """Times the iterations of one module: a clock reading for each mark, and none where not sampled.

    On CUDA devices the marks are events on the current stream, whose times are read when they are asked for,
    or when the next iteration is sampled.

    Times are those of forward, of backward from the first gradient that comes to the last, of communication
    from the launch of the first bucket to the last average, of its part that overlapped with backward, and of
    the rest, which the iteration waited for and so is exposed; in nanoseconds.

    Attributes:
        sample_rate: after the first iterations, one of so many is timed.
        samples: number of iterations that were timed to their end.

    Args:
        device: device of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self.sample_rate = SAMPLE_RATE
        self.samples = 0
        self._cuda = device.type == "cuda"
        self._device = device
        self._sampling = False
        self._host_ns: dict[Mark, int] = {}
        self._events: dict[Mark, torch.cuda.Event] = {}
        self._finished: tuple[dict[Mark, int], dict[Mark, torch.cuda.Event]] | None = None
        self._latest: tuple[dict[str, int], dict[Mark, int]] | None = None
        self._sums = dict.fromkeys(_FIELDS, 0)

    def begin(self, iteration: int, is_captured: bool = False) -> None:
        """Marks the beginning of forward.

        Args:
            iteration: number of iterations that were averaged before this one.
            is_captured: whether it becomes part of a CUDA graph, whose marks have no times.
        """
        self._sampling = not is_captured and (iteration < ALWAYS_SAMPLED or iteration % self.sample_rate == 0)
        if self._sampling:
            self._host_ns, self._events = {}, {}
            self.mark(Mark.FORWARD_BEGIN)

    def mark(self, what: Mark) -> None:
        """Notes a moment, once in each sampled iteration; forward's are those of the last one."""
        if not self._sampling or (
            what in self._host_ns and what not in {Mark.FORWARD_BEGIN, Mark.FORWARD_END}
        ):
            return
        self._host_ns[what] = time.perf_counter_ns()
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events[what] = event

    def end(self) -> bool:
        """Marks the end of communication; returns whether the iteration was timed as a whole."""
        if not self._sampling:
            return False
        self.mark(Mark.COMMUNICATION_END)
        self._sampling = False
        if len(self._host_ns) < len(Mark):  # forward ran without gradients, or a pass came without forward
            return False
        self._read()
        self._finished = self._host_ns, self._events
        self.samples += 1
        return True

    def _read(self) -> None:
        """Takes the times of the last sampled iteration; blocks until the device has passed its marks."""
        finished, self._finished = self._finished, None
        if finished is None:
            return
        host_ns, events = finished
        if events:
            events[Mark.COMMUNICATION_END].synchronize()
            first = events[Mark.FORWARD_BEGIN]
            at = {mark: int(first.elapsed_time(event) * 1e6) for mark, event in events.items()}
        else:
            at = host_ns
        begin, end = at[Mark.COMMUNICATION_BEGIN], at[Mark.COMMUNICATION_END]
        computed = at[Mark.BACKWARD_END]
        times = {
            "forward": at[Mark.FORWARD_END] - at[Mark.FORWARD_BEGIN],
            "backward": computed - at[Mark.BACKWARD_BEGIN],
            "communication": end - begin,
            "overlap": max(0, min(computed, end) - begin),
            "exposed": end - max(begin, min(computed, end)),
        }
        self._latest = times, {mark: ns + _EPOCH_NS for mark, ns in host_ns.items()}
        for name, value in times.items():
            self._sums[name] += value

    def log(self, group: ProcessGroup, where: str) -> None:
        """Logs the times of the last sampled iteration.

        Args:
            group: the model's group.
            where: model and iteration.
        """
        if _log.isEnabledFor(STATISTICS_LEVEL) and (latest := self.latest()) is not None:
            times = ", ".join(f"{name} {value / 1e6:.3f} ms" for name, value in latest[0].items())
            _log.of(group).log(STATISTICS_LEVEL, "%s: %s", where, times)

    def latest(self) -> tuple[dict[str, int], dict[Mark, int]] | None:
        """Returns the times of the last sampled iteration, and its marks in nanoseconds since 1970.

        ``None`` where there was none. On a CUDA device, blocks until it has passed the marks.
        """
        self._read()
        return self._latest

    def averages(self) -> dict[str, int]:
        """Returns the averages over all sampled iterations; zeros where there was none."""
        self._read()
        return {name: value // max(1, self.samples) for name, value in self._sums.items()}


# ---- facts ----------------------------------------------------------------------------------------------

_SWITCHES = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")

_OPTIONS = (
    "init_sync", "forward_sync_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph",
    "skip_all_reduce_unused_params", "batched_grad_copy", "mixed_precision", "device_ids", "output_device",
)  # fmt: skip


def construction_in_words(ddp: Any) -> str:
    """Returns the line that is logged when a module was wrapped: what it consists of, and every option."""
    reducer = ddp.reducer
    parameters = reducer.gradients.parameters
    sizes = reducer.initial_bucket_bytes
    frozen = sum(not parameter.requires_grad for parameter in ddp.module.parameters())
    parts = (
        f"{len(parameters)} parameters of {_joined(sorted(_dtypes(parameters)))}, {_nbytes(parameters)} bytes"
    )
    return (
        f"DistributedDataParallel({type(ddp.module).__name__}) of {parts}, in {len(sizes)} buckets of "
        f"{sizes} bytes on {_joined(dict.fromkeys(p.device for p in parameters))}, with caps of "
        f"{ddp._bucket_limits} bytes; {sum(1 for _ in ddp.module.buffers())} buffers, {frozen} "
        f"parameters frozen; {_joined(f'{option}={getattr(ddp, option)}' for option in _OPTIONS)}"
    )


def logging_data(ddp: Any) -> dict[str, Any]:
    """Returns the facts that are known; sizes are in bytes, lists are joined by commas, as in torch.

    Data types have the names that torch gives them here: ``float``, ``double``, ``c10::Half``, ...

    Times are in nanoseconds, of the last iteration that was sampled and, as ``avg_``, of all of them: each of
    the first ten and then one of a hundred. They are absent, and their averages zero, before the first one.

    Among them ``can_set_static_graph``: whether all synchronised passes so far, at least one, used the
    parameters alike.

    Args:
        ddp: the DistributedDataParallel.
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
        "dtypes": _joined(sorted(_CPP_NAMES.get(name, name) for name in _dtypes(parameters))),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": _nbytes(parameters),
        "unused_parameter_size": reducer.unused.unused_bytes,
        "bucket_cap_bytes": ddp._bucket_limits[-1],
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
    data = {f"avg_{name}": averages[field] for field, name in _FIELDS.items()}
    latest = clock.latest()
    if latest is not None:
        times, at = latest
        data |= {name: times[field] for field, name in _FIELDS.items()}
        data |= {name: at[mark] for mark, name in _MOMENTS.items()}
    return data


def _dtypes(parameters: Iterable[torch.Tensor]) -> set[str]:
    return {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}


def _nbytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _joined(values: Any) -> str:
    return ", ".join(map(str, values))
