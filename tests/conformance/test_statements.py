"""What the groups state about themselves is true, and what the backends state without a group is the same."""

from __future__ import annotations

import pytest
import torch
from conformance.statements import check_statements
from harness import current_store, run_ranks

from collectives import ProcessGroup
from collectives.backends.gloo import ProcessGroupGloo
from collectives.backends.round_robin import RoundRobinOptions
from collectives.core.capabilities import Capabilities
from collectives.registry.backends import GroupOptions, capabilities_of


def hold(group: ProcessGroup, backend: str | None) -> tuple[int, int]:
    stated = None if backend is None else capabilities_of(backend)
    assert (stated is None) == (backend is None)
    return check_statements(group, "cpu", stated)


@pytest.mark.sampled(2)
def test_statements(backend: str) -> None:
    results = run_ranks(hold, 2, backend, backend=backend)
    assert results[0] == results[1]
    assert min(results[0]) > 100


@pytest.mark.full
def test_statements_over_lanes_of_several_kinds() -> None:
    options = RoundRobinOptions(2, ("host", "gloo"))
    assert min(run_ranks(hold, 2, None, backend="round_robin", pg_options=options)[0]) > 100


class Liar(ProcessGroupGloo):
    """Says too much and too little."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu"}), reductions={torch.float32: frozenset({"SUM", "BAND"})}
        )

    def _admit(self, operation, tensor, op=None):
        if op is not None and op.name == "MAX":
            return
        super()._admit(operation, tensor, op)


def lie(rank: int, size: int) -> None:
    group = Liar(GroupOptions(current_store(), rank, size))
    try:
        with pytest.raises(AssertionError, match="BAND: "):
            check_statements(group, "cpu", None)
    finally:
        group.abort()


def test_a_yes_that_fails_is_found() -> None:
    run_ranks(lie, 2, isolated=True)
