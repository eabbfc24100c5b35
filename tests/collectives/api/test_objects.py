"""Collectives on picklable objects."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from harness import run_world

import collectives as dist


@dataclass
class Thing:
    """An object of a user's class, of a size that depends on the rank."""

    rank: int
    payload: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rank: int) -> Thing:
        return cls(rank, list(range(1000 * rank)))


def objects(rank: int, size: int) -> None:
    things = [Thing.of(r) for r in range(size)]

    everyone: list[object] = [None] * size
    assert dist.all_gather_object(everyone, things[rank]) is None
    assert everyone == things

    for arguments in ({}, {"dst": 2}, {"group_dst": 1}):
        root = arguments.get("dst", arguments.get("group_dst", 0))
        gathered: list[object] | None = [None] * size if rank == root else None
        dist.gather_object(things[rank], gathered, **arguments)
        assert gathered == (things if rank == root else None)

    for arguments in ({}, {"src": 2}, {"group_src": 1, "device": torch.device("cpu")}):
        root = arguments.get("src", arguments.get("group_src", 0))
        copies: list[object] = [things[root], "text", None, root] if rank == root else [None] * 4
        dist.broadcast_object_list(copies, **arguments)
        assert copies == [things[root], "text", None, root]
    empty: list[object] = []
    dist.broadcast_object_list(empty, 0)
    assert empty == []

    for arguments in ({}, {"src": 2}, {"group_src": 1}):
        root = arguments.get("src", arguments.get("group_src", 0))
        own: list[object] = [None, "kept"]
        dist.scatter_object_list(own, things if rank == root else None, **arguments)
        assert own == [things[rank], "kept"]

    for use_batch in (False, True):
        if rank == 0:
            dist.send_object_list([things[2], 7], 1, use_batch=use_batch)
        if rank == 1:
            pair: list[object] = [None, None]
            assert dist.recv_object_list(pair, 0, use_batch=use_batch) == 0
            assert pair == [things[2], 7]
    if rank == 2:
        dist.send_object_list(["any"], group_dst=0, device=torch.device("cpu"))
    if rank == 0:
        one: list[object] = [None]
        assert dist.recv_object_list(one) == 2  # from any rank
        assert one == ["any"]
    tensors: list[object] = [None] * size
    dist.all_gather_object(tensors, torch.full((rank,), 1.5))
    assert [t.tolist() for t in tensors] == [[1.5] * r for r in range(size)]


def test_every_function() -> None:
    run_world(objects, 3)


def objects_of_a_part(rank: int, size: int) -> None:
    group = dist.new_group([2, 1])
    if rank == 0:
        return
    everyone = [None, None]
    dist.all_gather_object(everyone, f"rank {rank}", group)
    assert everyone == ["rank 1", "rank 2"]
    own = [None]
    dist.scatter_object_list(own, ["for 1", "for 2"] if rank == 2 else None, 2, group)
    assert own == [f"for {rank}"]
    if rank == 1:
        dist.send_object_list([1], 2, group)
    else:
        one = [None]
        assert dist.recv_object_list(one, group=group, group_src=0) == 1


def test_ranks_are_global() -> None:
    run_world(objects_of_a_part, 3)


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("cannot pickle this")


def wrong_objects(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="object_list must have one entry for each of 2 ranks, but has 1"):
        dist.all_gather_object([None], 1)
    with pytest.raises(TypeError, match="object_list must be a list, but is of type tuple"):
        dist.broadcast_object_list((1,), 0)
    with pytest.raises(TypeError, match="cannot pickle this"):
        dist.all_gather_object([None, None], Unpicklable())
    if rank == 0:
        with pytest.raises(ValueError, match="one entry for each of 2 ranks, but has 3"):
            dist.gather_object(1, [None] * 3)
        with pytest.raises(TypeError, match="object_gather_list must be a list, but is of type NoneType"):
            dist.gather_object(1)
        with pytest.raises(TypeError, match="scatter_object_input_list must be a list"):
            dist.scatter_object_list([None])
    else:
        with pytest.raises(ValueError, match="object_gather_list is for the root, rank 0"):
            dist.gather_object(1, [None] * 2)
    with pytest.raises(ValueError, match="room for one object, but is empty"):
        dist.scatter_object_list([], [1, 2])
    with pytest.raises(ValueError, match="the destination is this rank itself"):
        dist.send_object_list([1], rank)
    with pytest.raises(ValueError, match="the source is this rank itself"):
        dist.recv_object_list([1], rank)
    everyone = [None, None]
    dist.all_gather_object(everyone, rank)  # nothing was sent
    assert everyone == [0, 1]


def test_wrong_arguments_end_before_anything_is_sent() -> None:
    run_world(wrong_objects, 2)


sprung: list[str] = []


def spring(where: str) -> None:
    sprung.append(where)


class Trap:
    """An object that runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return spring, ("here",)


def plain_objects(rank: int, size: int, weights_only: bool) -> None:
    options = {"weights_only": True} if weights_only else {}
    mine = {"rank": rank, "tensor": torch.full((2,), float(rank))}
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, mine, **options)
    assert [one["rank"] for one in everyone] == [0, 1]
    assert [one["tensor"].tolist() for one in everyone] == [[0.0, 0.0], [1.0, 1.0]]
    gathered: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, b"x"), gathered, **options)
    assert gathered == ([(0, b"x"), (1, b"x")] if rank == 0 else None)
    copies: list[object] = [[1.5], None] if rank == 0 else [None, None]
    dist.broadcast_object_list(copies, **options)
    assert copies == [[1.5], None]
    own: list[object] = [None]
    dist.scatter_object_list(own, ["a", {}] if rank == 0 else None, **options)
    assert own == ["a" if rank == 0 else {}]
    if rank == 0:
        dist.send_object_list([True, -1], 1, **options)
    else:
        assert dist.recv_object_list(pair := [None, None], 0, **options) == 0
        assert pair == [True, -1]
    for refused in (Thing(1), print, {1, 2}):
        with pytest.raises(TypeError, match="is no plain data"):
            dist.all_gather_object(everyone, refused, **options)  # before anything is sent


def test_plain_objects_by_argument() -> None:
    run_world(plain_objects, 2, True)


def test_plain_objects_by_environment() -> None:
    run_world(plain_objects, 2, False, env={"COLLECTIVES_OBJECTS": "plain"})


def trapped(rank: int, size: int) -> None:
    if rank == 0:
        dist.send_object_list([Trap()], 1)
        dist.send_object_list([{"harmless": 1}], 1, weights_only=True)
        return
    received = [None]
    with pytest.raises(dist.DistBackendError, match="something else than plain data"):
        dist.recv_object_list(received, 0, weights_only=True)
    assert received == [None]
    assert sprung == []
    dist.recv_object_list(received, 0)  # plain data is taken anyway
    assert received == [{"harmless": 1}]


def test_a_pickle_is_not_opened_where_only_plain_data_is_taken() -> None:
    run_world(trapped, 2)


def wrong_setting(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="COLLECTIVES_OBJECTS must be pickle or plain, is 'none'"):
        dist.all_gather_object([None], rank)


def test_an_unknown_setting_is_refused() -> None:
    run_world(wrong_setting, 1, env={"COLLECTIVES_OBJECTS": "none"})
