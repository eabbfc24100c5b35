"""Gradients on their way between ``.grad`` and the buckets.

A gradient is *collected* when it was put into its bucket. A parameter is *absent* from a pass that gave it no
gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from collectives.ddp.buckets import Bucket, assign_buckets

__all__ = ["BadGradientError", "Gradients"]


class BadGradientError(Exception):
    """A gradient that cannot be put into its bucket; the message is a clause that names the parameter."""


class Gradients:
    """The gradients of some parameters and the buckets that they lie in.

    Attributes:
        names: names of the parameters, by index.
        parameters: the parameters, by index.
        buckets: the buckets, in the order of their reduction.
        bucket_of: each parameter's bucket.
        views: each parameter's place in its bucket.

    Args:
        parameters: parameters that need gradients, by name.
        limits: caps of the buckets in bytes, from :func:`~collectives.ddp.buckets.bucket_limits`.
        as_views: whether ``.grad`` becomes the place in the bucket.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], limits: Sequence[int], *, as_views: bool
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.limits = tuple(limits)
        self._as_views = as_views
        self._kept: dict[int, torch.Tensor] = {}
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        self.views: list[torch.Tensor] = []
        self.lay_out(range(len(self.parameters) - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.parameters)

    def lay_out(self, order: Iterable[int]) -> None:
        """Makes the buckets for gradients that come in ``order``; gradients that lie in the old ones move."""
        assignment = assign_buckets(
            [parameter.numel() * parameter.element_size() for parameter in self.parameters],
            [(parameter.device, parameter.dtype) for parameter in self.parameters],
            self.limits,
            order,
        )
        if assignment == [bucket.indices for bucket in self.buckets]:
            return
        old_views = self.views
        last = len(assignment) - 1
        self.buckets = [
            Bucket(place, indices, [self.parameters[i] for i in indices], with_flag=place == last)
            for place, indices in enumerate(assignment)
        ]
        places = {
            index: (bucket, view)
            for bucket in self.buckets
            for index, view in zip(bucket.indices, bucket.views, strict=True)
        }
        self.bucket_of = [places[index][0] for index in range(len(self))]
        self.views = [places[index][1] for index in range(len(self))]
        with torch.no_grad():
            for parameter, old, view in zip(self.parameters, old_views, self.views, strict=False):
                if parameter.grad is old:
                    view.copy_(old)
                    parameter.grad = view

    def reset(self) -> None:
        """Begins a pass: no gradient is collected."""
        self._kept.clear()
        for bucket in self.buckets:
            bucket.reset()

    def collect(self, index: int) -> None:
        """Puts ``.grad`` into the bucket.

        Raises:
            BadGradientError: it cannot be put there.
        """
        parameter = self.parameters[index]
        grad = parameter.grad
        view = self.views[index]
        if grad is view:
            return
        try:
            view.copy_(grad)  # type: ignore[arg-type]
        except Exception as error:
            raise BadGradientError(self._what_is_bad(index, grad, error)) from error
        if self._as_views:
            parameter.grad = view

    def collect_bucket(self, bucket: Bucket, absent: Collection[int]) -> None:
        """Puts all gradients of a bucket into it at once, but for those of absent parameters.

        Raises:
            BadGradientError: one of them cannot be put there.
        """
        views, grads, moved = [], [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            grad = parameter.grad
            if grad is view or index in absent:
                continue
            if grad is None or grad.layout is not torch.strided:
                raise BadGradientError(self._what_is_bad(index, grad, None))
            views.append(view)
            grads.append(grad)
            moved.append(parameter)
        if views:
            torch._foreach_copy_(views, grads)
        if self._as_views:
            for parameter, view in zip(moved, views, strict=True):
                parameter.grad = view

    def _what_is_bad(self, index: int, grad: torch.Tensor | None, error: Exception | None) -> str:
        name = self.names[index]
        if grad is None:
            return f"the gradient of {name} was taken away before it was averaged"
        if grad.layout is not torch.strided:
            return (
                f"the gradient of {name} has layout {grad.layout}, but only dense gradients are averaged; "
                "make the layer produce dense ones (sparse=False)"
            )
        return f"the gradient of {name} could not be put into its bucket: {error}"

    def collect_absent(self, index: int) -> None:
        """Contributes for an absent parameter: what was accumulated in ``.grad`` before, else zeros.

        Raises:
            BadGradientError: what was accumulated cannot be put into the bucket.
        """
        grad = self.parameters[index].grad
        view = self.views[index]
        if grad is None:
            view.zero_()
        elif grad is view:
            self._kept[index] = grad.clone()
        else:
            try:
                view.copy_(grad)
            except Exception as error:
                raise BadGradientError(self._what_is_bad(index, grad, error)) from error

    def write_back(self, bucket: Bucket, absent: Collection[int]) -> None:
        """Writes the averages of a reduced bucket to ``.grad``, but for those of absent parameters."""
        if self._as_views:
            return
        views, grads = [], []
        for index, parameter, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
            if index in absent:
                continue
            grad = parameter.grad
            if grad is None:
                parameter.grad = view.clone()
            else:
                views.append(view)
                grads.append(grad)
        if views:
            torch._foreach_copy_(grads, views)

    def deliver_absent(self, index: int, *, used: bool) -> None:
        """Writes the average of a parameter that was absent here, or leaves ``.grad`` as it was.

        Args:
            index: the parameter.
            used: whether another rank, or an earlier pass under ``no_sync``, gave it a gradient.
        """
        parameter = self.parameters[index]
        view = self.views[index]
        if not used:
            if index in self._kept:
                view.copy_(self._kept[index])
        elif self._as_views:
            parameter.grad = view
        elif parameter.grad is None:
            parameter.grad = view.clone()
        else:
            parameter.grad.copy_(view)
