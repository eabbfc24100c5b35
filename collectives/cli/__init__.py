"""The command ``collectives``: its programs by name.

Inside: the choice of the program, the list of backends, the readers of flight records and of shared memory,
and its part under ``mpirun``. Not here: the programs that measure and check (:mod:`collectives.bench`).
"""

from __future__ import annotations

from collectives.cli.command import CommandError, main

__all__ = ["CommandError", "main"]
