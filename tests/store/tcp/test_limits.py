"""What clients of the store's server may take of its process, and what they are told beyond that."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from threading import Event

import pytest
from store_pairs import LONG
from store_server import store_server
from waiting import until

import collectives
from collectives.store import TCPStore
from collectives.store.tcp.store import max_server_bytes
from collectives.store.tcp.wire import Command, text

MIB = 2**20
HELLO = bytes([Command.VALIDATE]) + struct.pack("<I", 0x3C85F7CE)


OPEN_48_FILES = "[os.close(fd) for fd in [os.open('/dev/null', os.O_RDONLY) for _ in range(48)]] and 'opened'"


@pytest.fixture
def small(monkeypatch):
    """A server that holds 16 MiB."""
    monkeypatch.setenv("COLLECTIVES_STORE_BYTES", str(16 * MIB))
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    yield store
    store.close()


def key_list(keys):
    return struct.pack("<Q", len(keys)) + b"".join(map(text, keys))


def connect(port, start=HELLO):
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(start)
    return sock


def ended(sock):
    """Waits until the server hangs up; returns how much it sent before."""
    return len(received(sock, 2**40))


def received(sock, size):
    """Returns that many bytes, or fewer if the server hangs up."""
    data = bytearray()
    with suppress(ConnectionResetError):
        while len(data) < size and (part := sock.recv(min(MIB, size - len(data)))):
            data += part
    return bytes(data)


def send_until_hung_up(sock, request, times):
    """Returns whether the server hung up."""
    try:
        for _ in range(times):
            sock.sendall(request)
        sock.sendall(bytes([Command.PING]) + bytes(4))
        return received(sock, 4) != bytes(4)
    except (ConnectionResetError, BrokenPipeError):
        return True


def set_all(store, keys, value):
    for key in keys:
        store.set(key, value)


def ask(store, request):
    """Sends bytes from the connection of a client of ours."""
    with store._client.connection("test", 1.0) as connection:
        connection.send(request, float("inf"))
        connection.receive(1, float("inf"))


@contextmanager
def others_go_on(port):
    """Meanwhile other clients, old and new, complete every operation."""
    over = Event()

    def work():
        rounds = 0
        old = TCPStore("127.0.0.1", port, timeout=LONG)
        while not over.is_set():
            new = TCPStore("127.0.0.1", port, timeout=LONG)
            new.set("others", str(rounds))
            assert old.get("others") == str(rounds).encode()
            assert old.add("others-count", 1) > 0
            rounds += 1
            new.close()
        old.close()
        return rounds

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        try:
            yield
        finally:
            over.set()
        assert working.result(60) > 0


class TestWhatClientsAreTold:
    def test_a_value_that_grows(self, small):
        client = TCPStore("127.0.0.1", small.port, timeout=LONG)
        client.set("log", bytes(MIB))
        with pytest.raises(collectives.DistStoreError) as caught:
            client.append("log", b"x")
        message = str(caught.value)
        assert message.startswith(f"append: the store server at 127.0.0.1:{small.port} refused the request")
        assert f"{MIB + 1} bytes, of at most {MIB}" in message
        assert f"COLLECTIVES_STORE_BYTES higher (it is {16 * MIB})" in message
        assert len(client.get("log")) == MIB
        client.close()

    def test_a_value_that_is_set(self, small):
        for call in (
            lambda: small.set("big", bytes(MIB + 1)),
            lambda: small.compare_set("big", "", bytes(MIB + 1)),
            lambda: small.queue_push("big", bytes(MIB + 1)),
            lambda: small.multi_set(["first", "big"], ["", bytes(MIB + 1)]),
        ):
            with pytest.raises(collectives.DistStoreError, match=f"{MIB + 1} bytes, of at most {MIB}"):
                call()
        assert small.num_keys() == 0
        assert small.queue_len("big") == 0

    def test_all_values_together(self, small):
        for i in range(14):
            small.set(f"key{i}", bytes(MIB))
        with pytest.raises(collectives.DistStoreError, match=rf"hold \d+ bytes, of at most {15 * MIB}"):
            small.multi_set(["more1", "more2"], [bytes(MIB), ""])
        assert small.num_keys() == 14
        small.set("key0", bytes(MIB))  # in the place of what is there
        small.set("short", "fits")
        small.delete_key("key1")
        small.set("more", bytes(MIB))

    @pytest.mark.full
    def test_keys_count(self, small):
        with pytest.raises(collectives.DistStoreError, match=rf"hold \d+ bytes, of at most {16 * MIB}"):
            set_all(small, map(str, range(100_000)), b"")
        assert 16 * MIB / 1024 < small.num_keys() < 16 * MIB / 128
        small.delete_key("0")
        small.set("0", "")

    def test_a_reply(self, small):
        small.set("big", bytes(MIB))
        assert len(small.multi_get(["big"] * 3)) == 3
        size = 4 * (MIB + 8)
        with pytest.raises(
            collectives.DistStoreError,
            match=rf"get: .* the reply would have {size} bytes, of at most {4 * MIB}.*fewer keys",
        ):
            small.multi_get(["big"] * 4)
        small.set("key", "the client goes on")

    def test_a_wait_for_many_long_keys(self, small):
        with pytest.raises(collectives.DistStoreError, match=f"of at most {15 * MIB}"):
            small.wait([f"{i:08000}" for i in range(1000)])
        assert small._server.native.waiting == 0

    def test_protocol_limits(self, small):
        for request, message in (
            (bytes([19]), "no request begins with the byte 19"),
            (bytes([Command.GET]) + struct.pack("<Q", 8193), "a key of 8193 bytes, of at most 8192"),
            (bytes([Command.CHECK]) + struct.pack("<Q", 131073), "131073 keys, of at most 131072"),
            (bytes([Command.SET]) + text(b"/w") + text(b"x") + bytes([Command.ADD]) + text(b"/w") + bytes(8),
             "the key holds no integer"),
        ):  # fmt: skip
            with pytest.raises(collectives.DistStoreError, match=message):
                ask(small, request)

    @pytest.mark.parametrize("number", ["", " 1048576 ", "4611686018427387903"])
    def test_variable(self, monkeypatch, number):
        monkeypatch.setenv("COLLECTIVES_STORE_BYTES", number)
        assert max_server_bytes() == int(number or 2**30)

    @pytest.mark.parametrize("number", ["1 GiB", "1048575", "-1", "٣", "4611686018427387904"])
    def test_wrong_variable(self, monkeypatch, number):
        monkeypatch.setenv("COLLECTIVES_STORE_BYTES", number)
        with pytest.raises(ValueError, match="COLLECTIVES_STORE_BYTES is the number of bytes"):
            TCPStore("127.0.0.1", 0, is_master=True)


class TestMemory:
    def test_unfinished_requests_count_and_are_forgotten_with_their_clients(self, small):
        native = small._server.native
        part = bytes([Command.MULTI_SET]) + struct.pack("<Q", 100) + (text(b"/k") + text(bytes(MIB))) * 10
        with connect(small.port) as one, connect(small.port) as two, ThreadPoolExecutor(2) as threads:
            sending = [threads.submit(send_until_hung_up, sock, part, 1) for sock in (one, two)]
            until(lambda: sending[0].done() or sending[1].done())
            assert any(one.result() for one in sending if one.done())
            small.set("short", "fits")
            for sock in (one, two):
                with suppress(OSError):  # hung up on already
                    sock.shutdown(socket.SHUT_RDWR)
        until(lambda: native.connections == 1)
        for i in range(10):
            small.set(f"key{i}", bytes(MIB))

    def test_a_reply_keeps_its_value_while_the_key_changes(self, small):
        small.set("key", b"a" * MIB)
        with connect(small.port, HELLO + bytes([Command.MULTI_GET]) + key_list([b"/key"] * 3)) as sock:
            client = TCPStore("127.0.0.1", small.port, timeout=LONG)  # served behind what came before
            client.append("key", b"")
            client.set("key", b"b" * MIB)
            client.close()
            for _ in range(3):
                assert received(sock, MIB + 8) == text(b"a" * MIB)

    def test_a_wake_comes_after_the_reply_under_way(self, small):
        small.set("key", b"a" * MIB)
        wait = bytes([Command.WAIT]) + key_list([b"/later"])
        with connect(small.port, HELLO + wait + bytes([Command.MULTI_GET]) + key_list([b"/key"] * 3)) as sock:
            until(lambda: small._server.native.waiting == 1)
            small.set("later", "")
            assert received(sock, 3 * (MIB + 8) + 1) == text(b"a" * MIB) * 3 + b"\0"


class TestGreeting:
    def test_who_says_nothing_is_hung_up_on(self, server):
        with connect(server.port, b"") as silent, connect(server.port, HELLO[:3]) as slow:
            assert ended(silent) == 0
            assert ended(slow) == 0
        server.set("key", "value")

    def test_who_has_greeted_may_be_silent(self, server):
        with connect(server.port) as idle, connect(server.port, b"") as silent:
            assert ended(silent) == 0
            idle.sendall(bytes([Command.PING]) + b"abcd")
            assert received(idle, 4) == b"abcd"

    def test_a_long_first_request_is_not_taken_in(self, server):
        start = bytes([Command.SET]) + text(b"/k") + struct.pack("<Q", MIB)
        with connect(server.port, start) as sock:
            assert send_until_hung_up(sock, bytes(1024), 64)


@pytest.mark.full
class TestAttacks:
    """The server is in a process of its own."""

    def test_a_reply_a_hundred_thousand_times_as_long_as_its_request(self):
        with store_server() as server:
            store = TCPStore("127.0.0.1", server.port, timeout=LONG)
            store.set("mib", bytes(MIB))
            before = server.memory("VmHWM")
            with others_go_on(server.port):
                with connect(server.port) as sock:
                    sock.sendall(bytes([Command.MULTI_GET]) + key_list([b"/mib"] * 2000))
                    assert ended(sock) == 0
                with ExitStack() as stack:
                    # Within the limit; nobody reads.
                    request = bytes([Command.MULTI_GET]) + key_list([b"/mib"] * 200)
                    slow = [stack.enter_context(connect(server.port, HELLO + request * 5)) for _ in range(20)]
                    assert len(received(slow[0], 20 * MIB)) == 20 * MIB
            assert server.memory("VmHWM") < before + 64 * MIB
            store.close()

    def test_a_client_that_reads_replies_without_end(self):
        with store_server() as server:
            store = TCPStore("127.0.0.1", server.port, timeout=LONG)
            store.set("mib", bytes(MIB))
            store.multi_set([f"{i:0100}" for i in range(20_000)], [""] * 20_000)
            requests = (
                bytes([Command.MULTI_GET]) + key_list([b"/mib"] * 100) + bytes([Command.LIST_KEYS]) * 100
            )
            with connect(server.port) as sock, others_go_on(server.port):
                sock.sendall(requests * 10)
                for _ in range(500):
                    assert len(received(sock, MIB)) == MIB
            store.close()

    def test_appending_without_end(self):
        with store_server() as server:
            before = server.memory("VmHWM")
            request = bytes([Command.APPEND]) + text(b"/log") + text(bytes(8 * MIB))
            with others_go_on(server.port), connect(server.port) as sock:
                assert send_until_hung_up(sock, request, 64)
            assert server.memory("VmHWM") < before + 5 * 64 * MIB

    def test_setting_without_end(self):
        with store_server(COLLECTIVES_STORE_BYTES=str(128 * MIB)) as server:
            before = server.memory("VmHWM")
            with others_go_on(server.port):
                for kind in (Command.SET, Command.QUEUE_PUSH):
                    for i in range(8):
                        request = b"".join(
                            bytes([kind]) + text(b"/%d-%d" % (i, j)) + text(bytes(8 * MIB)) for j in range(4)
                        )
                        with connect(server.port) as sock:
                            send_until_hung_up(sock, request, 1)
            assert server.memory("VmHWM") < before + 4 * 128 * MIB

    @pytest.mark.parametrize("hello", [b"", HELLO], ids=["no-hello", "hello"])
    def test_requests_that_do_not_end(self, hello):
        with store_server(COLLECTIVES_STORE_BYTES=str(128 * MIB)) as server:
            before = server.memory("VmHWM")
            start = bytes([Command.MULTI_SET]) + struct.pack("<Q", 1000)
            part = text(b"/k") + text(bytes(8 * MIB))

            def send(_):
                with connect(server.port, hello + start) as sock:
                    return send_until_hung_up(sock, part, 25)

            with others_go_on(server.port), ThreadPoolExecutor(6) as threads:
                assert all(threads.map(send, range(6)))
            assert server.memory("VmHWM") < before + (4 * 128 if hello else 16) * MIB

    def test_silent_connections(self):
        with store_server() as server, ExitStack() as stack:
            server.limit("RLIMIT_NOFILE", 256)
            with others_go_on(server.port):
                silent = [stack.enter_context(connect(server.port, b"")) for _ in range(300)]
                assert server.evaluate(OPEN_48_FILES) == "'opened'"
                for sock in silent:
                    ended(sock)
            until(lambda: server.evaluate("store._server.native.connections") == "1")

    def test_connections_that_greet(self):
        ping = bytes([Command.PING]) + b"abcd"
        with store_server() as server, ExitStack() as stack:
            old = TCPStore("127.0.0.1", server.port, timeout=LONG)
            server.limit("RLIMIT_NOFILE", 256)
            socks = [stack.enter_context(connect(server.port, HELLO + ping)) for _ in range(300)]
            answers = [received(sock, 4) for sock in socks]
            assert set(answers) <= {b"abcd", b"coll", b""}
            assert 128 < answers.count(b"abcd") < 192
            assert server.evaluate(OPEN_48_FILES) == "'opened'"
            with pytest.raises(
                collectives.DistNetworkError,
                match=r"\d+ clients are connected .* 256 descriptors, of which 64 .* raise `ulimit -n`",
            ):
                TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1))
            old.set("key", "value")
            stack.close()
            new = TCPStore("127.0.0.1", server.port, timeout=LONG)
            assert new.get("key") == b"value"
            new.close()
            old.close()

    def test_out_of_address_space(self):
        with store_server() as server:
            server.limit("RLIMIT_AS", server.memory("VmSize") + 96 * MIB)
            with others_go_on(server.port):
                for i in range(4):
                    with connect(server.port) as sock:
                        for j in range(20):
                            request = bytes([Command.SET]) + text(b"/%d-%d" % (i, j)) + text(bytes(8 * MIB))
                            if send_until_hung_up(sock, request, 1):
                                break
                        else:
                            raise AssertionError("160 MiB cannot fit")
                        store = TCPStore("127.0.0.1", server.port, timeout=LONG)
                        for j in range(20):
                            store.delete_key(f"{i}-{j}")
                        store.close()

    def test_out_of_address_space_is_told(self):
        with store_server() as server:
            server.limit("RLIMIT_AS", server.memory("VmSize") + 96 * MIB)
            store = TCPStore("127.0.0.1", server.port, timeout=LONG)
            with pytest.raises(collectives.DistStoreError, match="the server's process is out of memory"):
                set_all(store, map(str, range(20)), bytes(8 * MIB))
            store.delete_key("0")
            store.set("key", "value")
            assert store.get("key") == b"value"
            store.close()
