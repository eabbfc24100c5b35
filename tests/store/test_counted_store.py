"""A store that counts what it is asked."""

from __future__ import annotations

from datetime import timedelta

from counted_store import CountedStore

from collectives.store import HashStore, PrefixStore


def test_requests_and_the_keys_in_them_are_counted_once() -> None:
    counted = CountedStore("counted", HashStore())
    part = PrefixStore("part", counted)
    part.set("one", "1")
    part.multi_set(["two", "three"], ["2", "3"])
    assert counted.take() == (2, 3)
    assert part.multi_get(["one", "two", "three"]) == [b"1", b"2", b"3"]
    part.wait(["one", "two"], timedelta(seconds=5))
    assert counted.take() == (2, 5)
    assert part.add("sum", 4) == 4
    assert part.check(["one", "four"]) is False
    assert part.delete_key("one")
    assert counted.take() == (3, 4)
    assert counted.take() == (0, 0)


def test_counts_of_stores_are_apart() -> None:
    one, two = (CountedStore(name, HashStore()) for name in ("one", "two"))
    one.set("key", "value")
    assert (one.take(), two.take()) == ((1, 1), (0, 0))
