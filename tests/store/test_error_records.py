"""Errors as ranks tell each other of them: nothing is lost, and nothing foreign is believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from collectives import (
    CollectiveTimeoutError,
    DistError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    QueueEmptyError,
    UnsupportedOperationError,
)
from collectives.errors import DistBackendError
from collectives.store.records import error_of, record_of

CAUSE = DistError("ValueError: bad shard", 2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLostError("lost", 2, operation="barrier", sequence=4), PeerLostError),
        (CollectiveTimeoutError("late", 1, missing_ranks=[1, 3], operation="all_reduce", sequence=1),
         CollectiveTimeoutError),
        (GroupAbortedError("aborted", 2, cause=CAUSE), GroupAbortedError),
        (QueueEmptyError("empty"), DistStoreError),
        (UnsupportedOperationError("no such thing"), DistBackendError),
    ],
)  # fmt: skip
def test_an_error_comes_as_it_was_told(error: DistError, kind: type[DistError]) -> None:
    told = error_of(json.loads(json.dumps(record_of(error))))
    assert type(told) is kind
    assert str(told) == str(error)
    assert told.details() == error.details()
    assert str(told.cause) == str(error.cause)


@pytest.mark.parametrize(
    "spoilt",
    [{"kind": "SystemExit"}, {"rank": "0"}, {"rank": True}, {"missing_ranks": [None]}, {"missing_ranks": 3},
     {"sequence": 1.5}, {"operation": None}, {"cause": "why"}],
)  # fmt: skip
def test_what_is_no_record_is_refused(spoilt: dict[str, Any]) -> None:
    record = {**record_of(PeerLostError("lost", 2)), **spoilt}
    with pytest.raises(ValueError, match="it has"):
        error_of(record)
