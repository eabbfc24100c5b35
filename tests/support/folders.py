"""Folders of the tests. Those of a process that was killed are removed by the next session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from census import SHARED_MEMORY

_PREFIX = "collectives-test-"
_YOUNG_S = 60.0
"""How long a folder may stand that its maker has not locked yet."""


class Folder:
    """A folder that is removed by :meth:`close`, or after the end of this process and those that it forked.

    Args:
        kind: what it is for.
        parent: where it stands; ``None`` for the usual place.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=parent))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # the kernel lets go of it with the last process

    def close(self) -> None:
        """Removes the folder; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep() -> None:
    """Removes the folders of processes that have ended."""
    for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        for path in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < _YOUNG_S:
                    continue
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(descriptor)
