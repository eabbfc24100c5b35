"""A store in a file that processes share.

Inside: the store, the locked file, the log that it holds, and the runs that use one file. Not here: what
every store keeps to (``store/base.py``).
"""

from __future__ import annotations

from collectives.store.file.store import FileStore

__all__ = ["FileStore"]
