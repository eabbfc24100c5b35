"""Groups as objects, without a world."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
from harness import run_ranks
from ports import free_port

import collectives as dist
from collectives import dist2
from collectives.backends.round_robin import RoundRobinOptions
from collectives.registry.backends import GroupOptions, create_group

LIMIT = timedelta(seconds=30)
PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def torch_groups(rank: int, size: int, port: int) -> None:
    torch_dist2 = pytest.importorskip("torch.distributed._dist2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    for backend, options in (("collectives", {}), ("collectives_round_robin", {"lanes": 2})):
        group = torch_dist2.new_group(backend, LIMIT, "cpu", **options)
        tensor = torch.full((2,), float(rank))
        with torch_dist2.process_group(group):
            torch_dist2.current_process_group().allreduce(tensor, torch_dist2.ReduceOp.SUM).wait()
        assert (tensor.tolist(), group.rank(), group.size()) == ([1, 1], rank, size)
        group.shutdown()


def test_groups_of_the_object_interface_of_torch() -> None:
    run_ranks(torch_groups, 2, free_port(), isolated=True, env=dict.fromkeys(PLACE))


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
    run_ranks(groups, 3, free_port(), isolated=True, env=dict.fromkeys(PLACE))


def options_of_backends(rank: int, size: int, port: int) -> None:
    # Before the ranks join: nobody else is there.
    fields = "group_name, group_desc, pg_options"
    for backend, wrong, known in (
        ("host", {"colour": "red", "lanes": 2}, f"threads, {fields}"),
        ("gloo", {"colour": 1, "lanes": 2}, f"_threads, _devices, {fields}"),
        ("round_robin", {"colour": 1, "lanes": 2}, f"lanes, backend, lane_options, {fields}"),
    ):
        unknown = "colour, lanes" if backend != "round_robin" else "colour"
        with pytest.raises(
            TypeError, match=rf"options of a {backend} group: unknown are {unknown}; known are {known}$"
        ):
            dist2.new_group(backend, LIMIT, "cpu", **wrong)
    with pytest.raises(
        TypeError, match=r"pg_options of a gloo group: unknown are colour; known are _threads"
    ):
        dist2.new_group("gloo", LIMIT, "cpu", pg_options={"colour": 1})
    with pytest.raises(TypeError, match="pg_options stand alone, but lanes came with them"):
        dist2.new_group("round_robin", LIMIT, "cpu", lanes=2, pg_options=RoundRobinOptions(2))

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    made = [dist2.new_group("host", LIMIT, "cpu", group_name="mine", group_desc="by hand", pg_options=None)]
    assert (made[0].group_name, made[0].group_desc) == ("mine", "by hand")
    for fields_given in ({"_threads": 5}, {"pg_options": {"_threads": 5}, "group_desc": "five"}):
        made.append(dist2.new_group("gloo", LIMIT, "cpu", **fields_given))
        assert made[-1]._health.inner.options._threads == 5
    assert made[-1].group_desc == "five"
    with pytest.raises(
        TypeError, match=rf"\[rank {rank}\] pg_options of the gloo .* _threads cannot be 'many'"
    ):
        dist2.new_group("gloo", LIMIT, "cpu", _threads="many")
    for fields_given in (
        {"lanes": 2, "lane_options": {"_threads": 3}, "pg_options": None},
        {"pg_options": {"lanes": 2, "backend": "gloo", "lane_options": {"_threads": 3}}},
        {"pg_options": RoundRobinOptions(2, "gloo", {"_threads": 3})},
    ):
        os.environ["COLLECTIVES_ROUND_ROBIN_BACKEND"] = "gloo" if "lanes" in fields_given else "host"
        made.append(dist2.new_group("round_robin", LIMIT, "cpu", **fields_given))
        assert [lane._health.inner.options._threads for lane in made[-1].lanes] == [3, 3]

    seen = []

    def extended(options: dist.DistributedBackendOptions, pg_options: object) -> dist.ProcessGroup:
        seen.append(pg_options)
        return create_group("host", GroupOptions(options.store, options.group_rank, options.group_size))

    def plain(store: object, group_rank: int, group_size: int, timeout: timedelta) -> dist.ProcessGroup:
        return create_group("host", GroupOptions(store, group_rank, group_size, timeout))

    dist.Backend.register_backend("extended", extended, extended_api=True, devices="cpu")
    dist.Backend.register_backend("plain", plain, devices="cpu")
    made.append(dist2.new_group("extended", LIMIT, "cpu", colour="red"))
    made.append(dist2.new_group("extended", LIMIT, "cpu"))
    made.append(dist2.new_group("plain", LIMIT, "cpu"))
    assert seen == [{"colour": "red"}, None]
    with pytest.raises(TypeError, match=f"unknown are colour; known are {fields}$"):
        dist2.new_group("plain", LIMIT, "cpu", colour="red")
    for group in made:
        tensor = torch.ones(3)
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [size] * 3
        group.shutdown()


def test_options_go_to_the_backend() -> None:
    env = dict.fromkeys((*PLACE, "COLLECTIVES_ROUND_ROBIN_LANES", "COLLECTIVES_ROUND_ROBIN_BACKEND"))
    run_ranks(options_of_backends, 2, free_port(), isolated=True, env=env)
