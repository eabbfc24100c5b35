"""A store served over TCP, compatible with torch's in both roles.

Inside: the store, the client's connections, the wire format, where the server listens. Not here: the server
itself, which is C++ (``backends/native/store``).
"""

from __future__ import annotations

from collectives.store.tcp.store import TCPStore

__all__ = ["TCPStore"]
