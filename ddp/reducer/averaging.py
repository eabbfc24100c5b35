"""Averages over a group: of any tensors, of sparse gradients, and of delayed ones in a message of their own.

Sparse gradients are averaged by gathering the rows that each rank has. A rank announces for each such
parameter how many rows it has; then all gather the indices and values of all, padded to the longest, and add
up what has the same index, in rank order, so that every rank gets the same bits. Where a rank's gradient is
dense after all, as of a weight that is also used densely, dense ones are averaged.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import nn

from collectives import ProcessGroup, ReduceOp, UnsupportedOperationError, Work
from collectives.core.operations import ALL_REDUCE, ALL_REDUCE_COALESCED
from collectives.core.sparse import sum_of_rows
from collectives.core.work import CoalescedWork, FinishingWork
from collectives.ddp.module.arguments import Settings


def averaging_op(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> ReduceOp:
    """Returns the reduction of :func:`average`: AVG where the group offers it (one rounding), else SUM.

    Raises:
        UnsupportedOperationError: the group can do neither.
    """
    dtype = dtype.to_real() if dtype.is_complex else dtype
    for op in (ReduceOp.AVG, ReduceOp.SUM):
        if group.supports("all_reduce", device=device.type, dtype=dtype, op=op):
            return op
    reason = group.capabilities.why_not("all_reduce", device=device.type, dtype=dtype, op=ReduceOp.SUM)
    raise UnsupportedOperationError(
        f"[rank {group.rank()}] gradients of {dtype} on {device.type} cannot be averaged over "
        f"{group.describe()}: {reason}"
    )


def launches(group: ProcessGroup, device: torch.device) -> bool:
    """Returns whether each operation is a launch on a device, which costs more than copying a gradient."""
    return device.type != "cpu" or group.is_stream_ordered(device)


def average(group: ProcessGroup, tensor: torch.Tensor) -> Work:
    """Averages a tensor over all ranks, in place, complex numbers as pairs of real ones; does not block.

    Args:
        group: the ranks.
        tensor: floating or complex tensor of the same shape and data type on every rank.
    """
    return Averager(group).start([_real(tensor)])


class Averager:
    """Averages over one group, again and again.

    Attributes:
        group: the ranks.
        divisor: what sums are divided by; ``None`` for the number of ranks, which makes them means.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.divisor: int | None = None
        self._ops: dict[tuple[torch.dtype, torch.device], ReduceOp] = {}

    def op_for(self, dtype: torch.dtype, device: torch.device) -> ReduceOp:
        """Returns the reduction for a data type; raises as :func:`averaging_op`."""
        key = (dtype, device)
        op = self._ops.get(key)
        if op is None:
            op = self._ops[key] = averaging_op(self.group, dtype, device)
        return op

    def start(self, tensors: Sequence[torch.Tensor]) -> Work:
        """Averages tensors over all ranks, each in place; does not block. The Work is to be waited for.

        Takes the group's fast path where there is one, which checks no arguments in Python. Where operations
        are launches, there is one for all tensors.

        Args:
            tensors: at least one; floating, of the same sizes and data types in the same order on every rank,
                on one device.
        """
        if len(tensors) > 1 and launches(self.group, tensors[0].device):
            return self._start_together(tensors)
        works = [self._start_one(tensor) for tensor in tensors]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    def _op(self, tensor: torch.Tensor) -> ReduceOp:
        return self.op_for(tensor.dtype, tensor.device) if self.divisor is None else ReduceOp.SUM

    def _start_one(self, tensor: torch.Tensor) -> Work:
        op = self._op(tensor)
        work = self.group.fast_collective(ALL_REDUCE.opcode, tensor, None, op.code, async_op=True)
        if work is None:
            work = self.group.call(ALL_REDUCE, tensor, op=op)
        return self._divided(work, op, [tensor])

    def _start_together(self, tensors: Sequence[torch.Tensor]) -> Work:
        by_op: dict[ReduceOp, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_op.setdefault(self._op(tensor), []).append(tensor)
        works = [
            self._divided(self.group.call(ALL_REDUCE_COALESCED, some, op=op), op, some)
            for op, some in by_op.items()
        ]
        return works[0] if len(works) == 1 else CoalescedWork(works)

    def _divided(self, work: Work, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> Work:
        """Returns the Work of a reduction that ends in means."""
        if op == ReduceOp.AVG:
            return work
        divide = partial(_divide, tensors, self.divisor or self.group.size())
        return FinishingWork(work, divide, list(tensors), async_op=False)


def _divide(tensors: Sequence[torch.Tensor], divisor: int) -> None:
    with torch.no_grad():
        torch._foreach_div_(list(tensors), divisor)


# ---- sparse gradients --------------------------------------------------------------------------------------


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
        self.reset()

    def reset(self) -> None:
        """Begins or ends a pass."""
        self.pending = len(self._parameters)
        self._work: Work | None = None
        self._arriving: list[tuple[torch.nn.Parameter, Callable[[], torch.Tensor]]] = []
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
                average = _gather_rows(parameter, self._grad(parameter), counts, dims.pop(), self._averager)
            else:
                average = _sum_dense(parameter, self._grad(parameter), self._averager)
            self._arriving.append((parameter, average))

    def _grad(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Returns what this rank contributes."""
        return None if self._zeros_only else parameter.grad

    def finish(self) -> None:
        """Writes the averages to ``.grad``; blocks until they are here."""
        for parameter, average in self._arriving:
            parameter.grad = average()


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


def _gather_rows(
    parameter: torch.nn.Parameter,
    grad: torch.Tensor | None,
    counts: Sequence[int],
    dims: int,
    averager: Averager,
) -> Callable[[], torch.Tensor]:
    """Sends the rows of all ranks to all; returns what waits for them and averages."""
    group, shape, device = averager.group, parameter.shape, parameter.device
    divisor = averager.divisor or group.size()
    size, longest = len(counts), max(counts)
    indices = torch.zeros(longest, dims, dtype=torch.int64, device=device)
    values = torch.zeros(longest, *shape[dims:], dtype=parameter.dtype, device=device)
    if grad is not None:
        grad = _coalesced(grad)
        indices[: grad._nnz()] = grad.indices().t()
        values[: grad._nnz()] = grad.values()
    all_indices = indices.new_empty(size * longest, dims)
    all_values = values.new_empty(size * longest, *shape[dims:])
    works = [
        group.all_gather_single(all_indices, indices),
        group.all_gather_single(_real(all_values), _real(values)),
    ] if longest else []  # fmt: skip

    def average() -> torch.Tensor:
        for work in works:
            work.wait()
        places = [slice(rank * longest, rank * longest + count) for rank, count in enumerate(counts)]
        summed = sum_of_rows(
            [all_indices[place] for place in places], [all_values[place] for place in places], shape
        )
        mean = summed.values().div_(divisor).to(all_values.dtype)
        return torch.sparse_coo_tensor(
            summed.indices(), mean, shape, is_coalesced=True, check_invariants=False
        )

    return average


def _sum_dense(
    parameter: torch.nn.Parameter, grad: torch.Tensor | None, averager: Averager
) -> Callable[[], torch.Tensor]:
    """Averages dense gradients of all ranks; returns what waits for that."""
    dense = torch.zeros_like(parameter) if grad is None else grad.to_dense()
    total = dense.detach().clone(memory_format=torch.contiguous_format)
    work = averager.start([_real(total)])

    def average() -> torch.Tensor:
        work.wait()
        return total

    return average


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns complex numbers as pairs of real ones, and others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# ---- delayed gradients -------------------------------------------------------------------------------------


class DelayedGradients:
    """The gradients of ``delay_all_reduce_named_params``: averaged in every pass, whatever else is set.

    A gradient that did not come counts as zeros. What was averaged before stays as it is when it is averaged
    again, but for rounding.

    Attributes:
        hooked: the parameters, and at the end the one that they wait for; :meth:`note` takes their indices.

    Args:
        settings: of the model; the message leaves when the trigger has its gradient, else at the end.
        averager: averages over the ranks.
    """

    def __init__(self, settings: Settings, averager: Averager) -> None:
        parameters, trigger = settings.delayed.values(), settings.trigger
        kinds = {p: (str(p.dtype), str(p.device)) for p in parameters}
        self._parameters = sorted(parameters, key=kinds.__getitem__)
        self.hooked = [*self._parameters, *([] if trigger is None else [trigger])]
        self._averager = averager
        for parameter in parameters:
            averager.op_for(parameter.dtype, parameter.device)
        self._kinds = [list(alike) for _, alike in groupby(self._parameters, kinds.__getitem__)]
        self._dtypes = [alike[0].dtype for alike in self._kinds]
        self._flats: list[torch.Tensor] = []
        self._sent: list[Work] = []
        self._came: set[int] = set()
        self._came_late = False

    @property
    def is_ready(self) -> bool:
        """Whether all gradients have come."""
        return len(self._came) == len(self.hooked)

    def note(self, index: int) -> bool:
        """Takes note of a gradient; returns whether it is one of those to be averaged."""
        self._came.add(index)
        delayed = index < len(self._parameters)
        self._came_late |= delayed and bool(self._sent)
        return delayed

    def launch(self, *, zeros: bool = False) -> None:
        """Sends the gradients as they are, if that was not done in this pass; does not wait.

        Args:
            zeros: whether zeros are sent for all of them.
        """
        if self._sent or not self._parameters:
            return
        self._flats = [
            torch.cat([_flat_grad(parameter, zeros) for parameter in parameters]).to(dtype)
            for parameters, dtype in zip(self._kinds, self._dtypes, strict=True)
        ]
        self._sent.append(self._averager.start(list(map(_real, self._flats))))

    def finish(self) -> None:
        """Waits for the averages and writes them to ``.grad``; sends before what was not sent."""
        if not self._parameters:
            return
        if self._came_late:  # their gradient was added to, as in reentrant checkpoints
            self._wait()
        self.launch()
        self._wait()
        for parameters, flat in zip(self._kinds, self._flats, strict=True):
            averages = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, average in zip(parameters, averages, strict=True):
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(average.view(parameter.shape))

    def _wait(self) -> None:
        sent, self._sent = self._sent, []
        for work in sent:
            work.wait()

    def reset(self) -> list[Work]:
        """Ends the pass; returns what was sent in it and not waited for."""
        sent, self._sent = self._sent, []
        self._flats, self._came_late = [], False
        self._came.clear()
        return sent


def _flat_grad(parameter: torch.nn.Parameter, zeros: bool) -> torch.Tensor:
    grad = parameter.grad
    if zeros or grad is None:
        return parameter.new_zeros(parameter.numel())
    return (grad if grad.layout is torch.strided else grad.to_dense()).reshape(-1)
