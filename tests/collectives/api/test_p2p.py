"""Messages between two ranks."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks, run_world

import collectives as dist


def exchanges(rank: int, size: int) -> None:
    peer = 1 - rank
    tensor = torch.empty(3)
    if rank == 0:
        assert dist.send(torch.arange(3.0), 1) is None
        assert dist.recv(tensor, 1) == 1
        assert tensor.tolist() == [3, 4, 5]
        assert dist.recv(tensor) == 1  # from any rank
        assert tensor.tolist() == [6, 7, 8]
    else:
        assert dist.recv(tensor, group_src=0) == 0
        assert tensor.tolist() == [0, 1, 2]
        dist.send(tensor + 3, group_dst=0)
        dist.send(tensor + 6, 0)
    first = torch.empty(1)
    work = dist.irecv(first, peer)
    dist.send(torch.tensor([30.0 + rank]), peer)
    work.wait()
    assert work.source_rank() == peer
    # To itself, which only the forms that do not block may.
    work = dist.irecv(first, rank)
    dist.isend(torch.tensor([5.0]), rank).wait()
    work.wait()
    assert first.item() == 5


def test_messages() -> None:
    run_world(exchanges, 2)


def without_a_world(group: dist.ProcessGroup) -> None:
    peer = 1 - group.rank()
    tensor, objects = torch.empty(1), [None]
    if group.rank() == 0:
        for _ in range(2):
            dist.send(torch.ones(1), group=group, group_dst=peer)
        dist.send_object_list(["object"], group=group, group_dst=peer)
    else:
        assert dist.recv(tensor, group=group) == peer
        assert dist.recv(tensor, group=group, group_src=peer) == peer
        assert dist.recv_object_list(objects, group=group, group_src=peer) == peer
        assert objects == ["object"]
    mine = torch.full((1,), float(group.rank()))
    batch = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer),
    ]
    assert [part.peer for part in batch] == [peer, peer]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert tensor.item() == peer


def test_a_group_made_without_a_world_has_its_own_ranks() -> None:
    run_ranks(without_a_world, 2, backend="host")


def long_and_short(rank: int, size: int) -> None:
    """Messages with one tag come in the order sent, however each side calls, and however long they are."""
    lengths = [1, 1024, 0, 1025, 300_000, 3, 2, 70_000, 1, 1, 0, 5]  # floats; at most 1024 go at once
    for way in range(4):
        sends_blocking, receives_blocking = way % 2 == 0, way // 2 == 0
        works = []
        for n, length in enumerate(lengths):
            message = torch.full((length,), float(n))
            got = torch.full((length,), -1.0)
            if rank == n % 2:
                works.append((dist.isend(message, 1 - rank), message))
                if sends_blocking:
                    works[-1][0].wait()
            elif receives_blocking and n % 3:
                assert dist.recv(got, 1 - rank) == 1 - rank
                assert torch.equal(got, message), f"message {n}, way {way}"
            else:
                work = dist.irecv(got, 1 - rank)
                work.wait()
                assert torch.equal(got, message), f"message {n}, way {way}"
        for work, _ in works:
            work.wait()
    # A short message that does not fit is dropped with an error, and the next one comes.
    if rank == 0:
        dist.send(torch.ones(2), 1)
        dist.send(torch.full((3,), 4.0), 1)
    else:
        got = torch.zeros(3)
        with pytest.raises(dist.CollectiveMismatchError, match="8 bytes"):
            dist.recv(got, 0)
        dist.recv(got, 0)
        assert got.tolist() == [4, 4, 4]


def test_long_and_short_messages_keep_their_order() -> None:
    run_world(long_and_short, 2)


def exchanges_in_a_part(rank: int, size: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    tensor = torch.zeros(1)
    if rank == 1:
        dist.send(tensor + 7, 2, group)
        assert dist.recv(tensor, group=group) == 2
    else:
        assert dist.recv(tensor, 1, group) == 1
        assert tensor.item() == 7
        dist.send(tensor, group=group, group_dst=0)
    with pytest.raises(ValueError, match="dst is global rank 0, but the group has the global ranks"):
        dist.isend(tensor, 0, group)
    with pytest.raises(ValueError, match="give dst or group_dst"):
        dist.send(tensor, group=group)


def test_ranks_of_messages_are_global() -> None:
    run_world(exchanges_in_a_part, 3)


def batches(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    received = [torch.empty(2), torch.empty(1)]
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(rank)), right),
        dist.P2POp(dist.irecv, received[0], left),
        dist.P2POp(dist.isend, torch.full((1,), 10.0 + rank), group_peer=right, tag=3),
        dist.P2POp(dist.irecv, received[1], group_peer=left, tag=3),
    ]
    assert (ops[0].peer, ops[2].peer, ops[0].group_peer) == (right, right, right)
    assert repr(ops[0]).startswith("P2POp(isend <ProcessGroup")
    assert f"group_src={rank}, group_dst={right}" in repr(ops[0])
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 4
    for work in works:
        work.wait()
    assert received[0].tolist() == [left, left]
    assert received[1].tolist() == [10 + left]


def test_batch() -> None:
    run_world(batches, 3)


def wrong_messages(rank: int, size: int) -> None:
    tensor = torch.ones(1)
    other = dist.new_group()
    part = dist.new_group([1])
    with pytest.raises(ValueError, match=rf"\[rank {rank}\] send .* is this rank itself .* use isend"):
        dist.send(tensor, rank)
    with pytest.raises(ValueError, match="the source is this rank itself"):
        dist.recv(tensor, rank)
    with pytest.raises(ValueError, match="destination is 9, but the ranks of this group are 0 to 1"):
        dist.isend(tensor, 9)
    with pytest.raises(ValueError, match="op must be isend or irecv, but is <function broadcast"):
        dist.P2POp(dist.broadcast, tensor, 0)
    with pytest.raises(TypeError, match=r"P2POp .*tensor must be a tensor, but is of type list"):
        dist.P2POp(dist.isend, [tensor], 0)
    if rank == 0:
        with pytest.raises(ValueError, match="this rank is not in the given group"):
            dist.P2POp(dist.isend, tensor, 1, part)
    for wrong in ([], None, (dist.P2POp(dist.isend, tensor, 0),)):
        with pytest.raises(ValueError, match="must be a list of at least one P2POp"):
            dist.batch_isend_irecv(wrong)
    with pytest.raises(ValueError, match="must hold P2POp objects only, but holds 1"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 0), 1])
    with pytest.raises(ValueError, match="a batch runs on one group"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 0), dist.P2POp(dist.isend, tensor, 0, other)])


def test_wrong_messages() -> None:
    run_world(wrong_messages, 2)


def whole_or_nothing(rank: int, size: int) -> None:
    received = torch.zeros(2)
    if rank == 1:
        with pytest.raises(ValueError, match="tag is -1"):
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, received, 0),
                    dist.P2POp(dist.isend, received.clone(), 0, tag=-1),
                ]
            )
        dist.barrier()
        dist.recv(received, 0)  # which the receive of the batch would have taken
        assert received.tolist() == [1, 1]
    else:
        dist.barrier()
        dist.send(torch.ones(2), 1)


@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_nothing_of_a_wrong_batch_is_sent(backend: str) -> None:
    run_world(whole_or_nothing, 2, backend=backend)
