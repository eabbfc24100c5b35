"""The communication hooks of ``bench ddp``, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks as torch_debugging
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default

from collectives.ddp.hooks import debugging_hooks, default_hooks
from collectives.ddp.hooks.adaptive_hook import AdaptiveState, adaptive_hook
from collectives.ddp.hooks.one_bit_hook import OneBitState, one_bit_hook
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from collectives.ddp.hooks.quantization_hooks import (
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from collectives.ddp.hooks.top_k_hook import TopKState, top_k_hook

__all__ = ["HOOKS", "NOOP", "TORCH_HOOKS", "register"]

NOOP: Final = "noop"
"""The hook that communicates nothing."""


def _power(rank: int, hook: Any = powerSGD_hook) -> Callable[[Any, int], tuple[Any, Any]]:
    return lambda group, exact: (
        PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, exact)),
        hook,
    )


HOOKS: Final[Mapping[str, Callable[[Any, int], tuple[Any, Any]]]] = {
    NOOP: lambda group, _: (group, debugging_hooks.noop_hook),
    "allreduce": lambda group, _: (group, default_hooks.allreduce_hook),
    "fp16": lambda group, _: (group, default_hooks.fp16_compress_hook),
    "bf16": lambda group, _: (group, default_hooks.bf16_compress_hook),
    "int8-tensor": lambda group, _: (group, quantization_pertensor_hook),
    "int8-block": lambda group, _: (group, quantization_perchannel_hook),
    "powersgd-1": _power(1),
    "powersgd-2": _power(2),
    "powersgd-4": _power(4),
    "powersgd-4-fp16": _power(4, default_hooks.fp16_compress_wrapper(powerSGD_hook)),
    "powersgd-batched": _power(1, batched_powerSGD_hook),
    "one-bit": lambda group, exact: (OneBitState(group, exact), one_bit_hook),
    "top-k": lambda group, exact: (TopKState(group, 0.01, exact), top_k_hook),
    "adaptive": lambda group, exact: (AdaptiveState(group, start_iter=exact), adaptive_hook),
}
"""This package's: each makes state and hook of a group and the number of steps that are averaged exactly."""

TORCH_HOOKS: Final[Mapping[str, Any]] = {
    NOOP: torch_debugging.noop_hook,
    "allreduce": torch_default.allreduce_hook,
    "fp16": torch_default.fp16_compress_hook,
    "bf16": torch_default.bf16_compress_hook,
}
"""torch's own that need no state."""


def register(parallel: nn.Module, kind: str, name: str, group: Any, exact: int) -> None:
    """Registers a hook with a wrapper.

    Args:
        parallel: the wrapper.
        kind: whose it is: ``"ours"`` or ``"torch"``.
        name: of the hook; empty for none.
        group: the wrapper's.
        exact: first steps that a hook with a state averages exactly.
    """
    if name:
        state, hook = HOOKS[name](group, exact) if kind == "ours" else (None, TORCH_HOOKS[name])
        parallel.register_comm_hook(state, hook)  # type: ignore[operator]
