"""Hooks by name, as torch lists them."""

from __future__ import annotations

import enum
from typing import Any, Protocol

from collectives.ddp.hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from collectives.ddp.reducer.buckets import Hook

__all__ = ["BuiltinCommHookType", "DDPCommHookType", "register_ddp_comm_hook"]


class BuiltinCommHookType(enum.IntEnum):
    """Hooks that torch has in C++; numbers as in ``torch.distributed``."""

    ALLREDUCE = 1
    FP16_COMPRESS = 2

    @property
    def hook(self) -> Hook:
        """The hook, whose state is a process group."""
        return default_hooks.allreduce_hook if self == self.ALLREDUCE else default_hooks.fp16_compress_hook


class DDPCommHookType(enum.Enum):
    """Hooks that :func:`register_ddp_comm_hook` knows; names as in torch.

    Attributes:
        hook: the hook.
        rank: that of its PowerSGDState, where it has one.
    """

    hook: Hook
    rank: int | None

    def __new__(cls, name: str, hook: Hook, rank: int | None = None) -> DDPCommHookType:  # noqa: PYI034
        """Returns a member whose value is its name."""
        member = object.__new__(cls)
        member._value_ = name
        member.hook, member.rank = hook, rank
        return member

    ALLREDUCE = "allreduce", default_hooks.allreduce_hook
    FP16_COMPRESS = "fp16_compress", default_hooks.fp16_compress_hook
    BF16_COMPRESS = "bf16_compress", default_hooks.bf16_compress_hook
    QUANTIZE_PER_TENSOR = "quantize_per_tensor", quantization_hooks.quantization_pertensor_hook
    QUANTIZE_PER_CHANNEL = "quantize_per_channel", quantization_hooks.quantization_perchannel_hook
    POWER_SGD = "powerSGD", powerSGD_hook.powerSGD_hook, 1
    POWER_SGD_RANK2 = "powerSGD_rank2", powerSGD_hook.powerSGD_hook, 2
    BATCHED_POWER_SGD = "batched_powerSGD", powerSGD_hook.batched_powerSGD_hook, 1
    BATCHED_POWER_SGD_RANK2 = "batched_powerSGD_rank2", powerSGD_hook.batched_powerSGD_hook, 2
    NOOP = "noop", debugging_hooks.noop_hook


class _Registers(Protocol):
    """A module that takes communication hooks: this package's DistributedDataParallel, or torch's."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Takes a hook and its state."""


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: _Registers, state: object = None) -> None:
    """Registers a hook by name; called on all ranks, outside of a backward pass.

    Args:
        comm_hook_type: the hook.
        model: this package's DistributedDataParallel, or torch's over one of this package's backends.
        state: the process group; ``None`` for the default group. PowerSGD makes a
            :class:`~collectives.ddp.hooks.powerSGD_hook.PowerSGDState` of it with the rank that the name says
            and torch's defaults.

    Raises:
        TypeError: ``comm_hook_type`` is none of the names.
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise TypeError(
            f"comm_hook_type must be a DDPCommHookType, but is {comm_hook_type!r} of type "
            f"{type(comm_hook_type).__name__}; for a hook of your own call model.register_comm_hook"
        )
    if comm_hook_type.rank is not None:
        state = powerSGD_hook.PowerSGDState(state, matrix_approximation_rank=comm_hook_type.rank)
    model.register_comm_hook(state, comm_hook_type.hook)
