"""Key/value stores, and how the processes of a job find each other.

See :class:`Store` for the contract that all stores keep, and :func:`rendezvous` for the ways to one.
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
