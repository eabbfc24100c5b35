"""Optimizers that know of other ranks."""

from __future__ import annotations

from collectives.ddp.optim.post_local_sgd import PostLocalSGDOptimizer
from collectives.ddp.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
