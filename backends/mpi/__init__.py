"""The mpi backend: an MPI library, reached through mpi4py, behind our contract.

Inside: the process group, the engine that drives its operations, MPI's communicators. Not here: the messages
that carry them out, which are C++ (``backends/native/mpi``).
"""

from __future__ import annotations

from collectives.backends.mpi.group import ProcessGroupMPI, capabilities, create, option_names
from collectives.backends.mpi.libmpi import decline, unavailable

__all__ = ["ProcessGroupMPI", "capabilities", "create", "decline", "option_names", "unavailable"]
