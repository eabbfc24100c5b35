"""Optimizers that know of other ranks.

Inside: one whose state is spread over the ranks (ZeRO), and one that averages parameters after its steps.
Not here: the averagers that it calls (:mod:`collectives.ddp.model_averaging`).
"""

from __future__ import annotations

from collectives.ddp.optim.post_local_sgd import PostLocalSGDOptimizer
from collectives.ddp.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]
