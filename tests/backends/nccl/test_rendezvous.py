"""What goes through the store before NCCL begins, where somebody else writes to it, too."""

from __future__ import annotations

from datetime import timedelta

import pytest

from collectives import DistBackendError, DistStoreError, HashStore
from collectives.backends.nccl.rendezvous import Rendezvous

LIMIT = timedelta(seconds=10)
RANKS = (0, 1)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", "a secret that all ranks of this job share")


def rendezvous(store: HashStore, rank: int) -> Rendezvous:
    return Rendezvous(store, rank, f"[rank {rank}]", lambda missing: None)


def first_rank(store: HashStore, value: bytes) -> None:
    """Publishes a value, and does not wait for rank 1."""
    with pytest.raises(Exception, match="rank 1 did not come"):
        rendezvous(store, 0).broadcast("id", RANKS, "making", timedelta(0), lambda: value)


def second_rank(store: HashStore) -> bytes:
    return rendezvous(store, 1).broadcast("id", RANKS, "making", LIMIT, bytes)


def test_a_value_of_any_bytes_arrives() -> None:
    store = HashStore()
    first_rank(store, bytes(range(256)))
    assert second_rank(store) == bytes(range(256))


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
    first_rank(store, b"value")
    store.set("id/value", forged)
    with pytest.raises(DistStoreError, match="'id/value' is not proved by this process's job secret"):
        second_rank(store)
