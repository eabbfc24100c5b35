"""Collective operations timed on several peers side by side: backends, torch's, plain mpi4py.

Inside: options, the parent's and the ranks' side of a measurement, peers, records and tables. Not here: the
program (:mod:`collectives.bench.allreduce`).
"""

from __future__ import annotations
