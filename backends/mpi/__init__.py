"""The mpi backend: an MPI library, reached through mpi4py, behind our contract."""

from __future__ import annotations

from collectives.backends.mpi.group import ProcessGroupMPI, capabilities, create, option_names
from collectives.backends.mpi.library import unavailable

__all__ = ["ProcessGroupMPI", "capabilities", "create", "option_names", "unavailable"]
