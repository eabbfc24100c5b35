"""Operations that are refused before any communication, and leave the group as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nccl_double.device import Graph
from nccl_double.groups import run_over_double

from collectives import BarrierOptions, DistBackendError, ProcessGroup

AFTERWARDS = "cannot be part of a CUDA graph; run the operation once before the capture"


def before_the_first(group: ProcessGroup) -> None:
    """The communicator may be there already, where the group is bound to a device; connections are not."""
    x = torch.ones(2)
    graph = Graph()
    with pytest.raises(DistBackendError, match=AFTERWARDS), graph.capture():
        group.allreduce(x)
    group.allreduce(x).wait()
    assert x.tolist() == [group.size()] * 2
    graph = Graph()
    with graph.capture():
        group.allreduce(x).wait()
    graph.replay()
    assert x.tolist() == [group.size() ** 2] * 2
    graph.reset()


@pytest.mark.parametrize("bound", [True, False], ids=["bound to a device", "not bound"])
def test_a_capture_before_the_first_operation(nccl_library: Path, bound: bool) -> None:
    options = {"device_id": torch.device("cpu")} if bound else {}
    run_over_double(before_the_first, 2, nccl_library, options=options)


def on_another_device(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"on cpu:1, but the group is bound to cpu by its device_id; move"):
        group.barrier(BarrierOptions(device_ids=[1]))
    x = torch.ones(2)
    group.allreduce(x).wait()
    assert x.tolist() == [group.size()] * 2


def test_a_group_that_is_bound_takes_one_device(nccl_library: Path) -> None:
    run_over_double(on_another_device, 2, nccl_library, options={"device_id": torch.device("cpu")})
