"""Communication hooks: how a full bucket of gradients is averaged.

A hook takes the state given to ``register_comm_hook`` and a :class:`~collectives.ddp.GradBucket`, and returns
a future of the averaged flat tensor. All hooks here serve torch's DistributedDataParallel, too, where it runs
over one of this package's backends in ``torch.distributed``.

============================================  =====================================  =========================
module                                        hooks                                  state
============================================  =====================================  =========================
:mod:`~collectives.ddp.hooks.default_hooks`   plain averaging; 16 bits, also around  a process group
                                              another hook
:mod:`~.quantization_hooks`                   8 bits                                 a process group
:mod:`~.powerSGD_hook`                        low-rank matrices                      ``PowerSGDState``
:mod:`~.one_bit_hook`                         signs                                  ``OneBitState``
:mod:`~.top_k_hook`                           the largest elements                   ``TopKState``
:mod:`~.adaptive_hook`                        as few bits as the gradients allow     ``AdaptiveState``
:mod:`~.post_localSGD_hook`                   a part of the ranks, after a while     ``PostLocalSGDState``
:mod:`~.ddp_zero_hook`                        as another hook, and a step of a       that of the other hook
                                              ``ZeroRedundancyOptimizer``
:mod:`~.debugging_hooks`                      none at all                            anything
============================================  =====================================  =========================
"""

from __future__ import annotations

from collectives.ddp.hooks import (
    adaptive_hook,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    one_bit_hook,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    top_k_hook,
)
from collectives.ddp.hooks.registration import BuiltinCommHookType, DDPCommHookType, register_ddp_comm_hook

__all__ = [
    "BuiltinCommHookType",
    "DDPCommHookType",
    "adaptive_hook",
    "ddp_zero_hook",
    "debugging_hooks",
    "default_hooks",
    "one_bit_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_hooks",
    "register_ddp_comm_hook",
    "top_k_hook",
]
