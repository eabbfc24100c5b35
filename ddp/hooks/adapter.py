"""What hooks need to serve this package's DistributedDataParallel and torch's alike.

torch's DistributedDataParallel over one of this package's backends in ``torch.distributed`` hands a hook a
``torch.distributed.GradBucket``, whose methods are those of ours, and takes errors in another form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future

from collectives import ProcessGroup
from collectives.core.work import chain
from collectives.ddp.default_group import resolve_group
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket

__all__ = [
    "after",
    "average_exactly",
    "comm_hook",
    "completed",
    "dense_buffer",
    "group_of",
    "is_torch_bucket",
    "pending",
    "widths",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_T = TypeVar("_T")
_S = TypeVar("_S")


def comm_hook(function: _Function) -> _Function:
    """Lets torch's ``register_comm_hook`` take a hook: it compares annotations with its own classes."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    empty = inspect.Signature.empty
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=bare, return_annotation=empty
    )
    return function


def is_torch_bucket(bucket: object) -> bool:
    """Returns whether a bucket comes from torch's DistributedDataParallel."""
    return isinstance(bucket, TorchBucket)


def group_of(process_group: object, bucket: object) -> ProcessGroup:
    """Returns the group that a hook averages over.

    Args:
        process_group: one of ours, or one of torch's that is carried out by one of ours; ``None`` for the
            default group, which is torch's for a bucket of torch's.
        bucket: the bucket.

    Raises:
        TypeError: it is another kind of group.
        ValueError: it is ``None`` and there is no default group.
    """
    if process_group is None and is_torch_bucket(bucket):
        process_group = torch.distributed.group.WORLD
    return resolve_group(process_group)


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """Returns the flat gradients as real numbers, complex ones as pairs; shares the bucket's memory.

    Raises:
        TypeError: the bucket holds a sparse gradient, as one of torch's may.
    """
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError(
            f"a gradient of layout {buffer.layout} and shape {list(buffer.shape)} cannot be compressed; let "
            "collectives.ddp.DistributedDataParallel average it, which keeps sparse gradients away from hooks"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def widths(bucket: GradBucket) -> list[int]:
    """Returns the number of real elements of each parameter of a bucket, in order."""
    width = 2 if bucket.buffer().is_complex() else 1
    return [parameter.numel() * width for parameter in bucket.parameters()]


def after(bucket: GradBucket, future: Future[_S], function: Callable[[Future[_S]], _T]) -> Future[_T]:
    """Returns a future of what ``function`` makes of a finished one, in the form that a reducer expects.

    Ours gets errors with their classes. torch's C++ reducer gets them as errors at all: it would take what
    ``Future.set_exception`` leaves for a value.
    """
    return future.then(function) if is_torch_bucket(bucket) else chain(future, function)


def completed(value: torch.Tensor) -> Future[torch.Tensor]:
    """Returns a future that holds a tensor already."""
    future = pending(value)
    future.set_result(value)
    return future


def pending(like: torch.Tensor) -> Future[torch.Tensor]:
    """Returns an empty future for a tensor on the device of ``like``."""
    devices: Sequence[torch.device] = [like.device] if like.is_cuda else []
    return Future(devices=list(devices))


def average_exactly(group: ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket in place; bitwise the same as without a hook. Does not block.

    Args:
        group: the ranks.
        bucket: the bucket.
    """
    buffer = bucket.buffer()

    def averaged(done: Future[Any]) -> torch.Tensor:
        done.value()
        return buffer

    return after(bucket, average(group, buffer).get_future(), averaged)
