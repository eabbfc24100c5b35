"""Low-rank approximation of matrices by one step of subspace iteration: the arithmetic of PowerSGD.

Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
NeurIPS 2019, algorithm 1. A matrix M of n rows and m columns is approximated by P Q^T, where P has n rows and
Q has m, and both have r columns: P = M Q, orthogonalised, then Q = M^T P.

All tensors here are batches of matrices: the first dimension counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["is_worth_compressing", "matrix_shape", "orthogonalize", "random_factors", "rank_of"]


def matrix_shape(parameter: torch.Tensor, numel: int) -> tuple[int, int]:
    """Returns rows and columns of a gradient as a matrix over its run of memory.

    Rows are the dimension with the longest stride, which is the first one but for formats such as
    channels_last; vectors and scalars are one column.

    Args:
        parameter: the parameter.
        numel: number of real elements of its gradient.
    """
    if parameter.dim() < 2 or not numel:
        return numel, 1
    outermost = max(range(parameter.dim()), key=lambda d: (parameter.stride(d), -d))
    rows = parameter.shape[outermost]
    return rows, numel // rows


def rank_of(shape: tuple[int, int], rank: int) -> int:
    """Returns the number of columns of the factors of such a matrix."""
    return min(*shape, rank)


def is_worth_compressing(shape: tuple[int, int], rank: int, min_compression_rate: float) -> bool:
    """Returns whether the factors of a matrix have so many times fewer elements than the matrix."""
    rows, columns = shape
    return columns > 1 and (rows + columns) * rank * min_compression_rate < rows * columns


def random_factors(
    seed: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Returns matrices from a standard normal distribution, the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0.0) -> None:
    """Makes the columns of each matrix orthonormal, in place, keeping the space that they span.

    Args:
        matrices: ``[b, n, r]`` with r at most n.
        epsilon: with zero, columns that vanish are replaced (QR decomposition by Householder reflections).
            Else it is added to the norm that each column is divided by (Gram-Schmidt), so that those stay
            zero.
    """
    if epsilon == 0:
        matrices.copy_(torch.linalg.qr(matrices).Q)
        return
    for column in range(matrices.shape[2]):
        this = matrices[:, :, column : column + 1]
        this.div_(torch.linalg.vector_norm(this, dim=1, keepdim=True) + epsilon)
        rest = matrices[:, :, column + 1 :]
        if rest.numel():
            rest.sub_(this @ (this.mT @ rest))
