r"""The file format of a FileStore: a header, then a log that only grows.

Integers are little endian.

Header, 64 bytes:

======  ====  ==============================================================================================
offset  size  content
======  ====  ==============================================================================================
0       8     magic ``\x8bCLSTORE``
8       4     u32 version: 1
12      4     u32 CRC-32 of bytes 16 to 63
16      16    id of the run, random
32      8     u64 time of creation, nanoseconds since 1970 (UTC)
40      8     i64 number of members of the run; negative if not fixed
48      16    zero
======  ====  ==============================================================================================

Record:

======  ====  ==============================================================================================
offset  size  content
======  ====  ==============================================================================================
0       4     u32 n: size of the body
4       4     u32 CRC-32 of the body
8       1     u8 kind; the body begins here
9       ...   what the table below says, up to byte 8 + n
======  ====  ==============================================================================================

====  ======  ==============================================================================================
kind  name    content after the kind
====  ======  ==============================================================================================
1     SET     u32 k, key of k bytes, value: the key holds the value from here on
2     APPEND  u32 k, key, value: the value is appended to what the key holds
3     REMOVE  u32 k, key: the key is gone
4     PUSH    u32 k, key, value: the value joins the queue
5     POP     u32 k, key: the oldest value leaves the queue
6     JOIN    u64 m, i64 world size that the member knows of (negative: none), u16 t, launch token of t bytes,
              identity of its process (:meth:`ProcessIdentity.to_bytes`): m is a member from here on
7     LEAVE   u64 m: m has closed the store
====  ======  ==============================================================================================

Records are written under the exclusive lock, those of one call by one ``write``. A writer that dies in it
leaves a record at the end that is shorter than it says: readers stop before it, the next writer cuts it off.
A record of full length with a wrong checksum is damage that no crash explains, and is reported.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from collectives.store.process import ProcessIdentity

__all__ = [
    "HEADER_BYTES",
    "MAGIC",
    "DamagedError",
    "Header",
    "Join",
    "Kind",
    "Record",
    "encode_join",
    "encode_leave",
    "encode_record",
    "records",
]

MAGIC = b"\x8bCLSTORE"
_VERSION = 1
_HEADER_START = struct.Struct("<8sII")
_HEADER_REST = struct.Struct("<16sQq16x")
HEADER_BYTES = _HEADER_START.size + _HEADER_REST.size
_RECORD = struct.Struct("<II")
_KEY = struct.Struct("<BI")
_JOIN = struct.Struct("<BQqH")
_LEAVE = struct.Struct("<BQ")


class DamagedError(Exception):
    """The file is one of ours, but not as we write it."""


class Kind(IntEnum):
    """First byte of a record's body."""

    SET = 1
    APPEND = 2
    REMOVE = 3
    PUSH = 4
    POP = 5
    JOIN = 6
    LEAVE = 7


@dataclass(frozen=True)
class Header:
    """What the first member of a run writes before anything else."""

    run: bytes
    created_ns: int
    world_size: int

    def to_bytes(self) -> bytes:
        """Returns the header's bytes."""
        rest = _HEADER_REST.pack(self.run, self.created_ns, self.world_size)
        return _HEADER_START.pack(MAGIC, _VERSION, zlib.crc32(rest)) + rest

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Reads a header that begins with the magic."""
        _, version, checksum = _HEADER_START.unpack_from(data)
        if version != _VERSION:
            raise DamagedError(f"its format has version {version}, this program knows {_VERSION}")
        if zlib.crc32(data[_HEADER_START.size : HEADER_BYTES]) != checksum:
            raise DamagedError("its header has a wrong checksum")
        return cls(*_HEADER_REST.unpack_from(data, _HEADER_START.size))


@dataclass(frozen=True)
class Join:
    """Content of a JOIN record."""

    member: int
    world_size: int
    token: bytes
    process: ProcessIdentity


@dataclass(frozen=True)
class Record:
    """A record of any kind; fields that its kind lacks are empty."""

    kind: Kind
    key: str = ""
    value: bytes = b""
    member: int = -1
    join: Join | None = None


def encode_record(kind: Kind, key: str, value: bytes = b"") -> bytes:
    """Returns a record on a key."""
    name = key.encode(errors="surrogateescape")
    return _framed(_KEY.pack(kind, len(name)) + name + value)


def encode_join(join: Join) -> bytes:
    """Returns a JOIN record."""
    start = _JOIN.pack(Kind.JOIN, join.member, join.world_size, len(join.token))
    return _framed(start + join.token + join.process.to_bytes())


def encode_leave(member: int) -> bytes:
    """Returns a LEAVE record."""
    return _framed(_LEAVE.pack(Kind.LEAVE, member))


def records(data: bytes) -> Iterator[tuple[Record, int]]:
    """Reads records from the start of ``data``.

    Yields:
        Each whole record, and the offset of its end. Stops before one that is cut off.

    Raises:
        DamagedError: a record is not as we write it.
    """
    position = 0
    while position + _RECORD.size <= len(data):
        size, checksum = _RECORD.unpack_from(data, position)
        start, end = position + _RECORD.size, position + _RECORD.size + size
        if end > len(data):
            return
        body = data[start:end]
        if zlib.crc32(body) != checksum:
            raise DamagedError("a record has a wrong checksum")
        try:
            record = _parsed(body)
        except (struct.error, ValueError, IndexError) as error:
            raise DamagedError(f"a record cannot be read: {error}") from error
        yield record, end
        position = end


def _framed(body: bytes) -> bytes:
    return _RECORD.pack(len(body), zlib.crc32(body)) + body


def _parsed(body: bytes) -> Record:
    kind = Kind(body[0])
    if kind is Kind.JOIN:
        _, member, world_size, token_size = _JOIN.unpack_from(body)
        token_end = _JOIN.size + token_size
        process = ProcessIdentity.from_bytes(body[token_end:])
        join = Join(member, world_size, body[_JOIN.size : token_end], process)
        return Record(kind, member=member, join=join)
    if kind is Kind.LEAVE:
        return Record(kind, member=_LEAVE.unpack(body)[1])
    _, key_size = _KEY.unpack_from(body)
    key_end = _KEY.size + key_size
    if key_end > len(body):
        raise ValueError("its key is longer than the record")
    key = body[_KEY.size : key_end].decode(errors="surrogateescape")
    return Record(kind, key=key, value=body[key_end:])
