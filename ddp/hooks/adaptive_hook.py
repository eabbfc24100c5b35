"""A hook that picks the precision of each bucket from the gradients in it.

Adaptive precision is named as future work in PyTorch Distributed (VLDB 2020, section 6.2.3); 1-bit SGD (Seide
et al., Interspeech 2014) is its coarsest level.

A bucket is sent at one of five levels: in 32 or 16 bits by all-reduce, in 8 by a quantized all-reduce, in 4
or 1 by gathered messages. 8 bits scale blocks of 256 elements of the bucket, 4 bits blocks of 512, 1 bit
blocks of 256 within each parameter. The error of a level is the norm of what it would leave out over the norm
of the gradients, on the rank where that is largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.futures import Future

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.core.quantized import BLOCK
from collectives.ddp.hooks.compression import (
    Affine,
    Cast,
    Codec,
    CompressingState,
    OfEach,
    Quantized,
    Signs,
    compress,
)
from collectives.ddp.hooks.state import check_integer, comm_hook, widths
from collectives.ddp.reducer.buckets import GradBucket

__all__ = ["LEVELS", "AdaptiveState", "adaptive_hook"]

_BLOCK = 512

_SIGNS_BLOCK = 256
"""As of :class:`~collectives.ddp.hooks.one_bit_hook.OneBitState`, which says why."""


@dataclass(frozen=True)
class _Level:
    """A way to send a bucket.

    Attributes:
        bits: of each element, with what blocks add.
        codec: writes the messages.
    """

    bits: float
    codec: Codec

    def cost(self, size: int) -> float:
        """Returns how many bits of each element a rank of ``size`` sends."""
        in_parts = self.codec.adds_up or isinstance(self.codec, Quantized)
        return self.bits * (2 / size if in_parts else 1.0) * (size - 1)

    def error(self, values: torch.Tensor, norm: torch.Tensor) -> float:
        """Returns the relative error on this rank; infinite where it cannot be told.

        Args:
            values: the gradients.
            norm: theirs, not zero.
        """
        rest = values.clone()
        self.codec.add_to(rest, self.codec.encode(values), -1.0)
        ratio = float(torch.linalg.vector_norm(rest) / norm)
        return ratio if math.isfinite(ratio) else math.inf


_LEVELS = {
    "32 bits": _Level(32, Cast()),
    "16 bits": _Level(16, Cast(torch.bfloat16)),
    "8 bits": _Level(8 + 32 / BLOCK, Quantized(torch.int8, BLOCK)),
    "4 bits": _Level(4 + 64 / _BLOCK, Affine(4, _BLOCK)),
}

LEVELS = (*_LEVELS, "1 bit")
"""Names of the levels, the most exact first."""


def _levels(bucket: GradBucket) -> dict[str, _Level]:
    """Returns the levels for a bucket; that of 1 bit measures each parameter by itself."""
    sizes = widths(bucket)
    signs = OfEach(Signs(_SIGNS_BLOCK), sizes)
    return {**_LEVELS, "1 bit": _Level(8 * signs.length() / sum(sizes), signs)}


class AdaptiveState(CompressingState):
    """Settings and memory of :func:`adaptive_hook`.

    Attributes:
        levels: the level of each bucket by the keys of its parameters; the same on all ranks.

    Args:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        tolerance: largest error that a level may have, above 0; of gradients like a normal distribution, 16
            bits have 0.002, 8 bits 0.007, 4 bits 0.12 and 1 bit 0.6.
        start_iter: number of iterations that average exactly before.
        interval: iterations between two measurements of the errors, 1 or more; they cost computing, no
            waiting. After one of gradients that are all zero, or not finite on a rank, the next iteration
            measures again.
        use_error_feedback: whether what was left out is added to the next gradient.

    Raises:
        TypeError: ``start_iter`` or ``interval`` is no integer.
        ValueError: an argument is out of its range.
    """

    _SETTINGS = (*CompressingState._SETTINGS, "tolerance", "interval")

    def __init__(
        self,
        process_group: object = None,
        tolerance: float = 0.2,
        start_iter: int = 0,
        interval: int = 100,
        use_error_feedback: bool = True,
    ) -> None:
        super().__init__(process_group, start_iter, use_error_feedback=use_error_feedback)
        if not tolerance > 0:
            raise ValueError(f"tolerance must be above 0, but is {tolerance}")
        check_integer("interval", interval, 1)
        self.tolerance = float(tolerance)
        self.interval = interval
        self.levels: dict[tuple[str, ...], str] = {}
        self._measurements: dict[tuple[str, ...], tuple[torch.Tensor, Work]] = {}
        self._undecided: set[tuple[str, ...]] = set()

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {**super().facts(), "levels": len(self.levels)}

    def reset_memory(self) -> None:
        """Forgets errors and levels; called on all ranks."""
        super().reset_memory()
        self.levels.clear()
        self._measurements.clear()
        self._undecided.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves; a measurement under way is taken anew."""
        return {**super().__getstate__(), "_measurements": {}}

    def codec(self, bucket: GradBucket, values: torch.Tensor, group: ProcessGroup) -> Codec:
        """Returns that of the cheapest level that the last measurement allows; waits for that.

        Measures the errors of all levels for the next iteration, where it is time to.
        """
        keys = self.keys_of(bucket)
        levels = _levels(bucket)
        if keys not in self.levels:
            self._forget_parts_of(keys)
        measured = self._measurements.pop(keys, None)
        if measured is not None:
            row, work = measured
            work.wait()
            self._decide(keys, levels, group, group.to_host(row).tolist())
        chosen = levels[self.levels.get(keys, LEVELS[0])].codec
        self._measure(keys, levels, group, values)
        return chosen

    def _decide(
        self, keys: tuple[str, ...], levels: Mapping[str, _Level], group: ProcessGroup, row: Sequence[float]
    ) -> None:
        """Chooses the level by a measurement, from what :meth:`_measure` sends."""
        norm, *errors = row
        if math.isfinite(norm):
            pairs = zip(LEVELS, [0.0, *errors], strict=True)
            allowed = [name for name, error in pairs if error <= self.tolerance]
            self.levels[keys] = min(allowed, key=lambda name: levels[name].cost(group.size()))
        # Zeros may go in as few bits as they like, but say nothing of what comes later; what is not finite,
        # such as an overflow that a gradient scaler provokes, says nothing at all.
        if math.isfinite(norm) and norm > 0:
            self._undecided.discard(keys)
        else:
            self._undecided.add(keys)

    def _forget_parts_of(self, keys: tuple[str, ...]) -> None:
        """Forgets the buckets that these parameters were in before they were laid out anew."""
        shared = set(keys)
        for old in [
            old for old in {**self.levels, **self._measurements} if old != keys and shared.intersection(old)
        ]:
            self.levels.pop(old, None)
            self._undecided.discard(old)
            if old in self._measurements:
                self._measurements.pop(old)[1].wait()

    def _measure(
        self, keys: tuple[str, ...], levels: Mapping[str, _Level], group: ProcessGroup, values: torch.Tensor
    ) -> None:
        """Measures the errors of all levels, where it is time to; all ranks get the largest."""
        settled = keys in self.levels and keys not in self._undecided
        if settled and (self.iter - self.start_iter) % self.interval:
            return
        norm = torch.linalg.vector_norm(values)
        size = float(norm) if torch.isfinite(norm) else math.inf
        tells = 0 < size < math.inf
        errors = [levels[name].error(values, norm) if tells else 0.0 for name in LEVELS[1:]]
        row = torch.tensor([size, *errors], dtype=torch.float32, device=values.device)
        self._measurements[keys] = row, group.allreduce([row], AllreduceOptions(reduceOp=ReduceOp.MAX))


@comm_hook
def adaptive_hook(state: AdaptiveState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages each bucket in as few bits as its gradients allow, with error feedback.

    Every ``state.interval`` iterations the ranks find out the error of each level, and the next iteration
    uses the level of all those within ``state.tolerance`` that sends least among so many ranks. Until then a
    bucket is sent in 32 bits. Buckets that are laid out again begin anew, but keep their errors.

    Args:
        state: settings and memory; this rank's own.
        bucket: the bucket; gets the averages.

    Returns:
        A future of the bucket's buffer with the averages.

    Raises:
        TypeError: the bucket holds a sparse gradient.
        ValueError: the ranks' states differ, or the state belongs to another model or number of ranks.
    """
    return compress(state, bucket)
