"""Operations that cannot become part of a CUDA graph are refused, and leave the group as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nccl_double.device import Graph
from nccl_double.groups import run_over_double

from collectives import DistBackendError, ProcessGroup

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
