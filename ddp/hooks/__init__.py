"""Communication hooks, which average a full bucket of gradients, and their registration by name.

A hook takes its state and a :class:`~collectives.ddp.GradBucket`, and returns a future of the averaged flat
tensor; torch's DistributedDataParallel takes them, too. Modules
are named as torch's; ``compression`` has those that torch does not, and ``state`` what all share.
"""

from __future__ import annotations

from types import ModuleType

from collectives.ddp.hooks import (
    compression,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from collectives.ddp.hooks.compression import (
    AdaptiveState,
    OneBitState,
    QuantizedAllreduceState,
    TopKState,
    adaptive_hook,
    one_bit_hook,
    quantized_allreduce_hook,
    top_k_hook,
)
from collectives.ddp.hooks.registration import BuiltinCommHookType, DDPCommHookType, register_ddp_comm_hook
from collectives.dynamo import leave_names_uncompiled

for _module in [value for value in globals().values() if isinstance(value, ModuleType)]:
    leave_names_uncompiled(vars(_module))
leave_names_uncompiled(globals())

__all__ = [
    "AdaptiveState",
    "BuiltinCommHookType",
    "DDPCommHookType",
    "OneBitState",
    "QuantizedAllreduceState",
    "TopKState",
    "adaptive_hook",
    "compression",
    "ddp_zero_hook",
    "debugging_hooks",
    "default_hooks",
    "one_bit_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_hooks",
    "quantized_allreduce_hook",
    "register_ddp_comm_hook",
    "top_k_hook",
]
