"""Averaging by messages that cannot be added up: all ranks gather all messages, and decode each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from collectives import ProcessGroup
from collectives.ddp.hooks.support.adapter import after, dense_buffer
from collectives.ddp.hooks.support.codecs import Codec
from collectives.ddp.hooks.support.error_feedback import working_dtype
from collectives.ddp.hooks.support.hook_state import FeedbackState, check_integer
from collectives.ddp.hooks.support.uncompressed import average_exactly
from collectives.ddp.reducer.buckets import GradBucket

__all__ = [
    "EncodedState",
    "average_encoded",
    "average_with_feedback",
    "encode_with_feedback",
    "keep_error",
    "with_feedback",
]

Subtract = Callable[[torch.Tensor], object]


def average_encoded(
    group: ProcessGroup, bucket: GradBucket, codec: Codec, message: torch.Tensor
) -> Future[torch.Tensor]:
    """Averages the ranks' messages into the bucket, in rank order, so that all ranks get the same bits.

    Sends the message once to each other rank; ``size`` messages are kept until they are decoded. Does not
    block.

    Args:
        group: the ranks.
        bucket: the bucket; at least one element.
        codec: what wrote the messages of all ranks.
        message: this rank's.
    """
    everyone = torch.empty(group.size() * message.numel(), dtype=torch.uint8, device=message.device)
    work = group.all_gather_single(everyone, message)
    buffer, result = dense_buffer(bucket), bucket.buffer()

    @torch.no_grad()
    def decode(done: Future[Any]) -> torch.Tensor:
        done.value()
        total = torch.zeros_like(buffer, dtype=working_dtype(buffer.dtype))
        for one in everyone.view(group.size(), -1):
            codec.add_to(total, one, 1 / group.size())
        buffer.copy_(total)
        return result

    return after(bucket, work.get_future(), decode)


class EncodedState(FeedbackState):
    """State of a hook that gathers encoded gradients, with error feedback.

    Args:
        process_group: the ranks.
        start_iter: number of iterations that average exactly before, 0 or more.
        use_error_feedback: whether errors are kept.

    Raises:
        TypeError: ``start_iter`` is no integer.
        ValueError: ``start_iter`` is negative.
    """

    def __init__(self, process_group: object, start_iter: int, *, use_error_feedback: bool) -> None:
        super().__init__(process_group, use_error_feedback=use_error_feedback)
        check_integer("start_iter", start_iter, 0)
        self.start_iter = start_iter

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {**super().facts(), "start_iter": self.start_iter}


@torch.no_grad()
def average_with_feedback(state: EncodedState, bucket: GradBucket, codec: Codec) -> Future[torch.Tensor]:
    """Averages a bucket through a codec; exactly during the first iterations. Does not block.

    Args:
        state: the hook's state; counts the iteration.
        bucket: the bucket.
        codec: writes and reads the messages.
    """
    dense_buffer(bucket)
    group = state.join(bucket)
    exact = state.iter < state.start_iter
    state.maybe_increase_iter(bucket)
    if exact or not bucket.buffer().numel():
        return average_exactly(group, bucket)
    message = encode_with_feedback(state, bucket, codec, with_feedback(state, bucket))
    return average_encoded(group, bucket, codec, message)


def with_feedback(state: FeedbackState, bucket: GradBucket) -> torch.Tensor:
    """Returns a copy of the flat gradients, with the error of the last iteration added."""
    buffer = dense_buffer(bucket)
    values = buffer.to(working_dtype(buffer.dtype), copy=True)
    if state.use_error_feedback:
        values.add_(state.errors.of(state.keys.of(bucket), bucket))
    return values


def keep_error(state: FeedbackState, bucket: GradBucket, values: torch.Tensor, sent: Subtract) -> None:
    """Keeps what was left out of values from :func:`with_feedback`; nothing where that is not finite.

    That is so of values that are not, and of those that were sent as infinite because their message, or a
    sum on the way there, has less range.

    Args:
        state: the state.
        bucket: the bucket.
        values: what was to be sent.
        sent: subtracts what was sent instead from a tensor, in place.
    """
    if not state.use_error_feedback:
        return
    error = state.errors.of(state.keys.of(bucket), bucket)
    sent(error.copy_(values))
    if not torch.isfinite(error.sum()):
        error.zero_()


def encode_with_feedback(
    state: FeedbackState, bucket: GradBucket, codec: Codec, values: torch.Tensor
) -> torch.Tensor:
    """Returns the message of values from :func:`with_feedback`, and keeps what it leaves out."""
    message = codec.encode(values)
    keep_error(state, bucket, values, lambda error: codec.add_to(error, message, -1.0))
    return message
