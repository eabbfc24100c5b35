"""Operations on CUDA streams: NCCL's calls for each, reductions, enqueueing, and operations in flight.

Not here: the Works that users wait for, and the watchdog that ends operations.
"""

from __future__ import annotations
