"""The rank that serves a world's store next, and how the others come to it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

import collectives as dist
from collectives.secret import SECRET
from collectives.store import HashStore, PrefixStore, TCPStore
from collectives.store.joining.standby import Standby, offer, succession

LIMIT = timedelta(seconds=30)
KEY = "a secret of sixteen characters and more"


@pytest.fixture
def ranks():
    """Gives the standbys of three ranks, the first of which serves the store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    clients = [TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=LIMIT) for _ in range(2)]
    standbys = [Standby(PrefixStore("a world", store)) for store in (server, *clients)]
    offers = [one.offer() for one in standbys]
    for one in standbys:
        one.learn("a world/", 0, [told["standby"] for told in offers])
    yield standbys
    for end in (*standbys, *clients, server):
        end.close()


def nobody_lost() -> list[int]:
    return []


def test_all_but_the_server_offer_to_serve(ranks) -> None:
    offers = [one.offer() for one in ranks]
    assert [told["serves"] for told in offers] == [True, False, False]
    assert offers[0]["standby"] == []
    assert all(told["standby"][0] == "127.0.0.1" for told in offers[1:])
    assert [ranks[1].leaves_with(rest) for rest in ([0, 1], [1, 2], [2])] == [False, True, True]


def test_where_no_rank_serves_the_store_it_stays() -> None:
    alone = Standby(HashStore())
    assert alone.offer() == {"serves": False, "standby": []}
    alone.learn("", -1, [])
    assert not alone.leaves_with([])
    alone.go_on([0])
    alone.close()


def test_the_others_wait_for_the_one_who_serves(ranks) -> None:
    came = threading.Event()
    found: list[Any] = []

    def come() -> None:
        def lost() -> list[int]:
            came.set()
            return []

        found.append(ranks[2].next_store(2, [1, 2], LIMIT, lost))

    late = threading.Thread(target=come)
    late.start()
    assert came.wait(30)  # it has tried in vain
    mine = ranks[1].next_store(1, [1, 2], LIMIT, nobody_lost)
    late.join(30)
    mine.set("key", "value")
    assert found[0].get("key") == b"value"
    assert (mine.is_master, found[0].is_master) == (True, False)
    found[0].close()
    # A second attempt finds the same store.
    assert ranks[1].next_store(1, [1], LIMIT, nobody_lost) is mine
    ranks[1].go_on([1, 2])
    assert (ranks[1].server, ranks[1].leaves_with([1])) == (0, True)


def test_the_next_store_demands_the_secret(monkeypatch) -> None:
    monkeypatch.setenv(SECRET, KEY)
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", first.port, wait_for_workers=False)
    standby = Standby(other)
    host, port = standby.offer()["standby"]
    standby.learn("a world/", 0, [[], [host, port]])
    next_store = standby.next_store(1, [1], LIMIT, nobody_lost)
    next_store.set("key", "value")
    for secret in ("", KEY[::-1]):
        monkeypatch.setenv(SECRET, secret)
        with pytest.raises(dist.DistNetworkError, match="secret"):
            TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=20))
    assert next_store.get("key") == b"value"
    for end in (standby, other, first):
        end.close()


def test_one_who_would_serve_and_has_gone_is_named(ranks) -> None:
    ranks[1].close()
    with pytest.raises(
        dist.PeerLostError, match=r"\[rank 2\] rank 1, which was to serve .* exclude it as well"
    ) as caught:
        ranks[2].next_store(2, [1, 2], LIMIT, nobody_lost)
    assert caught.value.rank == 1


def test_one_who_would_serve_and_does_not_come_is_named(ranks) -> None:
    with pytest.raises(dist.DistStoreError, match=r"rank 1 did not serve the store .* within 0.3 s") as late:
        ranks[2].next_store(2, [1, 2], timedelta(seconds=0.3), nobody_lost)
    assert late.value.missing_ranks == (1,)
    with pytest.raises(dist.PeerLostError, match="rank 1, which was to serve"):
        ranks[2].next_store(2, [1, 2], LIMIT, lambda: [1])


def test_nobody_serves_where_nobody_can(ranks) -> None:
    ranks[2].learn("a world/", 0, [[], [], []])
    with pytest.raises(dist.DistStoreError, match=r"none of the ranks .1, 2. has a port"):
        ranks[2].next_store(2, [1, 2], LIMIT, nobody_lost)


@pytest.mark.parametrize("address", [7, ["host"], ["host", "7"], ["host", 0], ["host", 65536], [1, 2]])
def test_addresses_that_no_rank_offers_are_refused(address) -> None:
    with pytest.raises(ValueError, match=r"address|standby"):
        offer({"serves": False, "standby": address})
    with pytest.raises(ValueError, match="address"):
        succession({"server": 0, "addresses": [[], address]}, 2)


@pytest.mark.parametrize("known", [{"server": 2}, {"server": -1}, {"addresses": [[]]}, {"addresses": 5}])
def test_what_rank_0_does_not_publish_is_refused(known) -> None:
    with pytest.raises(ValueError, match=r"server|addresses"):
        succession({"server": 0, "addresses": [[], []]} | known, 2)
