# ruff: noqa: N999 - the module's name is torch's
"""A hook for post-local SGD: averages over all ranks at first, later over a part of them.

Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", ICLR 2020. The parameters of the
parts are brought together by an optimizer that averages them now and then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.futures import Future

from collectives.ddp.default_group import subgroup_of_machine
from collectives.ddp.hooks.state import (
    HookState,
    average_exactly,
    check_integer,
    comm_hook,
    completed,
    group_of,
    is_torch_bucket,
)
from collectives.ddp.reducer.buckets import GradBucket
from collectives.logs import Log

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

_log = Log(__name__)


class PostLocalSGDState(HookState):
    """Settings of :func:`post_localSGD_hook`, as of torch's class of this name.

    It is pickled without its groups; assign ``process_group`` and ``subgroup`` after loading, where they were
    not ``None``.

    Args:
        process_group: all ranks, a group of ours or of torch's; ``None`` for the default group.
        subgroup: the part of the ranks that this one belongs to; ``None`` for groups of as many neighbouring
            ranks as there are CUDA devices, made when the hook is called first.
        start_localSGD_iter: number of iterations that average over all ranks, 0 or more.
        post_local_gradient_allreduce: whether gradients are averaged over ``subgroup`` after that; they are
            this rank's alone otherwise.

    Raises:
        TypeError: ``start_localSGD_iter`` is no integer.
        ValueError: ``start_localSGD_iter`` is negative.
    """

    _SETTINGS = (*HookState._SETTINGS, "start_localSGD_iter", "post_local_gradient_allreduce")

    def __init__(
        self,
        process_group: object,
        subgroup: object,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        super().__init__(process_group)
        check_integer("start_localSGD_iter", start_localSGD_iter, 0)
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = bool(post_local_gradient_allreduce)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves: all but the groups."""
        if self.subgroup is not None:
            _log.of(self.subgroup).warning(
                "the subgroup of %s cannot be saved; assign subgroup after loading, or one of as many ranks "
                "as there are CUDA devices is made",
                type(self).__name__,
            )
        return {**super().__getstate__(), "subgroup": None}


@comm_hook
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages the gradients over all ranks, and after some iterations over this rank's subgroup.

    Used with an optimizer that averages parameters over all ranks from ``state.start_localSGD_iter`` on.

    Args:
        state: settings and the count of iterations; this rank's own.
        bucket: the bucket; averaged in place.

    Returns:
        A future of the bucket's buffer with the averages; with ``post_local_gradient_allreduce=False``, from
        ``start_localSGD_iter`` on, of this rank's own gradients.

    Raises:
        ValueError: the ranks' states differ, or there is no subgroup and no CUDA device to count.
    """
    group = state.join(bucket)
    if state.subgroup is None and state.post_local_gradient_allreduce:
        state.subgroup = subgroup_of_machine(torch_world=is_torch_bucket(bucket))
    local = state.iter >= state.start_localSGD_iter
    state.maybe_increase_iter(bucket)
    if not local:
        return average_exactly(group, bucket)
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer())
    return average_exactly(group_of(state.subgroup, bucket), bucket)


post_localSGD_hook.averages_a_part = True  # type: ignore[attr-defined]
"""Its result cannot be scaled to a mean over other ranks."""
