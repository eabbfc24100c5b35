"""``collectives bench`` on CUDA tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from bench_reports import read_report
from gpu.cuda_ranks import needs_device

from collectives.bench.ddp import PEERS
from collectives.cli import main

pytestmark = needs_device


@pytest.mark.parametrize(
    ("more", "operations"),
    [([], ["all_reduce"]), (["--ops", "all_gather,barrier"], ["all_gather"])],
)
def test_both_peers_at_two_sizes(more: list[str], operations: list[str], tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "out.json"
    status = main(
        [
            *("bench", "allreduce", *more, "--device", "cuda", "--backends", "nccl,torch:nccl"),
            *("--sizes", "1K,1M", "--iters", "5", "--warmup", "2", "--json", str(path)),
        ]
    )
    assert status == 0, capsys.readouterr().out
    report = read_report(path)
    assert report.skipped == []
    found = [(r.operation, r.peer, r.size_bytes) for r in report.records if r.operation in operations]
    assert found == [
        (name, peer, size)
        for name in operations
        for size in (1024, 1 << 20)
        for peer in ("nccl", "torch:nccl")
    ]
    for record in report.records:
        assert record.device == "cuda"
        assert record.wrong_elements == 0
        assert record.cold.calls == record.hot.calls == record.host.calls == 5
        assert record.cold.min_us > 0
    described = report.environment
    assert described["gpus"][0] == torch.cuda.get_device_name(0)
    assert described["gpu_driver"]
    assert ("gpus_shared_by_ranks" in described) == (torch.cuda.device_count() < 2)
    assert "by way of" in described["peers"]["nccl"]
    assert "by way of torch" in described["peers"]["torch:nccl"]


def test_hooks(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "out.json"
    words = ["--models", "small", "--hooks", "none,fp16,powersgd-1", "--iters", "4", "--warmup", "4"]
    status = main(["bench", "ddp", "--device", "cuda", *words, "--json", str(path)])
    assert status == 0, capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["skipped"] == []
    peers = [f"ours:nccl{hook}" for hook in ("", "+fp16", "+powersgd-1")]
    assert [record["peer"] for record in report["records"]] == peers
    for record in report["records"]:
        assert record["ranks_identical"]
        assert record["sent_bytes"] > 0
        assert record["iteration"]["min_us"] > 0
    assert report["environment"]["gpus"][0] == torch.cuda.get_device_name(0)


def test_training_with_both_wrappers(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "out.json"
    words = ["--device", "cuda", "--models", "small", "--iters", "4", "--warmup", "2", "--json", str(path)]
    status = main(["bench", "ddp", *words])
    assert status == 0, capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["skipped"] == []
    assert [record["peer"] for record in report["records"]] == [*PEERS["cuda"]]
    for record in report["records"]:
        assert record["agrees"]
        assert record["iteration"]["min_us"] > record["forward"]["min_us"] > 0
        assert record["peak_memory_bytes"] > record["start_memory_bytes"]
    assert report["environment"]["gpus"][0] == torch.cuda.get_device_name(0)
