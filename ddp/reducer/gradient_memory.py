"""What the memory of a gradient is like: whether it may be reduced where it is, and as what."""

from __future__ import annotations

from collections.abc import Callable

import torch

from collectives.ddp.reducer.buckets import strides_of

__all__ = ["flat", "is_unshared"]

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _uses(tensor: torch.Tensor) -> int:
    return _count(tensor.untyped_storage()._cdata) if _count is not None else 2**31


_ALONE = _uses(torch.empty(1))
"""How often a storage is counted that one tensor uses; torch's releases differ."""


def is_unshared(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Returns whether nobody but ``.grad`` uses the memory of a gradient, and it lies as on every rank.

    Autograd may give two parameters gradients that share their memory, such as after ``a.view(-1) +
    b.view(-1)``; reduced in place, the second would be averaged while the first one is.
    """
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.dtype is parameter.dtype
        and grad.device == parameter.device
        and not grad.requires_grad
        and not grad.is_conj()
        and not grad.is_neg()
        and grad.shape == parameter.shape
        and _lies_as(grad, parameter)
        and _count is not None
        and _uses(grad) == _ALONE
    )


def _lies_as(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    if parameter.is_contiguous():
        return grad.is_contiguous()
    return grad.stride() == strides_of(parameter)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor that fills it without gaps, flat; complex numbers as pairs."""
    if not tensor.is_contiguous():
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
