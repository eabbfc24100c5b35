"""Ranks as processes of this machine, for benchmarks, the conformance examination and tests.

Inside: starting them (spawned, or by ``mpirun``), commands and answers, what becomes of a rank that fails.
Not here: what they run, process groups (:mod:`collectives.api`), a launcher for users (that is ``torchrun``).
"""

from __future__ import annotations

__all__: list[str] = []
