"""Messages of an MPI group: their memory and tags, and collectives made of messages between all ranks.

Not here: collectives that the C++ core exchanges (``native_exchange``) or that MPI itself carries out.
"""

from __future__ import annotations
