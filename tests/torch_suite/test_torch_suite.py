"""torch's own distributed tests pass on our backend; with more ranks they run by run.py."""

from __future__ import annotations

import pytest
from torch_suite.expected import FAILURES, complaint
from torch_suite.player import Player

SHARES = 6
PROFILED = (
    "test_all_reduce_sum", "test_all_reduce_sum_async", "test_all_gather", "test_barrier",
    "test_send_recv_torch_profiler", "test_send_recv_any_source_autograd_profiler",
)  # fmt: skip


@pytest.fixture(scope="module")
def player():
    player = Player()
    yield player
    player.close()


def check(player, backend, names):
    player.take(backend, 2)
    outcomes = {name: player.play(name) for name in names}
    complaints = [complaint(backend, name, one.status, one.text) for name, one in outcomes.items()]
    assert not any(complaints), "\n".join(filter(None, complaints))
    return [name for name, outcome in outcomes.items() if outcome.status == "passed"]


@pytest.mark.parametrize("share", range(SHARES))
def test_share(player, share):
    """Every sixth test; most of those that are skipped need GPUs."""
    player.take("collectives", 2)
    names = player.names[share::SHARES]
    assert len(names) > 40
    assert len(check(player, "collectives", names)) >= 10


def test_listed_failures_are_tests(player):
    player.take("collectives", 2)
    assert {name for names in FAILURES.values() for name in names} <= set(player.names)


@pytest.mark.parametrize("backend", ["collectives_round_robin", "collectives_gloo"])
def test_events_are_single_over_another_group(player, backend):
    assert check(player, backend, PROFILED) == list(PROFILED)
