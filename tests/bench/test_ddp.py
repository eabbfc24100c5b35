"""``collectives bench ddp`` as users run it."""

from __future__ import annotations

import json

import pytest
import torch
from machines import make_machines  # noqa: F401 - a fixture

from collectives.bench import ddp, models
from collectives.bench.core import devices, ranks
from collectives.bench.core.records import Timing, report_lines
from collectives.bench.ddp import Peer, TrainingRecord, TrainingReport
from collectives.bench.models import TASKS, loss_of
from collectives.cli import main
from collectives.registry.backends import why_unavailable

pytestmark = pytest.mark.usefixtures("preloaded_python")


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.full
def test_a_run_with_peers_of_all_kinds(tmp_path, capsys):
    path = tmp_path / "out.json"
    peers = "ours:host,ours:host+noop,torch:gloo,ours:absent,ours:host+unused+noop,ours:host+unused"
    status = main(
        ["bench", "ddp", "--models", "small", "--peers", peers, "--iters", "3", "--warmup", "2",
         "--batch", "1", "--import", "bench_bodies", "--json", str(path)]
    )  # fmt: skip
    assert status == 0
    out = capsys.readouterr().out
    assert "# skipped ours:absent: needs no_such_package" in out
    plain = json.loads(path.read_text())
    records = {record["peer"]: record for record in plain["records"]}
    options = ["ours:host+noop+unused", "ours:host+unused"]
    assert list(records) == ["ours:host", "ours:host+noop", "torch:gloo", *options]
    for record in records.values():
        assert record["agrees"]
        assert (record["ranks"], record["batch"], record["iteration"]["calls"]) == (2, 1, 3)
        assert record["parameters"] > 4e6
        for phase in ("forward", "backward", "step"):  # part of each iteration, on each rank
            for figure in ("min_us", "median_us", "p90_us"):
                assert 0 < record[phase][figure] <= record["iteration"][figure]
        # Parameters, gradients and buckets at least.
        assert record["peak_memory_bytes"] - record["start_memory_bytes"] > 3 * 4 * record["parameters"]
    ours, noop, torchs, unused_noop, unused = records.values()
    assert ours["communicates"]
    assert ours["ranks_identical"]
    assert not noop["communicates"]
    assert not noop["ranks_identical"]  # so that the check can fail
    assert ours["grad_norm"] == pytest.approx(torchs["grad_norm"], rel=1e-5)
    assert ours["grad_norm"] != pytest.approx(noop["grad_norm"], rel=1e-5)
    medians = {name: record["iteration"]["median_us"] for name, record in records.items()}
    assert ours["ratios"] == {
        "time_over_noop": medians["ours:host"] / medians["ours:host+noop"],
        "time_over_plain": None,
        "time_over_torch": medians["ours:host"] / medians["torch:gloo"],
        "memory_over_torch": ours["peak_memory_bytes"] / torchs["peak_memory_bytes"],
    }
    assert torchs["ratios"]["time_over_noop"] is None
    assert ours["grad_norm"] == unused["grad_norm"]
    for one in (unused_noop, unused):
        assert one["ratios"]["time_over_plain"] == medians[one["peer"]] / medians["ours:host"]


