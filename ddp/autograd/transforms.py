"""What data parallel training does about the transforms of ``torch.func``: grad, jacfwd, hessian, vmap.

Within one, the results of operations are values of the transform, without memory that could be sent.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["outside_transforms"]


def outside_transforms() -> AbstractContextManager[object]:
    """Returns a context whose operations no transform sees, for what communicates."""
    active: bool = torch._C._are_functorch_transforms_active()
    disabled: AbstractContextManager[object] = torch._C._DisableFuncTorch() if active else nullcontext()
    return disabled
