"""Data parallel training over a process group: DistributedDataParallel, its Join, hooks and optimizers.

Not here: process groups and collectives, of which this package uses the contracts only (:mod:`collectives`).
"""

from __future__ import annotations

if __name__ != "collectives.ddp":
    raise ImportError("this folder is the package collectives.ddp; import it by that name")

from collectives.ddp.distributed import DistributedDataParallel
from collectives.ddp.errors import GradientSyncError, JoinError, ModelMismatchError, UnevenInputsError
from collectives.ddp.join import Join, Joinable, JoinHook
from collectives.ddp.module.mixed_precision import MixedPrecision
from collectives.ddp.module.sync_batch_norm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)
from collectives.ddp.reducer.buckets import BucketLayout, GradBucket
from collectives.dynamo import leave_names_uncompiled

leave_names_uncompiled(globals())

__all__ = [
    "BucketLayout",
    "DistributedDataParallel",
    "GradBucket",
    "GradientSyncError",
    "Join",
    "JoinError",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "ModelMismatchError",
    "SyncBatchNorm",
    "UnevenInputsError",
    "convert_sync_batchnorm",
    "revert_sync_batchnorm",
]