@pytest.mark.full
def test_hooks_send_less_and_models_learn(tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--models", "digits", "--hooks", "none,noop,fp16", "--iters", "8", "--warmup", "4"]
    assert main(["bench", "ddp", *words, "--json", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ours:host")]
    assert len(rows) == 2 * 3
    plain, noop, fp16 = json.loads(path.read_text())["records"]
    assert [one["peer"] for one in (plain, noop, fp16)] == ["ours:host", "ours:host+noop", "ours:host+fp16"]
    size = 4 * plain["parameters"]
    tail = 160  # bytes of the signals at the end of a pass
    for one, part in ((plain, 1), (noop, 0), (fp16, 0.5)):
        assert part * size <= one["sent_bytes"] <= part * size + tail * (part > 0), one["peer"]
        assert one["link_bytes"] is None
        assert 0 < one["accuracy"] <= 1
    assert plain["iteration"]["calls"] == 8
    assert plain["final_loss"] < plain["first_loss"]
    assert fp16["final_loss"] == pytest.approx(plain["final_loss"], rel=0.02)
    assert plain["first_loss"] == noop["first_loss"] == fp16["first_loss"]
    assert not noop["ranks_identical"]  # so that the check can fail
    ratio = fp16["iteration"]["median_us"] / plain["iteration"]["median_us"]
    assert fp16["ratios"]["time_over_plain"] == ratio


@pytest.mark.full
def test_diloco_is_a_peer_that_sends_seldom(capsys):
    words = ["--models", "digits", "--hooks", "none,diloco-20,streaming-20", "--iters", "40", "--warmup", "3"]
    assert main(["bench", "ddp", *words]) == 0
    cells = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ours:host")]
    assert [row[-1] for row in cells[:3]] == ["yes"] * 3
    plain, *seldom = (float(row[1]) for row in cells[3:])
    assert all(0 < sent < plain / 15 for sent in seldom)


@pytest.mark.full
def test_machines_count_what_the_link_carries(make_machines):  # noqa: F811
    make_machines(1)  # skips where there can be none
    options = ddp.Options(
        ("digits",), hooks=("none", "powersgd-1"), iterations=3, warmup=3, machines=2, link="1gbit"
    )
    plain, compressed = ddp.measure(options).records
    assert plain.link_bytes > plain.sent_bytes
    assert compressed.link_bytes < plain.link_bytes


def record(peer, milliseconds, **changes):
    timing = Timing(5, *[milliseconds * 1e3] * 5)
    fields = {
        "peer": peer, "model": "m", "ranks": 2, "batch": 1, "length": 8, "parameters": 10,
        "parameter_tensors": 2, "iteration": timing, "forward": timing, "backward": timing, "step": timing,
        "peak_memory_bytes": 2**20, "start_memory_bytes": 0, "communicates": True, "ranks_identical": True,
        "grad_norm": 1.0, "agrees": True, **changes,
    }  # fmt: skip
    return TrainingRecord(**fields)


def test_ratios_compare_like_with_like():
    report = TrainingReport("ddp", {}, {}, [
        record("ours:host", 110), record("ours:host+noop", 100, communicates=False),
        record("torch:gloo", 220, agrees=False), record("torch:gloo+noop", 50, communicates=False),
        record("ours:host", 70, model="other"),
    ])  # fmt: skip
    assert report.ratios(report.records[0]) == {
        "time_over_noop": 1.1, "time_over_plain": None, "time_over_torch": 0.5, "memory_over_torch": 1.0,
    }  # fmt: skip
    assert report.ratios(report.records[1])["time_over_plain"] == 100 / 110
    assert report.ratios(report.records[1])["time_over_torch"] == 2.0
    assert set(report.ratios(report.records[4]).values()) == {None}
    report.records += [
        record("ours:gloo", 150),
        record("torch:collectives", 75),
        record("ours:mpi+unused", 1),
    ]
    ratios = [report.ratios(one)["time_over_noop"] for one in report.records]
    assert ratios == [
        1.1,
        None,
        4.4,
        None,
        None,
        1.5,
        1.5,
        None,
    ]  # over the same wrapper's without communication
    rows = [line.split() for line in report_lines(report) if line.startswith(" ")]
    assert [row[-1] for row in rows] == ["yes", "-", "NO", "-", *["yes"] * 4]


@pytest.mark.full
@pytest.mark.parametrize(
    "peers",
    [
        "ours:round_robin:2:gloo,torch:collectives_round_robin:2",
        "ours:mpi,ours:round_robin:2:mpi",  # whose ranks mpirun starts
    ],
)
def test_lanes_and_mpi_are_named_on_the_command_line(peers, capsys):
    if "mpi" in peers and why_unavailable("mpi") is not None:
        pytest.skip("needs an MPI and mpi4py")
    words = ["bench", "ddp", "--models", "small", "--iters", "1", "--warmup", "2", "--batch", "1"]
    assert main([*words, "--peers", peers]) == 0
    assert capsys.readouterr().out.count(" yes") == 2


def test_without_transformers_the_small_model_is_measured_and_the_command_is_named(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    skipped = []
    assert [model.name for model in ddp._models(ddp.Options(), skipped)] == ["small"]
    assert [entry.peer for entry in skipped] == ["resnet50", "bert-base", "bert-mini"]
    for entry in skipped:
        assert entry.reason == "needs transformers, not installed"
        assert entry.install.startswith("python -m pip install 'transformers>=")


def test_peers_that_disagree_are_told():
    class Processes:
        size = 2

        def __init__(self, norm):
            self.norm = norm

        def gather(self):
            return [ddp.Facts(10, 2, self.norm, 0, 1.0, checksum=1) for _ in range(2)]

    teams = []
    for name, norm in (("ours:host", 1.0), ("torch:gloo", 1.0005), ("torch:collectives", 1.01)):
        team = ddp._Ranks(Peer.parse(name), Processes(norm))
        team.samples = [{phase: [5] for phase in ddp.PHASES} | {"loss": [1.0], "sent": []}] * 2
        teams.append(team)
    agree = [record.agrees for record in ddp.records_of(teams, TASKS["small"], 1)]
    assert agree == [True, True, False]
    teams[0].facts[1].checksum = 2
    assert not ddp.records_of(teams, TASKS["small"], 1)[0].agrees


def test_backends_of_another_device_are_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(ranks, "why_unavailable", lambda name: None)
    monkeypatch.setattr(devices.CudaDevice, "why_unavailable", lambda self: None)
    skipped = []
    peers = ("ours:nccl", "ours:round_robin:3", "torch:gloo", "torch:collectives_mpi", "torch:glo", "alone")
    usable = ddp._usable_peers(ddp.Options(peers=peers, device="cuda"), skipped)
    assert [str(peer) for peer in usable] == ["ours:nccl", "torch:gloo", "alone"]
    assert [(one.peer, one.reason) for one in skipped] == [
        ("ours:round_robin:3", "serves tensors on cpu, and this measures tensors on cuda"),
        ("torch:collectives_mpi", "serves no tensors on cuda"),
        ("torch:glo", "torch.distributed has no backend 'glo' here"),
    ]
    assert [*map(str, ddp.Options(device="cuda", hooks=("none", "fp16")).chosen_peers())] == [
        "ours:nccl",
        "ours:nccl+fp16",
    ]
    with pytest.raises(ValueError, match="machines are played for tensors on the CPU"):
        ddp.Options(device="cuda", peers=("ours:nccl",), machines=2)


def test_too_little_memory_is_said_before_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(devices, "memory_available_bytes", lambda: 2**20)
    words = ["bench", "ddp", "--models", "small", "--peers", "alone,torch:gloo", "--nproc", "1"]
    assert main(words) == 1
    assert "name fewer at once by --peers" in capsys.readouterr().err


def test_a_model_that_nobody_named_is_skipped_where_memory_is_too_little(monkeypatch):
    monkeypatch.setattr(ddp, "FIELD", ("small", "digits"))
    measured = []

    def measure_one(model, *_):
        if model.name == "digits":
            raise MemoryError("8 peers need more")
        measured.append(record("ours:host", 1, model=model.name))
        return measured

    monkeypatch.setattr(ddp, "_measure_model", measure_one)
    report = ddp.measure(ddp.Options())
    assert report.records == measured
    assert ("digits", "8 peers need more") in [(entry.peer, entry.reason) for entry in report.skipped]


def test_names_of_peers():
    peer = Peer.parse("torch:gloo+unused+fp16")
    assert peer == Peer("torch", "gloo", "fp16", ("unused",))
    assert str(peer) == "torch:gloo+fp16+unused"
    assert str(Peer.parse("ours:host+static+views")) == "ours:host+views+static"
    assert str(Peer.parse("alone")) == "alone"
    assert not Peer.parse("alone").communicates


def test_every_output_takes_part_in_the_loss():
    tensors = [torch.ones(2, requires_grad=True) for _ in range(3)]
    loss_of({"a": tensors[0], "b": (tensors[1], None, [tensors[2]])}).backward()
    assert all(torch.equal(tensor.grad, torch.ones(2)) for tensor in tensors)
