"""The element types of torch and their codes in the C++ core."""

from __future__ import annotations

from typing import Final

import torch

import collectives._native as _native

# Names that the installed torch lacks are left out: the table serves every torch from 2.11 on.
NATIVE_CODES: Final[dict[torch.dtype, int]] = {
    dtype: code
    for name, code in _native.DTYPES.items()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The native code of every dtype that dense CPU tensors can have."""

_TORCH_DTYPES: Final[dict[int, torch.dtype]] = {code: dtype for dtype, code in NATIVE_CODES.items()}

# Tensor elements in one byte, where that is more than one.
_PACKED: Final[dict[torch.dtype, int]] = {
    dtype: elements
    for name, elements in (("quint4x2", 2), ("quint2x4", 4))
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


def native_code(dtype: torch.dtype) -> int:
    """Return the code under which the C++ core knows ``dtype``.

    Raises:
        TypeError: ``dtype`` has no code in this version.
    """
    try:
        return NATIVE_CODES[dtype]
    except KeyError:
        known = ", ".join(sorted(str(known) for known in NATIVE_CODES))
        raise TypeError(
            f"{dtype} is not supported (its bytes are: tensor.view(torch.uint8)); known: {known}"
        ) from None


def torch_dtype(code: int) -> torch.dtype:
    """Return the dtype that has the native ``code``.

    Raises:
        ValueError: no dtype of the installed torch has it.
    """
    try:
        return _TORCH_DTYPES[code]
    except KeyError:
        raise ValueError(f"no dtype of torch {torch.__version__} has the native code {code}") from None


def element_bytes(dtype: torch.dtype) -> int:
    """Return the size in bytes of one native element of ``dtype`` (see `native_count`).

    Raises:
        TypeError: ``dtype`` has no code in this version.
    """
    return _native.dtype_size(native_code(dtype))


def elements_per_byte(dtype: torch.dtype) -> int:
    """Return how many tensor elements of ``dtype`` share a byte; 1 for those of a byte or more."""
    return _PACKED.get(dtype, 1)


def native_count(tensor: torch.Tensor) -> int:
    """Return how many native elements a contiguous ``tensor`` holds.

    That is ``tensor.numel()``, except for ``quint4x2`` and ``quint2x4``, which pack 2 and 4 tensor elements
    into a byte: their native element is the byte, and ``tensor.element_size() * tensor.numel()`` would run
    past the end of the storage. The size in bytes is ``native_count(t) * element_bytes(t.dtype)``.
    """
    return -(-tensor.numel() // _PACKED.get(tensor.dtype, 1))
