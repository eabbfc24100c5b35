"""How long a run of ``collectives accept`` is to take."""

from __future__ import annotations

import pytest
from nccl_double.platform import DoublePlatform

from collectives.bench.acceptance import sections
from collectives.bench.acceptance.sections import SECTIONS, Budget, Plan, Work, budget_for, budget_of
from collectives.bench.core.devices import numbers_of_ranks


class Gpus(DoublePlatform):
    """Some devices."""

    def __init__(self, number: int) -> None:
        self.number = number

    def gpus(self) -> list[str]:
        return ["a GPU"] * self.number


def plan_on(gpus: int) -> Plan:
    return Plan("", Gpus(gpus), (1, *numbers_of_ranks(gpus)), short=False)


def test_measurements_share_what_is_left() -> None:
    assert budget_of(1, [Work(500.0), Work(measurements=4)]) == Budget(4, 25.0, 600.0)
    assert budget_of(8, [Work(3000.0, 20)]) == Budget(20, 30.0, 3600.0)


@pytest.mark.parametrize(("seconds", "each"), [(0.0, 60.0), (900.0, 5.0)])
def test_measurements_get_neither_too_little_nor_too_much(seconds: float, each: float) -> None:
    assert budget_of(1, [Work(seconds, 2)]) == Budget(2, each, seconds + 2 * each)


def test_what_is_said_of_it() -> None:
    assert str(Budget(3, 25.0, 600.0)) == (
        "about 10 min, longer where rows fail; 25 s for each of 3 measurements"
    )
    short = Plan("", Gpus(2), (2,), short=True)
    assert str(budget_for(short, ["training", "bandwidth"])) == "about 1 min, longer where rows fail"


def test_an_hour_is_enough_for_eight_gpus() -> None:
    assert budget_for(plan_on(8), [*SECTIONS]).total_s <= 3600
    assert (
        budget_for(plan_on(8), [*SECTIONS]).measurement_s > budget_for(plan_on(1), [*SECTIONS]).measurement_s
    )


def test_one_gpu_takes_little_more_than_ten_minutes() -> None:
    assert budget_for(plan_on(1), [*SECTIONS]).total_s <= 720


def test_each_section_counts() -> None:
    """Without it, all takes less, or measurements get more."""
    whole = budget_for(plan_on(1), [*SECTIONS])
    for name in SECTIONS:
        left = budget_for(plan_on(1), [other for other in SECTIONS if other != name])
        assert left.total_s < whole.total_s or left.measurement_s > whole.measurement_s, name


def test_the_first_provider_stands_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    run = []
    monkeypatch.setattr(sections, "checked", lambda section, name, _: run.append((section, name)))
    plan = Plan("", Gpus(2), (2,), short=False)

    def rows(_platform, _ranks, provider, *_, **__):
        run.append(("bandwidth", provider))
        return ()

    monkeypatch.setattr(sections, "bandwidth_rows", rows)
    for name in ("streams", "failures", "bandwidth"):
        [*SECTIONS[name](plan)]
    providers = {
        section: {
            provider
            for name, said in run
            if name == section
            for provider in ("cupy", "pynccl")
            if provider in said
        }
        for section in ("streams", "failures", "bandwidth")
    }
    assert providers == {section: {"cupy"} for section in ("streams", "failures", "bandwidth")}
