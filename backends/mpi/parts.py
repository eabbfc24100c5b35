"""Parts of tensors as memory, and what is computed on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

import collectives._native as _native
from collectives.backends._shared.arithmetic import kernel_factor
from collectives.core.dtypes import NATIVE_CODES, elements_per_byte, native_count
from collectives.core.types import ReduceOp

__all__ = ["Arithmetic", "Part", "arithmetic_of", "cut", "equal_parts", "part_of", "split_parts"]

_ITEM_BYTES = {dtype: _native.dtype_size(code) for dtype, code in NATIVE_CODES.items()}


class Part(NamedTuple):
    """Memory by address and number of bytes."""

    address: int
    nbytes: int


class Arithmetic(NamedTuple):
    """What the kernels are told.

    Attributes:
        dtype: code of the data type.
        op: code of the reduction.
        factor: divisor or multiplier.
        item: bytes of an element.
    """

    dtype: int
    op: int
    factor: float
    item: int


def arithmetic_of(dtype: torch.dtype, op: ReduceOp, ranks: int) -> Arithmetic:
    """Returns what the kernels are told of a reduction of so many ranks' tensors."""
    return Arithmetic(NATIVE_CODES[dtype], op.code, kernel_factor(op, ranks), _ITEM_BYTES[dtype])


def part_of(tensor: torch.Tensor) -> Part:
    """Returns the memory of a dense tensor."""
    return Part(tensor.data_ptr(), native_count(tensor) * _ITEM_BYTES[tensor.dtype])


def cut(whole: Part, item: int, ranks: int) -> list[Part]:
    """Returns a part for each rank, of whole elements; the first are longer by one where it must be."""
    count, rest = divmod(whole.nbytes // item, ranks)
    parts, address = [], whole.address
    for rank in range(ranks):
        nbytes = (count + (rank < rest)) * item
        parts.append(Part(address, nbytes))
        address += nbytes
    return parts


def equal_parts(tensor: torch.Tensor, ranks: int) -> list[Part]:
    """Returns an equal part of a dense tensor for each rank."""
    return split_parts(tensor, [tensor.numel() // ranks] * ranks)


def split_parts(tensor: torch.Tensor, splits: Sequence[int]) -> list[Part]:
    """Returns parts of a dense tensor of so many of its elements each, which make whole bytes."""
    parts, address = [], tensor.data_ptr()
    item, shared = _ITEM_BYTES[tensor.dtype], elements_per_byte(tensor.dtype)
    for count in splits:
        nbytes = count // shared * item
        parts.append(Part(address, nbytes))
        address += nbytes
    return parts
