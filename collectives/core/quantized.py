"""All-reduce that sends 8 bits for each element, composed of an all-to-all and an all-gather.

Each rank adds up a part of the tensor, in float32 and in the order of the ranks, and sends the sum to all.
What travels is quantized both times. A part is a header that says what it holds, the step of each block, and
a code for each element; ``kernels/quantize.hpp`` of the core, which does it on the CPU, says how they are
found. Where streams order operations, torch finds the same.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import torch

from collectives import _native
from collectives.core.arguments.staging import is_dense, write
from collectives.core.arguments.validation import check_outputs, check_tensor, fail
from collectives.core.native_dtypes import NATIVE_CODES
from collectives.core.operations import ALL_GATHER_INTO_TENSOR, ALL_TO_ALL_SINGLE
from collectives.core.process_group import ProcessGroup
from collectives.core.types import ReduceOp
from collectives.core.work import CompletedWork, FinishingWork, Work
from collectives.errors import CollectiveMismatchError, UnsupportedOperationError

BLOCK: Final = 256
"""Elements that share a step: 1.6 % of the bytes are steps then."""

FORMATS: Final = (torch.int8, torch.float8_e4m3fn)
"""Data types of codes."""

REDUCED: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Data types of tensors."""

_HEADER: Final = 16
_ALIGNMENT: Final = 16


def why_not(dtype: object, block: object) -> Exception | None:
    """Returns what is wrong with the settings of a quantized all-reduce."""
    if dtype not in FORMATS:
        return ValueError(f"dtype must be torch.int8 or torch.float8_e4m3fn, but is {dtype!r}")
    if isinstance(block, bool) or not isinstance(block, int):
        return TypeError(f"block must be an integer, but is {block!r} of type {type(block).__name__}")
    if not 1 <= block <= 1 << 30:
        return ValueError(f"block must be 1 to {1 << 30}, but is {block}")
    return None


