"""PyTorch Ignite's ``ignite.distributed`` with our backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import torch
from ignite.distributed import auto
from ignite.distributed.comp_models import native
from torch import nn

__all__ = ["register"]

_NAMES = ("collectives", "collectives_mpi", "collectives_round_robin")


def register(wrapper: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel) -> None:
    """Lets ``idist`` take the names of our backends, and ``idist.auto_model`` wrap models over them.

    Without it, ``idist.initialize`` refuses the names. In a world that torch made with one of them,
    ``auto_model`` returns models as they are, so that each rank trains alone. Called in each process, at the
    top of the script, so that ranks that ``idist.Parallel`` starts call it, too; a further call changes the
    wrapper. Does not communicate.

    Args:
        wrapper: what wraps models: torch's ``DistributedDataParallel``, or
            :class:`collectives.ddp.DistributedDataParallel`.
    """
    global _wrapper
    _wrapper = wrapper
    model = native._NativeDistModel
    model.available_backends = (*dict.fromkeys((*model.available_backends, *_NAMES)),)
    auto.auto_model = idist.auto_model = _auto_model


_theirs: Callable[..., nn.Module] = auto.auto_model
_wrapper: Callable[..., nn.Module] = nn.parallel.DistributedDataParallel


def _auto_model(model: nn.Module, sync_bn: bool = False, **kwargs: Any) -> nn.Module:
    if idist.backend() not in _NAMES or idist.get_world_size() == 1:
        return _theirs(model, sync_bn, **kwargs)
    model.to(idist.device())
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        kwargs["device_ids"] = [idist.get_local_rank()]
    return _wrapper(model, **kwargs)
