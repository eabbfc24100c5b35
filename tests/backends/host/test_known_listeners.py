"""Ranks on other machines that listen no more are found while a group forms."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from collectives.backends.host.known_listeners import KnownListeners
from collectives.errors import PeerLostError

LONG_AGO = float("-inf")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def known(listener: socket.socket) -> KnownListeners:
    listeners = KnownListeners()
    listeners.places[3] = [listener.getsockname()]
    return listeners


def check_until_lost(listeners: KnownListeners) -> None:
    while True:
        listeners.check([3], LONG_AGO)


def test_who_listens_no_more_is_named(listener: socket.socket) -> None:
    listeners = known(listener)
    listener.close()
    with pytest.raises(PeerLostError, match=r"rank 3 has died .*127\.0\.0\.1") as caught:
        check_until_lost(listeners)
    assert caught.value.rank == 3


def test_a_single_refusal_says_nothing(listener: socket.socket) -> None:
    listeners = known(listener)
    listener.close()
    listeners.check([3], LONG_AGO)


def test_who_listens_gets_connections_without_a_word(listener: socket.socket) -> None:
    known(listener).check([3], LONG_AGO)
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("ranks", "since"),
    [
        pytest.param([2], LONG_AGO, id="a rank that this one does not wait for"),
        pytest.param([3], float("inf"), id="too early"),
    ],
)
def test_who_need_not_be_asked_gets_no_connection(
    listener: socket.socket, ranks: list[int], since: float
) -> None:
    listener.setblocking(False)
    known(listener).check(ranks, since)
    with pytest.raises(BlockingIOError):
        listener.accept()
