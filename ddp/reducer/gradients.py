"""Gradients on their way between ``.grad`` and the buckets.

Words used here. A gradient is *packed* when it is copied into the buffer of its bucket, *in place* when it
is reduced where it is, without a copy. A packed one is *collected* when it was copied: at once where it is
large, so that it is still in the cache and its own memory can go, else with others when the bucket is full.
A parameter is *absent* from a pass that gave it no gradient. A *stand-in* travels instead of a gradient in
place that must not be touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from collectives.ddp.reducer.buckets import Bucket, assign_buckets, strides_of
from collectives.ddp.reducer.gradient_memory import flat, is_unshared

__all__ = ["IN_PLACE_BYTES", "BadGradientError", "Gradients"]

IN_PLACE_BYTES = 256 * 1024
"""Gradients of so many bytes or more are reduced in place where they can be, and else copied as they come."""


class BadGradientError(Exception):
    """A gradient that cannot be averaged; the message is a clause that names the parameter."""


class Gradients:
    """The gradients of some parameters and the buckets that they lie in.

    Attributes:
        names: names of the parameters, by index.
        parameters: the parameters, by index.
        sparse: indices of the parameters with sparse gradients, which lie in no bucket.
        delayed: indices of the parameters whose buckets come after that of :attr:`trigger`.
        trigger: index of a parameter, or ``None``, which puts the delayed buckets at the end.
        buckets: the buckets, in the order of their reduction; the last one has a tail.
        bucket_of: each parameter's bucket.

    Args:
        parameters: parameters that need gradients, by name.
        limits: caps of the buckets in bytes, from :func:`~collectives.ddp.reducer.buckets.bucket_limits`.
        tail: number of elements of the last bucket's tail.
        as_views: whether ``.grad`` becomes the place in the bucket.
        batched: whether all gradients are packed, and copied when their bucket is full.
        sparse: indices of the parameters with sparse gradients.
        delayed: indices of the parameters whose reduction is delayed.
        trigger: index of the parameter that the delayed ones come after.
        wire_dtype: data type that real floating gradients have in the buckets; ``None`` for their own.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        limits: Sequence[int],
        *,
        tail: int,
        as_views: bool = False,
        batched: bool = False,
        sparse: Collection[int] = (),
        delayed: Collection[int] = (),
        trigger: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.limits = tuple(limits)
        self.sparse = sorted(sparse)
        self.delayed = frozenset(delayed)
        self.trigger = trigger
        self._tail = tail
        self._as_views = as_views
        self._batched = batched
        self._all_packed = as_views or batched
        self._wire_dtype = wire_dtype
        self._kept: dict[int, torch.Tensor] = {}
        self._moving: dict[int, tuple[torch.Tensor, bool]] = {}
        self._silent: set[int] = set()
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, Bucket] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._at_once: frozenset[int] = frozenset()
        self._viewed: frozenset[int] = frozenset()
        self.lay_out(range(len(self.parameters) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.parameters)

    # ---- layout ------------------------------------------------------------------------------------------

    def pack_all(self) -> None:
        """Packs all gradients from now on, for a communication hook, which takes a flat buffer."""
        self._all_packed = True
        self._make_buckets([(bucket.indices, bucket.delayed) for bucket in self.buckets])

    def set_tail(self, size: int) -> None:
        """Gives the last bucket a tail of another size."""
        self._tail = size
        self._make_buckets([(bucket.indices, bucket.delayed) for bucket in self.buckets])

    def lay_out(self, order: Iterable[int]) -> bool:
        """Makes the buckets for gradients that come in ``order``; gradients that lie in the old ones move.

        Returns:
            Whether that changed anything.
        """
        order = [index for index in order if index not in self.sparse]
        early = self._assign([index for index in order if index not in self.delayed], self.limits)
        late = self._assign([index for index in order if index in self.delayed], [2**63])
        place = next((n for n, bucket in enumerate(early, 1) if self.trigger in bucket), len(early))
        plan = [
            *((indices, False) for indices in early[:place]),
            *((indices, True) for indices in late),
            *((indices, False) for indices in early[place:]),
        ]
        if self.buckets and plan == [(bucket.indices, bucket.delayed) for bucket in self.buckets]:
            return False
        self._make_buckets(plan)
        return True

    def _assign(self, order: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
        kinds = [(parameter.device, self._dtype(parameter)) for parameter in self.parameters]
        sizes = [p.numel() * dtype.itemsize for p, (_, dtype) in zip(self.parameters, kinds, strict=True)]
        return assign_buckets(sizes, kinds, limits, order)

    def _dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if self._wire_dtype is not None and parameter.dtype.is_floating_point:
            return self._wire_dtype
        return parameter.dtype

    @torch.no_grad()
    def _make_buckets(self, plan: Sequence[tuple[Sequence[int], bool]]) -> None:
        # Old buckets that no gradient lies in go before the new ones come: both at once may be the peak.
        moving = {i: v for i, v in self._views.items() if self.parameters[i].grad is v}
        self._views, self.bucket_of, self.buckets = {}, {}, []
        self._moving.clear()
        large = {i for i, p in enumerate(self.parameters) if p.numel() * p.element_size() >= IN_PLACE_BYTES}
        in_place: set[int] = set()
        if not self._all_packed:
            in_place = {i for i in large if self._dtype(self.parameters[i]) is self.parameters[i].dtype}
        self._at_once = frozenset() if self._batched else frozenset(large - in_place).difference(self.sparse)
        last = len(plan) - 1
        for place, (indices, delayed) in enumerate(plan or [((), False)]):
            parameters = [self.parameters[index] for index in indices]
            first = parameters[0] if parameters else self.parameters[0]
            bucket = Bucket(
                place,
                indices,
                parameters,
                dtype=self._dtype(first) if parameters else torch.float32,
                device=first.device,
                in_place=in_place,
                tail=self._tail if place >= last else 0,
                delayed=delayed,
            )
            self.buckets.append(bucket)
            for index, parameter, view in zip(indices, parameters, bucket.views, strict=True):
                self.bucket_of[index] = bucket
                if view is None:
                    continue
                self._views[index] = view
                if index in moving:  # an old bucket is free with the last gradient that leaves it
                    parameter.grad = view.copy_(moving.pop(index))
        if self._as_views:
            self._viewed = frozenset(
                index for index, view in self._views.items() if view.dtype is self.parameters[index].dtype
            )

    # ---- into the buckets --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begins or ends a pass: no gradient is collected, and none in place is held."""
        self._kept.clear()
        self._moving.clear()
        self._silent.clear()
        for bucket in self.buckets:
            bucket.reset()

    def came(self, index: int) -> None:
        """Collects a gradient that just came, where that is not better done with others.

        Raises:
            BadGradientError: it cannot be averaged.
        """
        if index not in self._at_once:
            return
        parameter = self.parameters[index]
        grad, view = parameter.grad, self._views[index]
        if grad is view:
            return
        self._copy(index, grad, view)
        if index in self._viewed:
            parameter.grad = view

    def _copy(self, index: int, grad: torch.Tensor | None, place: torch.Tensor) -> None:
        try:
            place.copy_(grad)  # type: ignore[arg-type]
        except Exception as error:
            raise BadGradientError(self._what_is_bad(index, grad, error)) from error

    def fill(self, bucket: Bucket, absent: Collection[int]) -> list[str]:
        """Collects what is left of a bucket before its reduction; what is bad is sent as zeros.

        Args:
            bucket: the bucket.
            absent: indices of the parameters absent so far, for which :meth:`collect_absent` was called.

        Returns:
            What is bad, in words.
        """
        bad: list[str] = []
        indices, views, grads = [], [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            if view is None:
                bucket.outside.append(self._outside(index, parameter, absent, bad))
                continue
            grad = parameter.grad
            if grad is view or index in absent or index in self._at_once:
                continue
            if grad is None or grad.layout is not torch.strided:
                bad.append(self._what_is_bad(index, grad, None))
                continue
            indices.append(index)
            views.append(view)
            grads.append(grad)
        if not views:
            return bad
        try:
            torch._foreach_copy_(views, grads)
        except Exception:  # noqa: BLE001 - found out which one below
            for index, grad, view in zip(indices, grads, views, strict=True):
                try:
                    self._copy(index, grad, view)
                except BadGradientError as error:  # noqa: PERF203
                    bad.append(str(error))
        if self._as_views:
            for index, view in zip(indices, views, strict=True):
                if index in self._viewed:
                    self.parameters[index].grad = view
        return bad

    def _outside(
        self, index: int, parameter: torch.nn.Parameter, absent: Collection[int], bad: list[str]
    ) -> torch.Tensor:
        """Returns what is reduced for a gradient in place: itself, or a stand-in."""
        grad = parameter.grad
        if grad is not None and index not in absent and is_unshared(grad, parameter):
            self._moving[index] = grad, False
            return flat(grad)
        stand_in = torch.empty_strided(
            parameter.shape, strides_of(parameter), dtype=parameter.dtype, device=parameter.device
        )
        try:
            if index in absent and (grad is None or index in self._silent):
                stand_in.zero_()
            else:
                self._copy(index, grad, stand_in)
        except BadGradientError as error:
            stand_in.zero_()
            bad.append(str(error))
        self._moving[index] = stand_in, True
        return flat(stand_in)

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

    def collect_absent(self, index: int, *, silent: bool = False) -> None:
        """Contributes for an absent parameter: what was accumulated in ``.grad`` before, else zeros.

        Args:
            index: the parameter.
            silent: whether it is zeros in any case.

        Raises:
            BadGradientError: what was accumulated cannot be averaged.
        """
        if silent:
            self._silent.add(index)
        view = self._views.get(index)
        if view is None:
            return  # fill() makes a stand-in
        grad = self.parameters[index].grad
        if grad is view:
            self._kept[index] = grad.clone()
        if grad is None or silent:
            view.zero_()
        elif grad is not view:
            self._copy(index, grad, view)

    def fill_with_zeros(self, bucket: Bucket) -> None:
        """Makes a bucket of zeros, which leaves every ``.grad`` alone."""
        bucket.wire.zero_()
        bucket.outside = [
            bucket.wire.new_zeros(parameter.numel() * (2 if parameter.is_complex() else 1))
            for index, parameter in zip(bucket.indices, bucket.parameters, strict=True)
            if index in bucket.in_place
        ]

    def part_from(self, buckets: Iterable[Bucket]) -> None:
        """Gives parameters another ``.grad`` where it is being reduced, so that that may go on unheeded."""
        for bucket in buckets:
            for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                moving = view if view is not None else self._moving.get(index, (None, False))[0]
                if parameter.grad is not None and parameter.grad is moving:
                    parameter.grad = parameter.grad.clone()

    # ---- out of the buckets ------------------------------------------------------------------------------

    def write_back(self, bucket: Bucket, absent: Collection[int]) -> None:
        """Writes the averages of a reduced bucket to ``.grad``, but for those of absent parameters."""
        views, grads, moved = [], [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            if index in absent or index in self._viewed:
                continue
            grad = parameter.grad
            average, is_copy = (view, True) if view is not None else self._moving[index]
            if not is_copy:
                moved.append(average)
                if grad is not average:
                    parameter.grad = average
            elif grad is None:
                parameter.grad = average.to(parameter.dtype, copy=True)
            else:
                views.append(average)
                grads.append(grad)
        if views:
            torch._foreach_copy_(grads, views)
        if moved:
            torch.autograd.graph.increment_version(moved)

    def deliver_absent(self, index: int, *, used: bool) -> None:
        """Writes the average of a parameter that was absent here, or leaves ``.grad`` as it was.

        Args:
            index: the parameter.
            used: whether another rank, or an earlier pass under ``no_sync``, gave it a gradient.
        """
        parameter = self.parameters[index]
        if index in self.sparse:
            return  # averaged as it is
        average = self._views.get(index)
        if not used:
            if index in self._kept and average is not None:
                average.copy_(self._kept[index])
            return
        if average is None:
            average = self._moving[index][0]
        if index in self._viewed:
            parameter.grad = average
        elif parameter.grad is None:
            parameter.grad = average.to(parameter.dtype, copy=True)
        else:
            parameter.grad.copy_(average)
