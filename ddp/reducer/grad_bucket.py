"""GradBucket: what a communication hook gets to see of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collectives.ddp.reducer.buckets import Bucket, layout
from collectives.dynamo import Uncompiled

__all__ = ["BucketLayout", "GradBucket"]


@dataclass(frozen=True)
class BucketLayout:
    """What lies in a bucket, as told to a communication hook when the buckets are laid out again.

    The state of the hook, or the hook itself, may have a method ``buckets_rebuilt(before, after)``, which
    gets the layouts of all buckets, in order. It is called on all ranks between two passes, and can carry
    over to the new buckets what it keeps for the old ones.

    Attributes:
        index: the bucket's place in the order of reduction.
        names: names of its parameters within the wrapped module, in the order of their gradients.
        parameters: those parameters.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]


class GradBucket(Uncompiled):
    """The gradients of one bucket, ready to be reduced, as the communication hook gets them.

    Methods are those of ``torch.distributed.GradBucket``, and :meth:`names`. Buckets are laid out again after
    the first backward pass, and where the order of the gradients changes for good, so that :meth:`index` then
    means other parameters; see :class:`BucketLayout`.

    Args:
        bucket: the bucket.
        names: names of its parameters within the wrapped module.
        last: whether it is the last one of the backward pass.
    """

    __slots__ = ("_bucket", "_buffer", "_last", "_names")

    def __init__(self, bucket: Bucket, names: Sequence[str], *, last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.buffer.view_as(bucket.buffer)  # the hook may give it other memory
        self._names = list(names)
        self._last = last

    def index(self) -> int:
        """Returns the bucket's place in the order of reduction, from zero."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Returns the flat tensor of all gradients, not divided by the number of ranks; it may be written."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the flat tensor, for a hook that this one calls.

        Args:
            buffer: as many elements as the bucket has, of any data type; aliased, not copied.

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
        return layout(self._bucket.forms, self._buffer)

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
