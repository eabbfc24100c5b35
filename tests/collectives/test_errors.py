"""What programs read of errors: the same attributes on every class, which survive pickle and copies."""

from __future__ import annotations

import copy
import pickle

import pytest

import collectives
from collectives import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_the_attributes(kind: type[errors.DistError]) -> None:
    plain = kind("what happened")
    assert str(plain) == "what happened"
    assert plain.details() == {"rank": -1, "missing_ranks": [], "operation": "", "sequence": -1}
    assert plain.cause is None
    cause = collectives.CollectiveTimeoutError("first", 2, missing_ranks=[2, 3], operation="barrier")
    error = kind("then", 1, missing_ranks=iter([1]), operation="all_reduce", sequence=7, cause=cause)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is kind
        assert str(same) == "then"
        assert (same.rank, same.missing_ranks, same.operation, same.sequence) == (1, (1,), "all_reduce", 7)
        assert type(same.cause) is collectives.CollectiveTimeoutError
        assert same.cause.missing_ranks == (2, 3)


def test_what_an_error_is_given_later_survives_too() -> None:
    error = collectives.GroupAbortedError("text")
    error.lane = 3  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(error)).lane == 3
