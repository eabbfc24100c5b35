"""Peers side by side at operations, sizes and numbers of ranks.

Inside: the plan of a run, the side that every rank plays, the peers. The programs are
:mod:`collectives.bench.allreduce` and :mod:`collectives.bench.every_operation`.
"""

from __future__ import annotations

__all__: list[str] = []
