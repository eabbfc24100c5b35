"""What a process is found to hold."""

from __future__ import annotations

import os
import socket
import threading

from holdings import holdings


def test_connections_are_sockets_of_tcp_that_are_connected() -> None:
    before = holdings()
    with socket.create_server(("127.0.0.1", 0)) as server:
        listens = holdings()
        assert (listens.descriptors, listens.connections) == (before.descriptors + 1, before.connections)
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            assert holdings().connections == before.connections + 2
        one, two = socket.socketpair()
        with one, two:
            assert holdings().connections == before.connections
    assert holdings().descriptors == before.descriptors


def test_threads_and_memory() -> None:
    before = holdings()
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    held = bytearray(b"x" * (64 << 20))
    during = holdings()
    go_on.set()
    thread.join()
    assert during.threads == before.threads + 1
    assert during.own_bytes - before.own_bytes >= 60 << 20
    assert len(held) == 64 << 20


def test_segments_count_what_is_allocated_in_them() -> None:
    before = holdings()
    segment, other = (os.memfd_create(name) for name in ("collectives", "another"))
    try:
        os.ftruncate(segment, 8 << 20)
        os.posix_fallocate(segment, 0, 1 << 20)
        os.posix_fallocate(other, 0, 1 << 20)
        during = holdings()
    finally:
        os.close(segment)
        os.close(other)
    assert during.segment_bytes - before.segment_bytes == 1 << 20
    assert during.own_bytes - before.own_bytes < 1 << 20
