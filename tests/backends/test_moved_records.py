"""A stranger at an open store, who knows no secret, and moves what ranks write to other keys."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from harness import current_store, run_ranks

import collectives
from collectives import DistError, DistNetworkError, DistStoreError, PeerLostError
from collectives.backends._shared.exit_reasons import Departure
from collectives.backends._shared.health import Health
from collectives.backends.nccl.communicators import Rendezvous
from collectives.core.process_group import ProcessGroup
from collectives.store import HashStore, PrefixStore, TCPStore
from collectives.store.joining.agreement import join_group
from collectives.store.joining.standby import Standby
from collectives.store.joining.world_rendezvous import meet_world
from collectives.store.process import current_process
from collectives.store.records import publish

SECRET = "a secret that all processes of this job share"
LIMIT = timedelta(seconds=3)
LAYERS: dict[str, tuple[Any, tuple[str, str]]] = {
    "collectives": (collectives, ("/group/1/", "/group/2/")),
    "torch": (torch.distributed, ("/0//1//", "/0//2//")),
}
"""Of each layer its functions, and what keys of its first and second group have in common."""


class CrossedStore(PrefixStore):
    """Shows a rank one group's keys where those of another group should be, and the other way round."""

    crossed: tuple[str, str] | None = None

    def _key(self, key: str) -> str:
        stored = super()._key(key)
        one, other = self.crossed or ("", "")
        if one and one in stored:
            return stored.replace(one, other, 1)
        return stored.replace(other, one, 1) if one else stored


def sum_in_a_pair(rank: int, size: int, layer: str, backend: str) -> float | str:
    """Returns the sum of the ranks of this one's pair, of which a stranger exchanges one; or an error."""
    dist, keys = LAYERS[layer]
    store = CrossedStore("moved", current_store())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)
    if rank in (1, 3):
        store.crossed = keys
    total = torch.tensor([float(rank)])
    try:
        groups = [dist.new_group(members, timeout=LIMIT) for members in ([0, 1], [2, 3])]
        dist.all_reduce(total, group=groups[rank // 2])
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize(
    ("layer", "backend", "secret"),
    [
        ("collectives", "host", SECRET),
        ("collectives", "host", None),
        ("collectives", "gloo", SECRET),
        ("collectives", "round_robin", SECRET),
        ("torch", "collectives", SECRET),
        ("torch", "collectives", None),
        ("torch", "collectives_round_robin", SECRET),
    ],
)
@pytest.mark.parametrize("placement", ["aaaa", "abcd"])
def test_ranks_of_groups_that_form_at_once_cannot_be_exchanged(
    layer: str, backend: str, secret: str | None, placement: str
) -> None:
    environment = {"COLLECTIVES_SECRET": secret}
    found = run_ranks(
        sum_in_a_pair, 4, layer, backend, placement=placement, env=environment, isolated=True, timeout=60
    )
    assert [type(one) for one in found] == [str] * 4, found


class KeptStore(HashStore):
    """One from which nothing is ever deleted."""

    def _delete_key(self, key: str) -> bool:
        return self._check([key])


class Written:
    """What the ranks of a group write, which then shows under the same keys of another group.

    The other group has the same name and ranks, in the next world of the job.
    """

    def __init__(self) -> None:
        self._base = KeptStore()
        self.here = PrefixStore("this world", self._base, scope="world 1")
        self.elsewhere = PrefixStore("that world", self._base, scope="world 2")

    def move(self) -> None:
        """Does what a stranger does."""
        for key in self._base.list_keys():
            if key.startswith("this world/"):
                self._base.set(key.replace("this", "that", 1), self._base.get(key))

    def forget(self, *keys: str) -> None:
        """Deletes keys of the other group."""
        for key in keys:
            HashStore._delete_key(self._base, f"that world/{key}")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    return Written()


def process_lost(store: PrefixStore) -> Any:
    return Health(store, 0, 3, "").find_lost()


def test_moved_process_records_and_exit_reasons_tell_of_no_loss(written: Written) -> None:
    ended = replace(current_process(), start=77)
    publish(PrefixStore("health", written.here), "process/1", ended.to_bytes().hex())
    assert process_lost(written.here).rank == 1
    written.move()
    assert process_lost(written.elsewhere) is None
    member = Health(written.here, 2, 3, "")
    member.publish(Departure(2, DistError("it has had enough", 2)))
    member.publish(Departure(1, PeerLostError("it has ended", 1)))
    written.move()
    assert process_lost(written.elsewhere) is None
    with pytest.raises(DistStoreError, match="'lost' is not proved"):
        Health(written.elsewhere, 0, 3, "").poll_lost()


class Member:
    """Rank 0 or 1 of 2, that only meets the other one in the store."""

    _timeout = LIMIT

    def __init__(self, rank: int, store: PrefixStore) -> None:
        self._rank, self._size, self._store = rank, 2, store
        self._monitored_barriers = iter([0])
        self.rank = lambda: rank
        self.describe = lambda: "a pair"
        self.lost_ranks = list[int]


def test_moved_arrivals_and_outcomes_let_nobody_through_a_monitored_barrier(written: Written) -> None:
    def come(rank: int, store: PrefixStore) -> None:
        member: Any = Member(rank, store)
        ProcessGroup.monitored_barrier(member, LIMIT, wait_all_ranks=True)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda rank: come(rank, written.here), range(2)))
    written.move()
    written.forget("monitored_barrier/0/arrived")
    with pytest.raises(DistStoreError, match="'monitored_barrier/0/outcome' is not proved"):
        come(1, written.elsewhere)
    for here in (written.here.get("monitored_barrier/0/1"), b"1"):
        written.move()
        written.elsewhere.set("monitored_barrier/0/1", here)
        written.forget("monitored_barrier/0/outcome")
        with pytest.raises(DistStoreError, match="'monitored_barrier/0/1' is not proved"):
            come(0, written.elsewhere)


