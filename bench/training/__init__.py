"""The training measurements: models, peers, the side that every rank runs, records.

The programs are :mod:`collectives.bench.ddp` and :mod:`collectives.bench.hooks`.
"""

from __future__ import annotations

__all__: list[str] = []
