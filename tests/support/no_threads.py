"""A process that gets no further threads from the system."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from collectives import DistBackendError

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


@contextlib.contextmanager
def threadless(*calls: Callable[[], object]) -> Iterator[None]:
    """Has calls refused, since no thread of Python begins within the ``with`` block."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    words = r"no thread could be started for .*: can't start new thread; raise the limit of processes"
    with mock.patch.object(threading.Thread, "start", refuse):
        for call in calls:
            with pytest.raises(DistBackendError, match=words):
                call()
        yield
