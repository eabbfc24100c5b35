"""torch's own ProcessGroupGloo behind our contract: the peer to compare with, and a lane of other groups.

Inside: the process group, its messages and reductions, Work, and what Gloo's errors mean. Not here: Gloo
itself, which torch has compiled in.
"""

from __future__ import annotations

from collectives.backends.gloo.connections import option_names
from collectives.backends.gloo.group import ProcessGroupGloo, capabilities, create, unavailable

__all__ = ["ProcessGroupGloo", "capabilities", "create", "option_names", "unavailable"]
