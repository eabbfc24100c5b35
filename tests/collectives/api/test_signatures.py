"""The user functions are those of the installed torch.distributed: names, parameters, order and defaults."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import warnings
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

import collectives as dist
from collectives import dist2
from collectives.registry import backends as registry

# Public names of torch.distributed that are no part of collectives, with the reason.
LEFT_OUT = {
    "Logger": "internals of torch's DistributedDataParallel",
    "RankType": "a type alias of torch's own typing",
    "Reducer": "internals of torch's DistributedDataParallel",
    "BuiltinCommHookType": "selects hooks written in C++ for torch's reducer",
    "GradBucket": "part of collectives.ddp",
    "remote_device": "part of rpc",
}

ENUMS_LEFT_OUT = {
    "BuiltinCommHookType": "selects hooks written in C++ for torch's reducer",
    "ErrorType": "what torch's NCCL group hands to its own hooks",
    "OpType": "kinds of operations of torch's own Work, which Python cannot ask for",
}
"""Enums of torch's extension that are no part of collectives, with the reason."""

# Submodules and what they import; no names of the interface.
MODULES = {
    "algorithms", "autograd", "c10d_logger", "config", "constants", "device_mesh", "distributed_c10d", "log",
    "logging", "logging_handlers", "rpc", "sys", "timedelta", "torch", "traceback", "typing", "utils",
}  # fmt: skip

PRIVATE = ("_all_gather_base", "_coalescing_manager", "_reduce_scatter_base")
"""Names with an underscore that programs use all the same."""


SINCE_2_14 = {
    "HookOpName", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy", "PutOptions", "ReconfigureOptions",
    "SignalOptions", "WaitSignalOptions", "WindowAccessType", "gather_into_tensor", "gather_single",
    "get_backend_impl", "set_timeout",
}  # fmt: skip
"""Names of torch 2.14 and newer, which are no part of collectives either."""

PARAMETERS_SINCE_2_14 = {"enable_reconfigure", "_backend_type"}
"""Of ``init_process_group`` and ``register_backend``."""

NEWER = {("barrier", "timeout"), ("new_group", "sort_ranks"), ("split_group", "backend")}
"""Functions with parameters that torch does not yet have in 2.11; it has ``weights_only`` from 2.15 on."""


def public(module: Any) -> list[str]:
    # By type(), because isinstance() looks into reduce_op, which warns.
    names = [n for n in dir(module) if not n.startswith("_") and n not in SINCE_2_14]
    return [n for n in names if type(getattr(module, n)) is not ModuleType]


def signature(function: Any) -> list[tuple[str, Any, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name not in PARAMETERS_SINCE_2_14]


def compared() -> list[str]:
    """Returns the functions and classes of torch.distributed that have a signature."""
    names = []
    for name in [*public(torch_dist), *PRIVATE]:
        value = getattr(torch_dist, name)
        if name in LEFT_OUT or name in MODULES or name in {"group", "GroupMember", "reduce_op"}:
            continue
        if not callable(value):
            continue
        try:
            signature(value)
        except ValueError:  # written in C++
            continue
        names.append(name)
    return names


@pytest.mark.parametrize("name", compared())
def test_signature_is_that_of_torch(name: str) -> None:
    theirs = signature(getattr(torch_dist, name))
    missing = {one[0] for one in signature(getattr(dist, name))} - {one[0] for one in theirs}
    newer = {one for one in missing if one == "weights_only" or (name, one) in NEWER}
    assert [one for one in signature(getattr(dist, name)) if one[0] not in newer] == theirs


def test_comparison_covers_the_interface() -> None:
    names = compared()
    assert {"init_process_group", "new_group", "all_reduce", "broadcast_object_list", "P2POp"} <= set(names)
    assert len(names) >= 60


@pytest.mark.parametrize("name", sorted(set(public(torch_dist)) - set(LEFT_OUT) - MODULES))
def test_every_public_name_is_here(name: str) -> None:
    assert hasattr(dist, name)
    assert name in dist.__all__


def test_what_is_left_out_is_what_torch_has() -> None:
    assert set(LEFT_OUT) - set(dir(torch_dist)) - {"remote_device"} == set()
    assert not [name for name in LEFT_OUT if name in dist.__all__]


def test_register_backend_has_the_signature_of_torch() -> None:
    assert signature(dist.Backend.register_backend) == signature(torch_dist.Backend.register_backend)


def test_object_interface_is_that_of_torch() -> None:
    theirs = pytest.importorskip("torch.distributed._dist2", reason="torch 2.14 and newer have none")
    for name in set(theirs.__all__) - {"ProcessGroup", "ReduceOp"}:
        assert signature(getattr(dist2, name)) == signature(getattr(theirs, name)), name


def test_kinds_of_backends_are_those_of_torch() -> None:
    """A group answers with its kind, as torch's groups of the same backends do."""
    kind = dist.ProcessGroup.BackendType
    for backend, group, expected in (
        ("host", "ProcessGroupHost", kind.CUSTOM),
        ("gloo", "ProcessGroupGloo", kind.GLOO),
        ("mpi", "ProcessGroupMPI", kind.MPI),
        ("nccl", "ProcessGroupNCCL", kind.NCCL),
        ("round_robin", "ProcessGroupRoundRobin", kind.CUSTOM),
        ("by_device", "ProcessGroupByDevice", kind.CUSTOM),
    ):
        package = "registry" if backend == "by_device" else "backends"
        module = importlib.import_module(f"collectives.{package}.{backend}")
        assert getattr(module, group).backend_type is expected, backend
        if backend in registry.backend_names():
            assert dist.Backend.backend_type_map[backend] is expected
        if backend in torch_dist.Backend.backend_type_map:
            assert torch_dist.Backend.backend_type_map[backend].value == expected


def enums_of_torch() -> dict[str, dict[str, int]]:
    """Returns the values of all enums of torch's extension by name, those within classes included."""
    found = {}
    classes = {name: getattr(c10d, name) for name in public(c10d) if isinstance(getattr(c10d, name), type)}
    inner = {f"{owner}.{n}": v for owner, value in classes.items() for n, v in vars(value).items()}
    for name, value in {**classes, **inner}.items():
        if isinstance(value, type) and (members := getattr(value, "__members__", None)):
            found[name] = {member: int(number) for member, number in members.items()}
    return found


ENUMS = {name: values for name, values in enums_of_torch().items() if name not in ENUMS_LEFT_OUT}


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_values_of_enums_are_those_of_torch(name: str) -> None:
    ours = functools.reduce(getattr, name.split("."), dist)
    assert {member: int(value) for member, value in ours.__members__.items()} == ENUMS[name]


def test_all_enums_are_compared() -> None:
    assert set(ENUMS) == {"DebugLevel", "ProcessGroup.BackendType", "ReduceOp.RedOpType", "WorkResult"}
    assert not [name for name in ENUMS_LEFT_OUT if name in dist.__all__]


@pytest.mark.parametrize("name", sorted(name for name in public(c10d) if name.endswith("Options")))
def test_option_records_are_those_of_torch(name: str) -> None:
    """Their time limit is what is not given: None here, and a negative time in torch."""
    theirs, ours = getattr(c10d, name)(), getattr(dist, name)()
    fields = [field for field in dir(theirs) if not field.startswith("_")]
    assert {"timeout", "asyncOp"} <= set(fields)
    assert sorted(fields) == sorted(field.name for field in dataclasses.fields(ours))
    for field in fields:
        if field == "timeout":
            assert ours.timeout is None
            assert theirs.timeout < timedelta(0)
        else:
            assert getattr(ours, field) == getattr(theirs, field), field
