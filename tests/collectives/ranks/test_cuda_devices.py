"""The CUDA device of a rank, and what ranks need that share one; with CUDA stubbed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives.conformance import examination
from collectives.ranks.cuda_devices import ON_ONE_GPU, shared_gpu_environment, take_cuda_device


@pytest.mark.parametrize(("gpus", "ranks", "mine"), [(2, 2, 1), (8, 4, 1), (1, 2, 0), (2, 4, 1)])
def test_ranks_share_gpus_only_where_they_must(gpus, ranks, mine, monkeypatch):
    taken = []
    for name in (*ON_ONE_GPU, "NCCL_HOSTID"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    take_cuda_device(1, ranks)
    assert taken == [mine]
    assert os.environ.get("NCCL_HOSTID") == ("rank1" if gpus < ranks else None)
    assert [name in os.environ for name in ON_ONE_GPU] == [gpus < ranks] * len(ON_ONE_GPU)


def test_ranks_that_share_a_gpu_look_like_machines_and_keep_what_the_user_says():
    first, second = (
        shared_gpu_environment(rank, {"NCCL_ALGO": "Tree", "NCCL_HOSTID": "x"}) for rank in (0, 1)
    )
    assert {name for name in first if first[name] != second[name]} == {"NCCL_HOSTID"}
    assert first == {**ON_ONE_GPU, "NCCL_ALGO": "Tree", "NCCL_HOSTID": "rank0"}


class RanksInThisProcess:
    """Ranks of which each runs its body here, and is its own connection."""

    def __init__(self, size: int, body: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.answers: list[Any] = []
        for rank in range(size):
            body(rank, self, *args)

    def send(self, answer: Any) -> None:
        self.answers.append((answer, os.environ.get("NCCL_HOSTID")))

    def collect(self, _: float) -> list[Any]:
        raise RuntimeError(str(self.answers))

    def close(self, *, at_once: bool) -> None:
        pass


def test_the_conformance_on_one_gpu_lets_nccl_share_it(monkeypatch):
    def no_device(_: int) -> None:
        raise RuntimeError("no driver")

    for name in (*ON_ONE_GPU, "NCCL_HOSTID"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", no_device)
    monkeypatch.setattr(examination, "SpawnedRanks", RanksInThisProcess)
    asked = examination.questions([torch.float32], ["broadcast"])
    with pytest.raises(RuntimeError, match=r"(?s)no driver.*'rank0'.*no driver.*'rank1'"):
        examination.examine("nccl", 2, asked, device="cuda")
