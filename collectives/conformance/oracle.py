"""What every operation must give: inputs are a formula of rank and index, results are computed the naive way.

The layout of a tensor is how its elements lie in memory: ``dense``, ``offset`` (dense, at an odd
place of a larger buffer), ``strided`` (every third element), ``transposed``, ``scalar`` (no dimension). The
rest of a buffer is its margin: no operation may write there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from collectives.core.types import ReduceOp, make_premul_sum

FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8)
INTS = (
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTS, *FLOATS, *COMPLEX)
"""Every data type that can be reduced."""

BYTES_ONLY = (torch.float4_e2m1fn_x2, torch.bits8, torch.bits16, torch.uint4)  # type: ignore[attr-defined]
"""Some data types that torch can hold, but not compute with or copy between layouts."""

PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

PREMUL = make_premul_sum(0.3)
OPS = (*(op for op in ReduceOp.__members__.values() if op != ReduceOp.PREMUL_SUM), PREMUL)

MARGIN = 0xA5

_KEPT_COUNT = 2048
"""Most elements of tensors of which many are kept, since many cases have the same; of larger ones few are."""

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@functools.lru_cache(maxsize=512)
def _hash(rank: int, count: int, salt: int) -> torch.Tensor:
    """Non-negative numbers of 31 bits that look random."""
    begin = (rank * 97531 + salt * 7919 + 12345) & 0xFFFFFFFF
    mixed = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(begin)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(2246822519)
    # Copied, because the stride of an empty array of NumPy is 0.
    return torch.empty(count, dtype=torch.int32).copy_(torch.from_numpy((mixed ^ (mixed >> 13)) >> 1))


def values(dtype: torch.dtype, rank: int, count: int, salt: int = 0) -> torch.Tensor:
    """Returns what a rank holds; a new flat tensor of ``count`` elements."""
    kept = _small_bytes if count <= _KEPT_COUNT else _large_bytes
    return kept(dtype, rank, count, salt).clone().view(dtype)


def _bytes(dtype: torch.dtype, rank: int, count: int, salt: int) -> torch.Tensor:
    return _make(dtype, rank, count, salt).view(torch.uint8)  # since torch cannot copy some of the types


_small_bytes = functools.lru_cache(maxsize=2048)(_bytes)
_large_bytes = functools.lru_cache(maxsize=32)(_bytes)


def _make(dtype: torch.dtype, rank: int, count: int, salt: int) -> torch.Tensor:
    if dtype in PARTS:
        return _make(PARTS[dtype], rank, 2 * count, salt).view(dtype)
    mixed = _hash(rank, count, salt)
    if dtype is torch.bool:
        return mixed % 3 != 0
    if dtype in INTS:
        # All bits of the type are used, so that sums wrap around.
        wide = mixed.to(torch.int64)
        wide |= wide << 33
        return wide.view(torch.uint8).view(-1, 8)[:, : dtype.itemsize].contiguous().view(-1).view(dtype)
    if dtype is torch.float8_e8m0fnu:
        return torch.pow(2.0, (mixed % 21 - 10).to(torch.float32)).to(dtype)
    if dtype in FLOATS:
        return ((mixed % 2001 - 1000).to(torch.float32) / 64).to(dtype)
    return (mixed % 256).to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)


def reduced(
    inputs: Sequence[torch.Tensor], op: ReduceOp, machines: Sequence[Sequence[int]] = ()
) -> torch.Tensor:
    """Returns the reduction of the ranks' inputs, in rank order and in the wide type, rounded once.

    Between ``machines``, each a list of ranks, those of a machine come first, in rank order, and then the
    machines' totals in the order given.
    """
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        function: _Combine = {"SUM": torch.logical_or, "MAX": torch.logical_or, "BOR": torch.logical_or,
                    "PRODUCT": torch.logical_and, "MIN": torch.logical_and, "BAND": torch.logical_and,
                    "BXOR": torch.logical_xor}[op.name]  # fmt: skip
        return functools.reduce(function, inputs).clone()
    if dtype in INTS:
        return _reduced_ints([tensor.numpy() for tensor in inputs], op)
    if dtype in PARTS:
        return reduced([tensor.view(PARTS[dtype]) for tensor in inputs], op, machines).view(dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    terms = [tensor.to(wide) for tensor in inputs]
    if op.factor is not None:
        terms = [term * torch.tensor(op.factor, dtype=wide) for term in terms]
    table: dict[str, _Combine] = {"PRODUCT": torch.mul, "MIN": _lesser, "MAX": _greater}
    combine = table.get(op.name, torch.add)

    def combined(terms: list[torch.Tensor]) -> torch.Tensor:
        parts = [functools.reduce(combine, [terms[rank] for rank in ranks]) for ranks in machines] or terms
        return functools.reduce(combine, parts)

    total = combined(terms)
    if op.name == "AVG":
        power = 2.0 ** math.ceil(math.log2(len(inputs)))  # no sum of the terms divided by it overflows
        scaled = combined([term / power for term in terms]) / len(inputs) * power
        total = total / len(inputs)
        total = torch.where(total.isfinite(), total, scaled)
    if dtype is torch.float8_e4m3fn:
        total = total.clamp(-448, 448)  # a conversion by torch up to 2.12 makes NaN of what is too large
    return total.to(dtype).clone()


def _lesser(total: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """As torch.minimum, but of equal zeros it keeps the first: torch's choice depends on the place."""
    return torch.where((term < total) | term.isnan(), term, total)


