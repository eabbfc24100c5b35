"""``collectives bench hooks`` as users run it."""

from __future__ import annotations

import json

import pytest
import torch
from harness import run_ranks
from machines import make_machines  # noqa: F401 - a fixture

from collectives.bench import hooks
from collectives.bench.core.devices import CudaDevice
from collectives.bench.training import models
from collectives.bench.training.counting_group import CountingGroup
from collectives.cli import main

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.full
def test_a_run_counts_bytes_and_compares_losses(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = "none,noop,fp16,int8-block,powersgd-1"
    assert (
        main(["bench", "hooks", "--tasks", "digits", "--hooks", words, "--steps", "12", "--json", str(path)])
        == 0
    )
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(" ")]
    assert [row[0] for row in table] == words.split(",")
    assert [row[-1] for row in table] == ["yes", "-", *["yes"] * 3]
    plain = json.loads(path.read_text())
    records = {record["hook"]: record for record in plain["records"]}
    size = 4 * records["none"]["parameters"]
    tail = 160  # bytes of the signals at the end of a pass
    for hook, least, most in (
        ("none", 1, 1), ("noop", 0, 0), ("fp16", 0.5, 0.5), ("int8-block", 0.25, 0.26),
        ("powersgd-1", 0.01, 0.05),
    ):  # fmt: skip
        assert least * size <= records[hook]["sent_bytes"] <= most * size + tail * (most > 0), hook
    assert records["none"]["iteration"]["calls"] == 8
    assert records["none"]["final_loss"] < records["none"]["first_loss"]
    assert records["fp16"]["final_loss"] == pytest.approx(records["none"]["final_loss"], rel=0.02)
    assert len({record["first_loss"] for record in records.values()}) == 1
    assert not records["noop"]["ranks_identical"]  # so that the check can fail
    medians = {name: record["iteration"]["median_us"] for name, record in records.items()}
    assert records["fp16"]["time_over_none"] == medians["fp16"] / medians["none"]


@pytest.mark.full
def test_machines_count_what_the_link_carries(make_machines):  # noqa: F811
    make_machines(1)  # skips where there can be none
    options = hooks.Options(("digits",), ("none", "powersgd-1"), steps=6, machines=2, link="1gbit")
    plain, compressed = hooks.measure(options).records
    assert plain.link_bytes > plain.sent_bytes
    assert compressed.link_bytes < plain.link_bytes


def count(group):
    counting = CountingGroup(group)
    found = []
    for run in (
        lambda t: counting.allreduce([t]),
        lambda t: counting.all_gather_single(t.new_empty(12), t),
        lambda t: counting.allgather([[t.clone() for _ in range(3)]], [t]),
        lambda t: counting.broadcast([t], root=1),
        lambda t: counting.barrier(),
    ):
        counting.sent_bytes = 0
        tensor = torch.ones(4)
        run(tensor).wait()
        found.append((counting.sent_bytes, tensor.tolist()))
    return found


def test_counting_group_counts_each_operation():
    for rank, found in enumerate(run_ranks(count, 3, backend="host")):
        ones = [1.0] * 4
        sent = 32 if rank == 1 else 0
        assert found == [(16 * 4 / 3, [3.0] * 4), (32, ones), (32, ones), (sent, ones), (0, ones)]


def test_without_transformers_the_task_is_skipped_and_the_command_named(monkeypatch, capsys):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "hooks", "--tasks", "language"]) == 1
    assert "# skipped language: needs transformers, not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "chess"], "unknown task 'chess'; known are digits, language"),
        (["--hooks", "zip"], "unknown hook 'zip'; known are none, noop"),
        (["--machines", "3"], "2 ranks cannot be shared equally among 3 machines"),
        (["--link", "1gbit"], "a link joins machines"),
        (["--backend", "hots"], "unknown backend 'hots'"),
        (["--backend", "nccl"], "nccl serves tensors on cuda, and this measures tensors on the CPU"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, capsys):
    assert main(["bench", "hooks", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_there_is_nothing_to_measure_on_it(capsys):
    assert main(["bench", "hooks", "--device", "cuda"]) == 1
    assert "tensors on cuda cannot be measured here" in capsys.readouterr().err


def test_each_device_has_its_backend(monkeypatch):
    assert hooks.Options().backend_name == "host"
    monkeypatch.setattr(CudaDevice, "why_unavailable", lambda self: None)
    assert hooks.Options(device="cuda").backend_name == "nccl"
    assert hooks.Options(device="cuda", backend="round_robin:3:nccl").backend_name == "round_robin:3:nccl"
    for wrong, said in (
        ({"backend": "host"}, "host serves tensors on cpu, and this measures tensors on cuda"),
        ({"machines": 2}, "machines are played for tensors on the CPU"),
    ):
        with pytest.raises(ValueError, match=said):
            hooks.Options(device="cuda", **wrong)
