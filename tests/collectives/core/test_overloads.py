"""Groups take the overloads of ``torch.distributed.ProcessGroup``, by position and by keyword."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

import collectives
from collectives.core.process_group import ProcessGroup
from collectives.store import HashStore
from collectives.torch_bridge.group import TorchGroup

NAMES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "all_gather_single",
    "_allgather_base", "allgather_coalesced", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "_reduce_scatter_base", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier", "send", "recv", "recv_anysource",
)  # fmt: skip

LIMIT = timedelta(seconds=20)


class Overload(NamedTuple):
    """A form of a method: its name, and names and types of its arguments."""

    method: str
    arguments: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.method}({', '.join(name for name, _ in self.arguments)})"


def overloads() -> Iterator[Overload]:
    """Yields the overloads that the installed torch documents."""
    for name in NAMES:
        text = getattr(getattr(c10d.ProcessGroup, name, None), "__doc__", None) or ""
        for arguments in re.findall(rf"\b{name}\(self: [\w.]+(?:, )?(.*)\) ->", text):
            found = re.findall(
                r"(\w+): ((?:[\w.| ]|\[(?:[^\[\]]|\[[^\]]*\])*\])+?)(?= = |, \w+: |$)", arguments
            )
            yield Overload(name, tuple(found))


OVERLOADS = list(overloads())


def value(overload: Overload, name: str, annotation: str) -> Any:
    """Returns an argument for a group of one rank."""
    if annotation.startswith("datetime"):
        return LIMIT
    if annotation.endswith("Options"):
        return getattr(c10d, annotation.rpartition(".")[2])()
    if annotation.endswith("ReduceOp"):
        return torch_dist.ReduceOp.MAX
    if "Supports" in annotation:
        return [] if annotation.startswith("collections") else 0
    tensor = torch.full((2,), 1.0 if "in" in name.lower() else 0.0)
    for _ in range(annotation.count("Sequence")):
        tensor = [tensor]
    return tensor


def tensor_in(nested: Any) -> torch.Tensor:
    return nested if isinstance(nested, torch.Tensor) else tensor_in(nested[0])


@pytest.fixture(scope="module", params=["ours", "torch's"])
def group(request: pytest.FixtureRequest) -> Iterator[ProcessGroup | TorchGroup]:
    collectives.init_process_group("host", store=HashStore(), rank=0, world_size=1)
    world = collectives.group.WORLD
    assert world is not None
    yield world if request.param == "ours" else TorchGroup(world, "collectives", "overloads")
    collectives.destroy_process_group()


def test_all_overloads_were_found() -> None:
    assert len(OVERLOADS) >= len(NAMES)
    assert sum(overload.method == "allreduce" for overload in OVERLOADS) >= 3
    assert all(overload.arguments for overload in OVERLOADS)


@pytest.mark.parametrize("by_keyword", [False, True], ids=["position", "keyword"])
@pytest.mark.parametrize("overload", OVERLOADS, ids=str)
def test_overload(group: Any, overload: Overload, by_keyword: bool) -> None:
    given = {name: value(overload, name, annotation) for name, annotation in overload.arguments}
    if overload.method.startswith("recv"):
        sent = group.send([torch.ones(2)], 0, 0)
    if by_keyword and not any(re.fullmatch(r"arg\d", name) for name in given):
        work = getattr(group, overload.method)(**given)
    else:
        work = getattr(group, overload.method)(*given.values())
    if overload.method == "send":
        group.recv([torch.ones(2)], 0, 0).wait()
    work.wait()
    tensors = [v for (name, a), v in zip(overload.arguments, given.values(), strict=True) if "Tensor" in a]
    if len(tensors) == 2:
        output, source = (tensor_in(tensor) for tensor in tensors)
        assert torch.equal(output, source)
    elif overload.method.startswith("recv"):
        sent.wait()
        assert tensor_in(tensors[0]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("overload", [o for o in OVERLOADS if o.arguments[-1][0] == "opts"], ids=str)
def test_limits_of_records_hold(group: Any, overload: Overload) -> None:
    """torch's records are read, and their -1 ms stands for no limit."""
    given = {name: value(overload, name, annotation) for name, annotation in overload.arguments}
    assert given["opts"].timeout == timedelta(milliseconds=-1)
    given["opts"].asyncOp = False
    getattr(group, overload.method)(**given).wait()
    given["opts"].timeout = LIMIT
    getattr(group, overload.method)(**given).wait()


def test_a_reduction_with_a_factor_needs_it(group: Any) -> None:
    premul = c10d.ReduceOp.PREMUL_SUM
    x = torch.ones(2)
    for call in (
        lambda: group.allreduce(x, premul),
        lambda: group.allreduce(x, op=collectives.ReduceOp.PREMUL_SUM),
        lambda: group.reduce(x, 0, premul),
        lambda: group.reduce_scatter(x, [x], premul),
        lambda: collectives.all_reduce(x, premul),
        lambda: collectives.reduce_scatter_single(x, x, collectives.ReduceOp.PREMUL_SUM),
    ):
        with pytest.raises(ValueError, match=r"PREMUL_SUM.*make_premul_sum"):
            call()
    group.allreduce(x, collectives.make_premul_sum(3.0)).wait()
    assert x.tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match=r"PREMUL_SUM.*make_premul_sum"):  # after one that was taken, too
        group.allreduce(x, premul)
