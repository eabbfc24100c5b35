"""What the memory of a gradient is like: whether it may be reduced where it is, and as what."""

from __future__ import annotations

from collections.abc import Callable

import torch

from collectives.ddp.reducer.buckets import strides_of

__all__ = ["flat", "form_of", "is_unshared", "lies_at", "shaped", "starts_at"]

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _uses(tensor: torch.Tensor) -> int:
    return _count(tensor.untyped_storage()._cdata) if _count is not None else 2**31


_ALONE = _uses(torch.empty(1))
"""How often a storage is counted that one tensor uses; torch's releases differ."""


def form_of(parameter: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without memory in the shape, strides and data type of a parameter's gradient."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # since torch 2.10 they may differ
    return torch.empty_strided(parameter.shape, strides_of(parameter), dtype=dtype, device="meta")


def is_unshared(grad: torch.Tensor, form: torch.Tensor, device: torch.device) -> bool:
    """Returns whether nobody but ``.grad`` uses the memory of a gradient, and it lies as on every rank.

    Autograd may give two parameters gradients that share their memory, such as after ``a.view(-1) +
    b.view(-1)``; reduced in place, the second would be averaged while the first one is.

    Args:
        grad: the gradient.
        form: the form that all ranks give it.
        device: the device of its bucket.
    """
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and grad.dtype is form.dtype
        and grad.device == device
        and not grad.requires_grad
        and not grad.is_conj()
        and not grad.is_neg()
        and grad.shape == form.shape
        and (grad.is_contiguous() if form.is_contiguous() else grad.stride() == form.stride())
        and _count is not None
        and _uses(grad) == _ALONE
    )


def lies_at(grad: torch.Tensor | None, place: torch.Tensor) -> bool:
    """Returns whether a gradient is exactly some place in memory, in its shape and strides."""
    try:
        return grad is not None and grad.is_set_to(place)
    except RuntimeError:  # of another layout
        return False


def starts_at(grad: torch.Tensor | None, place: torch.Tensor | None) -> bool:
    """Returns whether a gradient begins where some place in memory does."""
    try:
        return grad is not None and place is not None and grad.data_ptr() == place.data_ptr()
    except RuntimeError:  # of a layout without an address
        return False


def shaped(memory: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """Returns what :func:`flat` was called with."""
    memory = torch.view_as_complex(memory.view(-1, 2)) if form.is_complex() else memory
    return memory.as_strided(form.shape, form.stride(), memory.storage_offset())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor that fills it without gaps, flat; complex numbers as pairs."""
    if not tensor.is_contiguous():
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
