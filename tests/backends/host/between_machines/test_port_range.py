"""Ports on which ranks of several machines listen, as a firewall lets them."""

from __future__ import annotations

import pytest
import torch
from harness import RankFailedError, current_store, run_ranks
from ports import free_ports, listening

from collectives.registry.backends import GroupOptions, create_group


def _rounds(rank, size, ports):
    for number in range(3):
        group = create_group("host", GroupOptions(current_store(), rank, size, group_name=f"round{number}"))
        # The port of one group is free for the next.
        assert [port for port in ports if listening(port)] == list(ports)
        tensor = torch.full((100_000,), rank + 1.0)
        group.allreduce(tensor).wait()
        assert tensor[-1] == 3
        group.barrier().wait()
        group.shutdown()


def run(ports):
    text = f"{ports[0]}-{ports[-1]}"
    run_ranks(_rounds, 2, ports, placement="ab", env={"COLLECTIVES_PORT_RANGE": text})


def test_each_rank_of_a_group_has_a_port_of_the_range():
    run(free_ports(2))


def test_a_range_that_is_too_small_is_named():
    with pytest.raises(RankFailedError, match=r"all 1 ports of COLLECTIVES_PORT_RANGE are in use"):
        run(free_ports(1))
