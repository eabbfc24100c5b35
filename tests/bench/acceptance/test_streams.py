"""What is taken for a wrong order of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from collectives.bench.acceptance.ranks import RankEnd
from collectives.bench.acceptance.report import CheckFailedError
from collectives.bench.acceptance.streams import CASES

RIGHT = {"found": [6.0, 6.0], "wanted": [6.0, 6.0], "seconds_of_the_host": 0.1}


def ended(values: Mapping[str, Any]) -> RankEnd:
    return RankEnd(0, values, 0.5, "")


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    assert CASES[case].judge([ended(RIGHT), ended(RIGHT)])["ranks"] == 2
    with pytest.raises(CheckFailedError, match=r"rank 1 has \[6.0, 2.0\] instead of \[6.0, 6.0\]"):
        CASES[case].judge([ended(RIGHT), ended({**RIGHT, "found": [6.0, 2.0]})])


def test_a_host_that_waits() -> None:
    with pytest.raises(CheckFailedError, match=r"the host waited: 1\.20 s"):
        CASES["late_producer"].judge([ended(RIGHT), ended({**RIGHT, "seconds_of_the_host": 1.2})])
