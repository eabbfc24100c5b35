"""Ways to move bytes over TCP by system calls alone."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["LIMIT_S", "WAYS", "Way", "Wire", "connected", "without_bbr"]

LIMIT_S: Final = 60
"""How long a call waits for the other rank."""

_LARGE_BUFFER = 4 << 20
_BLOCK = 256 << 10
_SEVERAL = 4
_PIPE = 1 << 20
_SO_ZEROCOPY, _MSG_ZEROCOPY = 60, 0x4000000
"""Numbers of Linux that Python has no names for."""


@dataclass(frozen=True)
class Wire:
    """A rank's ends of connections to the other one, and what it sends or fills.

    Attributes:
        sockets: of the connections.
        data: the bytes in memory.
        file: a file in memory with the same bytes.
    """

    sockets: Sequence[socket.socket]
    data: memoryview
    file: int


def _send(wire: Wire) -> None:
    """Sends the bytes in one call."""
    wire.sockets[0].sendall(wire.data)


def _fill(end: socket.socket, into: memoryview) -> None:
    while into:
        got = end.recv_into(into, 0, socket.MSG_WAITALL)
        if got == 0:
            raise EOFError("the other rank has closed the connection")
        into = into[got:]


def _receive(wire: Wire) -> None:
    """Fills the memory in one call, or as many as the kernel needs."""
    _fill(wire.sockets[0], wire.data)


def _blocks(wire: Wire) -> Iterator[tuple[socket.socket, memoryview]]:
    for number, begin in enumerate(range(0, len(wire.data), _BLOCK)):
        yield wire.sockets[number % len(wire.sockets)], wire.data[begin : begin + _BLOCK]


def _send_blocks(wire: Wire) -> None:
    for end, block in _blocks(wire):
        end.sendall(block)


def _receive_blocks(wire: Wire) -> None:
    for end, block in _blocks(wire):
        _fill(end, block)


def _send_without_copy(wire: Wire) -> None:
    end, data, calls = wire.sockets[0], wire.data, 0
    while data:
        sent = _send_some_without_copy(end, data)
        if sent == 0 and calls == 0:
            raise OSError(errno.ENOBUFS, "the kernel sends nothing from the caller's memory")
        calls += 1 if sent else -_completions(end)
        data = data[sent:]
    while calls:  # until then the memory belongs to the kernel
        calls -= _completions(end)


def _send_some_without_copy(end: socket.socket, data: memoryview) -> int:
    """Returns how many bytes one call has taken: 0 where the kernel can keep track of no more calls."""
    try:
        return end.send(data, _MSG_ZEROCOPY)
    except OSError as error:
        if error.errno != errno.ENOBUFS:
            raise
        return 0


def _completions(end: socket.socket) -> int:
    """Waits until some calls of ``send`` are done with their memory; returns how many."""
    waiting = select.poll()
    waiting.register(end, select.POLLERR)
    if not waiting.poll(LIMIT_S * 1000):
        raise TimeoutError(f"the kernel has told nothing about the memory that it sends from for {LIMIT_S} s")
    found = 0
    for _, _, content in end.recvmsg(0, 512, socket.MSG_ERRQUEUE)[1]:
        first, last = struct.unpack_from("=8xII", content, 0)  # sock_extended_err: ee_info, ee_data
        found += last - first + 1
    return found


def _send_file(wire: Wire) -> None:
    begin = 0
    while begin < len(wire.data):
        begin += os.sendfile(wire.sockets[0].fileno(), wire.file, begin, len(wire.data) - begin)


def _splice(wire: Wire) -> None:
    out, into = os.pipe()
    try:
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIPE)
        begin = 0
        while begin < len(wire.data):
            waiting = os.splice(wire.file, into, min(_PIPE, len(wire.data) - begin), offset_src=begin)
            begin += waiting
            while waiting:
                waiting -= os.splice(out, wire.sockets[0].fileno(), waiting)
    finally:
        os.close(out)
        os.close(into)


@dataclass(frozen=True)
class Way:
    """How bytes are moved by system calls.

    Attributes:
        send: of the first rank.
        receive: of the second.
        connections: how many.
        buffer: bytes that the kernel may hold at each end; 0 for what it finds right.
        no_copy: whether the sockets send from the caller's memory.
    """

    send: Callable[[Wire], None] = _send
    receive: Callable[[Wire], None] = _receive
    connections: int = 1
    buffer: int = 0
    no_copy: bool = False


WAYS: Final[Mapping[str, Way]] = {
    "send and recv": Way(),
    "buffers of 4 MiB": Way(buffer=_LARGE_BUFFER),
    "blocks of 256 KiB": Way(_send_blocks, _receive_blocks),
    "4 connections": Way(_send_blocks, _receive_blocks, connections=_SEVERAL),
    "MSG_ZEROCOPY": Way(_send_without_copy, no_copy=True),
    "sendfile": Way(_send_file),
    "splice": Way(_splice),
}
"""Ways to move bytes by system calls, by name; the last two send from a file in memory."""


def without_bbr(end: socket.socket) -> None:
    """Has a socket send as those of ``host`` between near machines; before it listens or connects."""
    if end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def connected(way: Way, end: socket.socket) -> socket.socket:
    """Returns a connected socket, set up for a way."""
    limit = struct.pack("ll", LIMIT_S, 0)  # not settimeout(), which polls before each call
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, limit)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if way.buffer else ():
        end.setsockopt(socket.SOL_SOCKET, option, way.buffer)
    if way.no_copy:
        end.setsockopt(socket.SOL_SOCKET, _SO_ZEROCOPY, 1)
    return end
