"""Buckets: which gradients are reduced together, and the state of each such set in a backward pass.

A bucket is a flat tensor in which gradients lie one after the other, so that one all-reduce averages them all
(PyTorch Distributed, VLDB 2020, section 3.2.2). Which bucket comes first after the first iteration is decided
in :mod:`collectives.ddp.reducer.bucket_order`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import groupby

import torch
from torch.futures import Future

from collectives import Work

__all__ = [
    "DEFAULT_BUCKET_CAP_MB",
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "BucketState",
    "assign_buckets",
    "bucket_limits",
    "layout",
    "strides_of",
]

MIB = 1024 * 1024

DEFAULT_BUCKET_CAP_MB = 25
"""Cap in MiB where the user names none (section 4.2 of the paper)."""

FIRST_BUCKET_BYTES = MIB
"""Cap of the first bucket: small, so that communication starts soon after the backward pass did."""


def bucket_limits(
    bucket_cap_mb: float | None = None, bucket_cap_mb_list: Sequence[float] | None = None
) -> list[int]:
    """Returns the caps of the first buckets in bytes, in order; the last one holds for all further buckets.

    Args:
        bucket_cap_mb: cap in MiB; ``None`` for 25; zero puts every gradient alone. The first bucket's is 1
            MiB where that is less.
        bucket_cap_mb_list: caps in MiB of the first bucket, the second, and so on; taken as they are.

    Raises:
        TypeError: a cap is no number.
        ValueError: a cap is negative or not finite, the list is empty, or both arguments are given.
    """
    if bucket_cap_mb_list is not None:
        if bucket_cap_mb is not None:
            raise ValueError(
                f"give bucket_cap_mb or bucket_cap_mb_list, not both: got {bucket_cap_mb} and "
                f"{list(bucket_cap_mb_list)}"
            )
        if not bucket_cap_mb_list:
            raise ValueError(
                "bucket_cap_mb_list is empty; give at least one cap in MiB, or None for the default"
            )
        return [_cap_bytes("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list]
    cap = _cap_bytes("bucket_cap_mb", DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb)
    return [min(FIRST_BUCKET_BYTES, cap), cap]


def _cap_bytes(name: str, cap: float) -> int:
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise TypeError(f"{name} must be a number of MiB, but is {cap!r} of type {type(cap).__name__}")
    if cap < 0 or not math.isfinite(cap):
        raise ValueError(f"{name} must be zero or positive and finite, but is {cap}")
    return int(cap * MIB)


def assign_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable], limits: Sequence[int], order: Iterable[int]
) -> list[list[int]]:
    """Returns which gradients share a bucket: for each bucket, in order of launch, the gradients' indices.

    Gradients are taken in ``order``. Each joins the open bucket of its kind; a bucket closes as soon as it
    holds its cap or more, so that it passes its cap by less than its last gradient. Buckets launch in the
    order in which their last gradient was taken, because that one makes them ready. A pure function: the same
    on every rank for the same arguments.

    Args:
        sizes: bytes of each gradient.
        kinds: device and data type of each gradient; gradients of different kinds never share a bucket.
        limits: caps in bytes, as from :func:`bucket_limits`, counted for each kind by itself.
        order: indices in the expected order of readiness; each index once.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    held: dict[Hashable, int] = {}
    closed: dict[Hashable, int] = {}
    finished: list[tuple[int, list[int]]] = []
    last_taken: dict[Hashable, int] = {}
    for position, index in enumerate(order):
        kind = kinds[index]
        open_buckets.setdefault(kind, []).append(index)
        held[kind] = held.get(kind, 0) + sizes[index]
        last_taken[kind] = position
        count = closed.get(kind, 0)
        if held[kind] >= limits[min(count, len(limits) - 1)]:
            finished.append((position, open_buckets.pop(kind)))
            held[kind] = 0
            closed[kind] = count + 1
    finished += [(last_taken[kind], bucket) for kind, bucket in open_buckets.items()]
    return [bucket for _, bucket in sorted(finished)]


