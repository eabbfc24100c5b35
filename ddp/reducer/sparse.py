"""Sparse gradients: averaged by gathering the rows that each rank has.

A rank announces for each such parameter how many rows it has; then all gather the indices and values of all,
padded to the longest, and add up what has the same index, in rank order, so that every rank gets the same
bits. Where a rank's gradient is dense after all, as of a weight that is also used densely, dense ones are
averaged.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from collectives import Work
from collectives.ddp.reducer.averaging import Averager

__all__ = ["SparseGradients", "sparse_parameters"]


class _Kind(enum.IntEnum):
    NOTHING = 0
    SPARSE = 1
    DENSE = 2
    ERROR = 3


_FIELDS = 4
"""What a rank announces of a gradient: kind, rows, sparse dimensions, whether this pass made it."""


def sparse_parameters(module: nn.Module) -> set[int]:
    """Returns the identities of the parameters of layers that produce sparse gradients."""
    layers = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse)
    return {id(layer.weight) for layer in layers}


class SparseGradients:
    """The sparse gradients of some parameters, averaged in each pass.

    Attributes:
        pending: number of gradients that have not come in this pass.

    Args:
        parameters: the parameters by their indices in the model.
        averager: averages over the ranks; its group gathers.
        device: device of tensors that the group takes.
    """

    def __init__(
        self, parameters: Mapping[int, torch.nn.Parameter], averager: Averager, device: torch.device
    ) -> None:
        self._parameters = dict(parameters)
        self._averager = averager
        self._device = device
        self._rows = torch.empty(0, dtype=torch.int64)
        self._work: Work | None = None
        self._arriving: list[tuple[torch.nn.Parameter, _Gathered | _Dense]] = []
        self._zeros_only = False
        self.pending = 0
        self.reset()

    def reset(self) -> None:
        """Begins or ends a pass."""
        self.pending = len(self._parameters)
        self._work = None
        self._arriving = []
        self._zeros_only = False

    def announce(self, unused: Collection[int], *, error: bool, zeros_only: bool = False) -> None:
        """Tells all ranks what this one has; called by all of them before the last bucket. Does not block.

        Args:
            unused: indices of the parameters that this pass gave no gradient.
            error: whether something went wrong here, so that nothing is to be exchanged.
            zeros_only: whether this rank contributes nothing, whatever stands in ``.grad``.
        """
        self._zeros_only = zeros_only
        rows = [
            field
            for index, parameter in self._parameters.items()
            for field in _describe(self._grad(parameter), used=index not in unused, error=error)
        ]
        mine = torch.tensor(rows, dtype=torch.int64, device=self._device)
        group = self._averager.group
        self._rows = torch.empty(group.size() * len(rows), dtype=torch.int64, device=self._device)
        self._work = group.all_gather_single(self._rows, mine)

    def exchange(self) -> None:
        """Waits for the announcements and issues what they call for; called after the last bucket."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        group = self._averager.group
        table = group.to_host(self._rows).view(group.size(), len(self._parameters), _FIELDS).tolist()
        if any(row[0] == _Kind.ERROR for rank in table for row in rank):
            return
        for place, parameter in enumerate(self._parameters.values()):
            rows = [rank[place] for rank in table]
            if not any(used for *_, used in rows):
                continue
            kinds = {kind for kind, *_ in rows}
            dims = {dims for kind, _, dims, _ in rows if kind == _Kind.SPARSE}
            if kinds <= {_Kind.NOTHING, _Kind.SPARSE} and len(dims) == 1:
                counts = [count for _, count, _, _ in rows]
                gathered = _Gathered(parameter, self._grad(parameter), counts, dims.pop(), self._averager)
                self._arriving.append((parameter, gathered))
            else:
                self._arriving.append((parameter, _Dense(parameter, self._grad(parameter), self._averager)))

    def _grad(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Returns what this rank contributes."""
        return None if self._zeros_only else parameter.grad

    def finish(self) -> None:
        """Writes the averages to ``.grad``; blocks until they are here."""
        for parameter, arriving in self._arriving:
            parameter.grad = arriving.average()

    def wait(self) -> None:
        """Blocks until the announcements are here."""
        if self._work is not None:
            self._work.wait()


def _describe(grad: torch.Tensor | None, *, used: bool, error: bool) -> tuple[int, int, int, int]:
    if error:
        return _Kind.ERROR, 0, 0, 0
    if grad is None:
        return _Kind.NOTHING, 0, 0, int(used)
    if grad.layout is not torch.sparse_coo:
        return _Kind.DENSE, 0, 0, int(used)
    return _Kind.SPARSE, _coalesced(grad)._nnz(), grad.sparse_dim(), int(used)


def _coalesced(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.is_coalesced() else grad.coalesce()


class _Gathered:
    """The rows of all ranks, on their way."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        grad: torch.Tensor | None,
        counts: Sequence[int],
        dims: int,
        averager: Averager,
    ) -> None:
        self._shape = parameter.shape
        self._counts = counts
        self._divisor = averager.divisor or averager.group.size()
        longest = max(counts)
        indices = torch.zeros(longest, dims, dtype=torch.int64, device=parameter.device)
        values = torch.zeros(longest, *parameter.shape[dims:], dtype=parameter.dtype, device=parameter.device)
        if grad is not None:
            grad = _coalesced(grad)
            indices[: grad._nnz()] = grad.indices().t()
            values[: grad._nnz()] = grad.values()
        wire = torch.view_as_real(values) if values.is_complex() else values
        size = len(counts)
        self._indices = torch.empty((size * longest, dims), dtype=torch.int64, device=parameter.device)
        self._values = torch.empty(
            (size * longest, *values.shape[1:]), dtype=values.dtype, device=values.device
        )
        target = torch.view_as_real(self._values) if values.is_complex() else self._values
        group = averager.group
        self._works = [
            group.all_gather_single(self._indices, indices),
            group.all_gather_single(target, wire),
        ] if longest else []  # fmt: skip

    def average(self) -> torch.Tensor:
        """Returns the average over the ranks."""
        for work in self._works:
            work.wait()
        longest = max(self._counts)
        places = [slice(rank * longest, rank * longest + count) for rank, count in enumerate(self._counts)]
        indices = torch.cat([self._indices[place] for place in places])
        values = torch.cat([self._values[place] for place in places])
        dtype = values.dtype
        if dtype.itemsize < 4:  # one rounding, at the end
            values = values.float()
        summed = torch.sparse_coo_tensor(indices.t(), values, self._shape, check_invariants=False).coalesce()
        mean = summed.values().div_(self._divisor).to(dtype)
        return torch.sparse_coo_tensor(
            summed.indices(), mean, self._shape, is_coalesced=True, check_invariants=False
        )


class _Dense:
    """Dense gradients of all ranks, on their way."""

    def __init__(self, parameter: torch.nn.Parameter, grad: torch.Tensor | None, averager: Averager) -> None:
        if grad is None:
            self._sum = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        else:
            self._sum = grad.to_dense().clone(memory_format=torch.contiguous_format)
        self._sum = self._sum.detach()
        wire = torch.view_as_real(self._sum) if self._sum.is_complex() else self._sum
        self._work = averager.start([wire])

    def average(self) -> torch.Tensor:
        """Returns the average over the ranks."""
        self._work.wait()
        return self._sum
