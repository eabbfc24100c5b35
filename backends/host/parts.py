"""Parts of dense tensors as the core takes them: address, and number of its elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.core.dtypes import elements_per_byte, native_count

__all__ = ["as_tuple", "equal_parts", "parts_of", "split_parts"]


def as_tuple(operand: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an operand now, because the caller may change a list of them later."""
    if operand is None:
        return ()
    return (operand,) if isinstance(operand, torch.Tensor) else tuple(operand)


def parts_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns a part for each of several tensors."""
    return [(tensor.data_ptr(), native_count(tensor)) for tensor in tensors]


def equal_parts(tensor: torch.Tensor, ranks: int) -> list[tuple[int, int]]:
    """Returns an equal part of a tensor for each rank."""
    return split_parts(tensor, [tensor.numel() // ranks] * ranks)


def split_parts(tensor: torch.Tensor, splits: Sequence[int]) -> list[tuple[int, int]]:
    """Returns parts of a tensor of so many of torch's elements each, which make whole bytes."""
    address, element, shared = tensor.data_ptr(), tensor.element_size(), elements_per_byte(tensor.dtype)
    parts = []
    for split in splits:
        count = split // shared
        parts.append((address, count))
        address += count * element
    return parts
