"""Which ranks are tried, how often, and how soon a death shows."""

from __future__ import annotations

import socket

import pytest

from collectives import PeerLostError
from collectives.store.joining import known_listeners
from collectives.store.joining.known_listeners import KnownListeners


class Listening:
    """Ranks that listen until they die, at a clock of their own."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.dead = set()
        self.tries = {}
        monkeypatch.setattr(known_listeners.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(known_listeners, "_refuses", self.refuses)

    def refuses(self, place):
        rank = place[1]
        self.tries[rank] = self.tries.get(rank, 0) + 1
        return rank in self.dead

    def wait(self, known, ranks, seconds, since, step=0.2):
        """Looks as one does who waits; returns when."""
        for _ in range(int(seconds / step)):
            self.now += step
            known.check(ranks, since)


@pytest.fixture
def listening(monkeypatch):
    return Listening(monkeypatch)


def known_of(size, rank=0):
    known = KnownListeners(rank)
    known.places = {other: [("::1", other)] for other in range(size) if other != rank}
    return known


@pytest.mark.parametrize("size", [2, 8, 9, 16, 17, 24, 33, 100])
def test_all_ranks_are_tried(listening, size) -> None:
    listening.wait(known_of(size), range(size), 4.0, listening.now)
    assert set(listening.tries) == set(range(1, size))


@pytest.mark.parametrize("size", [2, 3, 16, 100, 1000])
def test_the_backlog_of_a_rank_that_does_not_come_has_room(listening, size) -> None:
    """In half an hour, of all others that wait for it."""
    rank = size // 2
    known = known_of(size, rank)
    listening.wait(known, range(size), 1800.0, listening.now)
    assert max(listening.tries.values()) * size < socket.SOMAXCONN


@pytest.mark.parametrize("size", [2, 16, 32])
def test_a_death_shows_within_two_seconds(listening, size) -> None:
    began = listening.now
    known = known_of(size)
    listening.wait(known, range(size), 2.0, began)
    listening.dead = {size - 1}
    died = listening.now
    with pytest.raises(PeerLostError) as lost:
        listening.wait(known, range(size), 2.0, began)
    assert lost.value.rank == size - 1
    assert listening.now - died < 2.0


def test_a_death_shows_after_a_long_wait(listening) -> None:
    began = listening.now
    known = known_of(4)
    listening.wait(known, range(4), 100.0, began)
    listening.dead = {2}
    with pytest.raises(PeerLostError):
        listening.wait(known, range(4), 12.0, began)


def test_a_moment_of_refusal_is_no_death(listening) -> None:
    began = listening.now
    known = known_of(3)
    listening.dead = {1}
    listening.wait(known, range(3), 0.4, began)
    listening.dead = set()
    listening.wait(known, range(3), 5.0, began)
