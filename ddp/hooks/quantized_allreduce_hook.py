"""A hook that averages by a quantized all-reduce: 8 bits for each gradient, whatever the number of ranks.

Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016, for 8 bits; Tang et al.,
"DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", ICML
2019, for error feedback of both roundings.
"""

from __future__ import annotations

import torch
from torch.futures import Future

from collectives import ProcessGroup
from collectives.core.quantized import BLOCK, why_not
from collectives.ddp.hooks.compression import CompressingState, Quantized, compress
from collectives.ddp.hooks.state import comm_hook
from collectives.ddp.reducer.buckets import GradBucket

__all__ = ["QuantizedAllreduceState", "quantized_allreduce_hook"]


class QuantizedAllreduceState(CompressingState):
    """Settings and memory of :func:`quantized_allreduce_hook`.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        start_iter: number of iterations that average exactly before.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``, as of
            :func:`~collectives.quantized_all_reduce`.
        block: elements that share a scale of 4 bytes.
        use_error_feedback: whether what was left out is added to the next gradient.

    Raises:
        TypeError: ``start_iter`` or ``block`` is no integer.
        ValueError: an argument is out of its range.
    """

    _SETTINGS = (*CompressingState._SETTINGS, "dtype", "block")

    def __init__(
        self,
        process_group: object = None,
        start_iter: int = 0,
        dtype: torch.dtype = torch.int8,
        block: int = BLOCK,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group, start_iter, use_error_feedback=use_error_feedback)
        error = why_not(dtype, block)
        if error is not None:
            raise error
        self.dtype = dtype
        self.block = block

    def codec(self, bucket: GradBucket, values: torch.Tensor, group: ProcessGroup) -> Quantized:  # noqa: ARG002
        """Returns what writes and reads the messages of a bucket."""
        return Quantized(self.dtype, self.block)


@comm_hook
def quantized_allreduce_hook(state: QuantizedAllreduceState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients by :func:`~collectives.quantized_all_reduce`: a quarter of float32's traffic.

    Every rank sends each part of the bucket in 8 bits to the rank that averages it, and gathers the averages
    in 8 bits. While the parts of a bucket travel, the backward pass goes on; the next bucket waits for them.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; gets the averages.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel
            from collectives.ddp.hooks.quantized_allreduce_hook import (
                QuantizedAllreduceState,
                quantized_allreduce_hook,
            )

            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            model.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)
    """
    return compress(state, bucket)
