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

PLACEMENTS = {"2x1": [0, 1], "3x1": [0, 1, 2], "2x2": [0, 0, 1, 1], "mixed": [0, 1, 0, 2]}
COUNTS = [1, 777, 9_000, 70_001, 1_000_003]
"""Elements that travel in the frames of the arrival, and in one chunk or many of the long algorithms."""


def make_group(rank, size, placement, **options):
    """Returns the group of a rank that counts as one of the machine that the placement says."""
    os.environ["COLLECTIVES_HOST_MACHINE"] = f"machine{placement[rank]}"
    return create_group("host", GroupOptions(current_store(), rank, size, group_name="machines", **options))


def values(dtype, count, rank):
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator, dtype=torch.int64).to(dtype)


def placed_sum(dtype, count, placement):
    """Sums machine by machine in float32 or float64, and rounds once."""
    wide = dtype if dtype in (torch.float64, torch.int32) else torch.float32
    total = None
    for machine in sorted(set(placement), key=placement.index):
        ranks = [rank for rank, where in enumerate(placement) if where == machine]
        partial = values(dtype, count, ranks[0]).to(wide)
        for rank in ranks[1:]:
            partial = partial + values(dtype, count, rank).to(wide)
        total = partial if total is None else total + partial
    return total.to(dtype)


def _reductions(rank, size, placement):
    group = make_group(rank, size, placement)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        longest = placed_sum(dtype, max(COUNTS), placement)
        own = values(dtype, max(COUNTS), rank)
        for count in COUNTS:
            # The same numbers in each length: a prefix of the longest result, bit for bit.
            tensor = own[:count].clone()
            group.allreduce(tensor).wait()
            assert torch.equal(tensor, longest[:count]), (dtype, count)
            root = count % size
            tensor = own[:count].clone()
            before = tensor.clone()
            group.reduce(tensor, root).wait()
            assert torch.equal(tensor, longest[:count] if rank == root else before), (dtype, count, root)
            parts = count // size
            source = own[: parts * size].clone()
            output = torch.empty(parts, dtype=dtype)
            group.reduce_scatter_single(output, source).wait()
            assert torch.equal(output, longest[parts * rank : parts * (rank + 1)]), (dtype, count)
    group.shutdown()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_reductions_have_the_bits_of_the_placement_at_every_length(name):
    run_ranks(_reductions, len(PLACEMENTS[name]), PLACEMENTS[name], env={"COLLECTIVES_HOST_MACHINE": None})


def _movements(rank, size, placement):
    group = make_group(rank, size, placement)
    for count in (5, 100_003):
        mine = values(torch.int32, count, rank)
        everyone = [values(torch.int32, count, r) for r in range(size)]
        for root in range(size):
            tensor = mine.clone()
            group.broadcast(tensor, root).wait()
            assert torch.equal(tensor, everyone[root])
            outputs = [torch.empty(count, dtype=torch.int32) for _ in range(size)]
            group.gather([outputs] if rank == root else [], [mine], dist.GatherOptions(rootRank=root)).wait()
            assert rank != root or all(map(torch.equal, outputs, everyone))
            inputs = [everyone[root] + r for r in range(size)] if rank == root else None
            output = torch.empty(count, dtype=torch.int32)
            group.scatter([output], [inputs] if inputs else [], dist.ScatterOptions(rootRank=root)).wait()
            assert torch.equal(output, everyone[root] + rank)
        outputs = [torch.empty(count + r, dtype=torch.int32) for r in range(size)]
        group.allgather([outputs], [values(torch.int32, count + rank, rank)]).wait()
        assert all(torch.equal(outputs[r], values(torch.int32, count + r, r)) for r in range(size))
        outputs = [torch.empty(count - r, dtype=torch.int32) for r in range(size)]
        inputs = [everyone[rank][: count - rank] + r for r in range(size)]
        group.alltoall(outputs, inputs).wait()
        assert all(torch.equal(outputs[r], everyone[r][: count - r] + rank) for r in range(size))
    group.shutdown()


@pytest.mark.parametrize("name", ["3x1", "2x2"])
def test_everything_arrives_where_it_should(name):
    run_ranks(_movements, len(PLACEMENTS[name]), PLACEMENTS[name], env={"COLLECTIVES_HOST_MACHINE": None})


def _messages(rank, size, placement):
    group = make_group(rank, size, placement)
    lengths = [1, 50_000, 700_001]
    peers = [r for r in range(size) if r != rank]
    sends = [
        group.send([values(torch.int32, count, rank)], peer, tag)
        for peer in peers
        for tag, count in enumerate(lengths)
    ]
    for tag in reversed(range(len(lengths))):  # what comes first is not what is asked for first
        for peer in peers:
            tensor = torch.empty(lengths[tag], dtype=torch.int32)
            group.recv([tensor], peer, tag).wait()
            assert torch.equal(tensor, values(torch.int32, lengths[tag], peer))
    for send in sends:
        send.wait()
    if rank == 0:
        seen = set()
        for _ in peers:
            tensor = torch.empty(1)
            work = group.recv_anysource([tensor], 9)
            work.wait()
            assert tensor.item() == work.source_rank()
            seen.add(work.source_rank())
        assert seen == set(peers)
    else:
        group.send([torch.tensor([float(rank)])], 0, 9).wait()
    group.shutdown()


@pytest.mark.parametrize("name", ["3x1", "2x2"])
def test_messages_go_between_machines(name):
    run_ranks(_messages, len(PLACEMENTS[name]), PLACEMENTS[name], env={"COLLECTIVES_HOST_MACHINE": None})


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
    run_ranks(_mismatch, 4, PLACEMENTS["2x2"], env={"COLLECTIVES_HOST_MACHINE": None})


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


def test_streams_of_several_sockets_carry_the_same_bits():
    environment = {"COLLECTIVES_HOST_MACHINE": None, "COLLECTIVES_HOST_STREAMS": "3"}
    run_ranks(_reductions, 3, PLACEMENTS["3x1"], env=environment)
