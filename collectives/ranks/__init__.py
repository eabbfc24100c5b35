"""Ranks as processes of this machine, for users' functions, benchmarks, conformance and tests.

Inside: starting them (launched, spawned, or by ``mpirun``), their CUDA devices, commands and answers, what
becomes of a rank that fails. Not here: what they run, process groups (:mod:`collectives.api`), jobs on
several machines (that is ``torchrun``).
"""

from __future__ import annotations
