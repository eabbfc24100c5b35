"""The mpi backend: an MPI library, reached through mpi4py, behind our contract.

Inside: the process group, its Work, how operations are dispatched and make progress, MPI's communicators. Not
here: the exchange of small messages by address, which is C++ (``backends/native/mpi``).
"""

from __future__ import annotations

from collectives.backends.mpi.group import ProcessGroupMPI, capabilities, create, option_names
from collectives.backends.mpi.libmpi import decline, unavailable

__all__ = ["ProcessGroupMPI", "capabilities", "create", "decline", "option_names", "unavailable"]
