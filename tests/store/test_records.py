"""Records that ranks publish in a store: their proof where the job has a secret, errors, announcements."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from store_pairs import LONG
from threads import on_ranks

from collectives import (
    CollectiveTimeoutError,
    DistError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    QueueEmptyError,
    UnsupportedOperationError,
)
from collectives.errors import DistBackendError
from collectives.store import HashStore
from collectives.store.joining import world_rendezvous
from collectives.store.joining.agreement import join_group
from collectives.store.joining.world_rendezvous import meet_world
from collectives.store.records import (
    Announcements,
    as_bytes,
    as_text,
    error_of,
    fetch_all,
    fields,
    publish,
    publish_all,
    read,
    record_of,
    written,
)

SECRET = "a secret that all processes of this job share"
RECORD = {"world": 3}


def check(record: Any) -> dict[str, Any]:
    return fields(record, world=int)


def test_without_a_secret_a_record_is_json() -> None:
    assert written(None, "key", RECORD) == '{"world": 3}'
    assert read(None, "key", b'{"world": 3}', check) == RECORD


def test_with_a_secret_a_record_carries_a_proof_for_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    record = written(None, "key", RECORD).encode()
    assert read(None, "key", record, check) == RECORD
    forged = [
        b'{"world": 3}',
        b'{"world": 3}\n',
        record.replace(b"3", b"4", 1),
        record[:-1] + (b"0" if record[-1:] != b"0" else b"1"),
        record + b"\n",
        b"",
        "\u00e4\n\u00e4".encode(),
    ]
    for value in forged:
        with pytest.raises(DistStoreError, match="under 'key' is not proved by this process's job secret"):
            read(None, "key", value, check)
    with pytest.raises(DistStoreError, match="under 'other' is not proved"):
        read(None, "other", record, check)
    monkeypatch.setenv("COLLECTIVES_SECRET", "the secret of quite another job")
    with pytest.raises(DistStoreError, match="not proved"):
        read(None, "key", record, check)
    monkeypatch.delenv("COLLECTIVES_SECRET")
    with pytest.raises(DistStoreError, match="not proved"):
        read(None, "key", record, check)


def test_texts_and_bytes_are_checked() -> None:
    assert read(None, "key", written(None, "key", b"\0\xff".hex()).encode(), as_bytes) == b"\0\xff"
    assert read(None, "key", written(None, "key", "\u00e4").encode(), as_text) == "\u00e4"
    for check, value in ((as_text, b"5"), (as_bytes, b'"0"'), (as_bytes, b'"no"'), (as_bytes, b"[]")):
        with pytest.raises(DistStoreError, match="something unusable under 'key'"):
            read(None, "key", value, check)


def join_on_threads(store: HashStore, size: int) -> list[Any]:
    return on_ranks(size, lambda rank: meet_world(store, rank, size, "host", LONG)[0])


def test_a_world_forms_on_proved_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    store = HashStore()
    first, second = join_on_threads(store, 2)
    assert first == second
    store.set("join/call/2", "null")  # an attacker's word for rank 1's next attempt
    with pytest.raises(DistStoreError, match="'join/call/2' is not proved"):
        meet_world(store, 1, 2, "host", LONG)


def test_a_group_forms_on_proved_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    store = HashStore()
    store.set("make/1/0/outcome", "rank 1 asks for something else")  # says an attacker
    with pytest.raises(DistStoreError, match="'make/1/0/outcome' is not proved"):
        join_group(store, "make/1", 0, [0, 1], "ranks 0 and 1", LONG)


@pytest.mark.parametrize("setting", ["none", "COLLECTIVES_SECRET", "COLLECTIVES_INSECURE"])
def test_ranks_on_several_machines_need_a_secret(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setattr(world_rendezvous, "system", lambda: threading.current_thread().name)
    if setting != "none":
        monkeypatch.setenv(setting, SECRET if setting.endswith("SECRET") else "1")
        first, second = join_on_threads(HashStore(), 2)
        assert first == second
        return
    for error in join_on_threads(HashStore(), 2):
        assert isinstance(error, ValueError)
        assert "rank 0 and rank 1 run on different machines and have no job secret" in str(error)
        assert "export COLLECTIVES_SECRET_FILE=~/.collectives_secret" in str(error)


CAUSE = DistError("ValueError: bad shard", 2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLostError("lost", 2, operation="barrier", sequence=4), PeerLostError),
        (CollectiveTimeoutError("late", 1, missing_ranks=[1, 3], operation="all_reduce", sequence=1),
         CollectiveTimeoutError),
        (GroupAbortedError("aborted", 2, cause=CAUSE), GroupAbortedError),
        (QueueEmptyError("empty"), DistStoreError),
        (UnsupportedOperationError("no such thing"), DistBackendError),
    ],
)  # fmt: skip
def test_an_error_comes_as_it_was_told(error: DistError, kind: type[DistError]) -> None:
    told = error_of(json.loads(json.dumps(record_of(error))))
    assert type(told) is kind
    assert str(told) == str(error)
    assert told.details() == error.details()
    assert str(told.cause) == str(error.cause)


@pytest.mark.parametrize(
    "spoilt",
    [{"kind": "SystemExit"}, {"rank": "0"}, {"rank": True}, {"missing_ranks": [None]}, {"missing_ranks": 3},
     {"sequence": 1.5}, {"operation": None}, {"cause": "why"}],
)  # fmt: skip
def test_what_is_no_error_is_refused(spoilt: dict[str, Any]) -> None:
    record = {**record_of(PeerLostError("lost", 2)), **spoilt}
    with pytest.raises(ValueError, match="it has"):
        error_of(record)


class PoorStore(HashStore):
    """A store that gets and sets one key at a time."""

    def has_extended_api(self) -> bool:
        return False

    def multi_get(self, keys: Any) -> list[bytes]:
        raise NotImplementedError

    def multi_set(self, keys: Any, values: Any) -> None:
        raise NotImplementedError


def announce(store: HashStore, text: str) -> None:
    publish(store, f"news/{store.add('news', 1)}", text)


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
    late = f"news/{store.add('news', 1)}"
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
