"""The host backend between machines: the bits, the bytes sent, and deaths in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from harness import Died, current_store, run_ranks
from machines import bytes_without_repeats, make_machines  # noqa: F401 - a fixture

import collectives as dist
from collectives import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from collectives.registry.backends import GroupOptions, create_group


def make_group(rank, size, placement, **options):
    """Returns the group of a rank that counts as one of the machine that the placement says."""
    os.environ["COLLECTIVES_HOST_MACHINE"] = f"machine{placement[rank]}"
    return create_group("host", GroupOptions(current_store(), rank, size, group_name="machines", **options))


def _mismatch(rank, size, placement):
    group = make_group(rank, size, placement)
    tensor = torch.full((100_000 if rank == size - 1 else 10,), float(rank))
    with pytest.raises(CollectiveMismatchError, match=r"rank 0.*\n.*rank 1"):
        group.allreduce(tensor).wait()
    assert torch.equal(tensor, torch.full_like(tensor, rank))
    group.allreduce(tensor[:10]).wait()
    assert tensor[0].item() == sum(range(size))
    group.shutdown()


def test_a_mismatch_is_told_on_all_machines_and_nothing_is_written():
    run_ranks(_mismatch, 4, [0, 0, 1, 1], env={"COLLECTIVES_HOST_MACHINE": None})


def _all_reduce(group, count, dtype):
    tensor = torch.ones(count, dtype=dtype)
    group.barrier().wait()
    group.allreduce(tensor).wait()
    assert tensor[0].item() == tensor[-1].item() == group.size()


@pytest.mark.parametrize(
    ("placement", "dtype", "share"),
    [
        ([0, 1], torch.float32, 1.0),
        ([0, 0, 1, 1], torch.float32, 1.0),
        ([0, 1, 2], torch.float32, 4 / 3),
        ([0, 0, 1, 1], torch.bfloat16, 1.5),  # contributions of two ranks travel as float32
    ],
)
def test_an_all_reduce_sends_no_more_than_it_must(make_machines, placement, dtype, share):  # noqa: F811
    machines = make_machines(max(placement) + 1)
    count = 4 << 20
    before = [bytes_without_repeats(machines, machine) for machine in range(len(machines))]
    options = {"backend": "host", "isolated": True, "machines": (machines, placement)}
    run_ranks(_all_reduce, len(placement), count, dtype, **options)
    for machine, bytes_before in enumerate(before):
        ratio = (bytes_without_repeats(machines, machine) - bytes_before) / (count * dtype.itemsize)
        assert share <= ratio < share * 1.06, machine  # headers and acknowledgements


def _lose_a_peer(group, victim, started):
    group.barrier().wait()
    if group.rank() == victim:
        opts = dist.AllreduceOptions()
        opts.asyncOp = True
        group.allreduce([torch.ones(8 << 20)], opts)
        time.sleep(started)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        group.allreduce(torch.ones(8 << 20)).wait()
    return caught.value.rank


@pytest.mark.sampled(1)
@pytest.mark.parametrize("victim", [2, 3])
def test_a_peer_that_dies_in_the_middle_of_a_long_transfer_is_named(make_machines, victim):  # noqa: F811
    machines = make_machines(2, "100mbit")  # the transfer would take three seconds
    results = run_ranks(
        _lose_a_peer,
        4,
        victim,
        0.5,
        backend="host",
        isolated=True,
        lost=[victim],
        machines=(machines, [0, 0, 1, 1]),
    )
    assert isinstance(results[victim], Died)
    assert [lost for rank, lost in enumerate(results) if rank != victim] == [victim] * 3


def _lose_a_peer_at_some_time(group, victim):
    tensor = torch.ones(15_000)  # its parts travel with the arrival, and then results
    group.barrier().wait()
    if group.rank() == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            group.allreduce([tensor]).wait()
    except PeerLostError as error:
        return error.rank


@pytest.mark.sampled(1)
@pytest.mark.parametrize("placement", ["AABB", "ABC"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_peer_that_dies_in_one_of_many_reductions_is_named(placement, victim):
    size = len(placement)
    results = run_ranks(
        _lose_a_peer_at_some_time,
        size,
        victim,
        backend="host",
        isolated=True,
        lost=[victim],
        placement=placement,
    )
    assert isinstance(results[victim], Died)
    assert [lost for rank, lost in enumerate(results) if rank != victim] == [victim] * (size - 1)


def _time_out(group):
    group.barrier().wait()
    with pytest.raises(CollectiveTimeoutError):
        group.allreduce(torch.ones(16 << 20), timeout=timedelta(seconds=1)).wait()


def test_a_time_limit_ends_a_long_transfer(make_machines):  # noqa: F811
    machines = make_machines(2, "100mbit")  # the transfer would take six seconds
    run_ranks(_time_out, 3, backend="host", isolated=True, machines=(machines, [0, 0, 1]))


def _wrong_streams(rank, size, placement):
    os.environ["COLLECTIVES_HOST_STREAMS"] = "many"
    with pytest.raises(
        ValueError, match="COLLECTIVES_HOST_STREAMS=many is no number of sockets from 1 to 32"
    ):
        make_group(rank, size, placement)


def test_a_wrong_number_of_sockets_is_refused():
    environment = {"COLLECTIVES_HOST_MACHINE": None, "COLLECTIVES_HOST_STREAMS": None}
    run_ranks(_wrong_streams, 2, [0, 1], env=environment)
