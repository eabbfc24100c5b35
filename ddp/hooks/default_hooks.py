"""Hooks without state: plain averaging, and averaging in 16 bits.

The state of each is a process group, one of ours or of torch's, or ``None`` for the default group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from collectives import ReduceOp
from collectives.core.work import chain
from collectives.ddp.hooks.state import after, average_exactly, comm_hook, dense_buffer, group_of
from collectives.ddp.reducer.averaging import average, averaging_op
from collectives.ddp.reducer.buckets import GradBucket, Hook

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]


@comm_hook
def allreduce_hook(process_group: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients over the group; bitwise the same as without a hook.

    Args:
        process_group: the ranks; ``None`` for the default group.
        bucket: the bucket; averaged in place.

    Returns:
        A future of the bucket's buffer with the averages.
    """
    return average_exactly(group_of(process_group, bucket), bucket)


@comm_hook
def fp16_compress_hook(process_group: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients as float16: half the traffic of float32; values beyond 65504 overflow.

    Args:
        process_group: the ranks; ``None`` for the default group.
        bucket: the bucket; gets the averages, cast back.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
    """
    return _compressed(process_group, bucket, torch.float16)


@comm_hook
def bf16_compress_hook(process_group: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients as bfloat16: half the traffic of float32, its range, 8 bits of precision.

    Args:
        process_group: the ranks; ``None`` for the default group.
        bucket: the bucket; gets the averages, cast back.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
    """
    return _compressed(process_group, bucket, torch.bfloat16)


bf16_compress_hook.__name__ = "bf16_compress"
"""Not the function's own name, which torch's DistributedDataParallel refuses without CUDA and NCCL."""


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Returns a hook that runs ``hook`` on the gradients as float16, and casts its result back.

    Args:
        hook: any hook; the one returned takes its state, and can be pickled where it can.
    """
    return _CastHook(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Returns a hook that runs ``hook`` on the gradients as bfloat16, and casts its result back.

    Args:
        hook: any hook; the one returned takes its state, and can be pickled where it can.
    """
    return _CastHook(hook, torch.bfloat16)


@torch.no_grad()
def _compressed(process_group: object, bucket: GradBucket, dtype: torch.dtype) -> Future[torch.Tensor]:
    group = group_of(process_group, bucket)
    buffer, result = dense_buffer(bucket), bucket.buffer()
    compressed = buffer.to(dtype)
    if averaging_op(group, dtype, buffer.device) != ReduceOp.AVG:
        # Divide before the sum, which could overflow in so few bits; average() would divide after it.
        work = group.allreduce([compressed.div_(group.size())])
    else:
        work = average(group, compressed)

    def decompress() -> torch.Tensor:
        buffer.copy_(compressed)
        return result

    return after(work, decompress)


class _CastHook:
    """A hook around another one, which gets the gradients in another data type.

    Args:
        hook: the other one.
        dtype: that data type.
    """

    def __init__(self, hook: Hook, dtype: torch.dtype) -> None:
        self._hook = hook
        self._dtype = dtype
        self.is_local = bool(getattr(hook, "is_local", False))
        self.updates_parameters = bool(getattr(hook, "updates_parameters", False))
        self.averages_a_part = bool(getattr(hook, "averages_a_part", False))
        for told in ("pass_failed", "buckets_rebuilt"):
            if hasattr(hook, told):
                setattr(self, told, getattr(hook, told))
        # torch asks hooks for the names that functions have.
        name = f"{getattr(hook, '__name__', 'hook')}_as_{str(dtype).removeprefix('torch.')}"
        self.__name__ = self.__qualname__ = name

    @comm_hook
    def __call__(self, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_complex():
            shapes = ", ".join(str(list(parameter.shape)) for parameter in bucket.parameters())
            names = ", ".join(bucket.names()) if isinstance(bucket, GradBucket) else f"shapes {shapes}"
            raise TypeError(f"{buffer.dtype} gradients ({names}) cannot be cast to {self._dtype}")
        bucket.set_buffer(buffer.to(self._dtype))

        @torch.no_grad()
        def cast_back(done: Future[Any]) -> torch.Tensor:
            value = done.value()
            tensor = value[0] if isinstance(value, (list, tuple)) else value
            buffer.copy_(tensor.reshape(buffer.shape))
            return buffer

        return chain(self._hook(state, bucket), cast_back)
