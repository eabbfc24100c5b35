"""Connections to a TCP store's server: those of its own process, and what a connection gives back late."""

from __future__ import annotations

import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from waiting import until

import collectives
from collectives.store import TCPStore
from collectives.store.tcp.client import Connection, LocalConnection
from collectives.store.tcp.wire import Command, text

LONG = timedelta(seconds=30)


@pytest.fixture
def ends():
    """A connection, and the server's end of it."""
    mine, its = socket.socketpair()
    its.settimeout(30)
    connection = Connection(mine, b"name")
    yield connection, its
    connection.close()
    its.close()


class TestReplies:
    def test_each_form(self, ends):
        connection, its = ends
        its.sendall(
            struct.pack("<BIq", 7, 513, -5) + text(b"value") + struct.pack("<q", 2) + text(b"") + text(b"b")
        )
        soon = time.monotonic() + 30
        assert connection.replies("bunvl", soon) == [7, 513, -5, b"value", [b"", b"b"]]

    def test_a_reply_that_comes_after_the_time_limit_is_still_read(self, ends):
        connection, its = ends
        with pytest.raises(TimeoutError):
            connection.exchange(b"?", "v", time.monotonic() + 0.01)
        its.sendall(text(b"late"))
        assert connection.replies("v", time.monotonic() + 30) == [b"late"]
        assert its.recv(16) == b"?"

    def test_a_long_request_and_a_long_reply(self, ends):
        connection, its = ends
        content = bytes(range(256)) * 20_000

        def serve():
            got = bytearray()
            while len(got) < len(content):
                got += its.recv(2**20)
            its.sendall(text(bytes(got)))

        with ThreadPoolExecutor(1) as threads:
            served = threads.submit(serve)
            assert connection.exchange(content, "v", time.monotonic() + 30) == [content]
            served.result(30)

    @pytest.mark.parametrize(("form", "said"), [("v", b"\xff" * 8), ("l", b"\xff" * 8)])
    def test_a_length_that_cannot_be(self, ends, form, said):
        connection, its = ends
        its.sendall(said)
        with pytest.raises(ConnectionResetError, match="which cannot be"):
            connection.replies(form, time.monotonic() + 30)

    def test_a_form_that_is_none(self, ends):
        connection, _ = ends
        with pytest.raises(ValueError, match="'x' is no form of replies"):
            connection.replies("x", time.monotonic() + 30)

    def test_another_thread_can_end_an_exchange(self, ends):
        connection, _ = ends
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(connection.replies, "v", time.monotonic() + 30)
            connection.abort()
            with pytest.raises(ConnectionResetError, match="closed the connection"):
                waiting.result(30)


class TestInTheServersProcess:
    def test_requests_of_threads_and_of_sockets_are_single_steps(self, server):
        client = TCPStore("127.0.0.1", server.port, timeout=LONG)
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda i: (server, client)[i % 2].add("n", 1), range(600)))
        assert server.get("n") == client.get("n") == b"600"
        client.close()

    def test_what_is_set_here_ends_waits_elsewhere(self, server):
        client = TCPStore("127.0.0.1", server.port, timeout=LONG)
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(store.get, "later") for store in (client, server)]
            until(lambda: server._server.native.waiting == 2)
            server.set("later", "now")
            assert [wait.result(30) for wait in waits] == [b"now", b"now"]
        client.close()

    def test_no_socket_is_needed(self, server):
        native = server._server.native
        before = native.connections
        barrier = threading.Barrier(4)

        def work(thread):
            barrier.wait(30)
            for i in range(50):
                server.set(f"{thread}/{i}", str(i))
                assert server.get(f"{thread}/{i}") == str(i).encode()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        assert native.connections == before

    def test_a_refusal_says_why_and_the_store_goes_on(self, server, monkeypatch):
        monkeypatch.setenv("COLLECTIVES_STORE_BYTES", str(2**20))
        small = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
        with pytest.raises(collectives.DistStoreError, match=r"set: .* refused the request: the value would"):
            small.set("key", bytes(2**17))
        small.set("word", "no number")
        with pytest.raises(collectives.DistStoreError, match="no 64-bit integer"):
            small.add("word", 1)
        assert small.get("word") == b"no number"
        small.close()

    def test_a_connection_ends_with_the_server(self, server):
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
        assert store._server is not None
        connection = LocalConnection(store._server.native)
        store.close()
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            connection.exchange(bytes([Command.GETNUMKEYS]), "n", time.monotonic() + 30)

    def test_a_closed_store_stays_closed_beside_others(self, server):
        other = server.clone()
        other.set("key", "value")
        other.close()
        with pytest.raises(collectives.DistNetworkError, match="was closed in this process"):
            other.get("key")
        assert server.get("key") == b"value"
