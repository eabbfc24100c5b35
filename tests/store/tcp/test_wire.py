"""The store's server against bytes that no client of ours sends, and the exact bytes that clients do send."""

from __future__ import annotations

import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from waiting import until

from collectives.store import TCPStore
from collectives.store.tcp.wire import READY, Command

LONG = timedelta(seconds=20)
HELLO = bytes([0]) + struct.pack("<I", 0x3C85F7CE)
STOP_WAITING, WAIT_CANCELED = b"\x00", b"\x01"


@pytest.fixture(scope="module")
def server():
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    yield store
    store.close()


@pytest.fixture
def raw(server):
    """A socket that has said hello."""
    with connect(server) as sock:
        sock.sendall(HELLO)
        yield sock


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def u64(number):
    return struct.pack("<Q", number)


def text(data):
    return u64(len(data)) + data


def receive(sock, size):
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def is_hung_up(sock):
    try:
        return receive(sock, 1) == b""
    except ConnectionResetError:
        return True


def assert_alive(server):
    start = time.monotonic()
    assert server.add("alive", 1) > 0
    assert time.monotonic() - start < 5


def test_the_bytes_of_each_command(raw):
    """What a capture between torch's own client and server shows."""

    def ask(request, answer):
        raw.sendall(bytes.fromhex(request))
        assert receive(raw, len(bytes.fromhex(answer))).hex(" ") == answer

    ask("0d 87 10 00 00", "87 10 00 00")
    ask("04 05 00 00 00 00 00 00 00 69 6e 69 74 2f 01 00 00 00 00 00 00 00", "01 00 00 00 00 00 00 00")
    ask("01 02 00 00 00 00 00 00 00 2f 6b 02 00 00 00 00 00 00 00 76 76", "")
    ask("06 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 2f 6b", "00")
    ask("03 02 00 00 00 00 00 00 00 2f 6b", "02 00 00 00 00 00 00 00 76 76")
    ask("04 02 00 00 00 00 00 00 00 2f 6e f9 ff ff ff ff ff ff ff", "f9 ff ff ff ff ff ff ff")
    ask("05 02 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00 2f 6b 01 00 00 00 00 00 00 00 7a", "01")
    ask("05 00 00 00 00 00 00 00 00", "00")
    ask("06 00 00 00 00 00 00 00 00", "00")
    ask("06 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 7a 0c", "01")
    ask("08 02 00 00 00 00 00 00 00 2f 6b", "01 00 00 00 00 00 00 00")
    ask("08 02 00 00 00 00 00 00 00 2f 6b", "00 00 00 00 00 00 00 00")
    ask("09 01 00 00 00 00 00 00 00 61 02 00 00 00 00 00 00 00 78 78", "")
    ask("0a 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 61", "02 00 00 00 00 00 00 00 78 78")
    ask("0b 01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 61 01 00 00 00 00 00 00 00 31", "")
    ask(
        "02 01 00 00 00 00 00 00 00 61 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
        "01 00 00 00 00 00 00 00 31",
    )
    ask("0e 01 00 00 00 00 00 00 00 51 01 00 00 00 00 00 00 00 76", "")
    ask("10 01 00 00 00 00 00 00 00 51", "01 00 00 00 00 00 00 00")
    ask("0f 01 00 00 00 00 00 00 00 51", "01 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 76")
    ask("0f 01 00 00 00 00 00 00 00 51", "00 00 00 00 00 00 00 00")
    ask("07", "03 00 00 00 00 00 00 00")
    ask("12 01 00 00 00 00 00 00 00 62 01 00 00 00 00 00 00 00", "00")
    ask("12 01 00 00 00 00 00 00 00 62 09 00 00 00 00 00 00 00 0c", "01")


def test_a_server_of_ours_says_so(server, raw):
    raw.sendall(bytes([Command.CHECK]) + (1).to_bytes(8, "little") + text(b"collectives"))
    assert receive(raw, 1) == bytes([READY])
    assert "collectives" not in server.list_keys()


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([Command.VALIDATE]) + b"\0\0\0\0",
        bytes([Command.SET]) + text(b"/k") + text(b"v"),
        bytes([Command.PING]) + b"\0\0\0\0",
        b"\xff" * 100,
    ],
    ids=["http", "magic", "set", "ping", "ff"],
)
def test_who_does_not_say_hello_is_hung_up_on(server, start):
    with connect(server) as sock:
        sock.sendall(start)
        assert is_hung_up(sock)
    assert not server.check(["k"])
    assert_alive(server)


