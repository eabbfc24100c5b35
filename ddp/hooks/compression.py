"""Compression of gradients: codecs, and the one hook that averages through any of them.

A codec turns flat gradients into a message, and back with a loss. The message is a flat tensor whose length
depends on the number of elements alone, so that the messages of all ranks can be gathered without telling
lengths. Values travel in blocks, each with two float32 numbers of its own in front of all codes. Messages of
a codec that *adds up* are averaged instead; those of :class:`Quantized` are reduced in parts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives import ProcessGroup
from collectives.core.quantized import Parts, exchange
from collectives.core.work import chain
from collectives.ddp.hooks.phases import PhasedState, Phases
from collectives.ddp.hooks.state import (
    average_exactly,
    check_integer,
    dense_buffer,
    working_dtype,
)
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket

_ALIGNMENT = 8
"""Messages are padded to a multiple of so many bytes, so that each gathered one can be read in words."""

_SAMPLE = 1 << 14
"""Elements that the threshold of :class:`LargestElements` is guessed from."""


class Codec(Protocol):
    """Turns flat tensors into messages and back, with a loss.

    Attributes:
        adds_up: whether messages may be averaged.
    """

    adds_up: bool

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the message.

        Args:
            values: flat, floating; at least one element.
        """

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds what a message holds, times ``weight``, to ``values``, in place."""


class Cast:
    """Each element in another data type.

    Args:
        dtype: that data type; ``None`` for its own.
    """

    adds_up = True

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elements, which may share their memory."""
        return values.to(self.dtype or values.dtype)

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds the elements."""
        values.add_(message, alpha=weight)


class Quantized:
    """Each element as 8 bits of a scale that its block has, reduced by a quantized all-reduce.

    Args:
        dtype: of the codes.
        block: elements of a block.
    """

    adds_up = False

    def __init__(self, dtype: torch.dtype, block: int) -> None:
        self.dtype = dtype
        self.block = block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the message of all elements, as one part."""
        return self._part(values).encode(values.float())

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds code times scale."""
        decoded = torch.empty_like(values, dtype=torch.float32)
        self._part(values).decode(message, decoded)
        values.add_(decoded, alpha=weight)

    def _part(self, values: torch.Tensor) -> Parts:
        return Parts(values.numel(), 1, self.dtype, self.block, in_core=False)


class Affine:
    """Each element as a whole number of few bits, between the least and the greatest value of its block.

    Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017,
    with rounding to the nearest level and an offset.

    Args:
        bits: 8 or 4.
        block: elements of a block; ``None`` for one block of all.
    """

    adds_up = False

    def __init__(self, bits: int = 8, block: int | None = None) -> None:
        self.bits = bits
        self.block = block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the least value and the step of each block, then the codes."""
        blocks = _blocks(values, self.block)
        levels = (1 << self.bits) - 1
        least, greatest = (bound.unsqueeze(1) for bound in torch.aminmax(blocks, dim=1))
        step = (greatest - least) / levels
        inverse = torch.where(step > 0, step.reciprocal(), 0)
        codes = ((blocks - least) * inverse).round_().nan_to_num_(0).clamp_(0, levels).to(torch.uint8)
        flat = codes.view(-1)
        if self.bits == 4:
            flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(-1, 2)
            flat = flat[:, 0] | (flat[:, 1] << 4)
        return _joined([least, step], flat)

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds least value plus code times step."""
        count, width = _shape(values.numel(), self.block)
        (least, step), codes = _parted(message, count, 2, -(-count * width * self.bits // 8))
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)[: count * width]
        decoded = torch.addcmul(least, codes.view(count, width), step)
        values.add_(decoded.view(-1)[: values.numel()], alpha=weight)


class Signs:
    """Each element as its sign: one bit, and two values for each block.

    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training
    of speech DNNs", Interspeech 2014: the mean of the elements that are not negative and that of those that
    are stand for them. Blocks take the place of the columns there.

    Args:
        block: elements of a block, a multiple of 8.
    """

    adds_up = False

    def __init__(self, block: int = 1024) -> None:
        self.block = block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the two means of each block, then the signs, eight to a byte."""
        count, width = self._shape(values.numel())
        blocks = torch.nn.functional.pad(values, (0, count * width - values.numel())).view(count, width)
        positive = blocks >= 0
        sizes = torch.full((count, 1), width, device=values.device)
        sizes[-1] -= count * width - values.numel()  # padding is zero, and counts for neither mean
        padding = width - sizes
        above = positive.sum(1, keepdim=True) - padding
        # Both are summed: the difference to the sum of all would lose small values beside large ones.
        high = blocks.clamp(min=0).sum(1, keepdim=True) / above.clamp(min=1)
        low = blocks.clamp(max=0).sum(1, keepdim=True) / (sizes - above).clamp(min=1)
        return _joined([high, low], _packed(positive.view(-1)))

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds the mean that stands for each element."""
        count, width = self._shape(values.numel())
        (high, low), codes = _parted(message, count, 2, count * width // 8)
        decoded = torch.where(_unpacked(codes).view(count, width), high, low)
        values.add_(decoded.view(-1)[: values.numel()], alpha=weight)

    def length(self, numel: int) -> int:
        """Returns the bytes of the message of so many elements."""
        count, width = self._shape(numel)
        return _padded_size(8 * count + count * width // 8)

    def _shape(self, numel: int) -> tuple[int, int]:
        block = min(self.block, -(-numel // 8) * 8)
        return -(-numel // block), block


class OfEach:
    """Several tensors in one, each by itself, so that none is measured by the scale of another.

    Args:
        codec: writes and reads one of them.
        sizes: their numbers of elements.
    """

    adds_up = False

    def __init__(self, codec: Signs, sizes: Sequence[int]) -> None:
        self.codec = codec
        self.sizes = [size for size in sizes if size]

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the messages of all, one after the other."""
        return torch.cat([self.codec.encode(part) for part in values.split_with_sizes(self.sizes)])

    def length(self) -> int:
        """Returns the bytes of all messages."""
        return sum(map(self.codec.length, self.sizes))

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds what each message holds."""
        messages = message.split_with_sizes([self.codec.length(size) for size in self.sizes])
        for part, its in zip(values.split_with_sizes(self.sizes), messages, strict=True):
            self.codec.add_to(part, its, weight)


class LargestElements:
    """The elements of the largest absolute value, with their places; all others are left out.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Lin et al., "Deep gradient
    compression", ICLR 2018, for the threshold, which is guessed from a sample of a large tensor and then
    corrected.

    Args:
        ratio: part of the elements that is sent, above 0 and at most 1; at least one is.
    """

    adds_up = False

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def count(self, numel: int) -> int:
        """Returns how many elements are sent."""
        return min(numel, max(1, math.ceil(numel * self.ratio)))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values as float32 and places as int32."""
        places = self._places(values.abs(), self.count(values.numel()))
        chosen = values[places].float()
        return _padded(torch.cat([chosen.view(torch.uint8), places.to(torch.int32).view(torch.uint8)]))

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds the elements at their places."""
        size = 4 * self.count(values.numel())
        chosen = message[:size].view(torch.float32).to(values.dtype)
        values.index_add_(0, message[size : 2 * size].view(torch.int32), chosen, alpha=weight)

    @staticmethod
    def _places(sizes: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the places of the ``count`` largest."""
        if sizes.numel() > 4 * _SAMPLE:
            sample = sizes[:: sizes.numel() // _SAMPLE]
            # A quarter more than wanted, so that there are seldom too few.
            wanted = min(sample.numel(), 1 + math.ceil(1.25 * count * sample.numel() / sizes.numel()))
            threshold = sample.topk(wanted, sorted=False).values.min()
            places = (~(sizes < threshold)).nonzero().view(-1)  # those that are not numbers, too
            if places.numel() >= count:
                return places[sizes[places].topk(count, sorted=False).indices]
        return sizes.topk(count, sorted=False).indices


def _shape(numel: int, block: int | None) -> tuple[int, int]:
    """Returns number and width of the blocks of a flat tensor."""
    width = numel if block is None else min(block, numel)
    return -(-numel // width), width


def _blocks(values: torch.Tensor, block: int | None) -> torch.Tensor:
    """Returns a tensor as one row for each block; the last one is filled up with its last element."""
    count, width = _shape(values.numel(), block)
    missing = count * width - values.numel()
    if missing:
        values = torch.cat([values, values[-1:].expand(missing)])
    return values.view(count, width)


def _joined(numbers: list[torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    parts = [number.float().contiguous().view(-1).view(torch.uint8) for number in numbers]
    return _padded(torch.cat([*parts, codes]))


def _padded(message: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(message, (0, _padded_size(message.numel()) - message.numel()))


def _padded_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _parted(
    message: torch.Tensor, count: int, numbers: int, code_bytes: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the columns of numbers in front of a message, and its codes."""
    head = message[: 4 * count * numbers].view(torch.float32).view(numbers, count, 1)
    begin = 4 * count * numbers
    return list(head), message[begin : begin + code_bytes]


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Returns truth values, a multiple of eight, as bytes; the first of eight is the lowest bit."""
    eights = bits.view(torch.uint8).view(-1, 8)
    packed = eights[:, 0].clone()
    for place in range(1, 8):
        packed |= eights[:, place] << place
    return packed


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Returns each bit of bytes as a truth value, the lowest first."""
    every = torch.arange(256, device=codes.device)
    table = (every.unsqueeze(1) >> torch.arange(8, device=codes.device)).bitwise_and_(1).bool()
    return table.index_select(0, codes.int()).view(-1)


# ---- the hook ----------------------------------------------------------------------------------------------


class CompressingState(PhasedState):
    """State of a hook that averages through a codec, with error feedback.

    Args:
        process_group: the ranks.
        start_iter: number of iterations that average exactly before, 0 or more.
        use_error_feedback: whether errors are kept.

    Raises:
        TypeError: ``start_iter`` is no integer.
        ValueError: ``start_iter`` is negative.
    """

    _SETTINGS = (*PhasedState._SETTINGS, "start_iter")

    def __init__(self, process_group: object, start_iter: int, *, use_error_feedback: bool) -> None:
        super().__init__(process_group, use_error_feedback=use_error_feedback)
        check_integer("start_iter", start_iter, 0)
        self.start_iter = start_iter

    @abstractmethod
    def codec(self, bucket: GradBucket, values: torch.Tensor, group: ProcessGroup) -> Codec:
        """Returns what writes and reads the messages of a bucket; the same on all ranks.

        Args:
            bucket: the bucket.
            values: its gradients with the error added; not changed.
            group: the ranks; all call it for the same buckets.
        """


@torch.no_grad()
def compress(state: CompressingState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket through the codec of a state; exactly in the first iterations, and on one rank alone.

    The error of the last iteration is added. What the message leaves out is kept for the next one; nothing
    where that is not finite. That is so of values that are not, and of those that were sent as infinite
    because their message, or a sum on the way there, has less range.

    Args:
        state: the hook's state; counts the iteration.
        bucket: the bucket.
    """
    buffer = dense_buffer(bucket)
    group = state.join(bucket)
    if state.iter < state.start_iter or not buffer.numel() or group.size() == 1:
        state.flush(bucket.index())
        state.maybe_increase_iter(bucket)
        return average_exactly(group, bucket)
    values = buffer.to(working_dtype(buffer.dtype), copy=True)
    error = state.error_of(bucket, state.keys_of(bucket)) if state.use_error_feedback else None
    if error is not None:
        values.add_(error)
    codec = state.codec(bucket, values, group)
    state.maybe_increase_iter(bucket)
    return state.enter(bucket, _phases(group, bucket, codec, values, error)).outcome()


def _phases(
    group: ProcessGroup,
    bucket: GradBucket,
    codec: Codec,
    values: torch.Tensor,
    error: torch.Tensor | None,
) -> Phases:
    """Returns the phases of a bucket; but one, unless the codec has messages reduced in parts."""
    if isinstance(codec, Quantized):
        return (yield from _reduced_in_parts(group, bucket, codec, values, error))
    message = codec.encode(values)
    if error is not None:
        codec.add_to(error.copy_(values), message, -1.0)
        _forget_unless_finite(error)
    return average_encoded(group, bucket, codec, message)


def _forget_unless_finite(error: torch.Tensor) -> None:
    finite = torch.isfinite(error.sum())
    if not error.is_cpu:
        error.masked_fill_(~finite, 0.0)  # the host does not wait for the device
    elif not finite:
        error.zero_()


def _reduced_in_parts(
    group: ProcessGroup,
    bucket: GradBucket,
    codec: Quantized,
    values: torch.Tensor,
    error: torch.Tensor | None,
) -> Phases:
    """Averages by a quantized all-reduce, whose exchange is two phases."""
    parts = Parts.of(group, values, codec.dtype, codec.block, average=True)
    flat = values.float()
    steps = exchange(group, parts, flat, keeps_rest=error is not None)
    next(steps)
    yield
    try:
        message, work = yield from steps
    except Exception as failure:  # noqa: BLE001 - the future raises it
        return failure
    if error is not None:
        _forget_unless_finite(error.copy_(flat))
    buffer, result = dense_buffer(bucket), bucket.buffer()

    @torch.no_grad()
    def decode(done: Future[Any]) -> torch.Tensor:
        done.value()
        # Not into memory of the caller's stream, unless the result is there.
        values = buffer if buffer.dtype is torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
        parts.decode(message, values)
        if values is not buffer:
            buffer.copy_(values)
        return result

    return chain(work.get_future(), decode)


def average_encoded(
    group: ProcessGroup, bucket: GradBucket, codec: Codec, message: torch.Tensor
) -> Future[torch.Tensor]:
    """Averages the ranks' messages into the bucket, in rank order, so that all ranks get the same bits.

    Sends the message once to each other rank, where messages do not add up; ``size`` messages are kept until
    they are decoded. Does not block.

    Args:
        group: the ranks.
        bucket: the bucket; at least one element.
        codec: what wrote the messages of all ranks.
        message: this rank's.
    """
    everyone = message if codec.adds_up else message.new_empty(group.size() * message.numel())
    work = average(group, message) if codec.adds_up else group.all_gather_single(everyone, message)
    buffer, result = dense_buffer(bucket), bucket.buffer()

    @torch.no_grad()
    def decode(done: Future[Any]) -> torch.Tensor:
        done.value()
        if codec.adds_up:
            buffer.copy_(message)
            return result
        total = torch.zeros_like(buffer, dtype=working_dtype(buffer.dtype))
        for one in everyone.view(group.size(), -1):
            codec.add_to(total, one, 1 / group.size())
        buffer.copy_(total)
        return result

    return chain(work.get_future(), decode)
