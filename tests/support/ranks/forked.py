"""What a child may do that a rank forks, for the tests of all backends."""

from __future__ import annotations

import gc
import os
import pickle
import traceback
from datetime import timedelta

import pytest
import torch

import collectives as dist
from collectives import GroupAbortedError, ProcessGroup
from collectives.core.checked_group import CheckedGroup


def in_child(function):
    """Returns what a function returns in a forked child, which then ends; its error is raised here."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = pickle.dumps(function())
        except BaseException:  # noqa: BLE001 - told to the parent
            answer = pickle.dumps(AssertionError(traceback.format_exc()))
        try:
            os.write(write_end, answer)
        finally:  # it must never go on as the parent
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        value = pickle.loads(pipe.read())
    assert os.waitpid(pid, 0)[1] == 0
    if isinstance(value, AssertionError):
        raise value
    return value


def refusal(call) -> str:
    with pytest.raises(GroupAbortedError) as caught:
        call()
    return str(caught.value)


def beside_a_child(group: ProcessGroup, checked: bool = False) -> list[str]:
    """Tries what it can in a child of a rank; returns what it was told, and checks that the group goes on."""
    used: ProcessGroup = CheckedGroup(group) if checked else group
    other = 1 - used.rank()
    used.allreduce([torch.ones(1)]).wait()
    late = torch.zeros(2)
    receive = used.recv([late], other)
    outer = [used]

    def child() -> list[str]:
        limit = timedelta(seconds=20)
        told = [
            refusal(lambda: outer[0].allreduce([torch.ones(1)])),
            refusal(lambda: outer[0].allreduce([torch.ones(1)], dist.AllreduceOptions(asyncOp=False))),
            refusal(lambda: outer[0].broadcast([torch.ones(70_000)], root=0)),
            refusal(outer[0].barrier),
            refusal(lambda: outer[0].monitored_barrier(limit)),
            refusal(lambda: outer[0].send([torch.ones(2)], other)),
            refusal(lambda: outer[0].recv_anysource([torch.ones(2)])),
            refusal(receive.wait),
        ]
        outer[0].abort()
        outer[0].shutdown()
        outer.clear()
        gc.collect()
        return told

    told = in_child(child)
    used.send([torch.full((2,), 3.0)], other).wait()
    receive.wait()
    assert late.tolist() == [3.0, 3.0]
    large = torch.ones(70_000)
    used.allreduce([large]).wait()
    assert (large == 2).all()
    return told
