"""A selection of the suite for ranks of the host backend on several machines, joined by TCP on loopback."""

from __future__ import annotations

import os

import pytest
from conformance import test_messages, test_movement, test_reductions, test_renewal
from harness import current_store, run_ranks

from collectives.registry.backends import GroupOptions, create_group

PLACEMENTS = {"2x2": [0, 0, 1, 1], "3x1": [0, 1, 2]}

BODIES = {
    # The oracle adds up in the order of ranks, which is the order between machines where each has one rank.
    "3x1": [
        test_reductions.all_reduce,
        test_reductions.reduce,
        test_reductions.reduce_scatter,
        test_reductions.special_values,
        test_movement.gather,
        test_movement.scatter,
        test_messages.tags_and_order,
        test_messages.large_both_ways,
        test_renewal.broken_and_renewed,
    ],
    "2x2": [
        test_reductions.bits_of_one_sum,
        test_movement.broadcast,
        test_movement.all_gather_uneven,
        test_movement.all_to_all_single,
        test_messages.exchange,
        test_messages.from_anyone,
        test_messages.beside_collectives,
    ],
}


def on_its_machine(rank, size, placement, body):
    os.environ["COLLECTIVES_HOST_MACHINE"] = f"machine{placement[rank]}"
    group = create_group("host", GroupOptions(current_store(), rank, size, group_name="machines"))
    try:
        body(group)
    except BaseException:
        group.abort()
        raise
    group.shutdown()


CASES = [
    pytest.param(name, body, id=f"{name}-{body.__name__}")
    for name, bodies in BODIES.items()
    for body in bodies
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "body"), CASES)
def test_between_machines(name, body):
    placement = PLACEMENTS[name]
    run_ranks(
        on_its_machine,
        len(placement),
        placement,
        body,
        timeout=110,
        env={"COLLECTIVES_HOST_MACHINE": None},
    )
