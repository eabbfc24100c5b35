"""Records under the numbers of a counter: read once each, whoever is late, and no more than there can be."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.errors import DistStoreError
from collectives.store import HashStore
from collectives.store.records import Announcements, as_text, fetch_all, next_key, publish, publish_all


class PoorStore(HashStore):
    """A store that gets and sets one key at a time."""

    def has_extended_api(self) -> bool:
        return False

    def multi_get(self, keys: Any) -> list[bytes]:
        raise NotImplementedError

    def multi_set(self, keys: Any, values: Any) -> None:
        raise NotImplementedError


def announce(store: HashStore, text: str) -> None:
    publish(store, next_key(store, "news"), text)


@pytest.mark.parametrize("kind", [HashStore, PoorStore])
def test_records_are_told_once_with_their_numbers(kind: type[HashStore]) -> None:
    store = kind()
    news = Announcements(store, "news", 9)
    assert news.new(as_text) == {}
    announce(store, "a")
    announce(store, "b")
    assert news.new(as_text) == {1: "a", 2: "b"}
    assert (news.new(as_text), news.counted) == ({}, 2)
    later = Announcements(store, "news", 9, after=1)
    assert later.new(as_text) == {2: "b"}


def test_a_record_that_is_late_holds_up_no_other() -> None:
    store = HashStore()
    news = Announcements(store, "news", 9)
    late = next_key(store, "news")
    announce(store, "b")
    assert (news.new(as_text), news.late) == ({2: "b"}, [1])
    publish(store, late, "a")
    assert (news.new(as_text), news.late) == ({1: "a"}, [])


@pytest.mark.parametrize("count", [12, -1])
def test_more_records_than_there_can_be_are_not_read(count: int) -> None:
    store = HashStore()
    news = Announcements(store, "news", 9, after=2)
    store.add("news", count)
    with pytest.raises(DistStoreError, match=f"'news' of the store counts {count} .* of at most 11"):
        news.new(as_text)


@pytest.mark.parametrize("kind", [HashStore, PoorStore])
def test_many_records_of_any_store(kind: type[HashStore]) -> None:
    store = kind()
    publish_all(store, {})
    publish_all(store, {"a": "1", "b": "2", "c": "3"})
    assert fetch_all(store, ["c", "a", "b"], as_text) == ["3", "1", "2"]
