"""What torch.compile must know of data parallel training: where to split graphs.

TorchDynamo is not imported here: nothing in this module costs anything until somebody else has done so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from collectives.ddp.reducer.buckets import FIRST_BUCKET_BYTES
from collectives.dynamo import compiler_is_loaded

__all__ = ["outside_transforms", "run_module", "splits_graphs"]


def outside_transforms() -> AbstractContextManager[object]:
    """Returns a context whose operations no transform sees, for what communicates."""
    active: bool = torch._C._are_functorch_transforms_active()
    disabled: AbstractContextManager[object] = torch._C._DisableFuncTorch() if active else nullcontext()
    return disabled


def run_module(module: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module from a frame that the compiler traces; it begins at no frame of torch's own modules."""
    return module(*inputs, **kwargs)


@dataclass(frozen=True)
class _Wrapper:
    """What the compiler's optimizer asks a wrapper for.

    Attributes:
        bucket_bytes_cap: bytes of parameters after which a graph ends.
    """

    bucket_bytes_cap: int


@contextlib.contextmanager
def splits_graphs(bucket_bytes: int) -> Iterator[None]:
    """Context in which the compiler splits graphs at the boundaries of the buckets.

    One graph of a whole module would deliver all gradients at the end of its backward pass, with nothing left
    to hide communication behind. The compiler's optimizer for torch's own wrapper splits it where parameters
    fill a bucket; it looks for the wrapper in this attribute. ``torch._dynamo.config.optimize_ddp = False``
    turns it off.

    Args:
        bucket_bytes: cap of a bucket; the optimizer does not go below that of its first one, 1 MiB.
    """
    owner: Any = torch.nn.parallel.DistributedDataParallel
    if not compiler_is_loaded() or not hasattr(owner, "_active_ddp_module"):
        yield
        return
    before = owner._active_ddp_module
    owner._active_ddp_module = _Wrapper(max(bucket_bytes, FIRST_BUCKET_BYTES))
    try:
        yield
    finally:
        owner._active_ddp_module = before
