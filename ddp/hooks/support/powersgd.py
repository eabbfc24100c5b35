"""PowerSGD on one bucket: how its gradients become their approximate average.

The arithmetic is in :mod:`collectives.ddp.hooks.support.powersgd`, settings and memory in
:mod:`collectives.ddp.hooks.powerSGD_hook`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch.futures import Future

from collectives import ProcessGroup, Work
from collectives.ddp.hooks.support.adapter import pending, widths
from collectives.ddp.hooks.support.error_feedback import ErrorMemory, ParameterKeys, working_dtype
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket

__all__ = [
    "BucketCompression",
    "Division",
    "is_worth_compressing",
    "layer_by_layer",
    "matrix_shape",
    "orthogonalize",
    "random_factors",
    "rank_of",
    "whole_bucket",
]


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


_SEEDS = 2**31 - 1


@dataclass
class _Batch:
    """Matrices of one shape that are compressed together.

    Attributes:
        keys: names of their factors in the memory.
        covers: keys of the parameters in each.
        spans: the run of each in the flat gradients.
        shape: rows and columns.
        rank: columns of the factors.
        matrices: ``[b, n, m]``, with the gradients' memory where there is one without padding.
        p: factors ``[b, n, r]``, views of the message.
        q: factors ``[b, m, r]``, views of the message.
    """

    keys: list[str]
    covers: list[Sequence[str]]
    spans: list[slice]
    shape: tuple[int, int]
    rank: int
    matrices: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    p: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    q: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def take(self, flat: torch.Tensor) -> None:
        """Makes the matrices of flat gradients."""
        rows, columns = self.shape
        size = rows * columns
        if len(self.spans) == 1 and self.spans[0].stop - self.spans[0].start == size:
            self.matrices = flat[self.spans[0]].view(1, rows, columns)
            return
        self.matrices = flat.new_zeros(len(self.spans), rows, columns)
        for matrix, span in zip(self.matrices, self.spans, strict=True):
            matrix.view(-1)[: span.stop - span.start].copy_(flat[span])

    def leave_out(self, error: torch.Tensor) -> None:
        """Writes what the factors do not hold of the matrices to the flat error."""
        rows, columns = self.shape
        approximate = self.q.mT
        for place, span in enumerate(self.spans):
            size = span.stop - span.start
            one = slice(place, place + 1)
            whole = size == rows * columns
            out = error[span].view(1, rows, columns) if whole else None
            rest = torch.baddbmm(self.matrices[one], self.p[one], approximate[one], alpha=-1, out=out)
            if not whole:
                error[span] = rest.view(-1)[:size]

    def put_back(self, flat: torch.Tensor) -> None:
        """Writes the product of the factors to the flat gradients."""
        torch.bmm(self.p, self.q.mT, out=self.matrices)
        if self.matrices.data_ptr() == flat[self.spans[0]].data_ptr():
            return
        for matrix, span in zip(self.matrices, self.spans, strict=True):
            flat[span] = matrix.view(-1)[: span.stop - span.start]


@dataclass
class _Plan:
    """What becomes of the gradients in a bucket.

    Attributes:
        batches: those that are compressed.
        plain: runs of those that are not.
    """

    batches: list[_Batch]
    plain: list[slice]


class _State(Protocol):
    """What the compression of a bucket needs of a ``PowerSGDState``."""

    matrix_approximation_rank: int
    min_compression_rate: float
    use_error_feedback: bool
    orthogonalization_epsilon: float
    batch_tensors_with_same_shape: bool
    total_numel_before_compression: int
    total_numel_after_compression: int
    rng: np.random.RandomState
    keys: ParameterKeys
    errors: ErrorMemory

    def factor(self, key: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Returns the remembered Q of a matrix."""

    def keep_factor(self, key: str, parameters: Collection[str], factor: torch.Tensor | None) -> None:
        """Remembers the Q of a matrix."""


