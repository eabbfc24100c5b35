"""What the wrapper tells of itself: facts under the names that torch gives them, and lines in the log."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel
from collectives.ddp.logging_data import STATISTICS_LEVEL


@on_ranks(2)
def test_logging_data(group):
    ours = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3).double()), process_group=group, bucket_cap_mb=0.00001
    )
    before = ours._get_ddp_logging_data()

    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double()

    ours.module.insert(1, Cast())
    for _ in range(2):
        ours(torch.ones(1, 2)).sum().backward()
    after = ours._get_ddp_logging_data()
    for _ in range(10):
        ours(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="must be 1 or more, but is 0"):
        ours._set_ddp_runtime_logging_sample_rate(0)
    last = ours._get_ddp_logging_data()["forward_compute_time_start"]
    ours(torch.ones(1, 2)).sum().backward()  # not sampled any more
    assert ours._get_ddp_logging_data()["forward_compute_time_start"] == last
    ours._set_ddp_runtime_logging_sample_rate(1)
    ours(torch.ones(1, 2)).sum().backward()
    assert ours._get_ddp_logging_data()["forward_compute_time_start"] > last
    expected = {
        "world_size": 2,
        "rank": group.rank(),
        "backend_name": "host",
        "module_name": "Sequential",
        "dtypes": "double, float",
        "num_parameter_tensors": 4,
        "total_parameter_size_bytes": 24 + 72,
        "bucket_sizes": "24, 48, 24",
        "bucket_cap_bytes": 10,
        "iteration": 0,
        "can_set_static_graph": False,
        "has_rebuilt_buckets": 0,
        "unused_parameter_size": 0,
        "output_device": -1,
        "broadcast_buffers": 1,
    }
    assert expected.items() <= before.items()
    changes = {
        "iteration": 2,
        "can_set_static_graph": True,
        "has_rebuilt_buckets": 1,
        "prev_iteration_grad_ready_order_indices": "3, 2, 1, 0",
        "rebuilt_bucket_sizes": "24, 48, 24",
        "rebuilt_per_bucket_param_indices": "3, 2, 1 0",
    }
    assert changes.items() <= after.items()
    assert before["avg_forward_compute_time"] == before["avg_backward_exposed_comm_time"] == 0
    assert "forward_compute_time" not in before
    comm, overlap = after["backward_comm_time"], after["backward_compute_comm_overlap_time"]
    assert after["backward_exposed_comm_time"] + overlap == comm > 0
    moments = [
        after[f"{name}_time_{end}"]
        for name, end in (
            ("forward_compute", "start"), ("backward_compute", "start"), ("backward_compute", "end"),
            ("backward_comm", "end"),
        )
    ]  # fmt: skip
    assert moments == sorted(moments)
    assert abs(moments[0] / 1e9 - time.time()) < 600
    assert after["backward_compute_time"] == moments[2] - moments[1]
    assert 0 < after["forward_compute_time"] <= moments[1] - moments[0]
    averages = [after[f"avg_{name}_time"] for name in ("forward_compute", "backward_compute")]
    assert all(average > 0 for average in averages)


def threads(group):
    return DistributedDataParallel(nn.Linear(2, 2), process_group=group)._get_ddp_logging_data()


def test_threads_of_gloo() -> None:
    """torch has them for Gloo alone."""
    for options, count in (({}, 2), ({"pg_options": {"_threads": 3}}, 3)):
        for data in run_ranks(threads, 2, backend="gloo", **options):
            assert data["gloo_num_threads"] == count
    (data,) = run_ranks(threads, 1, backend="host")
    assert "gloo_num_threads" not in data


def logged(group, level):
    """Returns what construction and one iteration log."""
    logger, lines = logging.getLogger("collectives"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[0].bias.requires_grad_(False)
        ours = DistributedDataParallel(model, process_group=group, static_graph=True, bucket_cap_mb=1)
        ours(torch.randn(3, 2)).sum().backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [line for line in lines if "DistributedDataParallel" in line[1]]


def test_construction_and_times_are_logged_as_the_level_says() -> None:
    """Features DB-09 and DB-10."""
    for rank, lines in enumerate(run_ranks(logged, 2, STATISTICS_LEVEL, backend="host")):
        (level, made), (lower, timed) = lines
        assert (level, lower) == (logging.INFO, STATISTICS_LEVEL)
        assert made.startswith(f"[rank {rank}] host group ")
        assert " of 2: DistributedDataParallel(Sequential) of 3 parameters" in made
        for words in (
            "3 parameters of float32, 32 bytes, in 1 buckets of [32] bytes on cpu",
            "[1048576, 1048576] bytes",
            "3 buffers, 1 parameters frozen", "static_graph=True", "find_unused_parameters=False",
            "device_ids=None", "forward_sync_buffers=True",
        ):  # fmt: skip
            assert words in made
        number = r"\d+\.\d{3} ms"
        assert re.fullmatch(
            rf"\[rank {rank}\] host group .* of 2: DistributedDataParallel\(Sequential\), iteration 1: "
            rf"forward {number}, "
            rf"backward {number}, communication {number}, overlap {number}, exposed {number}",
            timed,
        )
    for lines in run_ranks(logged, 2, logging.INFO, backend="host"):
        assert [level for level, _ in lines] == [logging.INFO]
    assert run_ranks(logged, 2, logging.WARNING, backend="host") == [[], []]
