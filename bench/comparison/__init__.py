"""Collective operations timed on several peers side by side: backends, torch's, plain mpi4py.

Inside: options, the parent's and the ranks' side of a measurement, peers, records, tables, plots, goals. Not
here: the programs (:mod:`collectives.bench.allreduce`, :mod:`collectives.bench.every_operation`).
"""

from __future__ import annotations
