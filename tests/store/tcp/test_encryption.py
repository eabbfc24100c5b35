"""Connections to a TCP store that are encrypted: what the network sees, what it can change, who agrees."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from store_pairs import LONG

from collectives import DistNetworkError, DistStoreError
from collectives.store import TCPStore
from collectives.store.tcp.store import refusals

SECRET = "a secret that all processes of this job share"
VALUE = b"what nobody on the network may read"
_HELLO, _NONCE = 17, 32
_HEADER, _TAG = 12, 16
_Change = Callable[[int, bytes], bytes]


@pytest.fixture(autouse=True)
def encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    monkeypatch.setenv("COLLECTIVES_ENCRYPTION", "on")


class _Half:
    """One direction of a connection, which somebody between its ends passes on."""

    def __init__(
        self, source: socket.socket, target: socket.socket, seen: list[bytes], change: _Change | None
    ) -> None:
        self._source, self._target, self._seen, self._change = source, target, seen, change

    def _exactly(self, size: int) -> bytes:
        read = b""
        while len(read) < size:
            part = self._source.recv(size - len(read))
            if not part:
                raise ConnectionError
            read += part
        self._seen.append(read)
        return read

    def run(self, greeting: int) -> None:
        """Passes the handshake on, then records, until an end closes the connection.

        Args:
            greeting: the number of bytes before the proof.
        """
        with suppress(OSError):
            self._target.sendall(self._exactly(greeting))
            self._target.sendall(self._exactly(32))
            for number in range(1 << 30):
                if self._change is None:  # there may be none
                    self._seen.append(self._source.recv(1 << 16))
                    if not self._seen[-1]:
                        break
                    self._target.sendall(self._seen[-1])
                else:
                    header = self._exactly(_HEADER)
                    record = header + self._exactly(struct.unpack("<I", header[:4])[0] + _TAG)
                    self._target.sendall(self._change(number, record))
        for end in (self._source, self._target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def between(port: int, seen: list[bytes], change: _Change | None = None) -> Iterator[int]:
    """Context with a port behind which is another one, and somebody between who sees all, and changes some.

    Args:
        port: of the server.
        seen: gets what passes, both ways.
        change: gets the number of each record of the client on its connection, and the record.
    """

    def accept() -> None:
        with suppress(OSError):
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection(("127.0.0.1", port))
                ends.extend((ours, theirs))
                forth = _Half(ours, theirs, seen, change)
                back = _Half(theirs, ours, seen, None)
                threads.append(threading.Thread(target=forth.run, args=(_HELLO + _NONCE,)))
                threads.append(threading.Thread(target=back.run, args=(_NONCE,)))
                threads[-2].start()
                threads[-1].start()

    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()


def use(client: TCPStore, server: TCPStore) -> None:
    """Has a client ask for little and much, at once and waiting."""
    client.set("little", VALUE)
    assert server.get("little") == VALUE
    big = VALUE * 100_000
    client.set("big", big)
    assert server.get("big") == client.get("big") == big
    client.multi_set([f"key{i}" for i in range(1000)], [b"%d" % i for i in range(1000)])
    assert client.multi_get([f"key{i}" for i in range(1000)]) == [b"%d" % i for i in range(1000)]
    waiting = threading.Thread(target=client.wait, args=(["later"],))
    waiting.start()
    assert client.add("count", 5) == 5
    server.set("later", VALUE)
    waiting.join()
    with pytest.raises(DistStoreError):
        client.wait(["never"], timedelta(seconds=0.05))
    assert client.compare_set("little", VALUE.decode(), "new") == b"new"


def test_what_passes_tells_nothing(server: TCPStore) -> None:
    seen: list[bytes] = []
    with between(server.port, seen) as port:
        client = TCPStore("127.0.0.1", port, timeout=LONG)
        use(client, server)
        client.close()
    said = b"".join(seen)
    assert len(said) > 2 * 100_000 * len(VALUE)
    assert VALUE not in said
    assert b"little" not in said


def test_without_encryption_it_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_ENCRYPTION", "off")
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    seen: list[bytes] = []
    with between(store.port, seen) as port:
        client = TCPStore("127.0.0.1", port, timeout=LONG)
        client.set("little", VALUE)
        client.close()
    assert VALUE in b"".join(seen)
    store.close()


def _count(client: TCPStore) -> None:
    for i in range(10):
        client.set("key", b"%d" % i)


CHANGES: dict[str, _Change] = {
    "flip": lambda _, record: record[:-20] + bytes([record[-20] ^ 1]) + record[-19:],
    "flip length": lambda _, record: bytes([record[0] ^ 1]) + record[1:],
    "repeat": lambda _, record: record + record,
    "truncate": lambda _, record: record[:-1] + record,
    "leave out": lambda _, record: record[:0] + bytes(len(record)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_is_changed_ends_the_connection(server: TCPStore, how: str) -> None:
    def change(number: int, record: bytes) -> bytes:
        return CHANGES[how](number, record) if number == 4 else record

    with between(server.port, [], change) as port:
        client = TCPStore("127.0.0.1", port, timeout=LONG)
        told = (
            f"the connection to the store server at 127.0.0.1:{port} broke: bytes came on it that the other"
        )
        with pytest.raises(DistNetworkError, match=told):
            _count(client)
        client.close()
    assert server.get("key") in {b"0", b"1", b"2", b"3"}
    assert "It has ended 1 connection, from 127.0.0.1, of clients that know the secret: " in refusals(server)


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_who_does_not_agree_is_told_the_variable(
    server: TCPStore, monkeypatch: pytest.MonkeyPatch, encryption: str
) -> None:
    other = {"on": "off", "off": "on"}[encryption]
    monkeypatch.setenv("COLLECTIVES_ENCRYPTION", encryption)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG)
    monkeypatch.setenv("COLLECTIVES_ENCRYPTION", other)
    with pytest.raises(DistNetworkError, match="set COLLECTIVES_ENCRYPTION to the same"):
        TCPStore("127.0.0.1", store.port, timeout=timedelta(hours=1))
    monkeypatch.setenv("COLLECTIVES_ENCRYPTION", encryption)
    TCPStore("127.0.0.1", store.port, timeout=LONG).close()
    store.close()


def test_a_suite_that_is_changed_on_its_way_lets_nobody_in(server: TCPStore) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def intercept() -> None:
        with suppress(OSError):
            while True:
                ours, _ = listener.accept()
                with ours, socket.create_connection(("127.0.0.1", server.port)) as theirs:
                    hello = ours.recv(_HELLO + _NONCE)
                    theirs.sendall(hello[:16] + b"\0" + hello[17:])
                    ours.sendall(theirs.recv(_NONCE))
                    theirs.sendall(ours.recv(32))
                    ours.sendall(theirs.recv(32))

    thread = threading.Thread(target=intercept)
    thread.start()
    with pytest.raises(DistNetworkError, match="and COLLECTIVES_ENCRYPTION to the same"):
        TCPStore("127.0.0.1", listener.getsockname()[1], timeout=timedelta(seconds=5))
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_what_is_neither_on_nor_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_ENCRYPTION", "yes")
    with pytest.raises(ValueError, match="COLLECTIVES_ENCRYPTION must be on or off, is 'yes'"):
        TCPStore("127.0.0.1", 0, is_master=True)


def test_encryption_needs_a_secret_where_everybody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLLECTIVES_SECRET")
    monkeypatch.setenv("COLLECTIVES_INSECURE", "1")
    with pytest.raises(ValueError, match="COLLECTIVES_ENCRYPTION=on needs a job secret"):
        TCPStore("127.0.0.1", 0, is_master=True)
