"""Records under the numbers of a counter: read once each, whoever is late, and no more than there can be."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.errors import DistStoreError
from collectives.store import HashStore
from collectives.store.joining.announcements import Announcements, Ask, get_all, next_key, set_all
from collectives.store.records import as_text, written


class PoorStore(HashStore):
    """A store that gets and sets one key at a time."""

    def has_extended_api(self) -> bool:
        return False

    def multi_get(self, keys: Any) -> list[bytes]:
        raise NotImplementedError

    def multi_set(self, keys: Any, values: Any) -> None:
        raise NotImplementedError


def asking(store: HashStore) -> Ask:
    return lambda what, *arguments: getattr(store, what)(*arguments)


def announce(ask: Ask, text: str) -> None:
    key = next_key(ask, "news")
    ask("set", key, written(text, key))


@pytest.mark.parametrize("kind", [HashStore, PoorStore])
def test_records_are_told_once_with_their_numbers(kind: type[HashStore]) -> None:
    ask = asking(kind())
    news = Announcements("news", 9)
    assert news.new(ask, as_text) == {}
    announce(ask, "a")
    announce(ask, "b")
    assert news.new(ask, as_text) == {1: "a", 2: "b"}
    assert (news.new(ask, as_text), news.counted) == ({}, 2)
    later = Announcements("news", 9, after=1)
    assert later.new(ask, as_text) == {2: "b"}


def test_a_record_that_is_late_holds_up_no_other() -> None:
    ask = asking(HashStore())
    news = Announcements("news", 9)
    late = next_key(ask, "news")
    announce(ask, "b")
    assert (news.new(ask, as_text), news.late) == ({2: "b"}, [1])
    ask("set", late, written("a", late))
    assert (news.new(ask, as_text), news.late) == ({1: "a"}, [])


@pytest.mark.parametrize("count", [12, -1])
def test_more_records_than_there_can_be_are_not_read(count: int) -> None:
    ask = asking(HashStore())
    news = Announcements("news", 9, after=2)
    ask("add", "news", count)
    with pytest.raises(DistStoreError, match=f"'news' of the store counts {count} .* of at most 11"):
        news.new(ask, as_text)


@pytest.mark.parametrize("kind", [HashStore, PoorStore])
def test_many_records_of_any_store(kind: type[HashStore]) -> None:
    ask = asking(kind())
    set_all(ask, {})
    set_all(ask, {"a": "1", "b": "2", "c": "3"})
    assert get_all(ask, ["c", "a", "b"], as_text) == ["3", "1", "2"]
