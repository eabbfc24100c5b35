"""What DistributedDataParallel is under Join: a model that trains on uneven inputs."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, UnsupportedOperationError
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.join.join import Join, Joinable, JoinHook
from collectives.ddp.join.protocol import Phase
from collectives.ddp.module.buffers import BufferSync
from collectives.ddp.module.sync_batch_norm import SyncBatchNorm
from collectives.ddp.reducer.bucket_reducer import Hook
from collectives.ddp.reducer.reducer import Reducer
from collectives.ddp.sync.broadcast import broadcast_coalesced

__all__ = [
    "ForwardCollectives",
    "JoinableModel",
    "ModelJoinHook",
    "agree_on_collectives",
    "refuse_layers_that_communicate",
]

_SUM = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.SUM)
_MAX = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.MAX)


@dataclass(frozen=True)
class ForwardCollectives:
    """What a forward and its backward pass communicate.

    Attributes:
        buffers: whether buffers are sent.
        averages: whether gradients will be averaged.
        active: ranks that run the forward.
    """

    buffers: bool
    averages: bool
    active: Sequence[int] = ()

    def code(self) -> int:
        """Returns the number that stands for it; never zero."""
        return 1 + 2 * self.buffers + 4 * self.averages

    @classmethod
    def of(cls, code: int) -> ForwardCollectives:
        """Returns what a number stands for."""
        return cls(buffers=bool((code - 1) & 2), averages=bool((code - 1) & 4))

    def __str__(self) -> str:
        buffers = "sends" if self.buffers else "does not send"
        gradients = "averages" if self.averages else "does not average"
        return f"{buffers} buffers and {gradients} gradients"


def agree_on_collectives(
    group: ProcessGroup, device: torch.device, mine: ForwardCollectives | None, model: str
) -> ForwardCollectives:
    """Returns what all active ranks communicate, of which there is one at least; called by all ranks, blocks.

    Args:
        group: the ranks.
        device: device of tensors that the group takes.
        mine: this rank's; ``None`` where it has joined.
        model: the model in words.

    Raises:
        GradientSyncError: active ranks communicate different things; raised on all ranks.
    """
    codes = [0] * group.size()
    if mine is not None:
        codes[group.rank()] = mine.code()
    row = torch.tensor(codes, dtype=torch.int32, device=device)
    group.allreduce([row], _SUM).wait()
    everyones = group.to_host(row).tolist()
    by_rank = {rank: ForwardCollectives.of(code) for rank, code in enumerate(everyones) if code}
    if len(set(by_rank.values())) > 1:
        reasons = {rank: f"its forward {agreed}" for rank, agreed in by_rank.items()}
        head = f"[rank {group.rank()}] {model} over {group.describe()}: ranks differ in a forward under join:"
        lines = [f"  rank {rank}: {reason}" for rank, reason in reasons.items()]
        advice = "Use no_sync() and torch.no_grad() alike on all ranks that have inputs."
        raise GradientSyncError("\n".join([head, *lines, advice]), reasons)
    agreed = next(iter(by_rank.values()))
    return ForwardCollectives(agreed.buffers, agreed.averages, list(by_rank))


def refuse_layers_that_communicate(module: nn.Module, group: ProcessGroup) -> None:
    """Checks that no layer communicates by itself in training, which a rank without inputs could not match.

    Raises:
        ValueError: there is such a layer.
    """
    layers = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) and layer.training
    ]
    if layers and group.size() > 1:
        raise ValueError(
            f"[rank {group.rank()}] {', '.join(layers)} of {type(module).__name__} normalise over all ranks "
            "in forward, which a rank without inputs cannot take part in; pass "
            "throw_on_early_termination=True, or use BatchNorm"
        )


class ModelJoinHook(JoinHook):
    """Stands in for a model on a rank that has joined.

    Args:
        shadow_forward: communicates what the active ranks do in a forward, and returns whether a backward
            pass follows at once.
        shadow_backward: takes part in a backward pass.
        parameters: those whose gradients it leaves in ``.grad``.
        state: returns the tensors that all ranks must have in common in the end.
        group: the ranks.
        device: device of tensors that the group takes.
    """

    def __init__(
        self,
        shadow_forward: Callable[[], bool],
        shadow_backward: Callable[[], None],
        parameters: Sequence[nn.Parameter],
        state: Callable[[], Iterable[torch.Tensor]],
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._shadow_forward = shadow_forward
        self._shadow_backward = shadow_backward
        self._parameters = parameters
        self._state = state
        self._group = group
        self._device = device
        self._has_gradients = False

    def main_hook(self) -> None:
        """Shadows a forward, and the backward pass where that does not announce itself."""
        if self._shadow_forward():
            self.backward_hook()

    def backward_hook(self) -> None:
        """Shadows a backward pass."""
        self._has_gradients = True
        self._shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Gives all ranks the model of the last one that joined, the highest of several.

        Gradients of the others' passes go, so that nothing is added to them later.
        """
        if self._has_gradients:
            for parameter in self._parameters:
                parameter.grad = None
        root = torch.tensor([self._group.rank() if is_last_joiner else -1], device=self._device)
        self._group.allreduce([root], _MAX).wait()
        broadcast_coalesced(self._group, list(self._state()), int(self._group.to_host(root)))


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
