"""Key/value stores, and how the processes of a job find each other.

Inside: :class:`Store`, the contract that all stores keep, the stores, the ways to one (:func:`rendezvous`),
and how ranks join worlds and groups (``joining``). Not here: the server of a TCP store
(``backends/native/store``).
"""

from __future__ import annotations

if __name__ != "collectives.store":
    raise ImportError("this folder is the package collectives.store; import it by that name")

from collectives.store.base import Store
from collectives.store.file import FileStore
from collectives.store.memory import HashStore
from collectives.store.prefix import PrefixStore
from collectives.store.rendezvous import register_rendezvous_handler, rendezvous
from collectives.store.tcp import TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "register_rendezvous_handler",
    "rendezvous",
]
