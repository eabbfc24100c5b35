"""Answers beside what a backend states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from collectives.backends import nccl
from collectives.conformance.examination import Answer, Status, questions, unkept
from collectives.core.capabilities import OPERATIONS, Capabilities

STATED = Capabilities(
    devices=frozenset({"cpu"}),
    reductions={torch.float32: frozenset({"SUM", "MAX"})},
    operations=frozenset(OPERATIONS) - {"recv_anysource"},
    moves=frozenset({torch.float32, torch.uint8}),
    uneven=False,
    tags=False,
)


def refused(function: str, dtype: torch.dtype | None, stated: Capabilities = STATED) -> list[str]:
    """Returns what is not kept by a backend that refuses everything."""
    dtypes = None if dtype is None else [dtype]
    question = questions(dtypes, [function])[0]
    reducing = function in {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
    names = [op.name for op in question.ops] if reducing else [function]
    answer = Answer(Status.UNSUPPORTED, dict.fromkeys(names, "no"), 0, len(names))
    assert set(unkept(question, answer, stated, "cpu").values()) <= {"no"}
    return sorted(unkept(question, answer, stated, "cpu"))


@pytest.mark.parametrize(
    ("function", "dtype", "unkept_ones"),
    [
        ("all_reduce", torch.float32, ["MAX", "SUM"]),
        ("all_reduce", torch.float64, []),
        ("all_gather", torch.float32, ["all_gather"]),
        ("all_gather", torch.int16, []),
        ("all_to_all_single", torch.float32, []),
        ("isend, recv", torch.float32, ["isend, recv"]),
        ("isend, recv, tagged", torch.float32, []),
        ("batch_isend_irecv", torch.float32, ["batch_isend_irecv"]),
        ("recv from any rank", torch.float32, []),
        ("barrier", None, ["barrier"]),
        ("object collectives", None, ["object collectives"]),
    ],
)
def test_what_is_stated_may_not_be_refused(
    function: str, dtype: torch.dtype | None, unkept_ones: list[str]
) -> None:
    assert refused(function, dtype) == unkept_ones


def test_more_is_stated_by_one_that_does_more() -> None:
    more = replace(STATED, operations=frozenset(OPERATIONS), uneven=True, tags=True)
    for function in ("all_to_all_single", "isend, recv, tagged", "recv from any rank"):
        assert refused(function, torch.float32, more) == [function]


def test_every_function_can_be_looked_up() -> None:
    """Those that nccl does not offer are the ones its page names."""
    stated = nccl.capabilities()
    not_stated = set()
    for question in questions([torch.float32]):
        answer = Answer(Status.UNSUPPORTED, {question.function: "no", "SUM": "no"}, 0, 1)
        if not unkept(question, answer, stated, "cuda"):
            not_stated.add(question.function)
    assert not_stated == {"isend, recv, tagged", "recv from any rank"}


def test_what_is_offered_besides_counts_too() -> None:
    (question,) = questions([torch.float32], ["reduce_scatter_tensor"])
    some = Answer(Status.OK, {"MAX": "no", "MIN": "no"}, 1, 3)
    assert unkept(question, some, STATED, "cpu") == {"MAX": "no"}
    for status in (Status.WRONG, Status.HANG):
        assert unkept(question, replace(some, status=status), STATED, "cpu") == {}
