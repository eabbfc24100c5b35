"""Where measured tensors are: the devices, what ranks that share a GPU need, torch's functions as a peer."""

from __future__ import annotations

import os

import pytest
import torch

from collectives.bench.allreduce import Options, Report, available_backends
from collectives.bench.core.devices import DEVICES, CudaDevice, describe_machine, memory_available_bytes
from collectives.bench.core.records import header_lines


def test_the_cpu_adds_nothing_to_a_call():
    cpu = DEVICES["cpu"]
    assert cpu.why_unavailable() is None
    assert cpu.describe((2,)) == {}
    assert cpu.starting(dict) is dict
    before = dict(os.environ)
    cpu.take(1, 2)
    assert dict(os.environ) == before
    assert 0 < cpu.memory_per_rank_bytes(4) <= memory_available_bytes() // 2


def test_a_call_on_cuda_is_over_when_the_device_is(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("device"))
    cuda = CudaDevice()
    cuda.finish()
    cuda.starting(lambda: order.append("barrier"))()
    assert order == ["device", "device", "barrier"]


def test_the_smallest_share_of_a_gpu_counts(monkeypatch):
    free = [(40 << 30, 80 << 30), (70 << 30, 80 << 30)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: free[gpu])
    assert [CudaDevice().memory_per_rank_bytes(ranks) >> 30 for ranks in (1, 2, 3)] == [39, 39, 19]


def test_the_report_names_gpus_and_how_they_are_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"GPU {gpu}")
    described = CudaDevice().describe((1, 2, 4))
    assert described["gpus"] == ["GPU 0"]
    assert described["gpus_shared_by_ranks"] == [2, 4]
    assert described["gpus_shared_environment"]["NCCL_HOSTID"] == "rank<rank>"
    assert "gpus_shared_by_ranks" not in CudaDevice().describe((1,))
    versions = {"nccl": "NCCL 2.28.9 by way of cupy 14.2.0"}
    environment = {**describe_machine(), **described, "peers": versions}
    said = "\n".join(header_lines(Report("allreduce", environment, {})))
    assert "; gpus GPU 0; " in said
    assert "gpus shared by ranks 2,4; gpus shared environment NCCL_SOCKET_IFNAME is lo" in said
    assert "peers nccl is NCCL 2.28.9 by way of cupy 14.2.0" in said


def test_machines_are_for_the_cpu(monkeypatch):
    monkeypatch.setattr(CudaDevice, "why_unavailable", lambda self: None)
    with pytest.raises(ValueError, match="machines are played for tensors on the CPU, not on cuda"):
        Options(sizes=(8,), device="cuda", machines=2)
    with pytest.raises(ValueError, match="unknown device 'tpu'; known are cpu, cuda"):
        Options(sizes=(8,), device="tpu")


def test_peers_of_another_device_are_left_out_with_the_reason():
    available, skipped = available_backends(["HOST", "torch:nccl", "torch:gloo"])
    assert available == ["host", "torch:gloo"]
    assert [entry.peer for entry in skipped] == ["torch:nccl"]
    available, skipped = available_backends(["host", "gloo"], "cuda")
    assert available == ["gloo"]
    assert {entry.reason for entry in skipped} == {"serves tensors on cpu, and this measures tensors on cuda"}