class BucketCompression:
    """One bucket on its way from gradients to averages, in three phases with an all-reduce between them.

    The compressions of a pass overlap: while the messages of one travel, the next one computes. All ranks
    issue the messages in the same order, which the order of the buckets fixes.

    Attributes:
        index: of the bucket.
        future: of the average.
    """

    def __init__(
        self,
        state: _State,
        bucket: GradBucket,
        buffer: torch.Tensor,
        group: ProcessGroup,
        divide: Division,
    ) -> None:
        self.index = bucket.index()
        self.future = pending(buffer)
        self._state = state
        self._group = group
        self._result = bucket.buffer()
        self._buffer = buffer
        keys = state.keys.of(bucket)
        dtype = working_dtype(buffer.dtype)
        self._flat = buffer if buffer.dtype is dtype else buffer.to(dtype)
        self._error = state.errors.of(keys, bucket) if state.use_error_feedback else None
        self._plan = divide(state, bucket, keys)
        self._failure: Exception | None = None
        self._work: Work | None = None
        self._message = self._wire = self._flat.new_empty(0)
        self._plain: Sequence[torch.Tensor] = ()

    @torch.no_grad()
    def begin(self) -> None:
        """Computes each P and sends it on its way, with the gradients that are not compressed."""
        flat, plan = self._flat, self._plan
        if self._error is not None:
            flat.add_(self._error)
        for batch in plan.batches:
            batch.take(flat)
        sizes = [span.stop - span.start for span in plan.plain]
        factors = [len(batch.keys) * batch.shape[0] * batch.rank for batch in plan.batches]
        self._message = flat.new_empty(sum(sizes) + sum(factors))
        parts = self._message.split_with_sizes([*sizes, *factors])
        self._plain = parts[: len(sizes)]
        for span, part in zip(plan.plain, self._plain, strict=True):
            part.copy_(flat[span])
        self._first_factors()
        for batch, part in zip(plan.batches, parts[len(sizes) :], strict=True):
            batch.p = part.view(len(batch.keys), batch.shape[0], batch.rank)
            torch.bmm(batch.matrices, batch.q, out=batch.p)
        self._count()
        self._send()

    @torch.no_grad()
    def advance(self) -> None:
        """Waits for the first message, computes each Q and sends it; failures go to the future."""
        self._protected(self._advance)

    def _advance(self) -> None:
        self._receive()
        flat, plan = self._flat, self._plan
        for span, part in zip(plan.plain, self._plain, strict=True):
            flat[span] = part
            if self._error is not None:  # all of it went; there is one where settings have changed
                self._error[span] = 0
        if not plan.batches:
            return
        factors = [batch.q.numel() for batch in plan.batches]
        self._message = flat.new_empty(sum(factors))
        for batch, part in zip(plan.batches, self._message.split_with_sizes(factors), strict=True):
            orthogonalize(batch.p, self._state.orthogonalization_epsilon)
            batch.q = part.view(batch.q.shape)
            torch.bmm(batch.matrices.mT, batch.p, out=batch.q)
        self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the second message, writes averages and errors, and completes the future."""
        self._protected(self._finish)
        if self._failure is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(self._failure)  # type: ignore[arg-type]

    def outcome(self) -> Future[torch.Tensor]:
        """Returns the future of a finished compression; raises what it failed with."""
        if self._failure is not None:
            raise self._failure
        return self.future

    def _finish(self) -> None:
        if self._plan.batches:
            self._receive()
        finite = bool(torch.isfinite(self._message.sum()))
        for batch in self._plan.batches:
            if self._error is not None and finite:
                batch.leave_out(self._error)
            batch.put_back(self._flat)
            for key, covered, factor in zip(batch.keys, batch.covers, batch.q, strict=True):
                # One of zeros would stay so for ever where an epsilon takes care of the norms.
                lives = not self._state.orthogonalization_epsilon or bool(factor.any())
                self._state.keep_factor(key, covered, factor if finite and lives else None)
        if self._error is not None and not finite:
            self._error.zero_()
        if self._flat is not self._buffer:
            self._buffer.copy_(self._flat)

    def _protected(self, phase: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                phase()
            except Exception as error:  # noqa: BLE001 - the future raises it
                self._failure = error

    def _send(self) -> None:
        self._wire = self._message.to(self._buffer.dtype)
        self._work = average(self._group, self._wire)

    def _receive(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._wire is not self._message:
            self._message.copy_(self._wire)

    def _first_factors(self) -> None:
        """Gives each batch its Q to begin with."""
        state = self._state
        known: dict[str, torch.Tensor] = {}
        fresh: dict[str, tuple[int, int]] = {}
        # In the order of the gradients: what is computed together must not matter.
        wanted = [
            (span.start, key, (batch.shape[1], batch.rank))
            for batch in self._plan.batches
            for key, span in zip(batch.keys, batch.spans, strict=True)
        ]
        for _, key, shape in sorted(wanted):
            kept = state.factor(key, shape)
            if kept is None:
                fresh[key] = shape
            else:
                known[key] = kept.to(self._flat.device)
        if fresh:
            drawn = random_factors(
                int(state.rng.randint(_SEEDS)), list(fresh.values()), self._flat.dtype, self._flat.device
            )
            known.update(zip(fresh, drawn, strict=True))
        for batch in self._plan.batches:
            batch.q = torch.stack([known[key] for key in batch.keys])
            orthogonalize(batch.q, state.orthogonalization_epsilon)

    def _count(self) -> None:
        factors = sum(batch.q.numel() for batch in self._plan.batches)
        self._state.total_numel_before_compression += self._buffer.numel()
        self._state.total_numel_after_compression += self._message.numel() + factors


def layer_by_layer(state: _State, bucket: GradBucket, keys: Sequence[str]) -> _Plan:
    """Makes a matrix of each gradient that is worth it."""
    plan = _Plan([], [])
    same: dict[tuple[int, int], _Batch] = {}
    end = 0
    for key, parameter, numel in zip(keys, bucket.parameters(), widths(bucket), strict=True):
        span = slice(end, end + numel)
        end += numel
        shape = matrix_shape(parameter, numel)
        if not is_worth_compressing(shape, state.matrix_approximation_rank, state.min_compression_rate):
            plan.plain.append(span)
            continue
        batch = same.get(shape) if state.batch_tensors_with_same_shape else None
        if batch is None:
            batch = same[shape] = _Batch([], [], [], shape, rank_of(shape, state.matrix_approximation_rank))
            plan.batches.append(batch)
        batch.keys.append(key)
        batch.covers.append([key])
        batch.spans.append(span)
    return plan


def whole_bucket(state: _State, bucket: GradBucket, keys: Sequence[str]) -> _Plan:
    """Makes one square matrix of all gradients."""
    numel = sum(widths(bucket))
    if not numel:
        return _Plan([], [])
    side = math.isqrt(numel - 1) + 1
    shape = (side, side)
    rank = rank_of(shape, state.matrix_approximation_rank)
    return _Plan([_Batch(["; ".join(keys)], [list(keys)], [slice(0, numel)], shape, rank)], [])


Division = Callable[[_State, GradBucket, Sequence[str]], _Plan]
"""Decides what becomes of the gradients in a bucket with these keys of its parameters."""
