"""Communication hooks that update parameters in the backward pass, by a ZeroRedundancyOptimizer.

Each is made of a hook that averages. When the gradients of a bucket are averaged, the rank that owns a
parameter in it updates it, while other buckets are on their way; then the parameters are sent to all ranks.

The ranks issue the operations of both parts in one order, whatever the group and the hook: the parameters of
a bucket are sent from the thread that launches buckets, never while a hook has more to issue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.futures import Future

from collectives.ddp.broadcast import CoalescedBroadcast
from collectives.ddp.hooks.state import comm_hook, is_torch_bucket, pending
from collectives.ddp.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from collectives.ddp.reducer.buckets import GradBucket, Hook, layout

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Returns a hook that averages by ``hook``, and updates and sends parameters once all gradients came.

    The updates of the first buckets overlap with the communication of the last; better where communication is
    slow. To be registered on ``ddp`` by all ranks, before its first backward pass.

    Parameters change before the backward pass is known to have gone well: where that raises, they may have
    had a part of the update. They are still equal on all ranks. Parameters that no rank used are updated by a
    gradient of zeros. Gradients stand averaged in ``.grad`` afterwards.

    Args:
        hook: averages a bucket, such as ``allreduce_hook``.
        ddp: the model, of this package or of torch.
        zero: the optimizer of parameters of ``ddp``, made with ``overlap_with_ddp=True``.
        shard_buckets: whether the parameters of a bucket may have several owners, so that the optimizer state
            is dealt out as evenly as without overlap; otherwise each bucket of the first pass has one owner,
            which makes fewer and larger messages.

    Raises:
        ValueError: ``zero`` was made without ``overlap_with_ddp``, or has parameters whose gradients are in
            no bucket, or ``ddp`` skips buckets.
        RuntimeError: ``zero`` was stepped or loaded already, and ``shard_buckets`` is not set.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel
            from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step
            from collectives.ddp.hooks.default_hooks import allreduce_hook
            from collectives.ddp.optim import ZeroRedundancyOptimizer

            model = DistributedDataParallel(torch.nn.Linear(8, 4))
            zero = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01
            )
            model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, zero))
            model(torch.randn(16, 8)).sum().backward()  # updates the parameters, too
    """
    return _Steps(ddp, zero, shard_buckets).around(hook, interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Returns a hook that averages by ``hook``, and updates and sends parameters as each bucket is averaged.

    Before a bucket is launched, the one before it is waited for, and its parameters are updated and sent; so
    updates overlap with the backward pass; better where communication is fast. All else is as for
    :func:`hook_with_zero_step`.

    Args:
        hook: averages a bucket, such as ``allreduce_hook``.
        ddp: the model.
        zero: the optimizer.
        shard_buckets: whether the parameters of a bucket may have several owners.

    Raises:
        ValueError: as for :func:`hook_with_zero_step`.
        RuntimeError: as for :func:`hook_with_zero_step`.
    """
    return _Steps(ddp, zero, shard_buckets).around(hook, interleaved=True)


class _Steps:
    """The updates of one backward pass after another.

    What goes wrong in an update is raised at the end of the pass only: until then this rank communicates as
    all others do, and sends parameters that it could not update as they are.

    Args:
        ddp: the model.
        zero: the optimizer.
        shard_buckets: whether the parameters of a bucket may have several owners.
    """

    def __init__(self, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool) -> None:
        rank = zero.process_group.rank()
        if not zero.overlap_with_ddp:
            raise ValueError(
                f"[rank {rank}] the ZeroRedundancyOptimizer must be made with overlap_with_ddp=True to be "
                "stepped by a hook"
            )
        if getattr(ddp, "skip_all_reduce_unused_params", False):
            raise ValueError(
                f"[rank {rank}] skip_all_reduce_unused_params leaves out buckets, whose parameters a hook "
                "could not update"
            )
        buckets = _buckets(ddp)
        bucketed = {parameter for bucket in buckets for parameter in bucket}
        strange = [
            index
            for index, parameter in enumerate(p for group in zero.param_groups for p in group["params"])
            if parameter.requires_grad and parameter not in bucketed
        ]
        if strange:
            raise ValueError(
                f"[rank {rank}] parameters {strange} of the optimizer have gradients in no bucket of "
                f"{type(ddp).__name__}: they are of another module, or sparse"
            )
        if not shard_buckets:
            zero.assign_together(buckets)
        zero.has_hook = True
        self._zero = zero
        self._reduced: list[tuple[GradBucket, Future[Any]]] = []
        self._messages: dict[tuple[int, ...], list[CoalescedBroadcast]] = {}
        self._updated: list[Sequence[torch.Tensor]] = []
        self._sending: list[CoalescedBroadcast] = []
        self._failure: Exception | None = None

    def around(self, hook: Hook, *, interleaved: bool) -> Hook:
        """Returns a hook that calls another one, named after it, and that says what it does besides.

        Args:
            hook: the other one.
            interleaved: whether the parameters of a bucket are updated and sent before the next one is
                launched; else those of all after the last one.
        """

        def hook_and_step(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
            if interleaved and bucket.index():
                flush = getattr(state, "flush", None)
                if callable(flush):  # of a hook that completes a future only with the next bucket
                    flush(bucket.index())
                self.update()
                self.start_sending()
            try:
                future = hook(state, bucket)
            except BaseException:
                if is_torch_bucket(bucket):  # torch calls no pass_failed()
                    self.finish_sending()
                raise
            self.add(bucket, future)
            if bucket.is_last():
                self.update()
                if interleaved:
                    self.start_sending()
                    self.finish_sending()
                else:
                    self._zero.send_parameters()
            return self.outcome(bucket, future)

        made: Any = hook_and_step
        made.__name__ = made.__qualname__ = f"{getattr(hook, '__name__', 'hook')}_with_zero_step"
        made.updates_parameters = True
        made.process_group = self._zero.process_group

        def pass_failed() -> None:
            self.pass_failed()
            if hasattr(hook, "pass_failed"):
                hook.pass_failed()

        made.pass_failed = pass_failed
        if hasattr(hook, "buckets_rebuilt"):
            made.buckets_rebuilt = hook.buckets_rebuilt
        result: Hook = comm_hook(made)
        return result

    def pass_failed(self) -> None:
        """Gives all ranks the parameters of their owners, who may have updated some and not sent them."""
        self._zero.send_parameters()

    def add(self, bucket: GradBucket, future: Future[Any]) -> None:
        """Takes in a bucket whose reduction was issued; the first one begins a pass."""
        if bucket.index() == 0:
            self._reduced, self._updated, self._sending = [], [], []
            self._failure = None
        self._reduced.append((bucket, future))

    @torch.no_grad()
    def update(self) -> None:
        """Updates this rank's parameters in the buckets taken in; blocks until these are averaged."""
        reduced, self._reduced = self._reduced, []
        for bucket, future in reduced:
            parameters = bucket.parameters()
            self._updated.append(parameters)
            try:
                result = future.wait()
                flat = (result[0] if isinstance(result, (list, tuple)) else result).reshape(-1)
                self._zero.update(dict(zip(parameters, layout(bucket.gradients(), flat), strict=True)))
            except Exception as error:  # noqa: BLE001 - raised by outcome()
                self._failure = self._failure or error

    def outcome(self, bucket: GradBucket, future: Future[torch.Tensor]) -> Future[torch.Tensor]:
        """Returns what the hook returns for a bucket: at the last one, what an update failed with, if any."""
        if self._failure is None or not bucket.is_last():
            return future
        if is_torch_bucket(bucket):  # torch's reducer would take an exception in a future for a value
            raise self._failure
        failed = pending(bucket.buffer())
        failed.set_exception(self._failure)  # type: ignore[arg-type]
        return failed

    @torch.no_grad()
    def start_sending(self) -> None:
        """Sends the parameters of updated buckets to all ranks; does not wait."""
        updated, self._updated = self._updated, []
        for parameters in updated:
            for message in self._messages_of(parameters):
                message.start()
                self._sending.append(message)

    def _messages_of(self, parameters: Sequence[torch.Tensor]) -> list[CoalescedBroadcast]:
        key = tuple(map(id, parameters))
        if key not in self._messages:
            by_owner: dict[int, list[torch.Tensor]] = {}
            for parameter in parameters:
                owner = self._zero.owner(parameter)
                if owner is not None:
                    by_owner.setdefault(owner, []).append(parameter)
            group = self._zero.process_group
            self._messages[key] = [
                CoalescedBroadcast(group, by_owner[rank], rank) for rank in sorted(by_owner)
            ]
        return self._messages[key]

    @torch.no_grad()
    def finish_sending(self) -> None:
        """Blocks until all ranks' parameters are here."""
        sending, self._sending = self._sending, []
        for message in sending:
            message.finish()


def _buckets(ddp: Any) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters in each bucket of a model of this package or of torch."""
    gradients = getattr(ddp.reducer, "gradients", None)
    if gradients is not None:
        return [list(bucket.parameters) for bucket in gradients.layouts()]
    return [list(bucket.parameters()) for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
