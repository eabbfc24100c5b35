"""The ring of a group's last operations, and their totals."""

from __future__ import annotations

from datetime import timedelta

import pytest

from collectives.core.recording.flight_record import FlightRecord, RecordedOperation, add_totals


def begun(record: FlightRecord, number: int, name: str = "all_reduce") -> RecordedOperation:
    operation = RecordedOperation(record, name, number, "SUM", (2, 3), "float32", 1, 24, timedelta(seconds=5))
    record.begin(operation)
    return operation


def test_the_last_ones_stay_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD", "2")
    record = FlightRecord(pytest.fail)
    for number in (1, 2, 3):
        begun(record, number).end()
    begun(record, 1, "barrier")
    assert [(one.name, one.number, one.state) for one in record.operations()] == [
        ("all_reduce", 3, "done"),
        ("barrier", 1, "pending"),
    ]
    assert record.begun == 4
    totals = record.totals()
    assert (totals["all_reduce"]["count"], totals["all_reduce"]["bytes"]) == (3, 72)
    assert totals["barrier"] == {"count": 1, "bytes": 24, "errors": 0, "seconds": 0}
    values = record.operations()[0].values()
    assert (values["shape"], values["detail"], values["timeout_seconds"]) == ([2, 3], "SUM", 5.0)
    assert values["began_ns"] <= values["ended_ns"]


def test_an_operation_ends_once() -> None:
    told: list[str] = []
    record = FlightRecord(told.append)
    first, second = begun(record, 1), begun(record, 2)
    first.end(ValueError("bad shard"))
    first.end()
    second.end(ValueError("another"))
    assert (first.state, first.error) == ("failed", "ValueError: bad shard")
    assert record.totals()["all_reduce"]["errors"] == 2
    assert told == ["ValueError: bad shard"]  # the first of the group alone


@pytest.mark.parametrize("text", ["many", "-1", "1.5", "1000001", "1" * 30])
def test_the_number_is_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD", text)
    with pytest.raises(ValueError, match=f"COLLECTIVES_FLIGHT_RECORD must be .* but is '{text}'"):
        FlightRecord(pytest.fail)


def test_none_are_kept_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_FLIGHT_RECORD", "0")
    record = FlightRecord(pytest.fail)
    begun(record, 1)
    assert record.operations() == []
    assert record.totals()["all_reduce"]["count"] == 1


def test_totals_of_groups_add_up() -> None:
    sums = {"barrier": {"count": 1.0, "seconds": 0.5}}
    add_totals(sums, {"barrier": {"count": 2, "seconds": 0.25}, "send": {"count": 4, "seconds": 1}})
    assert sums == {"barrier": {"count": 3, "seconds": 0.75}, "send": {"count": 4, "seconds": 1}}
