"""The command ``collectives``: its programs by name, the list of backends, and its part under ``mpirun``.

The other programs are in :mod:`collectives.bench`.
"""

from __future__ import annotations

from collectives.cli.command import CommandError, main

__all__ = ["CommandError", "main"]
