"""A process that gets no further threads from the system."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

_A_USER = 64_321
"""Whom the limit binds, unlike root; has no processes."""


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Lets every start of a thread fail in this process, which should be one of its own."""
    user = os.getuid()
    if user == 0:
        os.setresuid(_A_USER, _A_USER, 0)
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, limits)
        if user == 0:
            os.setresuid(0, 0, 0)
