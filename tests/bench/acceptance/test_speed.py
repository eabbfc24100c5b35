"""Verdicts on times: right results always, times where they tell something."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nccl_double.platform import DoublePlatform

from collectives.bench.acceptance import command
from collectives.bench.acceptance.command import SECTIONS, Cost, Plan
from collectives.bench.acceptance.report import Verdict
from collectives.bench.allreduce import Record, Report
from collectives.bench.core.records import Skipped, Timing
from collectives.bench.ddp import TrainingRecord, TrainingReport


class Devices(DoublePlatform):
    """Devices whose times tell something."""

    compared = ("nccl", "torch:nccl")
    trained = ("ours:nccl", "torch:nccl")
    times_tell = True


def plan(platform=None):
    return Plan("", platform or Devices(), (2,), short=True)


def record(peer, size, us, wrong=0):
    times = Timing(10, us, us, us, us, us)
    return Record("all_reduce", peer, 2, size, size // 4, "float32", "sum", True, times, wrong, times, 0)


def rows(monkeypatch, records, skipped=()):
    asked = []

    def measure(options):
        asked.append(options)
        return Report("allreduce", {}, {}, list(records), list(skipped))

    monkeypatch.setattr(command, "measure", measure)
    return [*command._measured(plan(), 2, "all_reduce", "8", ["all_reduce"])]


@pytest.mark.parametrize(("us", "verdict"), [(31.0, Verdict.PASSED), (33.0, Verdict.FAILED)])
def test_ours_may_take_a_tenth_and_10_us_more(monkeypatch, us, verdict):
    run, at_8 = rows(monkeypatch, [record("nccl", 8, us), record("torch:nccl", 8, 20.0)])
    assert run.verdict is Verdict.PASSED
    assert at_8.verdict is verdict
    assert at_8.said.startswith(f"nccl {us} us")
    assert ("32.0 us are allowed" in at_8.said) == (verdict is Verdict.FAILED)


def test_the_time_of_the_host_stands_beside_that_of_torch(monkeypatch):
    ours = replace(record("nccl", 8, 21.0), host=Timing(10, 4.25, 4.0, 5.0, 4.0, 4.3))
    run, at_8 = rows(monkeypatch, [ours, record("torch:nccl", 8, 20.0)])
    assert at_8.said.split("; ") == [
        "nccl 21.0 us, 0.000381 GB/s, host 4.2 us",
        "torch:nccl 20.0 us, 0.0004 GB/s, host 20.0 us",
    ]
    assert run.figures["records"][0]["host"]["median_us"] == 4.25


def test_a_fast_wrong_result_fails(monkeypatch):
    _, at_8 = rows(monkeypatch, [record("nccl", 8, 1.0, wrong=3), record("torch:nccl", 8, 20.0)])
    assert at_8.verdict is Verdict.FAILED
    assert at_8.said == "nccl: 3 wrong elements"


def test_a_peer_that_cannot_run_is_told(monkeypatch):
    (run,) = rows(monkeypatch, [], [Skipped("nccl", "CuPy is not installed")])
    assert (run.verdict, run.said) == (Verdict.FAILED, "nccl: CuPy is not installed")


def test_ranks_that_share_a_device_get_no_verdict_on_times(monkeypatch):
    monkeypatch.setattr(Devices, "gpus", lambda self: ["the only one"])
    _, at_8 = rows(monkeypatch, [record("nccl", 8, 900.0), record("torch:nccl", 8, 20.0)])
    assert at_8.verdict is Verdict.PASSED
    assert at_8.said.endswith("no verdict on times here")


@pytest.mark.parametrize(
    ("ms", "agrees", "verdict", "said"),
    [
        (10.4, True, Verdict.PASSED, "ours:nccl 10.4 ms, torch:nccl 10.0 ms"),
        (10.6, True, Verdict.FAILED, "1.05 times torch's are allowed"),
        (9.0, False, Verdict.FAILED, "ranks or gradients differ: ours:nccl"),
    ],
)
def test_training_may_take_a_twentieth_more_and_must_agree(monkeypatch, ms, agrees, verdict, said):
    def trained(peer, ms, agrees):
        time = Timing(4, *[1e3 * ms] * 5)
        return TrainingRecord(peer, "small", 2, 1, 1, 1, 1, *[time] * 4, 1, 1, True, agrees, 1.0, agrees)

    def measure(options):
        assert options.peers == ("ours:nccl", "torch:nccl")
        records = [trained("ours:nccl", ms, agrees), trained("torch:nccl", 10.0, True)]
        return TrainingReport("ddp", {}, {}, records)

    monkeypatch.setattr(command.ddp, "measure", measure)
    (row,) = SECTIONS["training"](plan())
    assert row.verdict is verdict
    assert said in row.said


def test_host_cost_has_a_limit(monkeypatch):
    names = list(command.LIMITS)
    costs = [Cost(names[0], 20, 10, 15.1), Cost(names[1], 20, 10, 14.9), Cost(names[2], 20, 10, 30.0)]
    monkeypatch.setattr(command, "measure_host_cost", lambda calls: costs)
    whole, *judged = SECTIONS["host-cost"](plan())
    assert whole.verdict is Verdict.PASSED
    assert [row.name for row in judged] == names
    assert [row.verdict for row in judged] == [Verdict.FAILED, Verdict.PASSED, Verdict.PASSED]
    assert "15.0 us are allowed" in judged[0].said
    assert {row.verdict for row in SECTIONS["host-cost"](plan(DoublePlatform()))} == {Verdict.PASSED}
    allowed = command.LIMITS[names[1]][0]
    costs[1] = Cost(names[1], allowed + 1, 10, 1.0)  # which are the same everywhere
    for platform in (Devices(), DoublePlatform()):
        row = [*SECTIONS["host-cost"](plan(platform))][2]
        assert row.verdict is Verdict.FAILED
        assert f"{allowed + 1} frames of Python" in row.said
        assert row.said.endswith(f"; {allowed} frames are allowed")


def test_a_measurement_that_breaks_is_a_row(monkeypatch):
    def breaks(*_, **__):
        raise RuntimeError("no driver")

    monkeypatch.setattr(command, "measure_host_cost", breaks)
    monkeypatch.setattr(command.ddp, "Options", breaks)
    rows = [row for name in ("host-cost", "training") for row in SECTIONS[name](plan())]
    assert [(row.verdict, row.said) for row in rows] == [(Verdict.FAILED, "RuntimeError: no driver")] * 2
