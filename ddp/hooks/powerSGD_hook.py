# ruff: noqa: N999 - the module's name is torch's
"""PowerSGD: gradients as products of thin matrices, with error feedback.

Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
NeurIPS 2019.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.futures import Future

from collectives import ProcessGroup
from collectives.ddp.hooks.state import (
    FeedbackState,
    Phases,
    average_exactly,
    check_integer,
    comm_hook,
    dense_buffer,
    group_of,
    widths,
    working_dtype,
)
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket
from collectives.logs import Log

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

_log = Log(__name__)


class PowerSGDState(FeedbackState):
    """Settings and memory of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    Arguments are those of torch's class. Memory is kept by parameter, so that it survives new layouts of the
    buckets, and can be pickled (:class:`~collectives.ddp.hooks.state.HookState`), random numbers
    included. The batched hook begins the factors anew where the buckets are laid out again, and keeps the
    errors.

    Attributes:
        iter: iterations so far.
        rng: source of the seeds for the first factors; the same on all ranks.
        q_memory_dict: the factor Q of each parameter, or of each bucket by the keys of its parameters in one,
            from the last iteration.
        error_dict: the error of each parameter by key, a flat tensor; beyond memory of the size of the
            gradients, nothing is needed for it.
        total_numel_before_compression: elements that were to be averaged since compression began.
        total_numel_after_compression: elements that were sent instead.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        matrix_approximation_rank: columns of the factors, 1 or more. Lower compresses more; 1 to 4 is usual,
            up to 32 for some language models. Tune it by doubling from 1.
        start_powerSGD_iter: number of iterations that average exactly before; a tenth of all, and no less
            than a warm-up has, is a good beginning. 2 or more with error feedback or warm start, as in torch,
            whose buckets are not final before.
        min_compression_rate: a matrix is compressed only where ``(rows + columns) * rank * rate < rows *
            columns``; positive, and less than 1 for compression that sends more.
        use_error_feedback: whether what was left out is added to the next gradient; leave it on.
        warm_start: whether factors begin from those of the last iteration; leave it on.
        orthogonalization_epsilon: added to the norm of each column before dividing by it; zero, which uses
            another method that needs no such help, is the most accurate.
        random_seed: of the first factors; the same on all ranks, 0 to 2**32 - 1.
        compression_stats_logging_frequency: the logger of this module tells how much was saved whenever so
            many iterations have passed, at level INFO.
        batch_tensors_with_same_shape: whether matrices of the same shape in a bucket are computed together,
            which pays on accelerators with many small ones, and copies them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.
    """

    _SETTINGS = (
        *FeedbackState._SETTINGS, "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate",
        "warm_start", "orthogonalization_epsilon", "random_seed",
    )  # fmt: skip

    def __init__(
        self,
        process_group: object = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        super().__init__(process_group, use_error_feedback=use_error_feedback)
        check_integer("matrix_approximation_rank", matrix_approximation_rank, 1)
        check_integer("start_powerSGD_iter", start_powerSGD_iter, 0)
        check_integer("compression_stats_logging_frequency", compression_stats_logging_frequency, 1)
        check_integer("random_seed", random_seed, 0, 2**32 - 1)
        if (use_error_feedback or warm_start) and start_powerSGD_iter < 2:
            raise ValueError(
                "start_powerSGD_iter must be 2 or more with use_error_feedback or warm_start, but is "
                f"{start_powerSGD_iter}"
            )
        if not (min_compression_rate > 0 and math.isfinite(min_compression_rate)):
            raise ValueError(
                f"min_compression_rate must be positive and finite, but is {min_compression_rate}"
            )
        if not (orthogonalization_epsilon >= 0 and math.isfinite(orthogonalization_epsilon)):
            raise ValueError(
                f"orthogonalization_epsilon must be zero or positive, but is {orthogonalization_epsilon}"
            )
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = float(min_compression_rate)
        self.warm_start = bool(warm_start)
        self.orthogonalization_epsilon = float(orthogonalization_epsilon)
        self.random_seed = random_seed
        self.rng = np.random.RandomState(random_seed)
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.q_memory_dict: dict[str, torch.Tensor] = {}
        self._covered: dict[str, frozenset[str]] = {}
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        _, words, *place = self.rng.get_state()
        return {
            **super().facts(),
            "random numbers": zlib.crc32(np.asarray(words).tobytes(), zlib.crc32(repr(place).encode())),
            "remembered factors": len(self.q_memory_dict),
        }

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts an iteration where this is its last bucket, and logs when compression begins."""
        super().maybe_increase_iter(bucket)
        if bucket.is_last() and self.iter == self.start_powerSGD_iter:
            log = _log.of(group_of(self.process_group, bucket))
            log.info("PowerSGD begins to compress after %d iterations", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """Returns how many times fewer elements were sent, then those before and after compression."""
        before, after_ = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after_ if after_ else 0.0), before, after_

    def reset_memory(self) -> None:
        """Forgets errors and factors; called on all ranks."""
        super().reset_memory()
        self.q_memory_dict.clear()
        self._covered.clear()

    def pass_failed(self) -> None:
        """Begins anew, on all ranks, after a pass that may have left different memories on them."""
        super().pass_failed()
        self.rng.seed((self.random_seed + self.iter) % 2**32)

    # ---- what the hooks call -------------------------------------------------------------------------------

    def factor(self, key: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Returns the remembered Q of a matrix; ``None`` where it begins anew.

        Args:
            key: of the matrix.
            shape: columns of the matrix and rank; a Q of another shape is not used.
        """
        kept = self.q_memory_dict.get(key) if self.warm_start else None
        return None if kept is None or kept.shape != shape else kept

    def keep_factor(self, key: str, parameters: Collection[str], factor: torch.Tensor | None) -> None:
        """Remembers the Q of a matrix for the next iteration, ``None`` to begin anew then.

        Forgets those of other matrices with any of its parameters, of buckets that were laid out anew.

        Args:
            key: of the matrix.
            parameters: keys of all parameters in it.
            factor: its Q, not kept itself.
        """
        if key not in self._covered:
            for old in [old for old, covered in self._covered.items() if not covered.isdisjoint(parameters)]:
                del self._covered[old]
                self.q_memory_dict.pop(old, None)
            self._covered[key] = frozenset(parameters)
        if factor is None or not self.warm_start:
            self.q_memory_dict.pop(key, None)
        else:
            self.q_memory_dict[key] = factor.clone()

    def log_stats(self, bucket: GradBucket) -> None:
        """Logs how much was saved, when it is time to.

        Args:
            bucket: the bucket that was compressed; the last one of an iteration logs.
        """
        if bucket.is_last() and self.iter >= self.next_stats_report:
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency
            _log.of(group_of(self.process_group, bucket)).info(
                "PowerSGD after %d iterations: %.1f times fewer elements sent, %d of %d",
                self.iter, self.compression_stats()[0],
                self.total_numel_after_compression, self.total_numel_before_compression,
            )  # fmt: skip


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


def is_worth_compressing(shape: tuple[int, int], rank: int, min_compression_rate: float) -> bool:
    """Returns whether the factors of a matrix have so many times fewer elements than the matrix."""
    rows, columns = shape
    return columns > 1 and (rows + columns) * rank * min_compression_rate < rows * columns


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
    matrices: torch.Tensor = field(init=False)
    p: torch.Tensor = field(init=False)
    q: torch.Tensor = field(init=False)

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


_Plan = tuple[list[_Batch], list[slice]]
"""What becomes of the gradients in a bucket: matrices to compress, and the runs of all others."""

_Division = Callable[[PowerSGDState, GradBucket, Sequence[str]], _Plan]
"""Decides that for a bucket with these keys of its parameters."""


def _phases(
    state: PowerSGDState,
    bucket: GradBucket,
    buffer: torch.Tensor,
    group: ProcessGroup,
    divide: _Division,
) -> Phases:
    """Returns the three phases, with an all-reduce between two of them."""
    keys = state.keys_of(bucket)
    result, flat = bucket.buffer(), buffer.to(working_dtype(buffer.dtype))
    error = state.error_of(bucket, keys)
    batches, plain = divide(state, bucket, keys)

    # Each P, and the gradients that are not compressed.
    if error is not None:
        flat.add_(error)
    for batch in batches:
        batch.take(flat)
    sizes = [span.stop - span.start for span in plain]
    factors = [len(batch.keys) * batch.shape[0] * batch.rank for batch in batches]
    message = flat.new_empty(sum(sizes) + sum(factors))
    parts = message.split_with_sizes([*sizes, *factors])
    for span, part in zip(plain, parts, strict=False):
        part.copy_(flat[span])
    _first_factors(state, batches, flat)
    for batch, part in zip(batches, parts[len(sizes) :], strict=True):
        batch.p = part.view(len(batch.keys), batch.shape[0], batch.rank)
        torch.bmm(batch.matrices, batch.q, out=batch.p)
    factors = [batch.q.numel() for batch in batches]
    state.total_numel_before_compression += buffer.numel()
    state.total_numel_after_compression += message.numel() + sum(factors)
    receive = _start_average(group, message, buffer.dtype)
    yield
    try:
        # Each Q.
        receive()
        for span, part in zip(plain, parts, strict=False):
            flat[span] = part
            if error is not None:  # all of it went; there is one where settings have changed
                error[span] = 0
        if batches:
            message = flat.new_empty(sum(factors))
            for batch, part in zip(batches, message.split_with_sizes(factors), strict=True):
                orthogonalize(batch.p, state.orthogonalization_epsilon)
                batch.q = part.view(batch.q.shape)
                torch.bmm(batch.matrices.mT, batch.p, out=batch.q)
            receive = _start_average(group, message, buffer.dtype)
            yield
            receive()

        _take_averages(state, batches, flat, error, finite=bool(torch.isfinite(message.sum())))
        if flat is not buffer:
            buffer.copy_(flat)
    except Exception as failure:  # noqa: BLE001 - the future raises it
        return failure
    return result


def _take_averages(
    state: PowerSGDState,
    batches: Sequence[_Batch],
    flat: torch.Tensor,
    error: torch.Tensor | None,
    *,
    finite: bool,
) -> None:
    """Writes what the averaged factors hold to the flat gradients, and the rest to the error."""
    for batch in batches:
        if error is not None and finite:
            batch.leave_out(error)
        batch.put_back(flat)
        for key, covered, factor in zip(batch.keys, batch.covers, batch.q, strict=True):
            # One of zeros would stay so for ever where an epsilon takes care of the norms.
            lives = not state.orthogonalization_epsilon or bool(factor.any())
            state.keep_factor(key, covered, factor if finite and lives else None)
    if error is not None and not finite:
        error.zero_()


def _start_average(group: ProcessGroup, message: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Averages a message in the data type of the gradients; returns what waits for that."""
    wire = message.to(dtype)
    work = average(group, wire)

    def receive() -> None:
        work.wait()
        if wire is not message:
            message.copy_(wire)

    return receive


def _first_factors(state: PowerSGDState, batches: Sequence[_Batch], flat: torch.Tensor) -> None:
    """Gives each batch its Q to begin with."""
    known: dict[str, torch.Tensor] = {}
    fresh: dict[str, tuple[int, int]] = {}
    # In the order of the gradients: what is computed together must not matter.
    wanted = [
        (span.start, key, (batch.shape[1], batch.rank))
        for batch in batches
        for key, span in zip(batch.keys, batch.spans, strict=True)
    ]
    for _, key, shape in sorted(wanted):
        kept = state.factor(key, shape)
        if kept is None:
            fresh[key] = shape
        else:
            known[key] = kept.to(flat.device)
    if fresh:  # the same for the same seed on every device
        generator = torch.Generator("cpu").manual_seed(int(state.rng.randint(_SEEDS)))
        for key, shape in fresh.items():
            known[key] = torch.randn(shape, generator=generator, device="cpu").to(flat)
    for batch in batches:
        batch.q = torch.stack([known[key] for key in batch.keys])
        orthogonalize(batch.q, state.orthogonalization_epsilon)


def _layer_by_layer(state: PowerSGDState, bucket: GradBucket, keys: Sequence[str]) -> _Plan:
    """Makes a matrix of each gradient that is worth it."""
    batches: list[_Batch] = []
    plain: list[slice] = []
    same: dict[tuple[int, int], _Batch] = {}
    end = 0
    for key, parameter, numel in zip(keys, bucket.parameters(), widths(bucket), strict=True):
        span = slice(end, end + numel)
        end += numel
        shape = matrix_shape(parameter, numel)
        if not is_worth_compressing(shape, state.matrix_approximation_rank, state.min_compression_rate):
            plain.append(span)
            continue
        batch = same.get(shape) if state.batch_tensors_with_same_shape else None
        if batch is None:
            batch = same[shape] = _Batch([], [], [], shape, min(*shape, state.matrix_approximation_rank))
            batches.append(batch)
        batch.keys.append(key)
        batch.covers.append([key])
        batch.spans.append(span)
    return batches, plain


def _whole_bucket(state: PowerSGDState, bucket: GradBucket, keys: Sequence[str]) -> _Plan:
    """Makes one square matrix of all gradients."""
    numel = sum(widths(bucket))
    if not numel:
        return [], []
    side = math.isqrt(numel - 1) + 1
    shape = (side, side)
    rank = min(side, state.matrix_approximation_rank)
    return [_Batch(["; ".join(keys)], [list(keys)], [slice(0, numel)], shape, rank)], []


@comm_hook
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients as low-rank matrices, one for each parameter; exactly during the first steps.

    After ``state.start_powerSGD_iter`` iterations, on every bucket:

    1. The error of the last iteration is added. Gradients of n rows and m columns (all dimensions but the
       first as one) that are worth it become matrices M; all others, vectors among them, are not compressed.
    2. P = M Q for each M, with Q ``[m, r]`` from the last iteration or from a normal distribution,
       orthogonalised. All P ``[n, r]`` and all uncompressed gradients are averaged in one message, the latter
       are done.
    3. P is orthogonalised, Q = M^T P. All Q are averaged in another message.
    4. P Q^T is the result, M - P Q^T the new error.

    The hook computes on the caller's thread. Apex's mixed precision may conflict with it; use torch's.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; averaged in place.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel
            from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            model.register_comm_hook(PowerSGDState(matrix_approximation_rank=2), powerSGD_hook)
    """
    return _run(state, bucket, _layer_by_layer)


@comm_hook
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages each bucket as one low-rank square matrix; exactly during the first steps.

    As :func:`powerSGD_hook`, with the flat gradients of the whole bucket, padded with zeros, as the only
    matrix M: fewer operations, but rows and columns without a meaning, so that the result is worse: most of a
    gradient waits in the error for many steps, and a learning rate that suits the other hook may be too much.
    Of the digits of ``collectives bench ddp``, 300 steps with momentum teach (share read right; torch's own
    hooks on the same data in brackets):

    =====================  =============  =============
    learning rate          0.05           0.01
    =====================  =============  =============
    ``powerSGD_hook``      0.981 (0.969)
    this hook, rank 1      0.103 (0.097)  0.542 (0.458)
    this hook, rank 4                     0.875 (0.850)
    =====================  =============  =============

    So try the other first. ``min_compression_rate`` has no part in this one.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; averaged in place.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.
    """
    return _run(state, bucket, _whole_bucket)


@torch.no_grad()
def _run(state: PowerSGDState, bucket: GradBucket, divide: _Division) -> Future[torch.Tensor]:
    buffer = dense_buffer(bucket)
    group = state.join(bucket)
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return average_exactly(group, bucket)
    this = state.enter(bucket, _phases(state, bucket, buffer, group, divide))
    state.log_stats(bucket)
    state.maybe_increase_iter(bucket)
    return this.outcome()
