"""Hooks without state: plain averaging, and averaging in 16 bits.

The state of each is a process group, or ``None`` for the default group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from collectives import ProcessGroup, ReduceOp
from collectives.ddp.averaging import average, averaging_op
from collectives.ddp.default_group import resolve_group
from collectives.ddp.grad_bucket import GradBucket

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients over the group; bitwise the same as without a hook.

    Args:
        process_group: the ranks; ``None`` for the default group.
        bucket: the bucket; averaged in place.
    """
    buffer = bucket.buffer()
    work = average(resolve_group(process_group), buffer)
    return work.get_future().then(lambda done: _after(done, buffer))


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients as float16: half the traffic of float32; values beyond 65504 overflow.

    Args:
        process_group: the ranks; ``None`` for the default group.
        bucket: the bucket; gets the averages, cast back.
    """
    return _compressed(process_group, bucket, torch.float16)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients as bfloat16: half the traffic of float32, its range, 8 bits of precision.

    Args:
        process_group: the ranks; ``None`` for the default group.
        bucket: the bucket; gets the averages, cast back.
    """
    return _compressed(process_group, bucket, torch.bfloat16)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Returns a hook that runs ``hook`` on the gradients as float16, and casts its result back."""
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Returns a hook that runs ``hook`` on the gradients as bfloat16, and casts its result back."""
    return _wrapped(hook, torch.bfloat16)


def _compressed(
    process_group: ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> Future[torch.Tensor]:
    group = resolve_group(process_group)
    gradients = bucket.buffer()
    buffer = torch.view_as_real(gradients).view(-1) if gradients.is_complex() else gradients
    compressed = buffer.to(dtype)
    if averaging_op(group, dtype, buffer.device) != ReduceOp.AVG:
        # Divide before the sum, which could overflow in so few bits; average() would divide after it.
        work = group.allreduce([compressed.div_(group.size())])
    else:
        work = average(group, compressed)

    def decompress(done: Future[Any]) -> torch.Tensor:
        _after(done, buffer, compressed)
        return gradients

    return work.get_future().then(decompress)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    def compressed_hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if buffer.is_complex():
            raise TypeError(
                f"{buffer.dtype} gradients ({', '.join(bucket.names())}) cannot be cast to {dtype}"
            )
        bucket.set_buffer(buffer.to(dtype))
        return hook(state, bucket).then(lambda done: _after(done, buffer, done.value()))

    compressed_hook.__name__ = f"{getattr(hook, '__name__', 'hook')}_as_{str(dtype).removeprefix('torch.')}"
    return compressed_hook


def _after(
    done: Future[Any], buffer: torch.Tensor, result: torch.Tensor | list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Returns ``buffer``, with ``result`` cast into it; raises where the operation failed."""
    done.value()
    if result is not None:
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        with torch.no_grad():
            buffer.copy_(tensor.reshape(buffer.shape))
    return buffer
