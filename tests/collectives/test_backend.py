"""Names of backends, backends by device type, and backends that users add."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
import torch
from harness import run_ranks

import collectives as dist
from collectives.errors import DistBackendError
from collectives.registry import GroupOptions, backend_names, create_group


def test_names_are_lower_case_strings() -> None:
    assert dist.Backend("HOST") == "host" == dist.Backend.HOST
    assert type(dist.Backend("Gloo")) is str
    assert dist.Backend("CPU:Host,cuda:gloo") == "cpu:host,cuda:gloo"
    assert dist.Backend("undefined") == dist.Backend.UNDEFINED == "undefined"


def test_unknown_name_lists_those_known() -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'hots'; known are .*host"):
        dist.Backend("hots")
    with pytest.raises(ValueError, match="unknown backend"):
        dist.Backend("cpu:nothing")
    with pytest.raises(ValueError, match="of type int"):
        dist.Backend(3)  # type: ignore[arg-type]


def test_configuration_maps_device_types() -> None:
    assert repr(dist.BackendConfig("host")) == "cpu:host"
    config = dist.BackendConfig("cpu:host,meta:gloo")
    assert config.get_device_backend_map() == {"cpu": "host", "meta": "gloo"}
    assert repr(config) == config.name() == "cpu:host,meta:gloo"
    assert dist.BackendConfig("cpu:gloo,meta:gloo").name() == "gloo"
    assert dist.BackendConfig("undefined").get_device_backend_map()["cpu"] == "host"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cpu:host,cpu:gloo", "named twice"),
        ("cpu:host:gloo", "is not"),
        ("cpu:", "is not"),
        ("host,cpu:gloo", "is not"),
    ],
)
def test_wrong_configuration_says_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dist.BackendConfig(text)


def test_defaults_by_device() -> None:
    assert dist.get_default_backend_for_device("cpu") == "host"
    assert dist.get_default_backend_for_device(torch.device("cpu")) == "host"
    with pytest.raises(ValueError, match=r"no backend is registered for device meta; there are .*cpu"):
        dist.get_default_backend_for_device("meta")


def test_availability() -> None:
    assert dist.is_available()
    assert dist.is_backend_available("host")
    assert dist.is_backend_available("cpu:host,cuda:GLOO") == dist.is_gloo_available()
    assert not dist.is_backend_available("no_such_backend")
    assert not dist.is_ucc_available()
    assert not dist.is_xccl_available()
    assert dist.is_mpi_available() == ("mpi" in backend_names() and dist.is_backend_available("mpi"))


def test_complex_reductions() -> None:
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND")
    assert [n for n in names if dist.supports_complex(getattr(dist.ReduceOp, n))] == ["SUM", "AVG"]


def added_backend(rank: int, size: int, extended: bool) -> tuple[str, list[float], object]:
    name = f"added_{uuid.uuid4().hex}"
    seen: list[object] = []

    def plain(store: object, group_rank: int, group_size: int, timeout: timedelta) -> dist.ProcessGroup:
        seen.append(timeout.total_seconds())
        return create_group("gloo", GroupOptions(store, group_rank, group_size, timeout))

    def with_options(options: dist.DistributedBackendOptions, pg_options: object) -> dist.ProcessGroup:
        seen.append((options.group_id, options.global_ranks_in_group, pg_options))
        return create_group("gloo", GroupOptions(options.store, options.group_rank, options.group_size))

    dist.Backend.register_backend(name, with_options if extended else plain, extended, devices="cpu")
    assert getattr(dist.Backend, name.upper()) == name
    from harness import current_store

    # Names are equal on all ranks only where a user chooses them; so this world has one rank.
    dist.init_process_group(
        name, store=current_store(), rank=0, world_size=1, timeout=timedelta(seconds=7), pg_options="mine"
    )
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    backend = dist.get_backend()
    dist.destroy_process_group()
    return backend == name, tensor.tolist(), seen[0]


def test_backend_added_by_a_function() -> None:
    assert run_ranks(added_backend, 1, False) == [(True, [1.0, 1.0], 7.0)]


def test_backend_added_with_the_extended_interface() -> None:
    assert run_ranks(added_backend, 1, True) == [(True, [1.0, 1.0], ("0", [0], "mine"))]


def makes_nonsense(rank: int, size: int) -> None:
    from harness import current_store

    dist.Backend.register_backend("nonsense", lambda *args: "not a group", devices=["cpu"])
    with pytest.raises(TypeError, match=r"must make a collectives.ProcessGroup, but made builtins.str"):
        dist.init_process_group("nonsense", store=current_store(), rank=0, world_size=1)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="already registered"):
        dist.Backend.register_backend("nonsense", makes_nonsense)
    with pytest.raises(TypeError, match="cannot be called"):
        dist.Backend.register_backend("other", "nothing")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be a backend's name"):
        dist.Backend.register_backend("a:b", makes_nonsense)


def test_backend_that_makes_no_group() -> None:
    run_ranks(makes_nonsense, 1, isolated=True)


def two_backends(rank: int, size: int) -> None:
    from harness import current_store

    from collectives.registry import BackendSpec, register_backend_spec

    def broken(options: GroupOptions) -> dist.ProcessGroup:
        raise DistBackendError("no such hardware")

    register_backend_spec(BackendSpec("meta_host", ("meta",), lambda options: create_group("gloo", options)))
    register_backend_spec(BackendSpec("broken", ("meta",), broken))
    dist.init_process_group("cpu:host,meta:meta_host", store=current_store(), rank=rank, world_size=size)
    group = dist.group.WORLD
    assert dist.get_backend() == dist.get_backend_config() == "cpu:host,meta:meta_host"
    assert {kind: inner.name() for kind, inner in group.groups.items()} == {"cpu": "host", "meta": "gloo"}
    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(size))] * 5
    dist.barrier()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(size))
    # A gloo group takes no meta tensors; its own reason comes through.
    with pytest.raises(dist.UnsupportedOperationError, match="meta"):
        dist.all_reduce(torch.ones(1, device="meta"))
    dist.destroy_process_group()
    # The group that was made for the CPU does not outlive the failure for the other device type.
    with pytest.raises(DistBackendError, match="no such hardware"):
        dist.init_process_group("cpu:host,meta:broken", store=current_store(), rank=rank, world_size=size)
    assert not dist.is_initialized()


def test_backend_for_each_device_type() -> None:
    run_ranks(two_backends, 2, isolated=True)
