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
    """Hooks that :func:`register_ddp_comm_hook` knows; names as in torch."""

    ALLREDUCE = "allreduce"
    FP16_COMPRESS = "fp16_compress"
    BF16_COMPRESS = "bf16_compress"
    QUANTIZE_PER_TENSOR = "quantize_per_tensor"
    QUANTIZE_PER_CHANNEL = "quantize_per_channel"
    POWER_SGD = "powerSGD"
    POWER_SGD_RANK2 = "powerSGD_rank2"
    BATCHED_POWER_SGD = "batched_powerSGD"
    BATCHED_POWER_SGD_RANK2 = "batched_powerSGD_rank2"
    NOOP = "noop"


_HOOKS: dict[DDPCommHookType, tuple[Hook, int | None]] = {
    DDPCommHookType.ALLREDUCE: (default_hooks.allreduce_hook, None),
    DDPCommHookType.FP16_COMPRESS: (default_hooks.fp16_compress_hook, None),
    DDPCommHookType.BF16_COMPRESS: (default_hooks.bf16_compress_hook, None),
    DDPCommHookType.QUANTIZE_PER_TENSOR: (quantization_hooks.quantization_pertensor_hook, None),
    DDPCommHookType.QUANTIZE_PER_CHANNEL: (quantization_hooks.quantization_perchannel_hook, None),
    DDPCommHookType.NOOP: (debugging_hooks.noop_hook, None),
    DDPCommHookType.POWER_SGD: (powerSGD_hook.powerSGD_hook, 1),
    DDPCommHookType.POWER_SGD_RANK2: (powerSGD_hook.powerSGD_hook, 2),
    DDPCommHookType.BATCHED_POWER_SGD: (powerSGD_hook.batched_powerSGD_hook, 1),
    DDPCommHookType.BATCHED_POWER_SGD_RANK2: (powerSGD_hook.batched_powerSGD_hook, 2),
}
"""Each hook, and the rank of its PowerSGDState where it has one."""


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
    hook, rank = _HOOKS[comm_hook_type]
    if rank is not None:
        state = powerSGD_hook.PowerSGDState(state, matrix_approximation_rank=rank)
    model.register_comm_hook(state, hook)
