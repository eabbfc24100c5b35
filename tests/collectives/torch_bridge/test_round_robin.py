"""The backend collectives_round_robin in torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch_systems import test_functions
from torch_systems.ddp import test_ddp as test_torch_ddp
from torch_world import run_torch

from collectives.backends.round_robin import RoundRobinOptions

NAME = "collectives_round_robin"


def lanes(rank, size, number, kind):
    world = dist.group.WORLD
    assert dist.get_backend().startswith(NAME)
    assert [lane.name() for lane in world.inner.lanes] == [kind] * number
    tensors = [torch.full((4,), float(rank + turn)) for turn in range(7)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for turn, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        assert tensor.tolist() == [1.0 + 2 * turn] * 4
    if kind == "gloo":
        test_functions.coalescing_manager(rank, size)
    else:
        test_torch_ddp.unused_parameters(rank, size)


GLOO = {"COLLECTIVES_ROUND_ROBIN_BACKEND": "gloo"}


@pytest.mark.parametrize(
    ("number", "kind", "options"),
    [
        (3, "host", {"backend": NAME}),
        (2, "gloo", {"backend": NAME, "env": {"COLLECTIVES_ROUND_ROBIN_LANES": "2", **GLOO}}),
        (4, "host", {"backend": NAME, "init": {"pg_options": RoundRobinOptions(4)}}),
        (4, "gloo", {"backend": f"{NAME}:4", "env": GLOO}),
    ],
    ids=["default", "environment", "options", "name"],
)
def test_lanes(number, kind, options):
    run_torch(lanes, 2, number, kind, **options)


def sub_group(rank, size):
    group = dist.new_group(backend=f"{NAME}:2", pg_options={"backend": "gloo"})
    assert [lane.name() for lane in group.inner.lanes] == ["gloo"] * 2
    group = dist.new_group(backend=f"{NAME}:2", pg_options=RoundRobinOptions(2, "gloo"))
    assert [lane.name() for lane in group.inner.lanes] == ["gloo"] * 2
    for wrong in (RoundRobinOptions(3), {"lanes": 3}):
        with pytest.raises(ValueError, match="name says lanes=2, but pg_options say lanes=3"):
            dist.new_group(backend=f"{NAME}:2", pg_options=wrong)
    group = dist.new_group(backend=NAME, pg_options=RoundRobinOptions(2))
    assert len(group.inner.lanes) == 2
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size, size]
    with pytest.raises(TypeError, match="RoundRobinOptions"):
        dist.new_group(backend=NAME, pg_options=2)


def test_new_group():
    run_torch(sub_group)


def wrong_environment(rank, size):
    with pytest.raises(ValueError, match="COLLECTIVES_ROUND_ROBIN_LANES"):
        dist.new_group(backend=NAME)


@pytest.mark.parametrize("lanes", ["0", "-1", "many", ""])
def test_wrong_environment(lanes):
    run_torch(wrong_environment, env={"COLLECTIVES_ROUND_ROBIN_LANES": lanes})