class BucketState(enum.Enum):
    """Where a bucket stands within one backward pass."""

    FILLING = "filling"
    """Some of its gradients are not there yet."""
    READY = "ready"
    """All its gradients are there; buckets before it may still be filling."""
    LAUNCHED = "launched"
    """Its reduction was issued; its memory must not be touched."""
    DONE = "done"
    """The averages are there."""


class Bucket:
    """Gradients that are reduced together, through one backward pass after another.

    Most are copied to their views of a flat buffer. Large ones may be reduced in place, where autograd put
    them, as messages of their own: copying them would cost more than another message.

    Attributes:
        flat: what one all-reduce averages: the buffer, complex numbers as pairs of real ones, and the tail.
        buffer: the gradients that are not reduced in place.
        tail: the elements of the last bucket by which ranks signal each other; ``None`` in others.
        forms: the form of each gradient: a tensor in its shape and strides.
        views: the bucket view of each gradient, in its form; ``None`` for those that are reduced in place.
        in_place_tensors: flat tensors that are reduced besides :attr:`flat` in this pass.
        skipped: whether the gradients are left out of this pass.
        left_out: indices of single gradients that are.

    Args:
        index: place in the order of launch.
        indices: indices of the parameters, in the order of their gradients.
        parameters: those parameters; on one device.
        forms: the forms of their gradients.
        dtype: data type of the buffer.
        device: device of the parameters.
        in_place: indices of the parameters whose gradients are reduced where they are.
        tail: number of elements after the gradients.
    """

    __slots__ = (
        "buffer", "flat", "forms", "future", "in_place", "in_place_tensors", "index", "indices", "left_out",
        "parameters", "parts", "pending", "skipped", "state", "tail", "views", "work",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        indices: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        forms: Sequence[torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        in_place: Collection[int] = (),
        tail: int = 0,
    ) -> None:
        self.index = index
        self.indices = list(indices)
        self.parameters = list(parameters)
        self.forms = list(forms)
        self.in_place = [i for i in self.indices if i in in_place]
        copied = [form for i, form in zip(self.indices, self.forms, strict=True) if i not in in_place]
        numel = sum(form.numel() for form in copied)
        width = 2 if dtype.is_complex else 1
        self.flat = torch.zeros(numel * width + tail, dtype=dtype.to_real(), device=device)
        values = self.flat[: numel * width]
        self.buffer = torch.view_as_complex(values.view(numel, 2)) if dtype.is_complex else values
        self.tail = self.flat[numel * width :] if tail else None
        places = iter(layout(copied, self.buffer))
        self.views = [None if i in in_place else next(places) for i in self.indices]
        self.in_place_tensors: list[torch.Tensor] = []
        self.work: Work | None = None
        self.future: Future[torch.Tensor] | None = None
        self.reset()

    @property
    def nbytes(self) -> int:
        """Size of the gradients."""
        sizes = (form.numel() for i, form in zip(self.indices, self.forms, strict=True) if i in self.in_place)
        return (self.buffer.numel() + sum(sizes)) * self.buffer.element_size()

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is reduced, tensors of real numbers."""
        if self.skipped:
            return [] if self.tail is None else [self.tail]
        if self.left_out:
            return [*self.parts, *self.in_place_tensors]
        return (
            [self.flat, *self.in_place_tensors]
            if self.flat.numel() or not self.in_place_tensors
            else self.in_place_tensors
        )

    def reset(self) -> None:
        """Begins a pass: every gradient is pending."""
        self.pending = len(self.indices)
        self.state = BucketState.FILLING
        self.skipped = False
        self.left_out: frozenset[int] = frozenset()
        self.parts: list[torch.Tensor] = []
        self.in_place_tensors = []
        self.work = None
        self.future = None

    def skip(self) -> None:
        """Leaves the gradients out of this pass; a tail is sent all the same."""
        self.pending = 0
        self.skipped = True
        self.state = BucketState.READY

    def leave_out(self, unused: Collection[int], least_bytes: int) -> None:
        """Leaves unused gradients out of this pass where that saves more than another message costs.

        Gradients in place are messages of their own. In the buffer a gap makes two messages of one, so that
        small gaps are sent, too; what is sent of them is up to the caller.

        Args:
            unused: indices of parameters, some of which have gradients elsewhere; not all of this bucket's.
            least_bytes: size from which a gap pays.
        """
        left = [index for index in self.in_place if index in unused]
        width = self.flat.numel() - (0 if self.tail is None else self.tail.numel())
        ends: list[tuple[int, int]] = []  # of what is sent of the flat tensor
        offset = 0
        copied = [(i, view) for i, view in zip(self.indices, self.views, strict=True) if view is not None]
        for is_unused, members in groupby(copied, key=lambda pair: pair[0] in unused):
            run = list(members)
            end = offset + sum(view.numel() for _, view in run) * (2 if self.buffer.is_complex() else 1)
            if is_unused and (end - offset) * self.flat.element_size() >= least_bytes:
                left += [index for index, _ in run]
            else:
                ends.append((offset, end))
            offset = end
        ends.append((width, self.flat.numel()))
        if left:
            self.left_out = frozenset(left)
            self.parts = [self.flat[begin:end] for begin, end in _joined(ends)]
            self.pending -= len(left)

    def mark_ready(self) -> bool:
        """Counts one more gradient as there; returns whether it was the last one missing."""
        self.pending -= 1
        if self.pending:
            return False
        self.state = BucketState.READY
        return True

    def mark_launched(self, work: Work | None = None, future: Future[torch.Tensor] | None = None) -> None:
        """Takes note of what ends the reduction."""
        self.work = work
        self.future = future
        self.state = BucketState.LAUNCHED

    def wait(self) -> None:
        """Blocks until the averages are in the buffer.

        Raises:
            Exception: what the reduction or the communication hook failed with.
        """
        if self.work is not None:
            self.work.wait()
        elif self.future is not None:
            self._copy_result(self.future.wait())
        self.state = BucketState.DONE

    def _copy_result(self, result: object) -> None:
        """Copies what a communication hook's future holds into the buffer."""
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"the communication hook's future of bucket {self.index} must hold one tensor, "
                f"but holds a value of type {type(result).__name__}"
            )
        if result.shape != self.buffer.shape:
            raise ValueError(
                f"the communication hook's future of bucket {self.index} must hold a tensor of the bucket's "
                f"shape {list(self.buffer.shape)}, but its shape is {list(result.shape)}"
            )
        if result.dtype is not self.buffer.dtype or result.device != self.buffer.device:
            raise ValueError(
                f"the communication hook's future of bucket {self.index} must hold a tensor of "
                f"{self.buffer.dtype} on {self.buffer.device}, as the bucket's, but its tensor is of "
                f"{result.dtype} on {result.device}"
            )
        if not result.is_set_to(self.buffer):
            self.buffer.copy_(result)

    def __repr__(self) -> str:
        return (
            f"<Bucket {self.index} {self.state.value}, {len(self.indices)} gradients, {self.pending} pending>"
        )


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns spans in ascending order with those that touch made one, without empty ones."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return [(begin, end) for begin, end in joined if begin < end]


def layout(parameters: Iterable[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns views of ``flat``: one for each parameter, in its shape and strides, in order."""
    views = []
    offset = flat.storage_offset()
    for parameter in parameters:
        views.append(flat.as_strided(parameter.shape, strides_of(parameter), offset))
        offset += parameter.numel()
    return views


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd gives to a gradient: the parameter's where it has no gaps."""
    return parameter.stride() if _fills_its_memory(parameter) else _row_major(parameter.shape)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the elements take up one run of memory without gaps, in any order (channels_last)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
