"""Hooks that gather gradients as whole numbers of 8 bits: those that torch has, by their names and arguments.

They round once, and need one exchange, but every rank sends its message to each other one: traffic grows
with the number of ranks. Their state is a process group, or ``None`` for the default group, and they keep no
errors for the next step. :func:`~collectives.ddp.hooks.compression.quantized_allreduce_hook` does, and sends
a quarter of float32's bytes at any number of ranks: take it for more than two.
"""

from __future__ import annotations

import torch
from torch.futures import Future

from collectives.ddp.hooks.compression import Affine, average_encoded
from collectives.ddp.hooks.state import average_exactly, comm_hook, dense_buffer, group_of, working_dtype
from collectives.ddp.reducer.buckets import GradBucket

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]


@comm_hook
def quantization_pertensor_hook(process_group: object, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients as 8-bit levels between the least and the greatest one of the bucket.

    Every rank gathers the levels of all others: less traffic than float32 for up to 8 ranks.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        bucket: the bucket; gets the averages.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
    """
    return _quantized(process_group, bucket, Affine())


@comm_hook
def quantization_perchannel_hook(
    process_group: object, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Averages the gradients as 8-bit levels between the least and the greatest one of each block.

    More accurate than :func:`quantization_pertensor_hook` where gradients of one bucket differ in size, for
    8 more bytes with each block.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        bucket: the bucket; gets the averages.
        bucket_size: elements of a block, 1 or more.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: ``bucket_size`` is not positive.
    """
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be 1 or more, but is {bucket_size}")
    return _quantized(process_group, bucket, Affine(block=bucket_size))


@torch.no_grad()
def _quantized(process_group: object, bucket: GradBucket, codec: Affine) -> Future[torch.Tensor]:
    group = group_of(process_group, bucket)
    buffer = dense_buffer(bucket)
    if not buffer.numel():
        return average_exactly(group, bucket)
    return average_encoded(group, bucket, codec, codec.encode(buffer.to(working_dtype(buffer.dtype))))
