"""The fixture of the tests that run over all stores."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from store_pairs import LONG

from collectives.store import Store


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
