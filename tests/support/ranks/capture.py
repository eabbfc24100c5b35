"""Which bytes cross the link of a machine that a network namespace plays, as others on the network see.

::

    with Capture(machines, 0) as capture:
        ...
    assert capture.seen([b"a tensor's bytes"]) == [False]
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

from preloaded_python import Helper

from collectives.bench.core.namespaces import INTERFACE, Machines, enter

_ALL_PROTOCOLS = 3
_LONGEST = 1 << 17
_BUFFER = 1 << 28


class Capture(Helper):
    """Listens on a machine's link for the length of a ``with`` block; both directions count.

    Args:
        machines: among them the machine.
        machine: its number.
    """

    def __init__(self, machines: Machines, machine: int) -> None:
        super().__init__(__file__, machines.namespace(machine))

    def seen(self, patterns: Sequence[bytes]) -> list[bool]:
        """Ends it; returns for each pattern whether a packet had it, and fails where nothing came at all."""
        packets, *found = json.loads(self.end(json.dumps([pattern.hex() for pattern in patterns])))
        assert packets > 0
        return [bool(one) for one in found]


def _listen(namespace: str) -> None:
    enter(namespace)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as link:
        link.setsockopt(socket.SOL_SOCKET, 33, _BUFFER)  # SO_RCVBUFFORCE
        link.bind((INTERFACE, 0))
        print("ready", flush=True)
        patterns = [bytes.fromhex(one) for one in json.loads(sys.stdin.read() or "[]")]
        link.setblocking(False)
        packets = []
        try:
            while True:
                packets.append(link.recv(_LONGEST))
        except BlockingIOError:
            pass
    found = [any(pattern in packet for packet in packets) for pattern in patterns]
    print(json.dumps([len(packets), *found]))


if __name__ == "__main__":
    _listen(sys.argv[1])
