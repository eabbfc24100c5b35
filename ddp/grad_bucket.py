"""GradBucket: what a communication hook gets to see of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.ddp.buckets import Bucket

__all__ = ["GradBucket"]


class GradBucket:
    """The gradients of one bucket, ready to be reduced, as the communication hook gets them.

    Methods are those of ``torch.distributed.GradBucket``, and :meth:`names`. Buckets are laid out again after
    the first backward pass, so that :meth:`index` means other parameters from the second one on.

    Args:
        bucket: the bucket.
        names: names of its parameters within the wrapped module.
        last: whether it is the last one of the backward pass.
    """

    __slots__ = ("_bucket", "_buffer", "_last", "_names")

    def __init__(self, bucket: Bucket, names: Sequence[str], *, last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.buffer
        self._names = list(names)
        self._last = last

    def index(self) -> int:
        """Returns the bucket's place in the order of reduction, from zero."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Returns the flat tensor of all gradients, not divided by the number of ranks; it may be written."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the flat tensor, for a hook that this one calls; the data type may differ.

        Raises:
            TypeError: ``buffer`` is no tensor.
            ValueError: its number of elements is not the bucket's.
        """
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"buffer must be a tensor, but is of type {type(buffer).__name__}")
        if buffer.numel() != self._bucket.buffer.numel():
            raise ValueError(
                f"buffer has {buffer.numel()} elements, but bucket {self.index()} has "
                f"{self._bucket.buffer.numel()}"
            )
        self._buffer = buffer.reshape(-1)

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradient of each parameter, in its shape, as a view of :meth:`buffer`."""
        if self._buffer is self._bucket.buffer:
            return list(self._bucket.views)
        return self._bucket.layout(self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters, in the order of :meth:`gradients`."""
        return list(self._bucket.parameters)

    def names(self) -> list[str]:
        """Returns the parameters' names within the wrapped module, in the order of :meth:`gradients`."""
        return list(self._names)

    def is_last(self) -> bool:
        """Returns whether this is the last bucket of the backward pass, that of the first layers."""
        return self._last

    def __repr__(self) -> str:
        return f"<GradBucket {self.index()}: {', '.join(self._names)}>"
