"""Copies gradients from ``.grad`` to the buckets, and averages back.

What a program puts in the place of ``.grad``, or of its memory, is averaged: nothing here takes a gradient to
be where the last pass left it.

Most gradients are copied to their bucket views: large ones as they come, while they are in cache and so that
their own memory can go, the others together when their bucket is full. The largest are reduced in place,
without a copy, where nothing else shares their memory. On a device, where a launch costs more than a copy,
all are copied when their bucket is full, so that each bucket is one all-reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives.ddp.reducer.buckets import Bucket, assign_buckets
from collectives.ddp.reducer.gradient_memory import flat, form_of, is_unshared, lies_at, shaped, starts_at

__all__ = ["IN_PLACE_BYTES", "BadGradientError", "Gradients"]

IN_PLACE_BYTES = 256 * 1024
"""Gradients of so many bytes or more are reduced in place where they can be, else copied as they come."""


_ADDRESS = torch.Tensor.data_ptr


class BadGradientError(Exception):
    """A gradient that cannot be averaged; the message is a clause that names the parameter."""


class Gradients:
    """The gradients of some parameters and the buckets that they lie in.

    Attributes:
        names: names of the parameters, by index.
        parameters: the parameters, by index.
        forms: tensors without memory in the shape, strides and data type of each gradient, as the ranks have
            agreed on them; parameters may be given others later.
        sparse: indices of the parameters with sparse gradients, which lie in no bucket.
        buckets: the buckets, in the order of their reduction; the last one has a tail.
        bucket_of: each parameter's bucket.

    Args:
        parameters: parameters that need gradients, by name.
        limits: caps of the buckets in bytes, from :func:`~collectives.ddp.reducer.buckets.bucket_limits`.
        device: device of the tail where no gradient lies in a bucket.
        tail: number of elements of the last bucket's tail.
        as_views: whether ``.grad`` becomes the place in the bucket.
        batched: whether all gradients are copied, when their bucket is full.
        sparse: indices of the parameters with sparse gradients.
        reduce_dtype: data type that real floating gradients have in the buckets; ``None`` for their own.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        limits: Sequence[int],
        *,
        device: torch.device,
        tail: int,
        as_views: bool = False,
        batched: bool = False,
        sparse: Collection[int] = (),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.forms = [form_of(parameter) for parameter in self.parameters]
        self.limits = tuple(limits)
        self.sparse = sorted(sparse)
        self._devices = [parameter.device for parameter in self.parameters]
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self._device = device
        self._tail = tail
        self._as_views = as_views
        self._batched = batched
        self._copies_all = as_views or batched
        self._reduce_dtype = reduce_dtype
        self._saved: dict[int, torch.Tensor] = {}
        self._in_place: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._zeroed: set[int] = set()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._handed_out: dict[int, torch.Tensor] = {}  # what .grad becomes; programs may move them elsewhere
        self._addresses: frozenset[int] = frozenset()
        self._copied_as_they_come: frozenset[int] = frozenset()
        self.rebuild_buckets(range(len(self.parameters) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.parameters)

    # ---- layout ------------------------------------------------------------------------------------------

    def copy_all(self) -> None:
        """Reduces no gradient in place from now on, for a communication hook, which takes a flat buffer."""
        self._copies_all = True
        self._make_buckets([bucket.indices for bucket in self.buckets])

    def set_tail(self, size: int) -> None:
        """Gives the last bucket a tail of another size."""
        self._tail = size
        self._make_buckets([bucket.indices for bucket in self.buckets])

    def rebuild_buckets(self, order: Iterable[int]) -> bool:
        """Makes the buckets for gradients that come in ``order``; gradients that lie in the old ones move.

        Returns:
            Whether that changed anything.
        """
        order = [index for index in order if index not in self.sparse]
        kinds = [(device, self._dtype(form)) for device, form in zip(self._devices, self.forms, strict=True)]
        sizes = [form.numel() * dtype.itemsize for form, (_, dtype) in zip(self.forms, kinds, strict=True)]
        plan = assign_buckets(sizes, kinds, self.limits, order)
        if self.buckets and plan == [bucket.indices for bucket in self.buckets]:
            return False
        self._make_buckets(plan)
        return True

    def _dtype(self, form: torch.Tensor) -> torch.dtype:
        if self._reduce_dtype is not None and form.dtype.is_floating_point:
            return self._reduce_dtype
        return form.dtype

    @torch.no_grad()
    def _make_buckets(self, plan: Sequence[Sequence[int]]) -> None:
        # Old buckets that no gradient lies in go before the new ones come: both at once may be the peak.
        moving = {i: self._views[i] for i in self._handed_out if self._lies_in_bucket(i)}
        self._views, self._handed_out, self.bucket_of, self.buckets = {}, {}, {}, []
        self._in_place.clear()
        large = {i for i, form in enumerate(self.forms) if form.nbytes >= IN_PLACE_BYTES}
        in_place: set[int] = set()
        if not self._copies_all:
            in_place = {i for i in large if self._dtype(self.forms[i]) is self.forms[i].dtype}
        self._copied_as_they_come = (
            frozenset() if self._batched else frozenset(large - in_place).difference(self.sparse)
        )
        last = len(plan) - 1
        for place, indices in enumerate(plan or [()]):
            bucket = Bucket(
                place,
                indices,
                [self.parameters[index] for index in indices],
                [self.forms[index] for index in indices],
                dtype=self._dtype(self.forms[indices[0]]) if indices else torch.float32,
                device=self._devices[indices[0]] if indices else self._device,
                in_place=in_place,
                tail=self._tail if place >= last else 0,
            )
            self.buckets.append(bucket)
            for index, view in zip(indices, bucket.views, strict=True):
                self.bucket_of[index] = bucket
                if view is None:
                    continue
                self._views[index] = view
                if self._as_views and view.dtype is self.forms[index].dtype:
                    self._handed_out[index] = view.view_as(view)
                if index in moving:  # an old bucket is free with the last gradient that leaves it
                    view.copy_(moving.pop(index))
                    with contextlib.suppress(BadGradientError):  # the next pass tells
                        self._hand_out(index)
        self._addresses = frozenset(v.data_ptr() for v in self._handed_out.values() if v.numel())

    def _lies_in_bucket(self, index: int) -> bool:
        """Returns whether ``.grad`` is at its place in its bucket."""
        return lies_at(self.parameters[index].grad, self._views[index])

    def _hand_out(self, index: int) -> None:
        """Makes ``.grad`` the place in the bucket.

        Raises:
            BadGradientError: the parameter is elsewhere by now.
        """
        view, handed_out = self._views[index], self._handed_out[index]
        if not handed_out.is_set_to(view):
            handed_out = self._handed_out[index] = view.view_as(view)
        parameter = self.parameters[index]
        if parameter.numel() != view.numel() or parameter.dtype is not self._dtypes[index]:
            return  # which all ranks are told of
        try:
            parameter.grad = handed_out
        except RuntimeError as error:
            raise BadGradientError(self._what_is_bad(index, handed_out, error)) from error

    # ---- into the buckets --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begins or ends a pass."""
        self._saved.clear()
        self._in_place.clear()
        self._zeroed.clear()
        for bucket in self.buckets:
            bucket.reset()

    def copy_to_bucket(self, index: int) -> None:
        """Copies a gradient that just came to its bucket view, unless that is done when the bucket is full.

        Raises:
            BadGradientError: it cannot be averaged.
        """
        if index not in self._copied_as_they_come:
            return
        grad, view, handed_out = self.parameters[index].grad, self._views[index], self._handed_out.get(index)
        if handed_out is not None and handed_out is grad and grad.is_set_to(view):
            return
        self._copy(index, grad, view)
        if handed_out is not None:
            self._hand_out(index)

    def _copy(self, index: int, grad: torch.Tensor | None, place: torch.Tensor) -> None:
        """Copies a gradient that may be anywhere.

        Raises:
            BadGradientError: there is none, or it does not fit, or it lies where another one belongs.
        """
        try:
            if grad is not None and self._is_at_some_place([grad]) and not lies_at(grad, place):
                raise ValueError(
                    "it lies where the gradient of another parameter belongs, or in another shape than its "
                    "own; assign a copy, as p.grad = q.grad.clone()"
                )
            place.copy_(grad)  # type: ignore[arg-type]
        except Exception as error:
            raise BadGradientError(self._what_is_bad(index, grad, error)) from error

    def _is_at_some_place(self, grads: Iterable[torch.Tensor]) -> bool:
        """Returns whether one of some gradients lies at a place of the buckets that was handed out."""
        return bool(self._addresses) and not self._addresses.isdisjoint(map(_ADDRESS, grads))

    def fill_bucket(self, bucket: Bucket, unused: Collection[int]) -> list[str]:
        """Copies what is left of a bucket before its reduction; what is bad is sent as zeros.

        Args:
            bucket: the bucket.
            unused: indices of the parameters for which :meth:`fill_unused` was called.

        Returns:
            What is bad, in words.
        """
        bad: list[str] = []
        bucket.in_place_tensors = [
            self._in_place_tensor(index, unused, bad)
            for index in bucket.in_place
            if index not in bucket.left_out
        ]
        handed_out = self._handed_out
        indices, views, grads = [], [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            if view is None or index in unused or index in self._copied_as_they_come:
                continue
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided:
                bad.append(self._what_is_bad(index, grad, None))
                continue
            if handed_out and handed_out.get(index) is grad and grad.is_set_to(view):
                continue
            indices.append(index)
            views.append(view)
            grads.append(grad)
        if not views:
            return bad
        try:
            one_by_one = self._is_at_some_place(grads)
            if not one_by_one:
                torch._foreach_copy_(views, grads)
        except Exception:  # noqa: BLE001 - found out which one below
            one_by_one = True
        for index, grad, view in zip(indices, grads, views, strict=True) if one_by_one or handed_out else ():
            try:
                if one_by_one:
                    self._copy(index, grad, view)
                if index in handed_out:
                    self._hand_out(index)
            except BadGradientError as error:  # noqa: PERF203
                bad.append(str(error))
        return bad

    def _in_place_tensor(self, index: int, unused: Collection[int], bad: list[str]) -> torch.Tensor:
        """Returns what is reduced for a gradient in place: itself, or a copy where it must not be touched."""
        grad, form, device = self.parameters[index].grad, self.forms[index], self._devices[index]
        if grad is not None and index not in unused and is_unshared(grad, form, device):
            reduced = flat(grad)
            self._in_place[index] = reduced, None
            return reduced
        copied = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=device)
        try:
            if index in unused and (grad is None or index in self._zeroed):
                copied.zero_()
            else:
                self._copy(index, grad, copied)
        except BadGradientError as error:
            copied.zero_()
            bad.append(str(error))
        reduced = flat(copied)
        self._in_place[index] = reduced, copied
        return reduced

    def _what_is_bad(self, index: int, grad: torch.Tensor | None, error: Exception | None) -> str:
        name = self.names[index]
        if grad is None:
            return f"the gradient of {name} was taken away before it was averaged"
        if grad.layout is not torch.strided:
            return (
                f"the gradient of {name} has layout {grad.layout}, which is only averaged for the weights of "
                "Embedding and EmbeddingBag layers that had sparse=True when they were wrapped; make the "
                "layer produce dense gradients, or use one of those"
            )
        return f"the gradient of {name} could not be put into its bucket: {error}"

    def fill_unused(self, index: int, *, zeros_only: bool = False) -> None:
        """Contributes for an unused parameter: what was accumulated in ``.grad`` before, else zeros.

        Args:
            index: the parameter.
            zeros_only: whether it is zeros in any case.

        Raises:
            BadGradientError: what was accumulated cannot be averaged.
        """
        if zeros_only:
            self._zeroed.add(index)
        view = self._views.get(index)
        if view is None:
            return  # fill_bucket() makes a copy
        grad = self.parameters[index].grad
        if lies_at(grad, view):
            self._saved[index] = view.clone()
        if grad is None or zeros_only:
            view.zero_()
        else:
            self._copy(index, grad, view)

    def leave_out(self, unused: frozenset[int]) -> frozenset[int]:
        """Leaves unused gradients out of this pass, one by one, where that saves more than messages cost.

        Args:
            unused: indices of parameters that get no gradient on any rank.

        Returns:
            Those that are left out: not filled, not sent and not averaged.
        """
        for bucket in self.buckets:
            if not bucket.skipped and not unused.isdisjoint(bucket.indices):
                bucket.leave_out(unused, IN_PLACE_BYTES)
        return frozenset().union(*(bucket.left_out for bucket in self.buckets))

    def fill_with_zeros(self, bucket: Bucket) -> None:
        """Makes a bucket of zeros, which leaves every ``.grad`` alone."""
        bucket.flat.zero_()
        bucket.in_place_tensors = [
            bucket.flat.new_zeros(self.forms[index].numel() * (2 if self.forms[index].is_complex() else 1))
            for index in bucket.in_place
            if index not in bucket.left_out
        ]

    def release_grads(self, buckets: Iterable[Bucket]) -> None:
        """Gives parameters another ``.grad`` where it lies in a bucket, whose memory the peers still need.

        What peers have added by now may be in it.
        """
        for bucket in buckets:
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                reduced = view if view is not None else self._in_place.get(index, (None, None))[0]
                if (grad := parameter.grad) is not None and starts_at(grad, reduced):
                    parameter.grad = grad.clone()

    # ---- out of the buckets ------------------------------------------------------------------------------

    def finalize_bucket(self, bucket: Bucket, unused: Collection[int]) -> None:
        """Writes the averages of a reduced bucket to ``.grad``, but for those of unused parameters.

        Raises:
            BadGradientError: a parameter has moved elsewhere since its gradient came.
        """
        handed_out = self._handed_out
        views, grads, moved = [], [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            if index in unused:
                continue
            grad, average = parameter.grad, view
            if average is None:
                reduced, average = self._in_place[index]
                if average is None:
                    moved.append(reduced)
                    if not starts_at(grad, reduced):
                        parameter.grad = shaped(reduced, self.forms[index])
                    continue
            elif handed_out and (given := handed_out.get(index)) is not None:
                if grad is not given or not given.is_set_to(average):
                    self._hand_out(index)
                continue
            if grad is None:
                parameter.grad = average.to(self.forms[index].dtype, copy=True)
            else:
                views.append(average)
                grads.append(grad)
        if views:
            torch._foreach_copy_(grads, views)
        if moved:
            torch.autograd.graph.increment_version(moved)

    def finalize_unused(self, index: int, *, used: bool) -> None:
        """Writes the average of a parameter that this rank left unused, or leaves ``.grad`` as it was.

        Args:
            index: the parameter.
            used: whether another rank, or an earlier pass under ``no_sync``, gave it a gradient.
        """
        parameter = self.parameters[index]
        if index in self.sparse:
            return  # averaged as it is
        if not used:
            if index in self._saved:
                self._views[index].copy_(self._saved[index])
        elif index in self._handed_out:
            self._hand_out(index)
        else:
            # What is unused is never reduced in place.
            average: Any = self._views[index] if index in self._views else self._in_place[index][1]
            if parameter.grad is None:
                parameter.grad = average.to(self.forms[index].dtype, copy=True)
            else:
                parameter.grad.copy_(average)
