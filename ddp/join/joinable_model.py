"""What DistributedDataParallel is under Join: a model that trains on uneven inputs."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from collectives import ProcessGroup, UnsupportedOperationError
from collectives.ddp.join.join import Join, Joinable, JoinHook
from collectives.ddp.join.protocol import Phase
from collectives.ddp.join.shadow_collectives import (
    ForwardCollectives,
    ModelJoinHook,
    agree_on_collectives,
    refuse_layers_that_communicate,
)
from collectives.ddp.module.buffers import BufferSync
from collectives.ddp.reducer.bucket_reducer import Hook
from collectives.ddp.reducer.reducer import Reducer

__all__ = ["JoinableModel"]


class JoinableModel(Joinable):
    """The part of a model with a reducer that :class:`~collectives.ddp.Join` drives.

    Attributes:
        module: the module.
        process_group: the ranks.
        device: device of the module's first parameter.
        reducer: averages its gradients.
        parameters_to_ignore: names of parameters that are left alone.
        require_forward_param_sync: whether the next forward may send buffers.
    """

    _notifies_always = True

    module: nn.Module
    process_group: ProcessGroup
    device: torch.device
    reducer: Reducer
    parameters_to_ignore: set[str]
    require_forward_param_sync: bool
    _buffer_sync: BufferSync
    _delayed: list[str]
    _comm_hooks: list[tuple[Hook, object]]
    _given_group: Any

    def __init__(self) -> None:
        Joinable.__init__(self)
        self._divides_by_initial_world_size = True

    @abstractmethod
    def _in_words(self) -> str:
        """Returns the model in words, for messages."""

    @abstractmethod
    def will_sync_module_buffers(self) -> bool:
        """Returns whether the next forward sends rank 0's buffers to all ranks."""

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context for a training loop that is longer on some ranks than on others; all enter it.

        A rank that leaves the loop early takes part in the forward and backward passes of the others with
        gradients of zero, and what it has accumulated under :meth:`no_sync`. It gets the averaged gradients
        as they do, so that an optimizer in the same :class:`~collectives.ddp.Join` can keep up. In the end,
        all ranks get parameters and buffers of the last one; the state of an optimizer that is not in the
        context stays what it was on each rank.

        While the loop runs, buffers are those of the lowest rank that has inputs. Each forward blocks for the
        time of two small all-reduces, each backward pass for that of one.

        Args:
            divide_by_initial_world_size: whether sums of gradients are divided by the number of all ranks, so
                that every sample counts the same; otherwise by the number of those that have inputs, as in
                a smaller job. What a communication hook returns is scaled to that.
            enable: whether the context does anything; ``False`` where inputs are known to be even.
            throw_on_early_termination: whether all ranks raise when one of them has left the loop. Needed for
                modules that communicate in forward, such as :class:`~collectives.ddp.SyncBatchNorm`.

        Raises:
            UnsupportedOperationError: on entering, parameters are delayed.
            ValueError: on entering, a layer communicates and nothing would be thrown, or what a hook returns
                cannot be scaled: it updates parameters, or averages over a part of the ranks.
            UnevenInputsError: ``throw_on_early_termination`` is set and a rank has left the loop.
            JoinError: a rank left the context by an exception, or ranks are out of step.
            GradientSyncError: ranks that have inputs use :meth:`no_sync` differently.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns what a rank without inputs does in place of this module; called by :class:`Join`.

        Args:
            kwargs: ``divide_by_initial_world_size``; see :meth:`join`. Others are for other joinables.
        """
        config = self._join_config
        if self._delayed and config.enable:
            raise UnsupportedOperationError(
                f"{self._in_words()} has delay_all_reduce_named_params, which are averaged in passes that "
                "ranks without inputs do not hear of; train on even inputs, or delay none"
            )
        if config.enable and not config.throw_on_early_termination:
            refuse_layers_that_communicate(self.module, self.process_group)
        by_initial = bool(kwargs.get("divide_by_initial_world_size", True))
        if not by_initial:
            self._refuse_hooks_that_cannot_be_scaled()
        self.reducer.enter_join()
        self._divides_by_initial_world_size = by_initial
        return ModelJoinHook(
            self._shadow_forward,
            self.reducer.shadow_backward,
            self.reducer.gradients.parameters,
            self._state,
            self.process_group,
            self.device,
        )

    def _refuse_hooks_that_cannot_be_scaled(self) -> None:
        for trait, words in (
            ("updates_parameters", "updates parameters takes the mean over all ranks"),
            ("averages_a_part", "averages over a part of the ranks has no mean over those with inputs"),
        ):
            if any(getattr(hook, trait, False) for hook, _ in self._comm_hooks):
                raise ValueError(
                    f"[rank {self.process_group.rank()}] a hook that {words}; leave "
                    "divide_by_initial_world_size=True"
                )

    @property
    def join_device(self) -> torch.device:
        """Device of the module's first parameter."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The ranks, as torch's group where the module was given one."""
        return self._given_group

    def _state(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers that the ranks have in common."""
        parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        return [*parameters, *self._buffer_sync.named_buffers().values()]

    def _notify_forward(self, *, averages: bool) -> int:
        """Tells ranks that have joined what a forward communicates; returns whose buffers are sent."""
        config = self._join_config
        self.reducer.is_joining = bool(config.enable)
        if not config.enable:
            self.reducer.bucket_reducer.before_pass = None
            self.reducer.averager.divisor = None
            return 0
        Join.notify_join_context(self)
        agreed = self._agree_on_collectives(ForwardCollectives(self.will_sync_module_buffers(), averages))
        protocol = getattr(config, "protocol", None)  # the record of torch's context has none
        call = None
        if protocol is not None and config.each_notifies:
            call = functools.partial(protocol.announce_active, config.place, Phase.BACKWARD)
        self.reducer.bucket_reducer.before_pass = call
        return agreed.active[0]

    def _agree_on_collectives(self, mine: ForwardCollectives | None) -> ForwardCollectives:
        agreed = agree_on_collectives(self.process_group, self.device, mine, self._in_words())
        all_count = self._divides_by_initial_world_size or len(agreed.active) == self.process_group.size()
        self.reducer.averager.divisor = None if all_count else len(agreed.active)
        return agreed

    def _shadow_forward(self) -> bool:
        """Communicates what other ranks do in a forward; returns whether the backward pass comes at once."""
        agreed = self._agree_on_collectives(None)
        if agreed.averages:
            self.reducer.rebuild_buckets()
        if agreed.buffers:
            self._buffer_sync(agreed.active[0])
        self.require_forward_param_sync = agreed.averages
        if agreed.averages:
            self.reducer.shadow_forward()
        return agreed.averages and not getattr(self._join_config, "each_notifies", False)
