"""The memory of dense tensors: as bytes, and as parts by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from collectives.core.native_dtypes import element_bytes, elements_per_byte, native_count


class Part(NamedTuple):
    """Memory by address and number of bytes."""

    address: int
    nbytes: int


def byte_count(tensor: torch.Tensor) -> int:
    """Returns the number of bytes of a dense tensor; quantized types may have several elements in one."""
    if tensor.is_quantized:
        return native_count(tensor) * element_bytes(tensor.dtype)
    return tensor.numel() * tensor.element_size()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor as a flat tensor of bytes."""
    if not tensor.is_quantized:
        # A tensor of one element or none counts as contiguous whatever its strides are.
        return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), offset, (byte_count(tensor),), (1,))


def part_of(tensor: torch.Tensor) -> Part:
    """Returns the memory of a dense tensor."""
    return Part(tensor.data_ptr(), byte_count(tensor))


def byte_splits(tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """Returns the bytes of parts of a tensor, given their elements, which make whole bytes."""
    element, shared = tensor.element_size(), elements_per_byte(tensor.dtype)
    return [split // shared * element for split in splits]


def split_parts(tensor: torch.Tensor, splits: Sequence[int]) -> list[Part]:
    """Returns successive parts of a dense tensor of so many elements each, which make whole bytes."""
    parts, address = [], tensor.data_ptr()
    for nbytes in byte_splits(tensor, splits):
        parts.append(Part(address, nbytes))
        address += nbytes
    return parts


def equal_parts(tensor: torch.Tensor, ranks: int) -> list[Part]:
    """Returns an equal part of a dense tensor for each rank."""
    return split_parts(tensor, [tensor.numel() // ranks] * ranks)
