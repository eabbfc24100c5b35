"""The oracle itself: results known by hand, and that it finds what is wrong."""

from __future__ import annotations

import pytest
import torch
from conformance.oracle import (
    BYTES_ONLY,
    DTYPES,
    INTS,
    OPS,
    Report,
    close,
    place,
    raw,
    reduced,
    same,
    values,
    wrapped_mean,
)

from collectives import ReduceOp
from collectives.core.types import make_premul_sum


def test_known_results() -> None:
    half = torch.tensor([1 + 7 * 2**-9]).to(torch.bfloat16)
    assert half.item() == 1.015625
    eight = [torch.tensor([1.0 + 2**-7], dtype=torch.bfloat16)] + [
        torch.tensor([2.0**-9], dtype=torch.bfloat16)
    ] * 7
    # 1 + 4 / 512 + 7 / 512: rounded once 1.0234375, rounded at every step 1.0078125.
    assert reduced(eight, ReduceOp.SUM).item() == 1.0234375
    ints = [
        torch.tensor([-7, 7, 100, -128], dtype=torch.int8),
        torch.tensor([0, 0, 100, -1], dtype=torch.int8),
    ]
    assert reduced(ints, ReduceOp.AVG).tolist() == [-3, 3, 100, -64]
    assert reduced(ints, ReduceOp.SUM).tolist() == [-7, 7, -56, 127]
    bools = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    assert reduced(bools, ReduceOp.SUM).tolist() == [True, True, False]
    assert reduced(bools, ReduceOp.PRODUCT).tolist() == [True, False, False]
    assert reduced(bools, ReduceOp.BXOR).tolist() == [False, True, False]
    pair = [torch.tensor([1.0 + 2.0j]), torch.tensor([3.0 - 2.0j])]
    assert reduced(pair, ReduceOp.AVG).tolist() == [2.0 + 0.0j]
    assert reduced(pair, make_premul_sum(0.5)).tolist() == [2.0 + 0.0j]
    floats = [torch.tensor([2.0, float("nan")]), torch.tensor([3.0, 1.0])]
    assert reduced(floats, ReduceOp.PRODUCT)[0].item() == 6.0
    assert reduced(floats, ReduceOp.MIN)[0].item() == 2.0
    assert reduced(floats, ReduceOp.MAX)[1].isnan()
    order = [torch.tensor([2.0**24]), torch.tensor([1.0]), torch.tensor([-(2.0**24)])]
    assert reduced(order, ReduceOp.SUM).item() == 0.0
    assert reduced([order[0], order[2], order[1]], ReduceOp.SUM).item() == 1.0


@pytest.mark.parametrize("dtype", [*DTYPES, *BYTES_ONLY], ids=str)
def test_values_differ_by_rank_and_place(dtype: torch.dtype) -> None:
    rows = [values(dtype, rank, 64) for rank in range(4)]
    for rank in range(1, 4):
        assert same(rows[rank], rows[0]) is not None
    if dtype is not torch.bool:
        assert len(set(map(tuple, raw(rows[0]).view(64, -1).tolist()))) > 8
    assert same(values(dtype, 2, 64), rows[2]) is None
    if dtype in INTS:
        assert len(set(map(tuple, raw(values(dtype, 0, 500)).view(500, -1).tolist()))) > 200


@pytest.mark.parametrize("layout", ["dense", "offset", "strided", "transposed"])
def test_places_have_margins(layout: str) -> None:
    flat = values(torch.int32, 1, 60)
    placed = place(flat, layout)
    assert torch.equal(placed.tensor.reshape(-1), flat)
    assert placed.margin_is_whole()
    placed.tensor.fill_(3)
    assert placed.margin_is_whole()
    if layout in {"offset", "strided"}:
        assert placed.buffer.numel() > raw(flat).numel()
        placed.buffer.view(torch.int32)[0] = 3
        assert not placed.margin_is_whole()
    if layout in {"strided", "transposed"}:
        assert not placed.tensor.is_contiguous()
    assert place(flat[:1], "scalar").tensor.shape == ()


def test_differences_are_found() -> None:
    a = values(torch.float32, 0, 9)
    b = a.clone()
    b.view(torch.int32)[4] += 1
    text = same(a, b)
    assert text is not None
    assert "1 of 9 elements differ, first at 4" in text
    assert same(a, b[:8]) is not None
    assert same(a, a.to(torch.float64)) is not None
    assert same(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    nans = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert same(nans[:1], nans[1:]) is None
    assert same(nans.view(torch.complex64), nans.flip(0).view(torch.complex64)) is None
    assert close(b, a, [a], ReduceOp.SUM) is None
    wrong = a.clone()
    wrong[3] += 0.01
    assert close(wrong, a, [a], ReduceOp.SUM) is not None
    assert close(wrong, a, [a], ReduceOp.MAX) is not None
    for dtype in DTYPES:
        if dtype is not torch.bool and dtype not in INTS:
            x, y = values(dtype, 0, 9), values(dtype, 1, 9)
            for op in OPS[:1]:
                total = reduced([x, y], op)
                assert close(total, total, [x, y], op) is None
                assert close(values(dtype, 3, 9), total, [x, y], op) is not None, dtype


def test_a_report_fails_for_each_reason() -> None:
    class Group:
        def name(self) -> str:
            return "host"

    report = Report(Group())
    assert report.exact
    report.run("fine", lambda: None)
    with pytest.raises(AssertionError, match="only 1 cases ran"):
        report.finish(2)
    report.same("case 7", torch.zeros(2), torch.ones(2))
    with pytest.raises(AssertionError, match=r"(?s)1 of 1 cases failed:.case 7: 2 of 2 elements differ"):
        report.finish(1)
    with pytest.raises(AssertionError, match="case nine: ZeroDivisionError"):
        report.run("nine", lambda: 1 / 0)
    gloo = Group()
    gloo.name = lambda: "gloo"
    assert not Report(gloo).exact


@pytest.mark.parametrize("layout", ["dense", "offset", "strided", "transposed"])
def test_on_another_device_everything_lies_as_before(layout: str) -> None:
    placed = place(values(torch.int16, 0, 60), layout)
    there = placed.on("meta")
    assert (there.tensor.device.type, there.buffer.device.type) == ("meta", "meta")
    for what in ("shape", "dtype"):
        assert getattr(there.tensor, what) == getattr(placed.tensor, what)
    assert there.tensor.stride() == placed.tensor.stride()
    assert there.tensor.storage_offset() == placed.tensor.storage_offset()
    assert there.buffer.shape == placed.buffer.shape
    assert placed.on("cpu") is placed


def test_mean_of_a_sum_that_wrapped() -> None:
    inputs = [torch.tensor([100, -7], dtype=torch.int8), torch.tensor([100, 2], dtype=torch.int8)]
    assert wrapped_mean(inputs).tolist() == [-28, -2]  # (200 - 256) / 2, and -5 / 2 towards zero
    assert reduced(inputs, ReduceOp.AVG).tolist() == [100, -2]
