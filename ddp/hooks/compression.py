"""Compression of gradients: codecs, the one way to average through any of them, and the hooks that do.

Those hooks are ours alone: the largest gradients (:func:`top_k_hook`), their signs (:func:`one_bit_hook`), 8
bits of each (:func:`quantized_allreduce_hook`), or what the gradients allow (:func:`adaptive_hook`).

A codec turns flat gradients into a message, and back with a loss. The message is a flat tensor whose length
depends on the number of elements alone, so that the messages of all ranks can be gathered without telling
lengths. Values travel in blocks, each with two float32 numbers of its own in front of all codes. Messages of
a codec that *adds up* are averaged instead; those of :class:`Quantized` are reduced in parts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.futures import Future

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.core.quantized import BLOCK, Parts, exchange, why_not
from collectives.ddp.hooks.state import (
    FeedbackState,
    Phases,
    after,
    average_exactly,
    check_integer,
    comm_hook,
    dense_buffer,
    widths,
    working_dtype,
)
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket

__all__ = [
    "LEVELS",
    "AdaptiveState",
    "OneBitState",
    "QuantizedAllreduceState",
    "TopKState",
    "adaptive_hook",
    "one_bit_hook",
    "quantized_allreduce_hook",
    "top_k_hook",
]

_ALIGNMENT = 8
"""Messages are padded to a multiple of so many bytes, so that each gathered one can be read in words."""

_SAMPLE = 1 << 14
"""Elements that the threshold of :class:`LargestElements` is guessed from."""

_AFFINE_BLOCK = 512
_SIGNS_BLOCK = 256
"""Elements of a block; :class:`OneBitState` says why."""


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
        (least, step), codes = _parted(message, count, -(-count * width * self.bits // 8))
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)[: count * width]
        decoded = torch.addcmul(least, codes.view(count, width), step)
        values.add_(decoded.view(-1)[: values.numel()], alpha=weight)


class Signs:
    """Each element as its sign: one bit, and two values for each block.

    The mean of the elements that are not negative and that of those that are stand for them. Blocks take the
    place of the columns in the paper, which :class:`OneBitState` names.

    Args:
        block: elements of a block, a multiple of 8.
        sizes: numbers of elements of the tensors in one, each of which has blocks of its own, so that none is
            measured by the scale of another; empty for one tensor.
    """

    adds_up = False

    def __init__(self, block: int, sizes: Sequence[int] = ()) -> None:
        self.block = block
        self.sizes = [size for size in sizes if size]

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Returns for each tensor the two means of each block, then the signs, eight to a byte."""
        parts = values.split_with_sizes(self.sizes or [values.numel()])
        return torch.cat([self._encode_one(part) for part in parts])

    def add_to(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Adds the mean that stands for each element."""
        sizes = self.sizes or [values.numel()]
        messages = message.split_with_sizes(list(map(self._length, sizes)))
        for part, its in zip(values.split_with_sizes(sizes), messages, strict=True):
            self._add_one(part, its, weight)

    def length(self) -> int:
        """Returns the bytes of the message."""
        return sum(map(self._length, self.sizes))

    def _encode_one(self, values: torch.Tensor) -> torch.Tensor:
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

    def _add_one(self, values: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        count, width = self._shape(values.numel())
        (high, low), codes = _parted(message, count, count * width // 8)
        decoded = torch.where(_unpacked(codes).view(count, width), high, low)
        values.add_(decoded.view(-1)[: values.numel()], alpha=weight)

    def _length(self, numel: int) -> int:
        count, width = self._shape(numel)
        return _padded_size(8 * count + count * width // 8)

    def _shape(self, numel: int) -> tuple[int, int]:
        block = min(self.block, -(-numel // 8) * 8)
        return -(-numel // block), block


class LargestElements:
    """The elements of the largest absolute value, with their places; all others are left out.

    :class:`TopKState` names the papers. The threshold is guessed from a sample of a large tensor and then
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


def _parted(message: torch.Tensor, count: int, code_bytes: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the two columns of numbers in front of a message, and its codes."""
    begin = 8 * count
    return list(message[:begin].view(torch.float32).view(2, count, 1)), message[begin : begin + code_bytes]


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


# ---- the way through a codec -------------------------------------------------------------------------------


class CompressingState(FeedbackState):
    """State of a hook that averages through a codec, with error feedback.

    Args:
        process_group: the ranks.
        start_iter: number of iterations that average exactly before, 0 or more.
        use_error_feedback: whether errors are kept.

    Raises:
        TypeError: ``start_iter`` is no integer.
        ValueError: ``start_iter`` is negative.
    """

    _SETTINGS = (*FeedbackState._SETTINGS, "start_iter")

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

    def decode() -> torch.Tensor:
        # Not into memory of the caller's stream, unless the result is there.
        values = buffer if buffer.dtype is torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
        parts.decode(message, values)
        if values is not buffer:
            buffer.copy_(values)
        return result

    return after(work, decode)


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

    def decode() -> torch.Tensor:
        if codec.adds_up:
            buffer.copy_(message)
            return result
        total = torch.zeros_like(buffer, dtype=working_dtype(buffer.dtype))
        for one in everyone.view(group.size(), -1):
            codec.add_to(total, one, 1 / group.size())
        buffer.copy_(total)
        return result

    return after(work, decode)


# ---- the largest elements ----------------------------------------------------------------------------------


class TopKState(CompressingState):
    """Settings and memory of :func:`top_k_hook`: the largest gradients only, with error feedback.

    Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Lin et al., "Deep gradient
    compression", ICLR 2018, of which the sampled threshold is here, and the corrections of momentum are not:
    momentum is the optimizer's.

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


# ---- signs -------------------------------------------------------------------------------------------------


class OneBitState(CompressingState):
    """Settings and memory of :func:`one_bit_hook`: one bit for each gradient, with error feedback.

    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training
    of speech DNNs", Interspeech 2014.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        start_iter: number of iterations that average exactly before.
        block: elements of one parameter that share their two values, a multiple of 8; 8 bytes are sent with
            each block. Every element of a block becomes as large as the others of its sign, so that large
            blocks hold training up: of the digits of ``collectives bench ddp``, 300 steps teach 0.97 with
            blocks of 256 and 0.75 with blocks of 1024.
        use_error_feedback: whether what was left out is added to the next gradient; training seldom
            converges without.

    Raises:
        ValueError: an argument is out of its range.
    """

    _SETTINGS = (*CompressingState._SETTINGS, "block")

    def __init__(
        self,
        process_group: object = None,
        start_iter: int = 0,
        block: int = _SIGNS_BLOCK,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group, start_iter, use_error_feedback=use_error_feedback)
        check_integer("block", block, 8)
        if block % 8:
            raise ValueError(f"block must be a positive multiple of 8, but is {block}")
        self.block = block

    def codec(self, bucket: GradBucket, values: torch.Tensor, group: ProcessGroup) -> Codec:  # noqa: ARG002
        """Returns what writes and reads the messages of a bucket."""
        return Signs(self.block, widths(bucket))


@comm_hook
def one_bit_hook(state: OneBitState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages gradients of which each rank sends the signs, and two values for each block of them.

    Every rank gathers the messages of all others, a twenty-fifth of float32 with blocks of 256: less traffic
    than averaging for up to about 50 ranks.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; gets the averages.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.
    """
    return compress(state, bucket)


# ---- 8 bits ------------------------------------------------------------------------------------------------


class QuantizedAllreduceState(CompressingState):
    """Settings and memory of :func:`quantized_allreduce_hook`: 8 bits for each gradient.

    Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016, for 8 bits; Tang et al.,
    "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated compression", ICML
    2019, for error feedback of both roundings.

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
            from collectives.ddp.hooks import QuantizedAllreduceState, quantized_allreduce_hook

            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            model.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)
    """
    return compress(state, bucket)


# ---- adaptive precision ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Level:
    """A way to send a bucket.

    Attributes:
        bits: of each element, with what blocks add.
        codec: writes the messages.
    """

    bits: float
    codec: Codec

    def cost(self, size: int) -> float:
        """Returns how many bits of each element a rank of ``size`` sends."""
        in_parts = self.codec.adds_up or isinstance(self.codec, Quantized)
        return self.bits * (2 / size if in_parts else 1.0) * (size - 1)

    def error(self, values: torch.Tensor, norm: torch.Tensor) -> float:
        """Returns the relative error on this rank; infinite where it cannot be told.

        Args:
            values: the gradients.
            norm: theirs, not zero.
        """
        rest = values.clone()
        self.codec.add_to(rest, self.codec.encode(values), -1.0)
        ratio = float(torch.linalg.vector_norm(rest) / norm)
        return ratio if math.isfinite(ratio) else math.inf


_LEVELS = {
    "32 bits": _Level(32, Cast()),
    "16 bits": _Level(16, Cast(torch.bfloat16)),
    "8 bits": _Level(8 + 32 / BLOCK, Quantized(torch.int8, BLOCK)),
    "4 bits": _Level(4 + 64 / _AFFINE_BLOCK, Affine(4, _AFFINE_BLOCK)),
}

LEVELS = (*_LEVELS, "1 bit")
"""Names of the levels, the most exact first."""


def _levels(bucket: GradBucket) -> dict[str, _Level]:
    """Returns the levels for a bucket; that of 1 bit measures each parameter by itself."""
    sizes = widths(bucket)
    signs = Signs(_SIGNS_BLOCK, sizes)
    return {**_LEVELS, "1 bit": _Level(8 * signs.length() / sum(sizes), signs)}


class AdaptiveState(CompressingState):
    """Settings and memory of :func:`adaptive_hook`, which picks the precision of a bucket from its gradients.

    Adaptive precision is named as future work in PyTorch Distributed (VLDB 2020, section 6.2.3); 1-bit SGD
    (Seide et al., Interspeech 2014) is its coarsest level.

    A bucket is sent at one of five levels: in 32 or 16 bits by all-reduce, in 8 by a quantized all-reduce, in
    4 or 1 by gathered messages. 8 bits scale blocks of 256 elements of the bucket, 4 bits blocks of 512, 1
    bit blocks of 256 within each parameter. The error of a level is the norm of what it would leave out over
    the norm of the gradients, on the rank where that is largest.

    Attributes:
        levels: the level of each bucket by the keys of its parameters; the same on all ranks.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        tolerance: largest error that a level may have, above 0; of gradients like a normal distribution, 16
            bits have 0.002, 8 bits 0.007, 4 bits 0.12 and 1 bit 0.6.
        start_iter: number of iterations that average exactly before.
        interval: iterations between two measurements of the errors, 1 or more; they cost computing, no
            waiting. After one of gradients that are all zero, or not finite on a rank, the next iteration
            measures again.
        use_error_feedback: whether what was left out is added to the next gradient.

    Raises:
        TypeError: ``start_iter`` or ``interval`` is no integer.
        ValueError: an argument is out of its range.
    """

    _SETTINGS = (*CompressingState._SETTINGS, "tolerance", "interval")

    def __init__(
        self,
        process_group: object = None,
        tolerance: float = 0.2,
        start_iter: int = 0,
        interval: int = 100,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group, start_iter, use_error_feedback=use_error_feedback)
        if not tolerance > 0:
            raise ValueError(f"tolerance must be above 0, but is {tolerance}")
        check_integer("interval", interval, 1)
        self.tolerance = float(tolerance)
        self.interval = interval
        self.levels: dict[tuple[str, ...], str] = {}
        self._measurements: dict[tuple[str, ...], tuple[torch.Tensor, Work]] = {}
        self._undecided: set[tuple[str, ...]] = set()

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {**super().facts(), "levels": len(self.levels)}

    def reset_memory(self) -> None:
        """Forgets errors and levels; called on all ranks."""
        super().reset_memory()
        self.levels.clear()
        self._measurements.clear()
        self._undecided.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves; a measurement under way is taken anew."""
        return {**super().__getstate__(), "_measurements": {}}

    def codec(self, bucket: GradBucket, values: torch.Tensor, group: ProcessGroup) -> Codec:
        """Returns that of the cheapest level that the last measurement allows; waits for that.

        Measures the errors of all levels for the next iteration, where it is time to.
        """
        keys = self.keys_of(bucket)
        levels = _levels(bucket)
        if keys not in self.levels:
            self._forget_parts_of(keys)
        measured = self._measurements.pop(keys, None)
        if measured is not None:
            row, work = measured
            work.wait()
            self._decide(keys, levels, group, group.to_host(row).tolist())
        chosen = levels[self.levels.get(keys, LEVELS[0])].codec
        self._measure(keys, levels, group, values)
        return chosen

    def _decide(
        self, keys: tuple[str, ...], levels: Mapping[str, _Level], group: ProcessGroup, row: Sequence[float]
    ) -> None:
        """Chooses the level by a measurement, from what :meth:`_measure` sends."""
        norm, *errors = row
        if math.isfinite(norm):
            pairs = zip(LEVELS, [0.0, *errors], strict=True)
            allowed = [name for name, error in pairs if error <= self.tolerance]
            self.levels[keys] = min(allowed, key=lambda name: levels[name].cost(group.size()))
        # Zeros may go in as few bits as they like, but say nothing of what comes later; what is not finite,
        # such as an overflow that a gradient scaler provokes, says nothing at all.
        if math.isfinite(norm) and norm > 0:
            self._undecided.discard(keys)
        else:
            self._undecided.add(keys)

    def _forget_parts_of(self, keys: tuple[str, ...]) -> None:
        """Forgets the buckets that these parameters were in before they were laid out anew."""
        shared = set(keys)
        for old in [
            old for old in {**self.levels, **self._measurements} if old != keys and shared.intersection(old)
        ]:
            self.levels.pop(old, None)
            self._undecided.discard(old)
            if old in self._measurements:
                self._measurements.pop(old)[1].wait()

    def _measure(
        self, keys: tuple[str, ...], levels: Mapping[str, _Level], group: ProcessGroup, values: torch.Tensor
    ) -> None:
        """Measures the errors of all levels, where it is time to; all ranks get the largest."""
        settled = keys in self.levels and keys not in self._undecided
        if settled and (self.iter - self.start_iter) % self.interval:
            return
        norm = torch.linalg.vector_norm(values)
        size = float(norm) if torch.isfinite(norm) else math.inf
        tells = 0 < size < math.inf
        errors = [levels[name].error(values, norm) if tells else 0.0 for name in LEVELS[1:]]
        row = torch.tensor([size, *errors], dtype=torch.float32, device=values.device)
        self._measurements[keys] = row, group.allreduce([row], AllreduceOptions(reduceOp=ReduceOp.MAX))


@comm_hook
def adaptive_hook(state: AdaptiveState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages each bucket in as few bits as its gradients allow, with error feedback.

    Every ``state.interval`` iterations the ranks find out the error of each level, and the next iteration
    uses the level of all those within ``state.tolerance`` that sends least among so many ranks. Until then a
    bucket is sent in 32 bits. Buckets that are laid out again begin anew, but keep their errors.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; gets the averages.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.
    """
    return compress(state, bucket)
