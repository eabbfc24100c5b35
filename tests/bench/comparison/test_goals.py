"""Goals that a user sets for a comparison."""

from __future__ import annotations

import pytest

from collectives.bench.comparison.goals import check, goal_lines, parse_goal
from collectives.bench.comparison.records import Record
from collectives.bench.core.records import Timing


def record(peer, size, cold, hot=None, *, loop=None, ranks=2, operation="all_reduce", compared_as=""):
    timings = [None if us is None else Timing(5, us, us, us, us) for us in (cold, hot or cold, loop)]
    return Record(
        operation, peer, ranks, size, size // 4, "float32", "sum", True, timings[0], 0, timings[1], 0,
        timings[2], compared_as=compared_as,
    )  # fmt: skip


RECORDS = [
    record("host", 1024, 2.0, 1.0, loop=0.5),
    record("mpi4py", 1024, 1.5, 0.5, loop=0.3),
    record("host", 1 << 20, 100.0, ranks=4),
    record("mpi4py", 1 << 20, 250.0, ranks=4),
    record("limit", 1 << 20, 70.0, ranks=4, operation="add_", compared_as="all_reduce"),
    record("host", 1 << 20, 300.0, operation="broadcast"),
    record("mpi4py", 1 << 20, 200.0, operation="broadcast"),
]


def outcome(text):
    return [
        (each.record.size_bytes, each.allowed_us, each.is_met) for each in check(parse_goal(text), RECORDS)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host <= mpi4py", [(1024, 1.5, False), (1 << 20, 250.0, True), (1 << 20, 200.0, False)]),
        ("host <= mpi4py @ 8:4K", [(1024, 1.5, False)]),
        ("host <= mpi4py + 0.5us @ 1K", [(1024, 2.0, True)]),
        ("host.hot<=mpi4py.cold@1K", [(1024, 1.5, True)]),
        ("host.loop <= mpi4py.loop + 0.1 us", [(1024, 0.4, False)]),
        ("host <= mpi4py/2; ops all_reduce; ranks 4", [(1 << 20, 125.0, True)]),
        ("host <= mpi4py * 2 @ 1M,2M:4M; ops broadcast, all_reduce; ranks 2", [(1 << 20, 400.0, True)]),
        ("host <= limit/0.5", [(1 << 20, 140.0, True)]),
        ("host <= limit/0.8", [(1 << 20, 87.5, False)]),
        ("host <= gloo", []),
    ],
)
def test_goals_are_checked_where_both_were_measured(text, expected):
    assert outcome(text) == [(size, pytest.approx(us), met) for size, us, met in expected]


def test_summary_names_what_is_missed():
    goals = [
        parse_goal(text) for text in ("host <= mpi4py @ 1M; ranks 4", "host <= mpi4py/2", "host <= gloo")
    ]
    lines, all_met = goal_lines(goals, RECORDS)
    assert not all_met
    assert lines == [
        "# goal host <= mpi4py @ 1M; ranks 4: met, 1 of 1 points",
        "# goal host <= mpi4py/2: MISSED, 1 of 3 points",
        "#   all_reduce, 2 ranks, 1 KiB: 2 us, allowed 0.75 us (2.67x)",
        "#   broadcast, 2 ranks, 1 MiB: 300 us, allowed 100 us (3x)",
        "# goal host <= gloo: NOT MEASURED, 0 of 0 points",
    ]
    assert goal_lines(goals[:1], RECORDS)[1]
    assert goal_lines([], RECORDS) == ([], True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host < mpi4py", "is no goal"),
        ("host.warm <= mpi4py", "times are cold, hot, loop"),
        ("host <= mpi4py/0", "factor of 0"),
        ("host <= mpi4py @ many", "is no size"),
        ("host <= mpi4py; only 2", "neither 'ops"),
        ("host <= mpi4py; ops scan", "operations are all_reduce"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_goal(text)
