"""How ranks join worlds and groups through a store, and leave them.

Inside: the rendezvous of a world and that of a group, the records that processes announce there, and the
ranks that stand by to serve the store next. Not here: the ways to a first store (``store/rendezvous.py``).
"""

from __future__ import annotations
