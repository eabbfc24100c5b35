"""Names of groups on command lines."""

from __future__ import annotations

import pytest
from harness import run_world

from collectives.bench.core.ranks import new_group, split_lanes


def test_backends_and_lanes():
    assert split_lanes("HOST") == ("host", None)
    assert split_lanes("round_robin") == ("round_robin", None)
    assert split_lanes("round_robin:5") == ("round_robin", {"lanes": 5, "backend": "host"})
    assert split_lanes("round_robin:3:Gloo") == ("round_robin", {"lanes": 3, "backend": "gloo"})


@pytest.mark.parametrize("name", ["host:3", "round_robin:0", "round_robin:x", "round_robin:3:gloo:1"])
def test_other_forms_are_refused(name):
    with pytest.raises(ValueError, match=r"round_robin:LANES:BACKEND, such as round_robin:3:gloo"):
        split_lanes(name)


def lanes(rank, size):
    group = new_group("round_robin:2:gloo", [0, 1])
    return [lane.name() for lane in group.lanes]


def test_a_group_of_lanes():
    assert run_world(lanes, 2) == [["gloo", "gloo"]] * 2