def _greater(total: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    return torch.where((term > total) | term.isnan(), term, total)


def _reduced_ints(inputs: list[np.ndarray], op: ReduceOp) -> torch.Tensor:
    if op.name == "AVG":
        return _quotients(functools.reduce(np.add, [array.astype(object) for array in inputs]), inputs)
    function = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
                "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[op.name]  # fmt: skip
    return torch.from_numpy(functools.reduce(function, inputs).copy())


def _quotients(totals: np.ndarray, inputs: list[np.ndarray]) -> torch.Tensor:
    """Returns totals by the number of inputs, rounded towards zero."""
    number = len(inputs)
    quotients = [abs(int(total)) // number * (1 if total >= 0 else -1) for total in totals]
    return torch.from_numpy(np.array(quotients, dtype=inputs[0].dtype))


def wrapped_mean(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the mean of integers where the sum has wrapped around before it is divided, as NCCL's does."""
    arrays = [tensor.numpy() for tensor in inputs]
    return _quotients(functools.reduce(np.add, arrays), arrays)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements' bytes as a flat tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    dense = tensor.resolve_conj().contiguous() if not tensor.is_contiguous() or tensor.is_conj() else tensor
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


@dataclass
class Placed:
    """A tensor in some layout, with its margin."""

    tensor: torch.Tensor
    buffer: torch.Tensor

    def on(self, device: str) -> Placed:
        """Returns the same on a device, with the same places in memory; itself where it is there."""
        if self.buffer.device.type == device:
            return self
        tensor, buffer = self.tensor, self.buffer.to(device)
        whole = buffer.view(tensor.dtype)
        there = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return Placed(there, buffer)

    def margin_is_whole(self) -> bool:
        """Returns whether nothing but the tensor's elements was written."""
        if self.tensor.nbytes == self.buffer.nbytes:  # of elements that lie apart
            return True
        mask = torch.zeros(self.buffer.numel() // self.tensor.element_size(), dtype=torch.bool)
        if self.tensor.numel():
            offset = self.tensor.storage_offset()
            mask.as_strided(self.tensor.shape, self.tensor.stride(), offset).fill_(True)
        outside = self.buffer.cpu().view(-1, self.tensor.element_size())[~mask]
        return bool((outside == MARGIN).all())


def place(flat: torch.Tensor, layout: str) -> Placed:
    """Returns a tensor with the values of a flat one in a layout."""
    count, width, dtype = flat.numel(), flat.element_size(), flat.dtype
    elements = {"dense": count, "scalar": count, "transposed": count, "offset": count + 5}.get(
        layout, 3 * count + 2
    )
    buffer = torch.full((elements * width,), MARGIN, dtype=torch.uint8)
    whole = buffer.view(dtype)
    if layout == "scalar":
        target = whole.view(())
    elif layout == "offset":
        target = whole[3 : 3 + count]
    elif layout == "strided":
        target = whole[1 : 1 + 3 * count : 3]
    elif layout == "transposed":
        rows = next(rows for rows in range(math.isqrt(count) or 1, 0, -1) if count % rows == 0)
        target = whole.view(-1, rows).t() if count else whole.view(0, 1).t()
    else:
        target = whole
    if layout in {"dense", "offset", "scalar"}:
        target.view(-1).view(torch.uint8).copy_(flat.view(torch.uint8))
    else:
        target.copy_(flat.view(target.shape))
    return Placed(target, buffer)


def same(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Returns ``None`` where the bits are the same (any NaN equals any other), else the first difference."""
    actual, expected = actual.detach().cpu().reshape(-1), expected.reshape(-1)
    if actual.numel() != expected.numel() or actual.dtype is not expected.dtype:
        return f"{actual.dtype}[{actual.numel()}] instead of {expected.dtype}[{expected.numel()}]"
    left, right = raw(actual), raw(expected)
    if torch.equal(left, right):
        return None
    width = actual.element_size()
    differs = (left.view(-1, width) != right.view(-1, width)).any(dim=1)
    if actual.dtype in FLOATS:
        differs &= ~(actual.to(torch.float64).isnan() & expected.to(torch.float64).isnan())
    elif actual.dtype in PARTS:
        part = PARTS[actual.dtype]
        return same(raw(actual).view(part), raw(expected).view(part))
    if not differs.any():
        return None
    return _describe(differs, actual, expected)


def close(
    actual: torch.Tensor, expected: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp
) -> str | None:
    """Returns ``None`` where floats agree up to order and rounding of steps, else the first difference."""
    actual = actual.cpu()
    if actual.dtype in PARTS:
        part = PARTS[actual.dtype]
        inputs = [raw(tensor).view(part) for tensor in inputs]
        return close(raw(actual).view(part), raw(expected).view(part), inputs, op)
    if actual.dtype not in FLOATS or op.name in {"MIN", "MAX"}:
        return same(actual, expected)
    precision = 1.0 if actual.dtype is torch.float8_e8m0fnu else torch.finfo(actual.dtype).eps
    got, want = actual.reshape(-1).to(torch.float64), expected.reshape(-1).to(torch.float64)
    terms = [tensor.to(torch.float64).abs() for tensor in inputs]
    scale = functools.reduce(torch.mul if op.name == "PRODUCT" else torch.add, terms)
    differs = ~((got - want).abs() <= precision * (len(inputs) + 1) * scale)
    differs &= ~(got.isnan() & want.isnan()) & (got != want)
    return _describe(differs, actual, expected) if differs.any() else None


def _describe(differs: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    where = int(differs.nonzero()[0, 0])
    width = actual.element_size()
    got, want = (
        raw(tensor.reshape(-1)).view(-1, width)[where].numpy().tobytes().hex()
        for tensor in (actual, expected)
    )
    text = f"{int(differs.sum())} of {differs.numel()} elements differ, first at {where}: "
    text += f"bytes {got} instead of {want}"
    if actual.dtype not in BYTES_ONLY:
        text += f" ({actual.reshape(-1)[where].item()} instead of {expected.reshape(-1)[where].item()})"
    return text
