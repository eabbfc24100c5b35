"""A selection of the suite for ranks of the host backend on several machines, joined by TCP on loopback.

The values of collectives there are in :mod:`conformance.test_values`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conformance import test_messages, test_renewal
from harness import run_ranks

from collectives import ProcessGroup

BODIES = [
    test_messages.exchange,
    test_messages.tags_and_order,
    test_messages.large_both_ways,
    test_messages.from_anyone,
    test_messages.beside_collectives,
    test_renewal.broken_and_renewed,
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("placement", ["abc", "aabb"])
@pytest.mark.parametrize("body", BODIES)
def test_between_machines(body: Callable[[ProcessGroup], None], placement: str) -> None:
    run_ranks(body, len(placement), backend="host", placement=placement, timeout=110)
