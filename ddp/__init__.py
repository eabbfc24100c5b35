"""Data parallel training over a process group."""

from __future__ import annotations

from collectives.ddp.distributed import DistributedDataParallel
from collectives.ddp.errors import GradientSyncError, ModelMismatchError
from collectives.ddp.grad_bucket import GradBucket

__all__ = ["DistributedDataParallel", "GradBucket", "GradientSyncError", "ModelMismatchError"]
