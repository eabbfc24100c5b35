"""DistributedDataParallel under Join: what ranks without inputs communicate in its place.

At each forward the active ranks tell what they communicate, and the joined ones that they have none. So all
know which ranks are active, whose buffers are sent, and what sums are divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from collectives import AllreduceOptions, ProcessGroup, ReduceOp
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.join.join import JoinHook
from collectives.ddp.module.sync_batch_norm import SyncBatchNorm
from collectives.ddp.sync.broadcast import broadcast_coalesced

__all__ = ["ForwardCollectives", "ModelJoinHook", "agree_on_collectives", "refuse_layers_that_communicate"]

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
