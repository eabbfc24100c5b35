"""The formula that measured results are compared with."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import pytest
import torch

from collectives.bench import operations

COUNT = 600  # more than two periods
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64)

REFERENCE = {
    "sum": sum,
    "avg": lambda values: sum(values) / len(values),
    "product": math.prod,
    "min": min,
    "max": max,
    "band": lambda values: reduce(lambda a, b: a & b, values),
    "bor": lambda values: reduce(lambda a, b: a | b, values),
    "bxor": lambda values: reduce(lambda a, b: a ^ b, values),
}


def test_every_operation_has_a_reference():
    assert set(REFERENCE) == set(operations.REDUCTIONS)


@pytest.mark.parametrize("op", operations.REDUCTIONS)
def test_expected_is_the_reduction_of_the_sources(op):
    kind = int if op in {"band", "bor", "bxor"} else lambda value: value
    for dtype, size in itertools.product(DTYPES, [1, 2, 3, 4]):
        inputs = [operations.source(op, dtype, COUNT, rank, size).tolist() for rank in range(size)]
        wanted = [REFERENCE[op]([kind(value) for value in values]) for values in zip(*inputs, strict=True)]
        assert operations.expected(op, dtype, COUNT, size).tolist() == wanted, (dtype, size)


@pytest.mark.parametrize("op", operations.REDUCTIONS)
def test_every_input_differs_from_the_others_and_from_the_result(op):
    for size in (2, 3, 4, 5, 8):
        tensors = [operations.source(op, torch.float32, COUNT, rank, size) for rank in range(size)]
        tensors.append(operations.expected(op, torch.float32, COUNT, size))
        assert len({tuple(tensor.tolist()) for tensor in tensors}) == size + 1, size


@pytest.mark.parametrize("op", operations.REDUCTIONS)
def test_a_part_at_a_wrong_place_is_seen(op):
    for size in (1, 2, 3, 4, 8):
        wanted = operations.expected(op, torch.float32, 2048, size)
        for shift in (2**i for i in range(9)):
            assert operations.count_wrong(wanted.roll(shift), wanted) > 0, (size, shift)


@pytest.mark.parametrize("op", operations.REDUCTIONS)
def test_resting_value_rests(op):
    rest = operations.resting(op)
    assert REFERENCE[op]([rest] * 3) == rest


def test_shorter_input_is_the_front_of_a_longer_one():
    longer = operations.source("sum", torch.int32, COUNT, 1, 3)
    assert torch.equal(operations.source("sum", torch.int32, 7, 1, 3), longer[:7])


def test_count_wrong():
    wanted = torch.arange(5.0)
    assert operations.count_wrong(wanted.clone(), wanted) == 0
    result = wanted.clone()
    result[1], result[3] = 9, math.nan
    assert operations.count_wrong(result, wanted) == 2
    assert operations.count_wrong(torch.empty(0), torch.empty(0)) == 0
    off = torch.tensor([1.0, 1.5, 1.6, torch.nan])
    assert operations.count_wrong(off, torch.ones(4), 0.5) == 2
