"""Groups as objects, without a world."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
from harness import run_ranks

import collectives as dist
from collectives import dist2
from collectives.registry import GroupOptions, create_group

LIMIT = timedelta(seconds=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def groups(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    first, second = (dist2.new_group("host", LIMIT, "cpu") for _ in range(2))
    assert not dist.is_initialized()
    assert (first.rank(), first.size(), first.timeout) == (rank, size, LIMIT)
    assert first.group_name != second.group_name

    assert dist2.current_process_group() is None
    with dist2.process_group(first):
        assert dist2.current_process_group() is first
        with dist2.process_group(second):
            assert dist2.current_process_group() is second
            seen = []
            thread = threading.Thread(target=lambda: seen.append(dist2.current_process_group()))
            thread.start()
            thread.join()
            assert seen == [None]  # the current group is the thread's
        assert dist2.current_process_group() is first
        tensor = torch.full((2,), float(rank))
        dist2.current_process_group().allreduce(tensor, dist2.ReduceOp.SUM).wait()
        assert tensor.tolist() == [3, 3]
    assert dist2.current_process_group() is None
    with pytest.raises(KeyError), dist2.process_group(first):
        {}["no"]
    assert dist2.current_process_group() is None

    # Ranks of a group that is not registered are its own.
    dist.broadcast(tensor.fill_(rank), group=first, group_src=2)
    assert tensor.tolist() == [2, 2]
    with pytest.raises(ValueError, match="is not registered here"):
        dist.broadcast(tensor, 0, group=first)

    options = []

    def make(
        store: object, rank: int, world_size: int, timeout: timedelta, device: torch.device, **kwargs: object
    ) -> dist.ProcessGroup:
        options.append((device, kwargs))
        return create_group("gloo", GroupOptions(store, rank, world_size, timeout))

    dist2.register_backend("mine", make)
    third = dist2.new_group("mine", LIMIT, torch.device("cpu"), colour="red")
    assert options == [(torch.device("cpu"), {"colour": "red"})]
    third.barrier().wait()
    for name in ("mine", "host"):
        with pytest.raises(ValueError, match=f"backend '{name}' is already registered"):
            dist2.register_backend(name, make)
    with pytest.raises(ValueError, match="unknown backend 'none'"):
        dist2.new_group("none", LIMIT, "cpu")
    with pytest.raises(ValueError, match="backend 'host' does not serve cuda:0, only cpu"):
        dist2.new_group("host", LIMIT, "cuda:0")
    for group in (first, second, third):
        group.shutdown()


def test_groups_without_a_world() -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    run_ranks(groups, 3, free_port(), isolated=True, env=dict.fromkeys(names))
