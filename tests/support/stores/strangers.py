"""Processes that know nothing of a job but where it listens, and what they get from there.

As a program: ``strangers.py USER HOST PORT`` becomes the user, sends each line of its input, a hexadecimal
string, on a connection of its own, and prints what came back until the other end closed it. An empty line
sends nothing. ``strangers.py crowd HOST PORT COUNT`` holds that many connections until its input ends.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - another user may not read the library
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 30.0
NOBODY = 65534


def visit(port: int, *words: bytes, host: str = "127.0.0.1", user: int = os.getuid()) -> list[bytes]:
    """Returns what a process without the job's secret gets in answer to what it sends, by connection.

    Each connection is read until the other end closes it, so that one that stays open fails.

    Args:
        port: where to connect to.
        *words: what to send on each connection.
        host: where to connect to.
        user: the user whose process it is.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COLLECTIVES")}
    done = subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(user), host, str(port)],
        input="".join(f"{word.hex()}\n" for word in words),
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [bytes.fromhex(line.removeprefix("got ")) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def silent_crowd(port: int, count: int, *, host: str = "127.0.0.1") -> Iterator[None]:
    """Context in which another process holds that many connections, or as many as are taken, and is silent.

    Args:
        port: where to connect to.
        count: the number of connections.
        host: where to connect to.
    """
    crowd = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "crowd", host, str(port), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert crowd.stdin is not None
    assert crowd.stdout is not None
    with crowd:
        try:
            assert crowd.stdout.readline() == b"here\n"
            yield
        finally:
            crowd.stdin.close()
            crowd.wait(LIMIT_S)


def own_ports() -> list[int]:
    """Returns the ports of IPv4 on which this process listens."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the folder itself
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.append(int(fields[1].partition(":")[2], 16))
    return found


def _exchange(host: str, port: int, word: bytes) -> bytes:
    with socket.create_connection((host, port), timeout=LIMIT_S) as connection:
        answer = b""
        try:
            if word:
                connection.sendall(word)
            while part := connection.recv(4096):
                answer += part
        except ConnectionError:  # closed with bytes unread
            pass
        return answer


def _crowd(host: str, port: int, count: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connections = []
    for _ in range(count):
        connections.append(socket.socket())
        connections[-1].setblocking(False)  # one that is not taken must not hold up the others
        connections[-1].connect_ex((host, port))
    select.select([], connections[:1], [], LIMIT_S)
    print("here", flush=True)
    sys.stdin.read()


if __name__ == "__main__" and sys.argv[1] == "crowd":
    _crowd(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
elif __name__ == "__main__":
    os.setuid(int(sys.argv[1]))
    for text in sys.stdin:
        print("got", _exchange(sys.argv[2], int(sys.argv[3]), bytes.fromhex(text)).hex())