@pytest.mark.parametrize("key", ["make/1", "make/1/0/outcome"])
def test_moved_requests_and_outcomes_make_no_group(written: Written, key: str) -> None:
    join_group(written.here, "make/1", 0, [0], "rank 0", LIMIT)
    written.move()
    written.forget(*({"make/1/first", "make/1/0/outcome"} - {key, f"{key}/first"}))
    with pytest.raises(DistStoreError, match="is not proved"):
        join_group(written.elsewhere, "make/1", 0, [0], "rank 0", LIMIT)


def test_moved_values_of_a_broadcast_are_refused(written: Written) -> None:
    """As of NCCL's unique id, which names a place to connect to."""

    def broadcast(rank: int, store: PrefixStore) -> bytes:
        meeting = Rendezvous(store, Health(store, rank, 2, f"[rank {rank}]"))
        return meeting.broadcast("id", (0, 1), "making", LIMIT, lambda: b"a place")

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(lambda rank: broadcast(rank, written.here), range(2))) == [b"a place"] * 2
    written.move()
    with pytest.raises(DistStoreError, match="is not proved"):
        broadcast(1, written.elsewhere)


def test_answers_to_another_attempt_join_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts anew is the first attempt of a store that has lost its counters."""
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    former, later = KeptStore(), HashStore()
    with ThreadPoolExecutor(2) as ranks:
        worlds = ranks.map(lambda rank: meet_world(former, rank, 2, "x", LIMIT)[0], range(2))
        assert len(set(worlds)) == 1
    later.set("join/call/1", former.get("join/call/1"))
    with pytest.raises(DistStoreError, match=r"'join/call/1' an answer to another process"):
        meet_world(later, 1, 2, "x", LIMIT)


def test_the_next_store_of_another_world_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", first.port, wait_for_workers=False) for _ in range(2)]
    mine, other = (Standby(client) for client in clients)
    places = [[], *(one.offer()["standby"] for one in (mine, other))]
    mine.learn("world 1/", 0, places)
    other.learn("world 2/", 0, places)
    served = mine.next_store(1, [1, 2], LIMIT, list)
    with pytest.raises(DistNetworkError, match="is not trusted"):
        other.next_store(2, [1, 2], LIMIT, list)
    other.learn("world 1/", 0, places)
    found = other.next_store(2, [1, 2], LIMIT, list)
    served.set("key", "value")
    assert found.get("key") == b"value"
    for end in (found, mine, other, *clients, first):
        end.close()
