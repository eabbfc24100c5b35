"""The host backend: CPU tensors over shared memory on a machine, and TCP between machines.

Inside: the process group, how its ranks meet, addresses, thresholds, Work. Not here: transports and
algorithms, which are C++ (``backends/native``).
"""

from __future__ import annotations

from collectives.backends.host.group import ProcessGroupHost, capabilities, create, option_names

__all__ = ["ProcessGroupHost", "capabilities", "create", "option_names"]
