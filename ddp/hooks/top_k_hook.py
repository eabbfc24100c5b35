"""A hook that sends the largest gradients only, with error feedback.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Lin, Han, Mao, Wang, Dally, "Deep
gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018, of which the
sampled threshold is here, and the corrections of momentum are not: momentum is the optimizer's.
"""

from __future__ import annotations

import torch
from torch.futures import Future

from collectives import ProcessGroup
from collectives.ddp.hooks.compression import Codec, CompressingState, LargestElements, compress
from collectives.ddp.hooks.state import comm_hook
from collectives.ddp.reducer.buckets import GradBucket

__all__ = ["TopKState", "top_k_hook"]


class TopKState(CompressingState):
    """Settings and memory of :func:`top_k_hook`.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        ratio: part of the gradients of a bucket that a rank sends, above 0 and at most 1.
        start_iter: number of iterations that average exactly before.
        use_error_feedback: whether what was left out is added to the next gradient; training seldom
            converges without.

    Raises:
        ValueError: an argument is out of its range.
    """

    _SETTINGS = (*CompressingState._SETTINGS, "ratio")

    def __init__(
        self,
        process_group: object = None,
        ratio: float = 0.01,
        start_iter: int = 0,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group, start_iter, use_error_feedback=use_error_feedback)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, but is {ratio}")
        self.ratio = float(ratio)

    def codec(self, bucket: GradBucket, values: torch.Tensor, group: ProcessGroup) -> Codec:  # noqa: ARG002
        """Returns what writes and reads the messages of a bucket."""
        return LargestElements(self.ratio)


@comm_hook
def top_k_hook(state: TopKState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients of the largest absolute value, of which each rank chooses its own.

    Every rank gathers those of all others, 8 bytes each: less traffic than averaging for up to ``1 / ratio``
    ranks.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; gets the averages, zeros where no rank sent a value.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.
    """
    return compress(state, bucket)
