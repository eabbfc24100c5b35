"""What forming a group asks of the store: how much, and what is left there."""

from __future__ import annotations

from datetime import timedelta

import pytest
from counted_store import CountedStore
from harness import current_store, run_ranks

from collectives.backends.host import ProcessGroupHost
from collectives.backends.host.rendezvous_keys import RendezvousKeys, StoreLostError
from collectives.errors import DistStoreError
from collectives.store import HashStore, PrefixStore
from collectives.store.records import Checked, as_text, fields

LIMIT = timedelta(seconds=30)
POLLS = 10
"""Requests of a rank that looks again while others are slow."""


def number(record: object) -> Checked:
    return fields(record, number=int)


def keys_in(store: HashStore) -> RendezvousKeys:
    keys = RendezvousKeys(store, 3)
    keys.name_after("attempt")
    return keys


def test_announcements_are_read_once() -> None:
    store = HashStore()
    reader, *writers = (keys_in(store) for _ in range(3))
    assert reader.new("news", number) == []
    for i, writer in enumerate(writers):
        writer.announce("news", {"number": i})
    assert reader.new("news", number) == [{"number": 0}, {"number": 1}]
    assert reader.new("news", number) == []
    writers[0].announce("news", {"number": 5})
    assert reader.new("news", number) == [{"number": 5}]


def test_one_who_dies_before_its_announcement_holds_up_no_other() -> None:
    store = HashStore()
    reader, writer = keys_in(store), keys_in(store)
    store.add(writer.name("news"), 1)  # and nothing follows yet
    writer.announce("news", {"number": 7})
    assert reader.new("news", number) == [{"number": 7}]
    writer.set(writer.name("news", 1), {"number": 3})
    assert reader.new("news", number) == [{"number": 3}]


def test_each_rank_deletes_what_it_has_published() -> None:
    store = HashStore()
    one, two = keys_in(store), keys_in(store)
    one.announce("news", {"number": 1})
    one.set_own(one.name("leader", 0), "address")
    two.set_own(two.name("leader", 1), "address")
    one.delete_own()
    assert sorted(store.list_keys()) == [one.name("leader", 1), one.name("news")]


class PoorStore(HashStore):
    """A store that gets one key at a time."""

    def has_extended_api(self) -> bool:
        return False

    def multi_get(self, keys: object) -> list[bytes]:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [HashStore, PoorStore])
def test_many_records_of_any_store(kind: type[HashStore]) -> None:
    keys = keys_in(kind())
    names = [keys.name("host", i) for i in range(3)]
    for name in names:
        keys.set(name, name[-1])
    assert keys.get_all(names, as_text) == ["0", "1", "2"]


def test_a_store_that_fails_is_an_error_of_its_own() -> None:
    keys = keys_in(HashStore())
    keys.set(keys.name("count"), "text")
    with pytest.raises(StoreLostError, match="count"):
        keys.asked.add(keys.name("count"), 1)


def form(rank: int, size: int) -> tuple[int, int, int]:
    store = current_store()
    counted = CountedStore("counted", store)
    group = ProcessGroupHost(PrefixStore("group", counted), rank, size, LIMIT, group_name="group")
    requests, keys = counted.take()
    group.barrier().wait()
    left = sum("group" in key for key in store.list_keys())
    group.barrier().wait()
    group.shutdown()
    return requests, keys, left


def test_what_a_rank_asks_to_form_a_group_does_not_grow_with_their_number() -> None:
    few, many = (run_ranks(form, len(placement), placement=placement) for placement in ("aabb", "aabb" * 2))
    assert {left for *_, left in (*few, *many)} == {0}
    for what in (0, 1):
        # Rank 0 looks for all of them, again and again where they are slow.
        most = [max(found[what] for found in results[1:]) for results in (few, many)]
        assert most[1] <= most[0] + POLLS


def test_more_announcements_than_ranks_are_refused_before_they_are_read() -> None:
    store = HashStore()
    keys = keys_in(store)
    store.add(keys.name("news"), 1 << 40)
    with pytest.raises(DistStoreError, match=f"counts {1 << 40} announcements after 0, of at most 3;"):
        keys.new("news", number)
