"""What goes through the store before NCCL begins, where somebody else writes to it, too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

from collectives import CollectiveTimeoutError, DistBackendError, DistStoreError, HashStore
from collectives.backends._shared.health import Health
from collectives.backends.nccl.communicators import Rendezvous

LIMIT = timedelta(seconds=10)
RANKS = (0, 1)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", "a secret that all ranks of this job share")


def rendezvous(store: HashStore, rank: int) -> Rendezvous:
    return Rendezvous(store, Health(store, rank, 3, f"[rank {rank}]"))


@contextmanager
def first_rank(store: HashStore, value: bytes) -> Iterator[None]:
    """Publishes a value."""
    with ThreadPoolExecutor() as thread:
        asked = thread.submit(rendezvous(store, 0).broadcast, "id", RANKS, "making", LIMIT, lambda: value)
        store.wait(["id/0/0"])
        yield
        asked.exception()


def second_rank(store: HashStore, key: str = "id") -> bytes:
    return rendezvous(store, 1).broadcast(key, RANKS, "making", LIMIT, bytes)


def test_a_value_of_any_bytes_arrives() -> None:
    store = HashStore()
    with first_rank(store, bytes(range(256))):
        assert second_rank(store) == bytes(range(256))


def test_a_rank_that_comes_late_hears_who_gave_up() -> None:
    store = HashStore()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 did not come within 0\.01 s") as caught:
        rendezvous(store, 0).broadcast("id", RANKS, "making", timedelta(seconds=0.01), bytes)
    assert caught.value.missing_ranks == (1,)
    with pytest.raises(
        CollectiveTimeoutError, match="rank 1 did not come within another rank's time limit"
    ) as caught:
        second_rank(store)
    assert caught.value.missing_ranks == (1,)


def test_all_hear_who_gave_up() -> None:
    """One with a longer limit does not wait for it, and nobody comes to a broadcast that another has left."""
    store, ranks = HashStore(), (0, 1, 2)
    with ThreadPoolExecutor() as thread:
        patient = thread.submit(rendezvous(store, 1).broadcast, "id", ranks, "making", 10 * LIMIT, bytes)
        store.wait(["id/0/1"])
        with pytest.raises(CollectiveTimeoutError, match="rank 2 did not come"):
            rendezvous(store, 0).broadcast("id", ranks, "making", timedelta(seconds=0.01), bytes)
        with pytest.raises(CollectiveTimeoutError, match="rank 2 did not come within another"):
            patient.result(60)
    with pytest.raises(CollectiveTimeoutError, match="rank 2 did not come within another"):
        rendezvous(store, 2).broadcast("id", ranks, "making", LIMIT, bytes)


def test_the_reason_arrives_for_which_there_is_no_value() -> None:
    store = HashStore()

    def fail() -> bytes:
        raise OSError("no device")

    with pytest.raises(DistBackendError, match="making: no device"):
        rendezvous(store, 0).broadcast("id", RANKS, "making", LIMIT, fail)
    with pytest.raises(DistBackendError, match="rank 0 could not begin it: no device") as caught:
        second_rank(store)
    assert caught.value.rank == 0


@pytest.mark.parametrize("forged", [b"=" + bytes(128), b"!gone", b'["00", ""]', b'["00", ""]\nab'])
def test_a_value_that_no_rank_wrote_is_refused(forged: bytes) -> None:
    store = HashStore()
    with first_rank(store, b"value"):
        store.set("id/0/0", forged)
        with pytest.raises(DistStoreError, match="'id/0/0' is not proved by this process's job secret"):
            second_rank(store)
