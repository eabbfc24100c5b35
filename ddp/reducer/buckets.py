"""Buckets: which gradients are reduced together, how they lie there, and their state in a backward pass.

A bucket is a flat tensor in which gradients lie one after the other, so that one all-reduce averages them all
(PyTorch Distributed, VLDB 2020, section 3.2.2). What a program puts in the place of ``.grad``, or of its
memory, is averaged: nothing here takes a gradient to be where the last pass left it.

Most gradients are copied to their bucket views: large ones as they come, while they are in cache and so that
their own memory can go, the others together when their bucket is full. The largest are reduced in place,
without a copy, where nothing else shares their memory. On a device, where a launch costs more than a copy,
all are copied when their bucket is full, so that each bucket is one all-reduce.

After the first pass the buckets follow the order in which gradients come. Each rank traces that. The ranks
agree by Borda's count: each gives every parameter its place in its own trace, and the parameters are sorted
by the sum of their places, so that a bucket holds gradients that come at about the same time on all ranks
(section 6.2.1, "Gradient Order Prediction"). They agree again where the order changes for good: a rank whose
trace has been another one for several passes requests it. After each agreement it waits for twice as many, so
that a model whose order changes again and again does not make the ranks agree again and again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch.futures import Future

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, Work
from collectives.ddp.module.arguments import Settings
from collectives.ddp.reducer.averaging import launches
from collectives.dynamo import Uncompiled

IN_PLACE_BYTES = 256 * 1024
"""Gradients of so many bytes or more are reduced in place where they can be, else copied as they come."""

_FIRST_PATIENCE = 3
"""For so many passes a new order must hold before it is taken to be one for good."""

_SUM = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.SUM)
_ADDRESS = torch.Tensor.data_ptr


# ---- which gradients share a bucket ------------------------------------------------------------------------


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


def complete_trace(ready_order: Iterable[int], before: Sequence[int]) -> list[int]:
    """Returns the order of all parameters in a pass; unused ones come last.

    A bucket is launched when it is full and all before it are, and what is unused is known at the end of the
    pass only. So the buckets of unused parameters come behind all others, which are launched as they fill.

    Args:
        ready_order: indices of parameters in the order in which their gradients came; the last time counts.
        before: an order of all parameters, which unused ones keep among each other.
    """
    present = list(reversed(dict.fromkeys(reversed(list(ready_order)))))
    there = set(present)
    return present + [index for index in before if index not in there]


def agree_on_order(group: ProcessGroup, trace: Sequence[int], device: torch.device) -> list[int]:
    """Returns the order that the ranks' traces lead to; called by all of them. Blocks.

    Args:
        group: the ranks.
        trace: this rank's trace.
        device: device of tensors that the group takes.
    """
    places = torch.tensor(trace, dtype=torch.int64).argsort().tolist()  # of each index
    sums = torch.tensor(places, dtype=torch.int64, device=device)
    group.allreduce([sums], _SUM).wait()
    total = group.to_host(sums).tolist()
    return sorted(range(len(trace)), key=lambda index: (total[index], -index))


class OrderTrace:
    """The traces of one rank, pass by pass.

    Attributes:
        latest: the trace of the last pass.
        requests_relayout: whether the order has changed for good since the ranks agreed.

    Args:
        before: the order in which gradients are expected before the first pass.
    """

    def __init__(self, before: Iterable[int]) -> None:
        self.latest = list(before)
        self.requests_relayout = False
        self._ready_order: Sequence[int] = ()
        self._agreed: tuple[list[int], Sequence[int]] | None = None
        self._held = 0
        self._patience = _FIRST_PATIENCE

    def note(self, ready_order: Sequence[int]) -> None:
        """Takes in the order in which gradients came in a pass that ended well."""
        if self._agreed is not None and ready_order == self._agreed[1]:  # the usual case, quickly
            self.latest, self._ready_order = self._agreed
            self.requests_relayout = False
            return
        trace = complete_trace(ready_order, self.latest)
        self._held = self._held + 1 if trace == self.latest else 1
        self.latest, self._ready_order = trace, ready_order
        self.requests_relayout = (
            self._agreed is not None and trace != self._agreed[0] and self._held >= self._patience
        )

    def agree(self, group: ProcessGroup | None, device: torch.device) -> list[int]:
        """Returns the order that the ranks' latest traces lead to; called by all of them. Blocks.

        Args:
            group: the ranks; ``None`` for this one's trace alone.
            device: device of tensors that the group takes.
        """
        order = self.latest if group is None else agree_on_order(group, self.latest, device)
        if self._agreed is not None:
            self._patience *= 2
        self._agreed = self.latest, self._ready_order
        self.requests_relayout = False
        return order


# ---- the memory of gradients -------------------------------------------------------------------------------


def layout(parameters: Iterable[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns views of ``flat``: one for each parameter, in its shape and strides, in order."""
    views = []
    offset = flat.storage_offset()
    for parameter in parameters:
        views.append(flat.as_strided(parameter.shape, strides_of(parameter), offset))
        offset += parameter.numel()
    return views


