"""What members and newcomers agree on in a store, whoever of them comes first."""

from __future__ import annotations

import time

import pytest

from collectives import DistBackendError, GroupAbortedError, HashStore
from collectives.store.joining.meeting_place import MeetingPlace
from collectives.store.joining.newcomers import Newcomer, Newcomers

PLAN = {"count": 1, "left": [["a handle", 0], ["another", 1]]}


def test_who_cannot_hear_the_plan_finds_it() -> None:
    newcomers = Newcomers(HashStore(), "host")
    newcomers.propose("a call", PLAN)
    assert newcomers.plan_of("a call", DistBackendError("lost")) == PLAN
    newcomers.forget("a call", 0)
    with pytest.raises(DistBackendError, match="lost"):
        newcomers.plan_of("a call", DistBackendError("lost"))


def test_there_is_no_plan_once_a_member_has_given_up() -> None:
    newcomers = Newcomers(HashStore(), "host")
    for text in ("lost", "lost, too"):
        with pytest.raises(DistBackendError, match=f"^{text}$"):
            newcomers.plan_of("a call", DistBackendError(text))
    with pytest.raises(DistBackendError, match=r"^lost$"):
        newcomers.propose("a call", PLAN)


def test_one_member_begins_an_attempt() -> None:
    store = HashStore()
    newcomers, mine, other = Newcomers(store, "host"), MeetingPlace().handle, MeetingPlace(alone=True).handle
    newcomers.propose("a call", PLAN)
    assert newcomers.claimed_by_others("a call", 1, mine) is None
    for _ in range(2):
        newcomers.claim("a call", 1, mine)
    with pytest.raises(GroupAbortedError, match="gone on without this process"):
        newcomers.claim("a call", 1, other)
    assert newcomers.claimed_by_others("a call", 1, mine) is None
    assert isinstance(newcomers.claimed_by_others("a call", 1, other), GroupAbortedError)
    newcomers.claim("a call", 2, other)
    newcomers.forget("a call", 2)
    with pytest.raises(GroupAbortedError, match="gone on without this process"):
        newcomers.claim("a call", 1, other)
    assert store.num_keys() == 0


class SettlesMeanwhile(HashStore):
    """Members take the first number off the list while its newcomer is about to do something.

    Args:
        method: what it does in the store.
        key: with which key.
    """

    def __init__(self, method, key):
        super().__init__()
        self._moment = method, f"newcomers/{key}"

    def add(self, key, amount):
        found = super().add(key, amount)
        self._settle_at("add", key)
        return found

    def set(self, key, value):
        self._settle_at("set", key)
        super().set(key, value)

    def _settle_at(self, method, key):
        if self._moment == (method, key):
            self._moment = None
            Newcomers(self, "host").settle(1)


def test_a_newcomer_that_leaves_leaves_nothing() -> None:
    for store in (HashStore(), SettlesMeanwhile("add", "admitted")):
        newcomer, members = Newcomer(store, MeetingPlace().handle, "host"), Newcomers(store, "host")
        newcomer.leave()
        if members.waiting(1.0) == (1, []):
            members.settle(1)
        assert {*store.list_keys()} == {"newcomers/count", "newcomers/admitted"}


def test_a_newcomer_that_answers_too_late_announces_itself_anew() -> None:
    store = SettlesMeanwhile("set", "answer/1")
    newcomer, members = Newcomer(store, MeetingPlace().handle, "host"), Newcomers(store, "host")
    members.invite("who is there", [], [1])
    assert newcomer.next_invitation(time.monotonic() + 1.5) is None
    assert {*store.list_keys()} == {"newcomers/count", "newcomers/admitted", "newcomers/handle/2"}
    newcomer.leave()
    assert members.waiting(1.0) == (1, [])


def test_a_newcomer_that_was_passed_over_sees_it_though_its_keys_are_left() -> None:
    """As where the member that passes it over dies before it has deleted them."""
    store = HashStore()
    newcomer, members = Newcomer(store, MeetingPlace().handle, "host"), Newcomers(store, "host")
    members.invite("who is there", [], [1])
    store.add("newcomers/admitted", 1)
    assert newcomer.next_invitation(time.monotonic() + 1.5) is None
    assert {*store.list_keys()} == {"newcomers/count", "newcomers/admitted", "newcomers/handle/2"}


class FarAway(HashStore):
    """Takes 10 ms to say what is there; counts how often it is asked."""

    looks = 0

    def compare_set(self, key, expected, desired):
        self.looks += 1
        time.sleep(0.01)
        return super().compare_set(key, expected, desired)


def test_numbers_that_nobody_has_taken_cost_no_more_than_their_limit() -> None:
    store = FarAway()
    store.add("newcomers/count", 500)
    assert Newcomers(store, "host").waiting(0.4) == (500, [])
    assert 0 < store.looks <= 40, "looks for 0.2 s, of 10 ms each"
