"""Stores for tests."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from store_pairs import LONG

from collectives.store import Store, TCPStore

# torch's TCPStore looks the names of addresses up for its log, which a name server that does not answer
# would make last 5 s and more each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def pair(request, tmp_path):
    """Two handles on one store; see :mod:`store_pairs`."""
    with ExitStack() as stack:
        made = request.param(tmp_path)
        for store in made:
            store.set_timeout(LONG)
            if isinstance(store, Store):
                stack.callback(store.close)
        yield made[:2]


@pytest.fixture
def server():
    """A TCP store that runs its server in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    yield store
    store.close()


@pytest.fixture
def path(tmp_path):
    """Where a FileStore may be."""
    return tmp_path / "store"
