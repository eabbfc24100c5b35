"""``collectives tune`` keeps thresholds that measure better, and no others."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from collectives.backends.host import tuning_file
from collectives.bench.tuning import command as tune
from collectives.bench.tuning.report import Report
from collectives.bench.tuning.search import (
    PLAN,
    Comparison,
    Outcome,
    Step,
    TooNoisyError,
    compare,
    search,
)
from collectives.bench.tuning.timing import Probe, TimedGroups
from collectives.cli import CommandError, main

pytestmark = pytest.mark.usefixtures("preloaded_python")

SHORT, LONG = Probe("all_reduce", 4096), Probe("all_reduce", 1 << 20)
STEPS = (
    Step("one_shot_bytes", (8192, 65536), (SHORT,)),
    Step("ring_bytes", (262144, 524288), (LONG,)),
)
Cost = Callable[[Mapping[str, int], Probe], float]


class FakeGroups:
    """Ranks whose times are a formula of the thresholds, and noise."""

    def __init__(self, cost: Cost, noise: float = 0.01, ranks: int = 2) -> None:
        self.cost = cost
        self.ranks = ranks
        self.noise = noise
        self.groups: dict[int, Mapping[str, int]] = {}
        self.made = 0
        self.random = random.Random(7)

    def make(self, thresholds: Mapping[str, int]) -> int:
        assert tuning_file.fits(thresholds, self.ranks), thresholds
        self.made += 1
        self.groups[self.made] = dict(thresholds)
        return self.made

    def drop(self, number: int) -> None:
        del self.groups[number]

    def time_us(self, number: int, probe: Probe, calls: int) -> float:
        assert calls >= 1
        return self.cost(self.groups[number], probe) * self.random.lognormvariate(0, self.noise)


def found(cost: Cost, noise: float = 0.01) -> Outcome:
    rig = FakeGroups(cost, noise)
    outcome = search(rig, 2, tuning_file.defaults(2), 0.0, STEPS)  # type: ignore[arg-type]
    assert not rig.groups
    return outcome


def test_a_threshold_that_saves_time_is_kept_and_only_that() -> None:
    outcome = found(lambda s, p: 10 * (0.8 if s["one_shot_bytes"] == 8192 and p is SHORT else 1.0))
    assert outcome.after == {"one_shot_bytes": 8192}
    assert 0.05 < outcome.gain < 0.15
    before, after = outcome.before_us[0], outcome.after_us[0]
    assert after / before == pytest.approx(0.8, abs=0.03)
    default = tuning_file.defaults(2)["one_shot_bytes"]
    assert any(f"one_shot_bytes: {default} -> 8192" in line for line in tune.table(outcome))


def test_the_best_of_several_is_taken() -> None:
    outcome = found(lambda s, p: {8192: 9.0, 65536: 7.0}.get(s["one_shot_bytes"], 10.0))
    assert outcome.after == {"one_shot_bytes": 65536}


def test_noise_alone_changes_nothing() -> None:
    outcome = found(lambda s, p: 10.0, noise=0.05)
    assert outcome.after == {}
    assert "no thresholds measure better" in outcome.conclusion


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert found(lambda s, p: 9.8 if s["one_shot_bytes"] == 8192 else 10.0, noise=0.05).after == {}


def test_a_threshold_that_makes_another_operation_slower_is_given_up() -> None:
    def cost(setting: Mapping[str, int], probe: Probe) -> float:
        if probe is SHORT:  # shorter rings help long messages, and harm short ones: seen only all together
            return 13.0 if setting["ring_bytes"] == 262144 else 10.0 - 3 * (setting["one_shot_bytes"] == 8192)
        return 8.0 if setting["ring_bytes"] == 262144 else 10.0

    outcome = found(cost)
    assert outcome.after == {"one_shot_bytes": 8192}
    assert [name for name, *_ in outcome.steps] == ["one_shot_bytes", "ring_bytes"]


def test_a_machine_that_is_too_noisy_is_refused() -> None:
    with pytest.raises(TooNoisyError, match="the same thresholds differ by"):
        found(lambda s, p: 10.0, noise=0.8)


def test_a_gain_in_few_rounds_does_not_count() -> None:
    steady, lucky = [10.0] * 8, [1.0] * 5 + [11.0] * 3
    assert not Comparison([[steady], [steady], [lucky]]).is_better(2)
    assert Comparison([[steady], [steady], [[9.0] * 8]]).is_better(2)


def test_the_plan_tries_only_values_that_groups_accept() -> None:
    assert {step.name for step in PLAN} == set(tuning_file.FIELDS) - {"background_spin_us"}
    for step in PLAN:
        for value in step.values:
            least, most, unit, _ = tuning_file.FIELDS[step.name]
            assert least <= value <= most
            assert value % unit == 0, (step.name, value)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_thresholds_that_do_not_go_together_are_not_tried(ranks: int) -> None:
    def cost(setting: Mapping[str, int], probe: Probe) -> float:
        return 10 * 2 ** (setting["ring_bytes"] / (1 << 20)) * (1.1 - setting["chunk_bytes"] / (1 << 20))

    rig = FakeGroups(cost, ranks=ranks)
    outcome = search(rig, ranks, tuning_file.defaults(ranks), 0.0)  # type: ignore[arg-type]
    assert outcome.after["ring_bytes"] == 1 << 20  # the least where chunks are the longest
    assert {**tuning_file.defaults(ranks), **outcome.after}["chunk_bytes"] == 256 << 10


def test_a_threshold_is_given_up_with_the_one_that_it_needs() -> None:
    def cost(setting: Mapping[str, int], probe: Probe) -> float:
        short_ring, short_chunks = setting["ring_bytes"] == 256 << 10, setting["chunk_bytes"] == 64 << 10
        if probe is SHORT:
            return 20.0 if short_ring else 10.0
        return 10.0 - 3 * short_ring - 1.5 * short_chunks

    steps = (Step("chunk_bytes", (64 << 10,), (LONG,)), Step("ring_bytes", (256 << 10,), (LONG,)))
    steps += (Step("yields", (2,), (SHORT,)),)
    outcome = search(FakeGroups(cost, ranks=4), 4, tuning_file.defaults(4), 0.0, steps)  # type: ignore[arg-type]
    assert [name for name, *_ in outcome.steps] == ["chunk_bytes", "ring_bytes"]
    assert outcome.after == {}
    assert "what measures faster alone does not over all operations" in outcome.conclusion


def test_groups_that_were_not_better_stay_on_their_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [
        Outcome(2, tuning_file.defaults(2), {"ring_bytes": 524288}),
        Outcome(4, tuning_file.defaults(4)),
    ]
    file = tuning_file.save(tune.entries(outcomes), tmp_path / "tuning.json")
    monkeypatch.setenv(tuning_file.VARIABLE, str(file))
    assert tuning_file.tuning_for(2) == {**tuning_file.defaults(2), "ring_bytes": 524288}
    for size in (3, 4, 8):
        assert tuning_file.tuning_for(size) == tuning_file.defaults(size)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome | Exception], None]:
    """Gives the command a result, in place of a measurement."""

    monkeypatch.setattr(tune, "TimedGroups", contextlib.nullcontext)

    def give(result: Outcome | Exception) -> None:
        def answer(*arguments: object, **named: object) -> Outcome:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(tune, "search", answer)

    return give


BETTER = Outcome(2, tuning_file.defaults(2), {"ring_bytes": 524288}, conclusion="saves 9.0% of the time")


def test_the_command_stores_what_is_better_beside_what_is_there(
    tmp_path: Path, measured: Callable[[Outcome | Exception], None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(BETTER)
    file = tuning_file.save({8: {"spin_us": 50}}, tmp_path / "tuning.json")
    assert main(["tune", "--nproc", "2", "--file", str(file)]) == 0
    assert f"Stored in {file}" in capsys.readouterr().out
    assert tuning_file.stored(file) == {2: {"ring_bytes": 524288}, 3: {}, 8: {"spin_us": 50}}
    file.write_text("{}")
    assert main(["tune", "--nproc", "2", "--file", str(file)]) == 0
    assert "is replaced, because it cannot be used" in capsys.readouterr().out
    assert tuning_file.stored(file) == {2: {"ring_bytes": 524288}, 3: {}}


def test_a_dry_run_and_a_result_that_is_no_better_store_nothing(
    tmp_path: Path, measured: Callable[[Outcome | Exception], None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tuning.json"
    measured(BETTER)
    assert main(["tune", "--nproc", "2", "--file", str(file), "--dry-run"]) == 0
    measured(Outcome(2, tuning_file.defaults(2), conclusion="no thresholds measure better"))
    assert main(["tune", "--nproc", "2", "--file", str(file)]) == 0
    assert capsys.readouterr().out.count("othing is stored") == 2
    assert not file.exists()


def test_the_command_refuses_a_noisy_machine_and_a_place_that_groups_do_not_read(
    tmp_path: Path,
    measured: Callable[[Outcome | Exception], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured(TooNoisyError("two groups with the same thresholds differ by 40% here"))
    assert main(["tune", "--nproc", "2", "--file", str(tmp_path / "tuning.json")]) == 1
    assert "differ by 40%" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(tuning_file.VARIABLE, "")
    with pytest.raises(CommandError, match="give --file"):
        tune.run(argparse.Namespace(file=None, dry_run=False, nproc=(2,), budget=1.0))


def test_ranks_time_groups_that_differ_in_a_threshold() -> None:
    before = tuning_file.defaults(2)
    operations = dict.fromkeys(probe.operation for step in PLAN for probe in step.probes)
    probes = [Probe(operation, 0 if operation == "barrier" else 4096) for operation in operations]
    with TimedGroups(2) as rig:
        result = compare(rig, [before, {**before, "one_shot_bytes": 128}], probes, 0.0)
    assert [len(setting) for setting in result.times_us] == [len(probes)] * 3
    assert all(0 < turn < 1e6 for setting in result.times_us for rounds in setting for turn in rounds)
    json.dumps(result.times_us.tolist())


def test_a_report_says_what_each_probe_gains_and_which_thresholds_do_it() -> None:
    outcome = Outcome(
        2, {"yields": 0, "spin_us": 5}, {"spin_us": 20}, [], (SHORT, LONG), [10.0, 4.0], [8.0, 5.0]
    )
    report = Report("collectives tune", {}, {}, [outcome])
    (chart,) = report.charts()
    (bars,) = chart.curves
    assert (chart.title, bars.at) == ("2 ranks", ["all_reduce 4 KiB", "all_reduce 1 MiB"])
    assert bars.values == [0.8, 1.25]
    assert report.tables()["Thresholds"] == [
        {"ranks": 2, "threshold": "yields", "before": 0, "after": 0},
        {"ranks": 2, "threshold": "spin_us", "before": 5, "after": 20},
    ]


@pytest.mark.full
def test_the_outcome_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    monkeypatch.setattr("collectives.bench.tuning.search.MOST_NOISE", float("inf"))
    monkeypatch.setattr("collectives.bench.tuning.search.MIN_ROUNDS", 1)  # what no budget shortens
    written, page = tmp_path / "tune.json", tmp_path / "tune.html"
    words = ["--nproc", "2", "--budget", "1", "--dry-run", "--json", str(written), "--html", str(page)]
    assert main(["tune", *words]) == 0
    (record,) = json.loads(written.read_text("utf-8"))["records"]
    assert record["ranks"] == 2
    assert record["thresholds_before"] == tuning_file.defaults(2)
    assert record["thresholds_after"].keys() == record["thresholds_before"].keys()
    asked = {(probe.operation, probe.size_bytes) for step in PLAN for probe in step.probes}
    assert {(row["operation"], row["size_bytes"]) for row in record["times"]} == asked
    for row in record["times"]:
        assert row["ratio"] == row["after_us"] / row["before_us"]
    text = page.read_text("utf-8")
    assert text.count("Plotly.newPlot(") == 1
    for part in (
        "<td>reduce_scatter</td>",
        "<h2>Thresholds</h2>",
        "<td>spin_us</td>",
        "<h2>Conclusions</h2>",
    ):
        assert part in text
