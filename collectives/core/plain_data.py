"""Plain data as bytes, read back without running anything that the writer chose.

Plain are ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, lists, tuples and dicts of these, and
dense tensors; no subclasses but parameters. Each value is a letter, then its content:

======  ===================================================================================
letter  content
======  ===================================================================================
N T F   nothing: ``None``, ``True``, ``False``
i s b   u64 length, then bytes: an int in two's complement, a str in UTF-8, bytes
d       f64
l t     u64 count, then so many values
m       u64 count, then so many pairs of a key and a value
x       u8 code of the dtype, u8 number of dimensions, a u64 for each, then the elements
======  ===================================================================================

Numbers are little endian. The bytes begin with :data:`MAGIC`, with which no pickle begins.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from collectives.core.native_dtypes import element_bytes, native_code, torch_dtype

MAGIC = b"\x00plain1\n"

_DEEPEST = 100
_MOST_DIMENSIONS = 64
_CONSTANTS: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False}
_SEQUENCES: dict[bytes, type] = {b"l": list, b"t": tuple}


def dumps(value: Any) -> bytes:
    """Returns a value as bytes.

    Raises:
        TypeError: a part of it is no plain data; says which.
        ValueError: it is nested too deeply, or within itself.
    """
    parts = [MAGIC]
    _write(value, parts, "the object", 0)
    return b"".join(parts)


def loads(data: memoryview) -> Any:
    """Returns the value that bytes stand for, with tensors on the CPU and memory of its own.

    Raises:
        ValueError: they were not written by :func:`dumps`, or have been changed.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError("they are no plain data")
    reader = _Reader(data[len(MAGIC) :])
    value = reader.value(0)
    if reader.left:
        raise ValueError(f"{reader.left} bytes follow")
    return value


def _write(value: Any, parts: list[bytes], where: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError(f"{where} is nested more than {_DEEPEST} levels deep, or holds itself")
    kind = type(value)
    if value is None or kind is bool:
        parts.append(b"N" if value is None else b"T" if value else b"F")
    elif kind is int:
        _write_bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), parts)
    elif kind is float:
        parts.append(b"d" + struct.pack("<d", value))
    elif kind is str:
        _write_bytes(b"s", value.encode(errors="surrogatepass"), parts)
    elif kind is bytes:
        _write_bytes(b"b", value, parts)
    elif kind is list or kind is tuple:
        parts.append((b"l" if kind is list else b"t") + struct.pack("<Q", len(value)))
        for index, item in enumerate(value):
            _write(item, parts, f"{where}[{index}]", depth + 1)
    elif kind is dict:
        parts.append(b"m" + struct.pack("<Q", len(value)))
        for key, item in value.items():
            _write(key, parts, f"the key {key!r} of {where}", depth + 1)
            _write(item, parts, f"{where}[{key!r}]", depth + 1)
    elif kind in {torch.Tensor, torch.nn.Parameter}:
        _write_tensor(value, parts, where)
    else:
        raise TypeError(
            f"{where} is of type {kind.__module__}.{kind.__qualname__}, which is no plain data: None, bool, "
            "int, float, str, bytes, list, tuple, dict and dense tensors are"
        )


def _write_bytes(letter: bytes, content: bytes, parts: list[bytes]) -> None:
    parts += [letter, struct.pack("<Q", len(content)), content]


def _write_tensor(tensor: torch.Tensor, parts: list[bytes], where: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{where} is a tensor of {tensor.layout}, {tensor.dtype} on {tensor.device}: not dense"
        )
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    shape = tuple(dense.shape)
    parts.append(b"x" + struct.pack(f"<BB{len(shape)}Q", native_code(dense.dtype), len(shape), *shape))
    if dense.numel():
        parts.append(dense.reshape(-1).view(torch.uint8).numpy().tobytes())


class _Reader:
    """Reads values one after another; believes no length beyond the bytes that are there."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Number of bytes not read yet."""
        return len(self._data) - self._at

    def value(self, depth: int) -> Any:
        """Returns the next value."""
        if depth > _DEEPEST:
            raise ValueError(f"they are nested more than {_DEEPEST} levels deep")
        letter = self._take(1)
        if letter in _CONSTANTS:
            return _CONSTANTS[letter]
        if letter == b"d":
            return struct.unpack("<d", self._take(8))[0]
        if letter == b"x":
            return self._tensor()
        if letter not in {b"i", b"s", b"b", b"m", *_SEQUENCES}:
            raise ValueError(f"no value begins with {letter!r}")
        (count,) = struct.unpack("<Q", self._take(8))
        if count > self.left:  # of which every value has one at least
            raise ValueError(f"they announce {count} bytes or values where {self.left} bytes follow")
        if letter == b"m":
            return self._dict(count, depth)
        if letter in _SEQUENCES:
            return _SEQUENCES[letter](self.value(depth + 1) for _ in range(count))
        content = self._take(count)
        if letter == b"i":
            return int.from_bytes(content, "little", signed=True)
        return content if letter == b"b" else content.decode(errors="surrogatepass")

    def _dict(self, count: int, depth: int) -> dict[Any, Any]:
        found = {}
        for _ in range(count):
            key = self.value(depth + 1)
            try:
                found[key] = self.value(depth + 1)
            except TypeError as error:
                raise ValueError(f"a {type(key).__name__} is a key") from error
        return found

    def _tensor(self) -> torch.Tensor:
        code, dimensions = struct.unpack("<BB", self._take(2))
        dtype = torch_dtype(code)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        count = math.prod(shape)
        if max(shape, default=0) >= 2**63 or count * element_bytes(dtype) > self.left:
            raise ValueError(f"a tensor of shape {shape} where {self.left} bytes follow")
        # Not from the bytes themselves, which nothing may change; and frombuffer takes no empty ones.
        content = bytearray(self._take(count * element_bytes(dtype)))
        flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        try:
            # A bool of another value than 0 and 1 would not be one.
            return (flat.ne(0) if dtype is torch.bool else flat.view(dtype)).reshape(shape)
        except RuntimeError as error:
            raise ValueError(f"a tensor of {dtype} and shape {shape}") from error

    def _take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError("they end too early")
        self._at += count
        return bytes(self._data[self._at - count : self._at])
