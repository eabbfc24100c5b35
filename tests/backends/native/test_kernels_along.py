"""What goes along with reductions and copies: a second place for the result, memory that is fetched, and
lines that are taken over."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from collectives import _native
from collectives.core import native_dtypes

SUM, AVG, MAX = 0, 1, 4
CASES = [
    (torch.float32, SUM),
    (torch.float64, AVG),
    (torch.bfloat16, SUM),
    (torch.float8_e5m2, MAX),
    (torch.complex64, SUM),
    (torch.int32, AVG),
    (torch.int64, SUM),
    (torch.uint8, MAX),
    (torch.bool, SUM),
]


def _sources(dtype, n, count):
    generator = torch.Generator().manual_seed(count)
    sources = []
    for _ in range(n):
        bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        sources.append(bits.view(dtype) if dtype != torch.bool else bits.bool())
    return sources


def _raw(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_both_places_get_the_result(dtype, op, n):
    count = 10_007
    code, size = native_dtypes.native_code(dtype), dtype.itemsize
    sources = _sources(dtype, n, count)
    expected = torch.empty_like(sources[0])
    _native.reduce(expected.data_ptr(), [s.data_ptr() for s in sources], count, code, op, float(n))

    # The second place is each of the sources in turn, or none of them.
    for k in range(n + 1):
        mine = [s.clone() for s in sources]
        guarded = torch.full((count * size + 128,), 0xA5, dtype=torch.uint8)
        apart = torch.zeros_like(expected)
        second = mine[k] if k < n else apart
        _native.reduce(
            guarded.data_ptr() + 64,
            [s.data_ptr() for s in mine],
            count,
            code,
            op,
            float(n),
            second_ptr=second.data_ptr(),
            next_ptr=mine[0].data_ptr(),
        )
        assert torch.equal(guarded[64:-64], _raw(expected))
        assert (guarded[:64] == 0xA5).all()
        assert (guarded[-64:] == 0xA5).all()
        assert torch.equal(_raw(second), _raw(expected))
        for j in range(n):
            assert j == k or torch.equal(_raw(mine[j]), _raw(sources[j]))


def test_what_is_fetched_may_end_before_its_length_does():
    # Behind the last page of a mapping there is no memory, at address 1 neither.
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    near_the_end = torch.frombuffer(pages, dtype=torch.uint8)[-64:]
    a, b = torch.rand(100_000), torch.rand(100_000)
    code = native_dtypes.native_code(torch.float32)
    for address in (near_the_end.data_ptr(), 1):
        out = torch.empty_like(a)
        _native.reduce(
            out.data_ptr(), [a.data_ptr(), b.data_ptr()], a.numel(), code, SUM, 0.0, next_ptr=address
        )
        assert torch.equal(out, a + b)
        for function in (_native.copy, _native.copy_streaming):
            out.zero_()
            function(out.data_ptr(), a.data_ptr(), a.nbytes - 5, next_ptr=address)
            assert torch.equal(_raw(out)[:-5], _raw(a)[:-5])
            assert (_raw(out)[-5:] == 0).all()


@pytest.mark.parametrize("function", [_native.copy_taking, _native.copy_taking_streaming])
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 71, 4097, 32768, (1 << 17) + 13])
def test_what_is_taken_over_stays_as_it_is(function, nbytes):
    before = torch.randint(0, 256, (nbytes + 256,), dtype=torch.uint8)
    for start, to in ((0, 0), (1, 3), (63, 64), (8, 17)):
        source = before.clone()
        target = torch.full((nbytes + 256,), 0xA5, dtype=torch.uint8)
        function(target.data_ptr() + to, source.data_ptr() + start, nbytes)
        assert torch.equal(source, before)
        assert torch.equal(target[to : to + nbytes], before[start : start + nbytes])
        assert (target[:to] == 0xA5).all()
        assert (target[to + nbytes :] == 0xA5).all()


@pytest.mark.parametrize("function", [_native.copy_taking, _native.copy_taking_streaming])
def test_no_word_beyond_what_is_taken_over_is_touched(function):
    # Others may write there meanwhile: pages that cannot be written prove that nobody tries.
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    pages = mmap.mmap(-1, 3 * page)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    middle = memory.data_ptr() + page
    for address in (middle - page, middle + page):
        assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), mmap.PROT_READ) == 0
    target = torch.empty(page, dtype=torch.uint8)
    for begin, end in ((0, page), (3, page - 5), (page - 9, page), (0, 5)):
        function(target.data_ptr(), middle + begin, end - begin)
    for address in (middle - page, middle + page):
        assert (
            libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), mmap.PROT_READ | mmap.PROT_WRITE)
            == 0
        )