def flat_by_kind(
    tensors: Iterable[torch.Tensor],
) -> list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
    """Returns for each device and data type an empty flat tensor, those that belong there, their places."""
    kinds: dict[Hashable, list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    flats = [alike[0].new_empty(sum(tensor.numel() for tensor in alike)) for alike in kinds.values()]
    return [(flat, alike, layout(alike, flat)) for flat, alike in zip(flats, kinds.values(), strict=True)]


def strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that autograd gives to a gradient: the parameter's where it has no gaps."""
    like = torch.empty_like(parameter, device="meta")  # which has the same then
    if like.stride() != parameter.stride():
        like = like.new_empty(like.shape)
    return like.stride()


_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _uses(tensor: torch.Tensor) -> int:
    return _count(tensor.untyped_storage()._cdata) if _count is not None else 2**31


_ALONE = _uses(torch.empty(1))
"""How often a storage is counted that one tensor uses; torch's releases differ."""


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


# ---- gradients and buckets ---------------------------------------------------------------------------------


class Gradient:
    """The gradient of one parameter, and its place in a bucket.

    Attributes:
        index: place of the parameter in the model.
        name: name of the parameter.
        parameter: the parameter.
        form: tensor without memory in the shape, strides and data type of the gradient, as the ranks have
            agreed on them; the parameter may be given others later.
        device: device of the parameter.
        view: its place in a bucket; ``None`` where it is sparse or reduced in place.
        handed_out: what ``.grad`` becomes where that is the place; programs may move it elsewhere.
        comes_early: whether it is copied as it comes, and not when the bucket is full.

    Args:
        index: see above.
        name: see above.
        parameter: see above.
        places: addresses of all places in buckets that were handed out.
    """

    __slots__ = (
        "_dtype", "comes_early", "device", "form", "handed_out", "index", "name",
        "parameter",
        "places", "view",
    )  # fmt: skip

    def __init__(self, index: int, name: str, parameter: torch.nn.Parameter, places: set[int]) -> None:
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # since torch 2.10 they may differ
        self.index = index
        self.name = name
        self.parameter = parameter
        self.form = torch.empty_strided(parameter.shape, strides_of(parameter), dtype=dtype, device="meta")
        self.device = parameter.device
        self._dtype = parameter.dtype
        self.places = places
        self.leave()

    def leave(self) -> None:
        """Takes the gradient out of its bucket."""
        self.view: torch.Tensor | None = None
        self.handed_out: torch.Tensor | None = None
        self.comes_early = False

    def hand_out(self) -> None:
        """Makes ``.grad`` the place in the bucket, where that is handed out.

        Raises:
            RuntimeError: the parameter is elsewhere now.
        """
        view, handed_out, parameter = self.view, self.handed_out, self.parameter
        if view is None or handed_out is None:
            return
        if not handed_out.is_set_to(view):
            handed_out = self.handed_out = view.view_as(view)
        if parameter.numel() != view.numel() or parameter.dtype is not self._dtype:
            return  # which all ranks are told of
        try:
            parameter.grad = handed_out
        except RuntimeError as error:
            raise RuntimeError(self.what_is_bad(handed_out, error)) from error

    def copy_early(self) -> str:
        """Copies a gradient that just came to its place; returns in words what is bad."""
        grad, view, handed_out = self.parameter.grad, self.view, self.handed_out
        if view is None or (handed_out is not None and handed_out is grad and grad.is_set_to(view)):
            return ""
        if bad := self.copy(grad, view):
            return bad
        try:
            self.hand_out()
        except RuntimeError as error:
            return str(error)
        return ""

    def copy(self, grad: torch.Tensor | None, place: torch.Tensor) -> str:
        """Copies what stands in ``.grad``, which may be anywhere, to a place; returns in words what is bad.

        That is that there is none, or it does not fit, or it lies where another one belongs.
        """
        try:
            if grad is not None and self.lies_at_some_place([grad]) and not lies_at(grad, place):
                raise ValueError(
                    "it lies where the gradient of another parameter belongs, or in another shape than its "
                    "own; assign a copy, as p.grad = q.grad.clone()"
                )
            place.copy_(grad)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - all ranks are told
            return self.what_is_bad(grad, error)
        return ""

    def lies_at_some_place(self, grads: Iterable[torch.Tensor]) -> bool:
        """Returns whether one of some gradients lies at a place of the buckets that was handed out."""
        return bool(self.places) and not self.places.isdisjoint(map(_ADDRESS, grads))

    def what_is_bad(self, grad: torch.Tensor | None, error: Exception | None) -> str:
        """Returns in words why the gradient cannot be averaged."""
        if grad is None:
            return f"the gradient of {self.name} was taken away before it was averaged"
        if grad.layout is not torch.strided:
            return (
                f"the gradient of {self.name} has layout {grad.layout}, which is only averaged for the "
                "weights of Embedding and EmbeddingBag layers that had sparse=True when they were wrapped; "
                "make the layer produce dense gradients, or use one of those"
            )
        return f"the gradient of {self.name} could not be put into its bucket: {error}"


class Bucket:
    """Gradients that are reduced together, through one backward pass after another.

    Most are copied to their views of a flat buffer. Large ones may be reduced in place, where autograd put
    them, as messages of their own: copying them would cost more than another message.

    Attributes:
        gradients: the gradients, in their order.
        indices: indices of their parameters.
        flat: what one all-reduce averages: the buffer, complex numbers as pairs of real ones, and the tail.
        buffer: the gradients that are not reduced in place.
        tail: the elements of the last bucket by which ranks signal each other; ``None`` in others.
        in_place: flat tensors that are reduced besides :attr:`flat` in this pass.
        skipped: whether the gradients are left out of this pass.
        left_out: indices of single gradients that are.
        pending: number of gradients that are not there yet.
        work: what ends the reduction, where the group reduces; its memory must not be touched before.
        future: what ends it, where a communication hook does.
        done: whether that was waited for.

    Args:
        index: place in the order of launch.
        gradients: the gradients; on one device.
        dtype: data type of the buffer.
        device: device of the parameters.
        in_place: indices of the parameters whose gradients are reduced where they are.
        tail: number of elements after the gradients.
    """

    __slots__ = (
        "_alone", "_parts", "_reduced", "_saved", "_zeroed", "buffer", "done", "flat", "future", "gradients",
        "in_place", "index", "indices", "left_out", "pending", "skipped", "tail", "work",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        gradients: Sequence[Gradient],
        *,
        dtype: torch.dtype,
        device: torch.device,
        in_place: Collection[int] = (),
        tail: int = 0,
    ) -> None:
        self.index = index
        self.gradients = list(gradients)
        self.indices = [gradient.index for gradient in gradients]
        self._alone = [gradient for gradient in gradients if gradient.index in in_place]
        copied = [gradient for gradient in gradients if gradient.index not in in_place]
        numel = sum(gradient.form.numel() for gradient in copied)
        width = 2 if dtype.is_complex else 1
        self.flat = torch.zeros(numel * width + tail, dtype=dtype.to_real(), device=device)
        values = self.flat[: numel * width]
        self.buffer = torch.view_as_complex(values.view(numel, 2)) if dtype.is_complex else values
        self.tail = self.flat[numel * width :] if tail else None
        places = layout([gradient.form for gradient in copied], self.buffer)
        for gradient, view in zip(copied, places, strict=True):
            gradient.view = view
        self._saved: dict[int, torch.Tensor] = {}
        self._reduced: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._zeroed: set[int] = set()
        self.reset()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of the gradients."""
        return [gradient.parameter for gradient in self.gradients]

    @property
    def names(self) -> list[str]:
        """The parameters' names, in the order of the gradients."""
        return [gradient.name for gradient in self.gradients]

    @property
    def nbytes(self) -> int:
        """Size of the gradients."""
        alone = sum(gradient.form.numel() for gradient in self._alone)
        return (self.buffer.numel() + alone) * self.buffer.element_size()

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is reduced, tensors of real numbers."""
        if self.skipped:
            return [] if self.tail is None else [self.tail]
        if self.left_out:
            return [*self._parts, *self.in_place]
        return [self.flat, *self.in_place] if self.flat.numel() or not self.in_place else self.in_place

    def reset(self) -> None:
        """Begins a pass: every gradient is pending."""
        self.pending = len(self.indices)
        self.skipped = False
        self.left_out: frozenset[int] = frozenset()
        self._parts: list[torch.Tensor] = []
        self.in_place: list[torch.Tensor] = []
        self._saved.clear()
        self._reduced.clear()
        self._zeroed.clear()
        self.work: Work | None = None
        self.future: Future[torch.Tensor] | None = None
        self.done = False

    # ---- into the bucket ---------------------------------------------------------------------------------

    def skip(self) -> None:
        """Leaves the gradients out of this pass; a tail is sent all the same."""
        self.pending = 0
        self.skipped = True

    def leave_out(self, unused: Collection[int], least_bytes: int) -> None:
        """Leaves unused gradients out of this pass where that saves more than another message costs.

        Gradients in place are messages of their own. In the buffer a gap makes two messages of one, so that
        small gaps are sent, too; what is sent of them is up to the caller.

        Args:
            unused: indices of parameters, some of which have gradients elsewhere; not all of this bucket's.
            least_bytes: size from which a gap pays.
        """
        left = [gradient.index for gradient in self._alone if gradient.index in unused]
        width = self.flat.numel() - (0 if self.tail is None else self.tail.numel())
        ends: list[tuple[int, int]] = []  # of what is sent of the flat tensor
        offset = 0
        copied = [gradient for gradient in self.gradients if gradient.view is not None]
        for is_unused, members in groupby(copied, key=lambda gradient: gradient.index in unused):
            run = list(members)
            numel = sum(gradient.form.numel() for gradient in run)
            end = offset + numel * (2 if self.buffer.is_complex() else 1)
            if is_unused and (end - offset) * self.flat.element_size() >= least_bytes:
                left += [gradient.index for gradient in run]
            else:
                ends.append((offset, end))
            offset = end
        ends.append((width, self.flat.numel()))
        if left:
            self.left_out = frozenset(left)
            self._parts = [self.flat[begin:end] for begin, end in _joined(ends)]
            self.pending -= len(left)

    def mark_ready(self) -> bool:
        """Counts one more gradient as there; returns whether it was the last one missing."""
        self.pending -= 1
        return not self.pending

    def fill(self, unused: Collection[int]) -> list[str]:
        """Copies what is left of the gradients before the reduction; what is bad is sent as zeros.

        Args:
            unused: indices of the parameters for which :meth:`fill_unused` was called.

        Returns:
            What is bad, in words.
        """
        bad: list[str] = []
        self.in_place = [
            self._reduced_in_place(gradient, unused, bad)
            for gradient in self._alone
            if gradient.index not in self.left_out
        ]
        copied: list[Gradient] = []
        views, grads = [], []
        for gradient in self.gradients:
            view = gradient.view
            if view is None or gradient.comes_early or gradient.index in unused:
                continue
            grad = gradient.parameter.grad
            if grad is None or grad.layout is not torch.strided:
                bad.append(gradient.what_is_bad(grad, None))
                continue
            if gradient.handed_out is grad and grad.is_set_to(view):
                continue
            copied.append(gradient)
            views.append(view)
            grads.append(grad)
        if not views:
            return bad
        try:
            one_by_one = copied[0].lies_at_some_place(grads)
            if not one_by_one:
                torch._foreach_copy_(views, grads)
        except Exception:  # noqa: BLE001 - found out which one below
            one_by_one = True
        for gradient, grad, view in (
            zip(copied, grads, views, strict=True) if one_by_one or copied[0].places else ()
        ):
            if one_by_one and (words := gradient.copy(grad, view)):
                bad.append(words)
            elif gradient.handed_out is not None:
                try:
                    gradient.hand_out()
                except RuntimeError as error:
                    bad.append(str(error))
        return bad

    def _reduced_in_place(self, gradient: Gradient, unused: Collection[int], bad: list[str]) -> torch.Tensor:
        """Returns what is reduced for a gradient in place: itself, or a copy where it must not be touched."""
        index, form, grad = gradient.index, gradient.form, gradient.parameter.grad
        copied: torch.Tensor | None = None
        if grad is not None and index not in unused and is_unshared(grad, form, gradient.device):
            reduced = flat(grad)
        else:
            copied = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=gradient.device)
            if index in unused and (grad is None or index in self._zeroed):
                copied.zero_()
            elif words := gradient.copy(grad, copied):
                copied.zero_()
                bad.append(words)
            reduced = flat(copied)
        self._reduced[index] = reduced, copied
        return reduced

    def fill_unused(self, gradient: Gradient, *, zeros_only: bool = False) -> str:
        """Contributes for an unused parameter: what was accumulated in ``.grad`` before, else zeros.

        Args:
            gradient: its gradient.
            zeros_only: whether it is zeros in any case.

        Returns:
            What is bad, in words.
        """
        if zeros_only:
            self._zeroed.add(gradient.index)
        view = gradient.view
        if view is None:
            return ""  # fill() makes a copy
        grad = gradient.parameter.grad
        if lies_at(grad, view):
            self._saved[gradient.index] = view.clone()
        if grad is None or zeros_only:
            view.zero_()
            return ""
        return gradient.copy(grad, view)

    def fill_with_zeros(self) -> None:
        """Makes the bucket one of zeros, which leaves every ``.grad`` alone."""
        self.flat.zero_()
        self.in_place = [
            self.flat.new_zeros(gradient.form.numel() * (2 if gradient.form.is_complex() else 1))
            for gradient in self._alone
            if gradient.index not in self.left_out
        ]

    def release_grads(self) -> None:
        """Gives parameters another ``.grad`` where it lies in the bucket, whose memory the peers still need.

        What peers have added by now may be in it.
        """
        for gradient in self.gradients:
            reduced = gradient.view
            if reduced is None:
                reduced = self._reduced.get(gradient.index, (None, None))[0]
            if (grad := gradient.parameter.grad) is not None and starts_at(grad, reduced):
                gradient.parameter.grad = grad.clone()

    # ---- reduced -----------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Blocks until the averages are in the buffer; the first time only.

        Raises:
            Exception: what the reduction or the communication hook failed with.
        """
        if self.done:
            return
        self.done = True
        if self.work is not None:
            self.work.wait()
        elif self.future is not None:
            self._copy_result(self.future.wait())

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

    def finalize(self, unused: Collection[int]) -> None:
        """Writes the averages to ``.grad``, but for those of unused parameters.

        Raises:
            RuntimeError: a parameter has moved elsewhere since its gradient came.
        """
        averages, grads, moved = [], [], []
        for gradient in self.gradients:
            if gradient.index in unused:
                continue
            parameter, average, handed_out = gradient.parameter, gradient.view, gradient.handed_out
            grad = parameter.grad
            if average is None:
                reduced, average = self._reduced[gradient.index]
                if average is None:
                    moved.append(reduced)
                    if not starts_at(grad, reduced):
                        parameter.grad = shaped(reduced, gradient.form)
                    continue
            elif handed_out is not None:
                if grad is not handed_out or not handed_out.is_set_to(average):
                    gradient.hand_out()
                continue
            if grad is None:
                parameter.grad = average.to(gradient.form.dtype, copy=True)
            else:
                averages.append(average)
                grads.append(grad)
        if averages:
            torch._foreach_copy_(grads, averages)
        if moved:
            torch.autograd.graph.increment_version(moved)

    def finalize_unused(self, gradient: Gradient, *, used: bool) -> None:
        """Writes the average of a parameter that this rank left unused, or leaves ``.grad`` as it was.

        Args:
            gradient: its gradient.
            used: whether another rank, or an earlier pass under ``no_sync``, gave it one.
        """
        parameter, index = gradient.parameter, gradient.index
        # What is unused is never reduced in place.
        average = self._reduced[index][1] if gradient.view is None and used else gradient.view
        if not used:
            if index in self._saved and average is not None:
                average.copy_(self._saved[index])
        elif gradient.handed_out is not None:
            gradient.hand_out()
        elif average is not None and parameter.grad is None:
            parameter.grad = average.to(gradient.form.dtype, copy=True)
        elif average is not None and parameter.grad is not None:
            parameter.grad.copy_(average)


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns spans in ascending order with those that touch made one, without empty ones."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return [(begin, end) for begin, end in joined if begin < end]


class Gradients(Sequence[Gradient]):
    """The gradients of some parameters, by index, and the buckets that they lie in.

    Attributes:
        buckets: the buckets, in the order of their reduction; the last one has a tail.
        bucket_of: the bucket of each parameter.
        sparse: indices of the parameters with sparse gradients, which lie in no bucket.

    Args:
        settings: of the model.
        tail: number of elements of the last bucket's tail.
    """

    def __init__(self, settings: Settings, tail: int) -> None:
        self._places: set[int] = set()
        self._all = [Gradient(i, *item, self._places) for i, item in enumerate(settings.parameters.items())]
        self._settings = settings
        self._tail = tail
        self._batched = settings.batched or launches(settings.group, settings.device)
        self._copies_all = settings.as_views or self._batched
        self.sparse = sorted(settings.sparse)
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self.rebuild_buckets(range(len(self._all) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, by index."""
        return [gradient.parameter for gradient in self._all]

    def reset(self) -> None:
        """Begins or ends a pass."""
        for bucket in self.buckets:
            bucket.reset()

    def copy_all(self) -> None:
        """Reduces no gradient in place from now on, for a communication hook, which takes a flat buffer."""
        self._copies_all = True
        self.renew_buckets()

    def set_tail(self, size: int) -> None:
        """Gives the last bucket a tail of another size."""
        self._tail = size
        self.renew_buckets()

    def renew_buckets(self) -> None:
        """Takes other memory for the buckets, laid out as before."""
        self._make_buckets([bucket.indices for bucket in self.buckets])

    def rebuild_buckets(self, order: Iterable[int]) -> bool:
        """Makes the buckets for gradients that come in ``order``; gradients that lie in the old ones move.

        Returns:
            Whether that changed anything.
        """
        kinds = [(gradient.device, self._dtype(gradient)) for gradient in self._all]
        sizes = [g.form.numel() * dtype.itemsize for g, (_, dtype) in zip(self._all, kinds, strict=True)]
        order = [index for index in order if index not in self.sparse]
        plan = assign_buckets(sizes, kinds, self._settings.limits, order)
        if self.buckets and plan == [bucket.indices for bucket in self.buckets]:
            return False
        self._make_buckets(plan)
        return True

    def _dtype(self, gradient: Gradient) -> torch.dtype:
        """Returns the data type of a gradient in its bucket."""
        dtype = gradient.form.dtype
        return (self._settings.reduce_dtype or dtype) if dtype.is_floating_point else dtype

    @torch.no_grad()
    def _make_buckets(self, plan: Sequence[Sequence[int]]) -> None:
        # Old buckets that no gradient lies in go before the new ones come: both at once may be the peak.
        moving: dict[int, torch.Tensor] = {}
        for gradient in self._all:
            view = gradient.view if gradient.handed_out is not None else None
            if view is not None and lies_at(gradient.parameter.grad, view):
                moving[gradient.index] = view
            gradient.leave()
        view = None
        self.buckets, self.bucket_of = [], {}
        self._places.clear()
        large = {gradient.index for gradient in self._all if gradient.form.nbytes >= IN_PLACE_BYTES}
        in_place: set[int] = set()
        if not self._copies_all:
            in_place = {i for i in large if self._dtype(self._all[i]) is self._all[i].form.dtype}
        early = set() if self._batched else large - in_place
        last = len(plan) - 1
        for place, indices in enumerate(plan or [()]):
            gradients = [self._all[index] for index in indices]
            bucket = Bucket(
                place,
                gradients,
                dtype=self._dtype(gradients[0]) if gradients else torch.float32,
                device=gradients[0].device if gradients else self._settings.device,
                in_place=in_place,
                tail=self._tail if place >= last else 0,
            )
            self.buckets.append(bucket)
            for gradient in gradients:
                view, index = gradient.view, gradient.index
                self.bucket_of[index] = bucket
                gradient.comes_early = index in early
                if view is None:
                    continue
                if self._settings.as_views and view.dtype is gradient.form.dtype:
                    gradient.handed_out = view.view_as(view)
                    if view.numel():
                        self._places.add(view.data_ptr())
                if index in moving:  # an old bucket is free with the last gradient that leaves it
                    view.copy_(moving.pop(index))
                    with contextlib.suppress(RuntimeError):  # the next pass tells
                        gradient.hand_out()

    def leave_out(self, unused: frozenset[int], *, singly: bool) -> frozenset[int]:
        """Leaves unused gradients out of a pass: whole buckets, and where that pays single ones.

        Args:
            unused: indices of parameters that get no gradient on any rank.
            singly: whether single ones may be left out.

        Returns:
            Those that are left out: not filled, not sent and not averaged.
        """
        skipped: set[int] = set()
        for bucket in self.buckets if unused else ():
            if bucket.indices and unused.issuperset(bucket.indices):
                bucket.skip()
                skipped.update(bucket.indices)
            elif singly and not unused.isdisjoint(bucket.indices):
                bucket.leave_out(unused, IN_PLACE_BYTES)
                skipped |= bucket.left_out
        return frozenset(skipped)

    def layouts(self) -> list[BucketLayout]:
        """Returns what lies in the buckets."""
        return [
            BucketLayout(bucket.index, tuple(bucket.names), tuple(bucket.parameters))
            for bucket in self.buckets
            if bucket.indices
        ]


# ---- what communication hooks see --------------------------------------------------------------------------


@dataclass(frozen=True)
class BucketLayout:
    """What lies in a bucket, as told to a communication hook when the buckets are laid out again.

    The state of the hook, or the hook itself, may have a method ``buckets_rebuilt(before, after)``, which
    gets the layouts of all buckets, in order. It is called on all ranks between two passes, and can carry
    over to the new buckets what it keeps for the old ones.

    Attributes:
        index: the bucket's place in the order of reduction.
        names: names of its parameters within the wrapped module, in the order of their gradients.
        parameters: those parameters.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]


class GradBucket(Uncompiled):
    """The gradients of one bucket, ready to be reduced, as the communication hook gets them.

    Methods are those of ``torch.distributed.GradBucket``, and :meth:`names`. Buckets are laid out again after
    the first backward pass, and where the order of the gradients changes for good, so that :meth:`index` then
    means other parameters; see :class:`BucketLayout`.

    Args:
        bucket: the bucket.
        last: whether it is the last one of the backward pass.
    """

    __slots__ = ("_bucket", "_buffer", "_last")

    def __init__(self, bucket: Bucket, *, last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.buffer.view_as(bucket.buffer)  # the hook may give it other memory
        self._last = last

    def index(self) -> int:
        """Returns the bucket's place in the order of reduction, from zero."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Returns the flat tensor of all gradients, not divided by the number of ranks; it may be written."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the flat tensor, for a hook that this one calls.

        Args:
            buffer: as many elements as the bucket has, of any data type; aliased, not copied.

        Raises:
            TypeError: ``buffer`` is no tensor.
            ValueError: its number of elements is not the bucket's.
        """
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"buffer must be a tensor, but is of type {type(buffer).__name__}")
        if buffer.numel() != self._bucket.buffer.numel():
            raise ValueError(
                f"buffer has {buffer.numel()} elements, but bucket {self.index()} has "
                f"{self._bucket.buffer.numel()}"
            )
        self._buffer = buffer.reshape(-1)

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradient of each parameter, in its shape, as a view of :meth:`buffer`."""
        return layout([gradient.form for gradient in self._bucket.gradients], self._buffer)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the parameters, in the order of :meth:`gradients`."""
        return self._bucket.parameters

    def names(self) -> list[str]:
        """Returns the parameters' names within the wrapped module, in the order of :meth:`gradients`."""
        return self._bucket.names

    def is_last(self) -> bool:
        """Returns whether this is the last bucket of the backward pass, that of the first layers."""
        return self._last

    def __repr__(self) -> str:
        return f"<GradBucket {self.index()}: {', '.join(self.names())}>"


Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
"""A communication hook: takes its state and a full bucket, returns a future of the averaged flat tensor."""
