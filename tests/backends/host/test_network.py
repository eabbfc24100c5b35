"""Groups over network interfaces that the user names."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks

import collectives as dist
from collectives.backends.host import ProcessGroupHost


def _form(rank, size, names):
    os.environ["COLLECTIVES_HOST_MACHINE"] = str(rank)
    os.environ["COLLECTIVES_SOCKET_IFNAME"] = names[rank]
    try:
        group = ProcessGroupHost(current_store(), rank, size, timedelta(seconds=10), group_name="test")
    finally:
        del os.environ["COLLECTIVES_HOST_MACHINE"], os.environ["COLLECTIVES_SOCKET_IFNAME"]
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor[0] == size
    group.shutdown()


def test_group_over_two_named_interfaces():
    run_ranks(_form, 2, ["lo,lo", "lo,lo"])


def _form_unequal(rank, size):
    with pytest.raises(dist.DistNetworkError, match="equally many interfaces"):
        _form(rank, size, ["lo", "lo,lo"])


def test_unequal_numbers_of_interfaces_are_refused_on_all_ranks():
    run_ranks(_form_unequal, 2)
