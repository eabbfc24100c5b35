"""Plain data as bytes: what is taken, and that damaged bytes do no harm."""

from __future__ import annotations

import math
import pickle
import random
import struct
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from collectives.core.native_dtypes import NATIVE_CODES
from collectives.core.plain_data import MAGIC, dumps, loads


class Pair(NamedTuple):
    first: int
    second: int


VALUES = [
    None, True, False, 0, -1, 127, 128, -(2**63), 10**40, 0.0, -1.5, math.inf,
    "", "\u00e4\U0001f600", "\ud800", b"", b"\0x",
    [], [1, [2, (3,)]], (), (None, "a"), {}, {"a": 1, 2: {"b": [b"c"]}, (1, 2): None, None: 0.5},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back(value: Any) -> None:
    back = loads(memoryview(dumps(value)))
    assert back == value
    assert type(back) is type(value)


def test_nan_and_the_sign_of_zero_come_back() -> None:
    assert math.isnan(loads(memoryview(dumps(math.nan))))
    assert math.copysign(1, loads(memoryview(dumps(-0.0)))) == -1


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [one for one in NATIVE_CODES if "int4x2" not in str(one)], ids=str)
def test_tensors_come_back(dtype: torch.dtype) -> None:
    try:
        torch.ones(1).to(dtype).view(torch.uint8)
        tensors = [torch.ones(shape).to(dtype) for shape in ((), (0,), (3,), (2, 0, 5), (4, 3))]
    except (RuntimeError, TypeError, NotImplementedError):
        pytest.skip("torch makes no such tensor out of numbers")
    if tensors[0].is_quantized:
        pytest.skip("not dense")
    for tensor in tensors:
        back = loads(memoryview(dumps({"t": tensor})))["t"]
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert back.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))
        back.zero_()  # its memory is its own


def test_tensors_of_any_memory_come_back_dense() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    for tensor in (whole.T, whole[:, 1], torch.complex(whole, whole).conj(), torch.nn.Parameter(whole)):
        back = loads(memoryview(dumps(tensor)))
        assert back.equal(tensor.detach().resolve_conj())
        assert type(back) is torch.Tensor
        assert not back.requires_grad


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([1, {"a": {3}}], r"the object\[1\]\['a'\] is of type builtins.set"),
        (OrderedDict(), "collections.OrderedDict"),
        (Pair(1, 2), "Pair"),
        (print, "builtins.builtin_function_or_method"),
        (torch.ones(2).to_sparse(), "not dense"),
        (torch.ones(2, device="meta"), "on meta: not dense"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_the_writer(value: Any, found: str) -> None:
    with pytest.raises(TypeError, match=found):
        dumps(value)


def test_what_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="holds itself"):
        dumps(loop)


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "no plain data"),
        (pickle.dumps(1), "no plain data"),
        (MAGIC, "end too early"),
        (MAGIC + b"NN", "1 bytes follow"),
        (MAGIC + b"q", "no value begins with b'q'"),
        (MAGIC + b"l" + u64(2**62), "announce"),
        (MAGIC + b"s" + u64(9) + b"short", "announce"),
        (MAGIC + b"s" + u64(1) + b"\xff", "decode"),
        (MAGIC + (b"l" + u64(1)) * 200 + b"N", "levels deep"),
        (MAGIC + b"m" + u64(1) + b"l" + u64(0) + b"N", "a list is a key"),
        (MAGIC + b"x\xff\0", "native code 255"),
        (MAGIC + b"x\0\x41" + bytes(8 * 65), "65 dimensions"),
        (MAGIC + b"x\0\1" + u64(2**61) + bytes(64), "a tensor of shape"),
        (MAGIC + b"x\0\2" + u64(2**63, 0), "a tensor of shape"),
    ],
)
def test_other_bytes_are_refused_by_the_reader(data: bytes, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        loads(memoryview(data))


def test_damaged_bytes_raise_or_give_plain_data() -> None:
    whole = dumps([*VALUES, torch.arange(5.0), torch.ones(2, 2, dtype=torch.bool)])
    draw = random.Random(5)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(MAGIC), len(data))] = draw.randrange(256)
        try:
            value = loads(memoryview(data[: draw.randint(len(MAGIC), len(data))]))
        except ValueError:
            continue
        dumps(value)


def test_a_bool_is_true_or_false() -> None:
    data = bytearray(dumps(torch.ones(2, dtype=torch.bool)))
    data[-1] = 7
    assert loads(memoryview(data)).view(torch.uint8).tolist() == [1, 1]