TOO_MUCH = {
    "command": bytes([19]),
    "hello-again": HELLO,
    "key": bytes([Command.GET]) + u64(8 * 1024 + 1),
    "key-overflow": bytes([Command.GET]) + u64(2**64 - 1),
    "value": bytes([Command.SET]) + text(b"/k") + u64(8 * 2**20 + 1),
    "value-overflow": bytes([Command.SET]) + text(b"/k") + u64(2**64 - 9),
    "keys": bytes([Command.CHECK]) + u64(128 * 1024 + 1),
    "keys-overflow": bytes([Command.WAIT]) + u64(2**63),
    "pairs": bytes([Command.MULTI_SET]) + u64(2**64 - 1),
    "add-word": bytes([Command.SET]) + text(b"/w") + text(b"x") + bytes([Command.ADD]) + text(b"/w") + u64(1),
    "add-overflow": (bytes([Command.ADD]) + text(b"/o") + struct.pack("<q", 2**63 - 1)) * 2,
    "barrier-word": bytes([Command.SET])
    + text(b"/w")
    + text(b"x")
    + bytes([Command.BARRIER])
    + text(b"/w")
    + u64(1),
}


@pytest.mark.parametrize("request_", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_what_cannot_be_is_hung_up_on(server, raw, request_):
    raw.sendall(request_)
    if request_[-8:] == struct.pack("<q", 2**63 - 1):
        assert receive(raw, 8) == struct.pack("<q", 2**63 - 1)
    assert is_hung_up(raw)
    assert_alive(server)


def test_a_request_of_more_than_a_server_takes(server, raw):
    part = text(b"/k") + text(bytes(8 * 2**20))
    with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012
        raw.sendall(bytes([Command.MULTI_SET]) + u64(40))
        for _ in range(40):
            raw.sendall(part)
        receive(raw, 1)
        raise ConnectionResetError
    assert_alive(server)
    assert not server.check(["k"])


def test_requests_may_come_in_pieces(server, raw):
    requests = (
        bytes([Command.SET]) + text(b"/piece") + text(b"value")
        + bytes([Command.MULTI_SET]) + u64(2) + text(b"/p1") + text(b"") + text(b"/p2") + text(b"2")
        + bytes([Command.MULTI_GET]) + u64(3) + text(b"/piece") + text(b"/p1") + text(b"/p2")
    )  # fmt: skip
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for i in range(len(requests)):
        raw.sendall(requests[i : i + 1])
    assert receive(raw, 30) == text(b"value") + text(b"") + text(b"2")


def test_an_unfinished_request_stops_nobody_and_does_nothing(server):
    whole = bytes([Command.MULTI_SET]) + u64(2) + text(b"/u1") + text(b"v") + text(b"/u2") + text(b"v")
    for size in range(1, len(whole)):
        with connect(server) as sock:
            sock.sendall(HELLO + whole[:size])
    until(lambda: server._server.native.connections <= 3)
    assert not server.check(["u1"])
    assert_alive(server)


def test_one_who_does_not_read_answers(server, raw):
    server.set("big", bytes(2**20))
    request = bytes([Command.GET]) + text(b"/big")
    raw.setblocking(False)
    sent = 0
    stalled_since = None
    while stalled_since is None or time.monotonic() - stalled_since < 0.3:
        try:
            sent += raw.send(request * 100)
            stalled_since = None
        except BlockingIOError:
            stalled_since = stalled_since or time.monotonic()
            time.sleep(0.01)
        assert sent < 2**26, "the server takes requests in without end"
    assert_alive(server)
    # Reads on: nothing was lost.
    raw.setblocking(True)
    raw.settimeout(20)
    for _ in range(20):
        assert receive(raw, 8) == u64(2**20)
        assert len(receive(raw, 2**20)) == 2**20
    assert_alive(server)


def test_a_flood_delays_nobody(server, raw):
    with ThreadPoolExecutor(1) as threads:
        flood = bytes([Command.SET]) + text(b"/flood") + text(bytes(100))
        sending = threads.submit(raw.sendall, flood * 200_000)
        for _ in range(20):
            assert_alive(server)
        raw.settimeout(60)
        sending.result(60)


def test_cancelling_when_nothing_waits(raw):
    raw.sendall(bytes([Command.CANCEL_WAIT]) * 3)
    assert receive(raw, 3) == WAIT_CANCELED * 3


def test_a_wait_that_follows_a_wait_takes_its_place(server, raw):
    raw.sendall(
        bytes([Command.WAIT]) + u64(1) + text(b"/first") + bytes([Command.WAIT]) + u64(1) + text(b"/second")
    )
    until(lambda: server._server.native.waiting == 1)
    server.set("first", "")
    server.set("second", "")
    raw.sendall(bytes([Command.CANCEL_WAIT]))
    assert receive(raw, 2) == STOP_WAITING + WAIT_CANCELED


def test_requests_during_a_wait_are_answered(server, raw):
    raw.sendall(bytes([Command.WAIT]) + u64(1) + text(b"/later") + bytes([Command.PING]) + b"abcd")
    assert receive(raw, 4) == b"abcd"
    server.set("later", "")
    assert receive(raw, 1) == STOP_WAITING


def test_a_wait_for_one_key_twice(server, raw):
    raw.sendall(bytes([Command.WAIT]) + u64(2) + text(b"/twice") * 2)
    until(lambda: server._server.native.waiting == 1)
    server.set("twice", "")
    raw.sendall(bytes([Command.PING]) + b"abcd")
    assert receive(raw, 5) == STOP_WAITING + b"abcd"


def test_a_wait_for_a_key_and_a_queue(server, raw):
    raw.sendall(bytes([Command.WAIT]) + u64(2) + text(b"/mixed") + text(b"/mixed-queue"))
    until(lambda: server._server.native.waiting == 1)
    server.queue_push("mixed-queue", "1")
    assert server.queue_pop("mixed-queue") == b"1"
    server.set("mixed", "")
    raw.sendall(bytes([Command.PING]) + b"abcd")
    assert receive(raw, 4) == b"abcd"  # the queue is empty again
    server.queue_push("mixed-queue", "2")
    assert receive(raw, 1) == STOP_WAITING
    assert server.queue_pop("mixed-queue") == b"2"


def test_a_wake_for_a_queue_is_not_lost_with_the_client(server):
    with connect(server) as first:
        first.sendall(HELLO + bytes([Command.WAIT]) + u64(1) + text(b"/handed-on"))
        until(lambda: server._server.native.waiting == 1)
        with ThreadPoolExecutor(1) as threads:
            second = threads.submit(server.queue_pop, "handed-on")
            until(lambda: server._server.native.waiting == 2)
            server.queue_push("handed-on", "value")
            assert receive(first, 1) == STOP_WAITING
            assert not second.done()
            first.close()  # without a pop
            assert second.result(10) == b"value"


def test_a_barrier_that_loses_a_client_waits_on(server):
    def arrive(sock):
        sock.sendall(HELLO + bytes([Command.BARRIER]) + text(b"/lossy") + u64(2))

    with connect(server) as lost:
        arrive(lost)
        until(lambda: server._server.native.waiting == 1)
    until(lambda: server._server.native.waiting == 0)
    assert not server.check(["lossy"])
    with connect(server) as one, connect(server) as two:
        arrive(one)
        until(lambda: server._server.native.waiting == 1)
        arrive(two)
        assert receive(one, 1) == STOP_WAITING
        assert receive(two, 1) == STOP_WAITING
    assert server.get("lossy") == b"2"


def random_request(rng):
    """Returns a request that is right in parts."""
    kinds = [
        lambda: text(rng.randbytes(rng.randrange(20))),
        lambda: u64(rng.choice([0, 1, 2, 3, 2**31, 2**63, 2**64 - 1])),
        lambda: rng.randbytes(rng.randrange(12)),
        lambda: text(b"/fuzz"),
    ]
    fields = [rng.choice(kinds)() for _ in range(rng.randrange(5))]
    return bytes([rng.randrange(20)]) + b"".join(fields)


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes(server, seed):
    rng = random.Random(seed)
    kept = []
    server.set("kept", "value")
    for _ in range(150):
        sock = connect(server)
        data = HELLO if rng.random() < 0.9 else b""
        data += b"".join(random_request(rng) for _ in range(rng.randrange(1, 6)))
        if rng.random() < 0.2:
            data = rng.randbytes(rng.randrange(1, 300))
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data) + 1)]
        sock.sendall(data)
        if rng.random() < 0.2:
            kept.append(sock)  # idle, in whatever state it is
        elif rng.random() < 0.5:
            # Closing with an answer unread resets the connection.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.close()
        if rng.random() < 0.1:
            assert_alive(server)
    assert server.get("kept") == b"value"
    for sock in kept:
        sock.close()
    until(lambda: server._server.native.connections <= 3)
    assert server._server.native.waiting == 0
