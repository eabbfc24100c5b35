"""What the ranks of a check do, over the double of NCCL: each finds what it is there for."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import pytest
import torch
from harness import RankFailedError, current_store, run_ranks
from nccl_double.device import DoubleDevice, Graph
from nccl_double.platform import FILE_VARIABLE, DoublePlatform
from torch.utils._python_dispatch import TorchDispatchMode

from collectives.bench.acceptance.cases import CASES, Context, RankEnd


def context_of(rank, size, file, folder):
    os.environ[FILE_VARIABLE] = file
    platform = DoublePlatform()
    platform.take(rank, size)
    return Context(platform, rank, size, current_store(), folder)


def ends_of(folder, size):
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [RankEnd(0, answer["values"], 0.0, "") for answer in answers]


class LoadsKernels(TorchDispatchMode):
    """Waits for the device where an operation is met first, as CUDA may when it loads a kernel."""

    def __init__(self):
        super().__init__()
        self._loaded: set[Any] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self._loaded:
            self._loaded.add(func)
            device = DoubleDevice.shared(torch.device("cpu"))
            device.synchronize(device.current_stream())
        return func(*args, **(kwargs or {}))


def with_kernels_to_load(rank, size, file, folder):
    context = context_of(rank, size, file, folder)
    with LoadsKernels():
        CASES["late_producer"].body(context)
    context.platform.finish()


def test_the_first_use_of_a_kernel_is_no_host_that_waits(nccl_library, tmp_path):
    run_ranks(with_kernels_to_load, 2, str(nccl_library), str(tmp_path), isolated=True)
    CASES["late_producer"].judge(ends_of(tmp_path, 2))


class Reading(torch.optim.SGD):
    """An optimizer whose steps wait for the device."""

    def step(self):
        super().step()
        self.param_groups[0]["params"][0].sum().item()


def training(rank, size, file, folder, reads):
    context = context_of(rank, size, file, folder)
    with mock.patch.object(torch.optim, "SGD", Reading if reads else torch.optim.SGD):
        CASES["no_waiting_training"].body(context)
    context.platform.finish()


@pytest.mark.full
def test_a_step_of_training_that_waits_is_found(nccl_library, tmp_path):
    run_ranks(training, 2, str(nccl_library), str(tmp_path), False, isolated=True)
    CASES["no_waiting_training"].judge(ends_of(tmp_path, 2))
    with pytest.raises(RankFailedError, match="this thread would wait for a stream"):
        run_ranks(training, 2, str(nccl_library), str(tmp_path), True, isolated=True)


def left_alive(rank, size, file, folder):
    """Returns how many graphs and communicators there are when the process exits."""
    context = context_of(rank, size, file, folder)
    CASES["live_graph"].body(context)
    return sum(isinstance(one, Graph) for one in context.kept), context.platform.held()


def test_a_process_exits_with_collectives_in_a_graph(nccl_library, tmp_path):
    """Neither the graph nor the group's communicator has been ended by then."""
    found = run_ranks(left_alive, 2, str(nccl_library), str(tmp_path), isolated=True)
    assert found == [(1, 1)] * 2
    assert CASES["live_graph"].judge(ends_of(tmp_path, 2)) == {"seconds_to_exit": 0.0}
