"""Records that ranks publish in a store, and their proof where the job has a secret."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from store_pairs import LONG

from collectives.errors import DistStoreError
from collectives.store import HashStore
from collectives.store.joining import world_rendezvous
from collectives.store.joining.agreement import join_group
from collectives.store.joining.world_rendezvous import join_world
from collectives.store.records import as_bytes, as_text, fields, read, written

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
    results: list[Any] = [None] * size

    def join(rank: int) -> None:
        try:
            results[rank] = join_world(store, rank, size, "host", LONG)[0]
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results[rank] = error

    threads = [threading.Thread(target=join, args=(rank,), name=f"rank{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_world_forms_on_proved_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    store = HashStore()
    first, second = join_on_threads(store, 2)
    assert first == second
    store.set("join/call/2", "null")  # an attacker's word for rank 1's next attempt
    with pytest.raises(DistStoreError, match="'join/call/2' is not proved"):
        join_world(store, 1, 2, "host", LONG)


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