@dataclass(frozen=True)
class Parts:
    """How a flat float32 tensor travels in parts, one for each rank; the same on all ranks.

    Messages are flat bytes: of all parts, which a rank sends in an all-to-all, or of one, which it gathers.

    Attributes:
        numel: elements of the tensor.
        ranks: number of ranks.
        dtype: of the codes.
        block: elements that share a step.
        average: whether sums are divided by the number of ranks.
        in_core: whether the core computes, at once; else torch does, where its operations are in turn.
    """

    numel: int
    ranks: int
    dtype: torch.dtype = torch.int8
    block: int = BLOCK
    average: bool = False
    in_core: bool = True

    @classmethod
    def of(
        cls, group: ProcessGroup, tensor: torch.Tensor, dtype: torch.dtype, block: int, *, average: bool
    ) -> Parts:
        """Returns those of a tensor, of any data type, over a group."""
        in_core = tensor.is_cpu and not group.is_stream_ordered(tensor.device)
        return cls(tensor.numel(), group.size(), dtype, block, average, in_core)

    @property
    def width(self) -> int:
        """Elements of a part; the last ones may have fewer."""
        return -(-self.numel // (self.ranks * _ALIGNMENT)) * _ALIGNMENT

    @property
    def part_bytes(self) -> int:
        """Bytes of a part's message."""
        return _HEADER + self._steps_bytes + self.width

    @property
    def _steps_bytes(self) -> int:
        return 4 * -(-self.width // self.block)

    def span(self, rank: int) -> slice:
        """Returns the elements of a rank's part."""
        return slice(min(self.numel, rank * self.width), min(self.numel, (rank + 1) * self.width))

    def encode(self, values: torch.Tensor, rest: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the message of all parts.

        Args:
            values: flat, float32.
            rest: gets what the message leaves out, and NaN where values are not finite; may be ``values``.
        """
        message = self._empty(values.device, self.ranks)
        for rank in range(self.ranks):
            span = self.span(rank)
            self._encode_part(values[span], message[rank], None if rest is None else rest[span])
        return message.view(-1)

    def reduce(self, received: torch.Tensor, rank: int, rest: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the message of a part that is reduced, of which every rank has sent its own.

        Args:
            received: the messages of the part, in the order of the ranks.
            rank: whose part it is.
            rest: gets what the result's message leaves out, and NaN where the result is not finite.
        """
        span = self.span(rank)
        total = torch.empty(span.stop - span.start, dtype=torch.float32, device=received.device)
        weight = 1 / self.ranks if self.average else 1.0
        for place, message in enumerate(received.view(self.ranks, -1)):
            self._decode_part(message, total, weight, adds=place > 0)
        message = self._empty(received.device, 1)
        self._encode_part(total, message[0], rest)
        return message.view(-1)

    def decode(self, message: torch.Tensor, values: torch.Tensor) -> None:
        """Writes what the message of all parts holds to a flat float32 tensor."""
        for rank, part in enumerate(message.view(self.ranks, -1)):
            self._decode_part(part, values[self.span(rank)], 1.0, adds=False)

    def differences(self, received: torch.Tensor) -> list[str]:
        """Returns what ranks sent parts of, by rank, where that is not the same on all."""
        rows = received.view(self.ranks, -1)[:, :_HEADER]
        # contiguous() would keep the stride of a single row, which is no whole number of words.
        headers = rows.clone(memory_format=torch.contiguous_format).view(torch.int64).tolist()
        if all(header == self._header() for header in headers):
            return []
        return [
            f"rank {rank}: {numel} elements in {'int8' if not code & 1 else 'float8_e4m3fn'}, blocks of "
            f"{code >> 2}, {'AVG' if code & 2 else 'SUM'}"
            for rank, (numel, code) in enumerate(headers)
        ]

    def _header(self) -> list[int]:
        return [self.numel, self.block << 2 | self.average << 1 | (self.dtype is not torch.int8)]

    def _empty(self, device: torch.device, parts: int) -> torch.Tensor:
        message = torch.empty((parts, self.part_bytes), dtype=torch.uint8, device=device)
        header = torch.tensor(self._header(), dtype=torch.int64).view(torch.uint8)
        message[:, :_HEADER] = header.to(device, non_blocking=True)
        return message

    def _encode_part(self, values: torch.Tensor, message: torch.Tensor, rest: torch.Tensor | None) -> None:
        if values.numel() < self.width:  # what is beyond travels, too
            message[_HEADER:].zero_()
        steps, codes = message[_HEADER:].tensor_split([self._steps_bytes])
        if self.in_core:
            _native.quantize(
                codes.data_ptr(),
                steps.data_ptr(),
                values.data_ptr(),
                0 if rest is None else rest.data_ptr(),
                values.numel(),
                self.block,
                NATIVE_CODES[self.dtype],
            )
        elif values.numel():
            _quantize(codes, steps, values, self.block, self.dtype, rest)

    def _decode_part(self, message: torch.Tensor, values: torch.Tensor, weight: float, *, adds: bool) -> None:
        steps, codes = message[_HEADER:].tensor_split([self._steps_bytes])
        if self.in_core:
            _native.dequantize(
                values.data_ptr(),
                codes.data_ptr(),
                steps.data_ptr(),
                values.numel(),
                self.block,
                NATIVE_CODES[self.dtype],
                weight,
                adds,
            )
        elif values.numel():
            decoded = _dequantized(codes, steps, values.numel(), self.block, self.dtype, weight)
            values.add_(decoded) if adds else values.copy_(decoded)


# ---- by torch, where streams order operations --------------------------------------------------------------

_GREATEST: Final = {torch.int8: (127.0, 126.0), torch.float8_e4m3fn: (448.0, 416.0)}
"""Codes of a block's greatest magnitude; the second where elements of the block are not finite."""

_SPECIAL: Final = {torch.int8: (127, 129, 128), torch.float8_e4m3fn: (0x7E, 0xFE, 0x7F)}
"""Codes of infinity, negative infinity and NaN in such a block, as bytes."""


def _rows(flat: torch.Tensor, block: int) -> torch.Tensor:
    """Returns a flat tensor as a row for each block, filled up with zeros."""
    count = -(-flat.numel() // block)
    return torch.nn.functional.pad(flat, (0, count * block - flat.numel())).view(count, block)


def _quantize(
    codes: torch.Tensor,
    steps: torch.Tensor,
    values: torch.Tensor,
    block: int,
    dtype: torch.dtype,
    left: torch.Tensor | None,
) -> None:
    block = min(block, values.numel())
    rows = _rows(values, block)
    finite = torch.isfinite(rows)
    plain = finite.all(1, keepdim=True)
    greatest = torch.where(finite, rows.abs(), 0).amax(1, keepdim=True)
    usual, beside_infinity = _GREATEST[dtype]
    most = torch.full_like(greatest, usual).masked_fill_(~plain, beside_infinity)
    step = greatest / most
    higher, lower = (torch.nextafter(step, torch.full_like(step, bound)) for bound in (torch.inf, 0))
    step = torch.where(step * most < greatest, higher, step)
    step = torch.where(torch.isinf(step * most), lower, step)
    quotients = torch.where(finite, rows, 0) / torch.where(greatest == 0, 1, step)
    coded = quotients.round().to(dtype) if dtype is torch.int8 else quotients.to(dtype)
    rest = rows - coded.float() * step
    coded = coded.view(torch.uint8)
    infinity, negative_infinity, nan = _SPECIAL[dtype]
    coded = torch.where(rows == torch.inf, infinity, coded)
    coded = torch.where(rows == -torch.inf, negative_infinity, coded)
    coded = torch.where(rows.isnan(), nan, coded)
    stored = torch.where(plain, step, -step).view(-1)
    steps[: 4 * stored.numel()].copy_(stored.view(torch.uint8))
    codes[: values.numel()].copy_(coded.view(-1)[: values.numel()])
    if left is not None:
        left.copy_(torch.where(finite, rest, torch.nan).view(-1)[: values.numel()])


def _dequantized(
    codes: torch.Tensor, steps: torch.Tensor, numel: int, block: int, dtype: torch.dtype, weight: float
) -> torch.Tensor:
    block = min(block, numel)
    rows = _rows(codes[:numel], block)
    stored = steps[: 4 * len(rows)].view(torch.float32).view(-1, 1)
    values = rows.view(dtype).float() * (stored.abs() * weight)
    for code, special in zip(_SPECIAL[dtype], (torch.inf, -torch.inf, torch.nan), strict=True):
        values = torch.where(torch.signbit(stored) & (rows == code), special, values)
    return values.view(-1)[:numel]


# ---- the operation -----------------------------------------------------------------------------------------


def allreduce(
    group: ProcessGroup,
    tensor: torch.Tensor,
    op: ReduceOp,
    *,
    dtype: torch.dtype = torch.int8,
    block: int = BLOCK,
    async_op: bool = True,
) -> Work:
    """Reduces a tensor over all ranks, in place; afterwards it is bitwise the same on every rank.

    Blocks until this rank's part is reduced, where operations are not ordered by streams; with ``async_op``
    not for what follows.

    Args:
        group: the group; it exchanges and gathers bytes.
        tensor: same shape and data type on every rank.
        op: SUM or AVG.
        dtype: of the codes.
        block: elements that share a step.
        async_op: whether to return before it is done.

    Raises:
        TypeError: ``tensor`` is no tensor, or ``block`` no integer.
        ValueError: ``dtype`` or ``block`` is none of those that there are, or elements of the tensor share
            their memory.
        UnsupportedOperationError: another reduction, or another data type of the tensor.
        CollectiveMismatchError: the ranks' tensors or arguments differ; nothing was changed. Not raised where
            streams order operations, as the host would have to wait for them.
    """
    name = "quantized_all_reduce"
    check_tensor(group, name, tensor)
    error = why_not(dtype, block)
    if error is not None:
        fail(group, name, str(error), type(error))
    if op.code not in {ReduceOp.SUM.code, ReduceOp.AVG.code}:
        fail(group, name, f"the reduction must be SUM or AVG, but is {op.name}", UnsupportedOperationError)
    if tensor.dtype not in REDUCED or tensor.layout is not torch.strided:
        known = ", ".join(str(known) for known in REDUCED)
        reason = f"the tensor must be strided, of {known}, but is {tensor.layout} of {tensor.dtype}"
        fail(group, name, reason, UnsupportedOperationError)
    check_outputs(group, name, [tensor])
    if group.size() == 1:
        return CompletedWork([tensor])
    parts = Parts.of(group, tensor, dtype, block, average=op.code == ReduceOp.AVG.code)
    with torch.no_grad():
        flat = tensor.detach().reshape(-1).float()
        steps = exchange(group, parts, flat, async_op=async_op)
        next(steps)
        try:
            next(steps)
        except StopIteration as end:
            everyone, work = end.value

    def write_back() -> None:
        straight = tensor.dtype is torch.float32 and is_dense(tensor) and not tensor.is_inference()
        with torch.no_grad():
            values = tensor.detach() if straight else torch.empty_like(flat)
            parts.decode(everyone, values.view(-1))
        if not straight:
            write(tensor, values)

    return FinishingWork(work, write_back, [tensor], async_op)


def exchange(
    group: ProcessGroup, parts: Parts, flat: torch.Tensor, *, keeps_rest: bool = False, async_op: bool = True
) -> Generator[None, None, tuple[torch.Tensor, Work]]:
    """Reduces a flat tensor over all ranks, all but the decoding of the result.

    Yields once, when every rank's parts are on their way, and blocks for them when it goes on.

    Args:
        group: the ranks.
        parts: how the tensor travels.
        flat: the values, float32.
        keeps_rest: whether ``flat`` becomes what has to be added the next time to make up for both roundings:
            what this rank's messages left out; and in its own part, for all ranks, what the result's message
            did. NaN where that is not finite.
        async_op: whether the sums may still be on their way when it ends.

    Returns:
        The message of the result, and the Work after which it is there.

    Raises:
        CollectiveMismatchError: the ranks' tensors or arguments differ.
    """
    message = parts.encode(flat, flat if keeps_rest else None)
    received = torch.empty_like(message)
    work = group.call(ALL_TO_ALL_SINGLE, received, message, timeout=None, async_op=True)
    yield
    work.wait()
    _check_same(group, parts, received)
    mine = flat[parts.span(group.rank())]
    rest = torch.empty_like(mine) if keeps_rest else None
    reduced = parts.reduce(received, group.rank(), rest)
    if rest is not None:
        # A mean counts each rank's next values by one of so many.
        mine.add_(rest, alpha=group.size() if parts.average else 1)
    return message, group.call(ALL_GATHER_INTO_TENSOR, message, reduced, timeout=None, async_op=async_op)


def _check_same(group: ProcessGroup, parts: Parts, received: torch.Tensor) -> None:
    """Compares the parts of the ranks, where that does not make the host wait for a device.

    Raises:
        CollectiveMismatchError: they differ; raised on all ranks.
    """
    lines = parts.differences(received) if parts.in_core else []
    if lines:
        raise CollectiveMismatchError(
            f"[rank {group.rank()}] quantized_all_reduce on {group.describe()}: the ranks' tensors or "
            f"arguments differ; nothing was changed\n  " + "\n  ".join(lines),
            operation="quantized_all_reduce",
        )
