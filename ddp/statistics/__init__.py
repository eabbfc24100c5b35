"""What DistributedDataParallel can say about its iterations: their times, and the logging data of torch.

Not here: errors (:mod:`collectives.ddp.errors`), and the words of the ranks' reports
(:mod:`collectives.ddp.sync.error_report`).
"""

from __future__ import annotations
