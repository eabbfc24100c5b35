"""Plain averaging of a bucket: what hooks do that do not compress, or not yet."""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from collectives import ProcessGroup
from collectives.ddp.hooks.support.adapter import after
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket

__all__ = ["average_exactly"]


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
