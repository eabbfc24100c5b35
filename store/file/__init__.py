"""A store in a file that processes share.

Inside: the store, the locked file, the log that it holds, and the runs that use one file.
"""

from __future__ import annotations

from collectives.store.file.store import FileStore

__all__ = ["FileStore"]
