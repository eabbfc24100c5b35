"""Somebody on the network between two machines, who changes what one's connections to the other carry.

::

    machines = make_machines(4)
    with Interceptor(machines, victim=0, dialler=1, tamper=Tamper("flip", STREAM)):
        run_ranks(check, 2, ..., machines=(machines, [0, 1]), env={"COLLECTIVES_PORT_RANGE": PORTS})

Two more machines play it: the dialler takes the one for the victim (its link-layer address, as after ARP
spoofing), and the other makes the victim's connections. Connections that the victim dials are not touched.
Handshakes pass as they are, unless they are what is tampered with; records are told apart by their lengths.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass

from preloaded_python import Helper

from collectives.bench.core.namespaces import INTERFACE, Machines, enter

CONTROL, ARRIVAL, STREAM, MAIL = range(4)
"""Purposes of connections (``backends/native/state/hello.hpp``)."""
PORTS = "30000-30007"

_HELLO, _NONCE, _PROOF = 40, 32, 32
_PURPOSE = slice(28, 32)
_SUITE = 40
_HEADER, _TAG = 12, 16


@dataclass(frozen=True)
class Tamper:
    """What is done.

    Attributes:
        how: ``flip`` a bit of a record's bytes, or ``flip length``; ``repeat`` a record; ``reorder`` two;
            ``leave out`` one; ``truncate`` one, and go on; ``cut`` the connection within one; put one of
            others in (``foreign``); ``downgrade`` the cipher suite that the dialler names.
        purpose: of the connections.
        record: the number of the record, from the victim or to it.
        from_victim: in which direction.
    """

    how: str
    purpose: int
    record: int = 3
    from_victim: bool = False


class Interceptor(Helper):
    """Intercepts for the length of a ``with`` block.

    Args:
        machines: the victim, the dialler, and two more.
        tamper: what is done.
        victim: the number of a machine.
        dialler: likewise.
    """

    def __init__(self, machines: Machines, tamper: Tamper, victim: int = 0, dialler: int = 1) -> None:
        front, back = sorted({0, 1, 2, 3} - {victim, dialler})
        address = machines.address(victim)

        def run(machine: int, *words: str) -> str:
            command = machines.command(machine, words)
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        (link,) = json.loads(run(front, "ip", "-j", "link", "show", INTERFACE))
        run(front, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore")
        run(front, "ip", "address", "replace", f"{address}/32", "dev", "lo")
        neighbour = ["ip", "neigh", "replace", address, "lladdr", link["address"], "dev", INTERFACE]
        run(dialler, *neighbour, "nud", "permanent")
        words = [machines.namespace(front), machines.namespace(back), address, json.dumps(asdict(tamper))]
        super().__init__(__file__, *words)

    def tampered(self) -> int:
        """Ends it; returns on how many connections it has done what it was to do."""
        return int(self.end())


class _Connection:
    """One connection, in two halves; each has a thread."""

    count = 0

    def __init__(self, dialler: socket.socket, victim: socket.socket, tamper: Tamper) -> None:
        self._tamper = tamper
        self._dialler, self._victim = dialler, victim
        self._purpose = -1
        self._known = threading.Event()
        for body in (self._to_victim, self._from_victim):
            threading.Thread(target=body, daemon=True).start()

    def _to_victim(self) -> None:
        try:
            hello = bytearray(_exactly(self._dialler, _HELLO + 1 + _NONCE))
            (self._purpose,) = struct.unpack("<I", hello[_PURPOSE])
            if self._tamper.how == "downgrade" and self._purpose == self._tamper.purpose:
                hello[_SUITE] = 0
                _Connection.count += 1
            self._known.set()
            self._victim.sendall(hello)
            self._victim.sendall(_exactly(self._dialler, _PROOF))
            self._pass_records(self._dialler, self._victim, not self._tamper.from_victim)
        except (OSError, EOFError):
            self._end()

    def _from_victim(self) -> None:
        try:
            self._dialler.sendall(_exactly(self._victim, _NONCE))
            self._dialler.sendall(_exactly(self._victim, _PROOF))
            self._known.wait()
            self._pass_records(self._victim, self._dialler, self._tamper.from_victim)
        except (OSError, EOFError):
            self._end()

    def _pass_records(self, source: socket.socket, target: socket.socket, here: bool) -> None:
        here = here and self._purpose == self._tamper.purpose
        for number in range(1 << 40):
            header = _exactly(source, _HEADER)
            record = header + _exactly(source, struct.unpack("<I", header[:4])[0] + _TAG)
            if here and number == self._tamper.record:
                _Connection.count += 1
                record = self._changed(record, source, target)
            target.sendall(record)

    def _changed(self, record: bytes, source: socket.socket, target: socket.socket) -> bytes:
        how = self._tamper.how
        if how == "flip":
            return record[:-20] + bytes([record[-20] ^ 4]) + record[-19:]
        if how == "flip length":
            return record[:1] + bytes([record[1] ^ 8]) + record[2:]
        if how == "repeat":
            return record + record
        if how == "foreign":
            return os.urandom(len(record)) + record
        if how == "truncate":
            return record[:-1]
        if how == "leave out":
            return b""
        if how == "reorder":
            header = _exactly(source, _HEADER)
            following = header + _exactly(source, struct.unpack("<I", header[:4])[0] + _TAG)
            return following + record
        assert how == "cut", how
        target.sendall(record[:-1])
        raise EOFError

    def _end(self) -> None:
        for end in (self._dialler, self._victim):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _exactly(source: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        part = source.recv(size - len(read))
        if not part:
            raise EOFError
        read += part
    return read


def _accept(listener: socket.socket, back: str, target: tuple[str, int], tamper: Tamper) -> None:
    enter(back)  # of this thread: where new sockets are
    with suppress(OSError):
        while True:
            dialler, _ = listener.accept()
            victim = socket.socket()
            try:
                victim.connect(target)
            except OSError:
                dialler.close()
                continue
            for end in (dialler, victim):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Connection(dialler, victim, tamper)


def _intercept(front: str, back: str, address: str, tamper: Tamper) -> None:
    enter(front)
    first, last = map(int, PORTS.split("-"))
    for port in range(first, last + 1):
        listener = socket.create_server((address, port))
        arguments = (listener, back, (address, port), tamper)
        threading.Thread(target=_accept, args=arguments, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()
    print(_Connection.count)


if __name__ == "__main__":
    _, front_of, back_of, address_of, given = sys.argv
    _intercept(front_of, back_of, address_of, Tamper(**json.loads(given)))
