"""The host backend: CPU tensors over shared memory on a machine, and TCP between machines.

Inside: the process group, its Work, rendezvous of its ranks, network addresses, thresholds of algorithms. Not
here: transports, algorithms and kernels, which are C++ (``backends/native``).
"""

from __future__ import annotations

from collectives.backends.host.group import ProcessGroupHost, capabilities, create, option_names
from collectives.backends.host.threads import HostOptions

__all__ = ["HostOptions", "ProcessGroupHost", "capabilities", "create", "option_names"]
