"""How ranks join a world through a store: several times, after failures, and through the stores of others."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist
from counted_store import CountedStore
from threads import on_ranks, on_threads

import collectives as dist
from collectives.errors import DistStoreError
from collectives.store import HashStore, PrefixStore
from collectives.store.joining import world_rendezvous
from collectives.store.joining.agreement import join_group
from collectives.store.joining.world_rendezvous import leave_world
from collectives.store.process import own_user_only, system
from collectives.store.waiting import wait_for_keys

LIMIT = timedelta(seconds=30)


def meet_world(*arguments: Any) -> str:
    """Joins a world; returns its digits."""
    return world_rendezvous.meet_world(*arguments)[0]


def world_of(store: Any, size: int, **different: int) -> list[Any]:
    """Lets ranks join; ``different`` has the sizes that single ranks give, as ``rank1=3``."""
    return on_ranks(size, lambda r: meet_world(store, r, different.get(f"rank{r}", size), "x", LIMIT))


def one_world(joined: list[Any]) -> str:
    """Returns the digits of the world that all of these ranks have joined."""
    assert [type(digits) for digits in joined] == [str] * len(joined), joined
    assert len(set(joined)) == 1
    return str(joined[0])


@pytest.mark.parametrize("kind", ["host", "torch hash", "torch file", "torch prefix"])
def test_every_world_of_a_store_has_digits_of_its_own(kind: str, tmp_path: Path) -> None:
    stores: dict[str, Callable[[], Any]] = {
        "host": dist.HashStore,
        "torch hash": torch_dist.HashStore,
        "torch file": lambda: torch_dist.FileStore(str(tmp_path / "store"), 1),
        "torch prefix": lambda: torch_dist.PrefixStore("a", torch_dist.HashStore()),
    }
    store = stores[kind]()
    worlds = [one_world(world_of(store, size)) for size in (3, 1, 2, 3)]
    assert len(set(worlds)) == 4


def announce_attempt(store: Any, rank: int) -> int:
    """Does what a process does first that comes as a rank; returns the number of its attempt."""
    number = store.add("join/attempt", 1)
    about = {
        "rank": rank,
        "nonce": "0f",
        "protocol": world_rendezvous._PROTOCOL,
        "world_size": 1 + rank,
        "backend": "x",
        "process": "host:1",
        "system": system() if own_user_only() else "",
        "serves": False,
        "standby": [],
    }
    store.set(f"join/attempt/{number}", json.dumps(about))
    return int(number)


def test_what_a_dead_process_left_is_not_taken_for_a_rank() -> None:
    store = dist.HashStore()
    # A process of another number of ranks came as rank 1, and died.
    announce_attempt(store, 1)
    one_world(world_of(store, 2))
    # The same in the life after that: it was called, and died before it answered.
    announce_attempt(store, 1)
    (alone,) = on_threads(lambda: meet_world(store, 0, 2, "x", timedelta(milliseconds=300)))
    assert isinstance(alone, dist.DistStoreError)
    assert str(alone).startswith("[rank 0] init_process_group: rank 1 did not come within 0.3 s")
    one_world(world_of(store, 2))


@pytest.fixture
def waits_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has rank 0 soon give up waiting for ranks that do not come, and for those that it has refused."""
    for name in ("_OTHERS_LIMIT", "_READ_LIMIT"):
        monkeypatch.setattr(world_rendezvous, name, timedelta(seconds=0.5))


@pytest.mark.usefixtures("waits_briefly")
def test_all_hear_of_a_disagreement_and_may_try_again() -> None:
    store = dist.HashStore()
    for rank, error in enumerate(world_of(store, 3, rank2=4)):
        assert isinstance(error, ValueError)
        assert str(error) == (
            f"[rank {rank}] init_process_group: the ranks differ in world_size: rank 0 has 3, rank 2 has 4"
        )
    one_world(world_of(store, 3))


class SlowStore(dist.HashStore):
    """Sets the first outcome for rank 1, and comes back when that rank has tried again."""

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        found = super().compare_set(key, expected_value, desired_value)
        if key.endswith("/join/outcome"):
            self.wait(["join/attempt/2"], LIMIT)
        return found


@pytest.mark.usefixtures("waits_briefly")
def test_a_rank_may_try_again_before_rank_0_has_answered_all() -> None:
    store = SlowStore()

    def try_twice(rank: int) -> str:
        with pytest.raises(ValueError, match="the ranks differ in world_size"):
            meet_world(store, rank, 2 + rank, "x", LIMIT)
        return meet_world(store, rank, 2, "x", LIMIT)

    one_world(on_ranks(2, try_twice))


def test_missing_ranks_are_named_to_those_who_came() -> None:
    store = dist.HashStore()
    short = timedelta(milliseconds=300)
    errors = on_threads(*(lambda r=r: meet_world(store, r, 5, "x", short) for r in (0, 2)))  # type: ignore[misc]
    for rank, error in zip((0, 2), errors, strict=True):
        assert isinstance(error, dist.DistStoreError)
        assert str(error).startswith(
            f"[rank {rank}] init_process_group: ranks 1, 3, 4 did not come within 0.3 s"
        )
        assert (error.rank, error.missing_ranks) == (1, (1, 3, 4))


def test_missing_members_are_named_to_those_who_came() -> None:
    store, short = dist.HashStore(), timedelta(milliseconds=300)
    with pytest.raises(dist.DistStoreError, match="ranks 1, 3 did not come within") as caught:
        join_group(store, "make/1", 0, [0, 1, 3], "ranks 0, 1 and 3", short)
    assert (caught.value.rank, caught.value.missing_ranks) == (1, (1, 3))


class PoorStore(dist.HashStore):
    """A store without the optional operations."""

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        raise NotImplementedError

    def has_extended_api(self) -> bool:
        return False

    def multi_get(self, keys: Any) -> list[bytes]:
        raise NotImplementedError


def test_groups_need_no_more_of_a_store_than_every_store_has() -> None:
    store = PoorStore()
    joined = on_ranks(3, lambda r: join_group(store, "make/1", r, [0, 2], "ranks 0 and 2", LIMIT))
    assert joined == [None] * 3


def test_parts_that_one_call_makes_do_not_wait_for_each_other() -> None:
    store = dist.HashStore()
    calls = [
        lambda r=r, part=part: join_group(store, "make/1", r, part, "two parts", LIMIT, callers=range(5))  # type: ignore[misc]
        for part in ([0, 2], [3, 1])
        for r in part
    ]
    assert on_threads(*calls) == [None] * 4
    join_group(store, "make/1", 4, [], "two parts", LIMIT, callers=range(5))
    assert store.num_keys() == 0


def test_a_rank_that_takes_itself_for_no_member_stops_those_who_wait_for_it() -> None:
    store = dist.HashStore()
    errors = on_threads(
        lambda: join_group(store, "make/1", 0, [0, 1], "ranks 0 and 1", LIMIT),
        lambda: _join_once_asked(store, 1, [2], "rank 2"),
    )
    for error in errors:
        assert isinstance(error, dist.CollectiveMismatchError)
        assert "rank 0 asks for ranks 0 and 1, but rank 1 for rank 2" in str(error)


def _join_once_asked(store: dist.HashStore, rank: int, members: list[int], request: str) -> None:
    store.wait(["make/1/first"], LIMIT)
    join_group(store, "make/1", rank, members, request, LIMIT)


def test_what_a_member_asks_the_store_does_not_grow_with_their_number() -> None:
    most = []
    for size in (4, 24):
        plain, everyone = dist.HashStore(), range(size)
        stores = [CountedStore("counted", plain) for _ in everyone]

        def join(rank: int, stores: Any = stores, everyone: Any = everyone) -> None:
            join_group(stores[rank], "make/1", rank, everyone, "all", LIMIT, callers=everyone)

        assert on_ranks(size, join) == [None] * size
        most.append(max(store.take()[0] for store in stores))
    assert most[1] <= most[0] + 6, "more of the rare looks whether a member has died, where threads are slow"


class LostStore(dist.HashStore):
    """One whose keeper has died."""

    def __init__(self, kind: type[Exception] = dist.DistNetworkError) -> None:
        super().__init__()
        self._kind = kind

    def set(self, key: str, value: str | bytes) -> None:
        raise self._kind("the connection has ended")


def test_a_member_that_died_with_its_store_is_named() -> None:
    news = iter([[], [], [1, 2]])  # its end shows a little later
    with pytest.raises(dist.PeerLostError, match=r"\[rank 0\] new_group: rank 2, a member .* died") as caught:
        join_group(LostStore(), "make/1", 0, [0, 2], "ranks 0 and 2", LIMIT, lambda: next(news))
    assert caught.value.rank == 2


@pytest.mark.parametrize(
    "kind", [dist.DistNetworkError, torch_dist.DistNetworkError, torch_dist.DistStoreError, RuntimeError]
)
def test_a_store_that_is_lost_with_no_member_is_an_error_of_its_own(kind: type[Exception]) -> None:
    with pytest.raises(dist.DistNetworkError, match="the connection has ended") as caught:
        join_group(LostStore(kind), "make/1", 0, [0, 2], "ranks 0 and 2", LIMIT, lambda: [1])
    assert caught.value.rank == -1


def test_the_last_one_to_come_deletes_the_keys_of_a_group() -> None:
    store = dist.HashStore()
    joined = on_ranks(
        3, lambda r: join_group(store, "make/1", r, [0, 2], "ranks 0 and 2", LIMIT, callers=range(3))
    )
    assert joined == [None] * 3
    assert store.num_keys() == 0


def test_a_world_leaves_no_keys_to_the_next_but_one() -> None:
    store = dist.HashStore()

    def live(rank: int) -> None:
        digits = meet_world(store, rank, 3, "host", LIMIT)
        leave_world(PrefixStore(digits, store), rank)

    counts = []
    for _ in range(4):
        assert on_ranks(3, live) == [None] * 3
        counts.append(sum("leave" in key for key in store.list_keys()))
    assert counts == [3] * 4


def test_members_of_a_group_come_to_one_decision() -> None:
    store = dist.HashStore()
    requests = ["this", "this", "that"]
    errors = on_ranks(3, lambda r: join_group(store, "make/1", r, range(3), requests[r], LIMIT))
    for rank, error in enumerate(errors):
        assert isinstance(error, dist.CollectiveMismatchError)
        assert str(error).startswith(f"[rank {rank}] new_group: rank ")
        assert "that" in str(error)
        assert "all ranks must create the same groups in the same order" in str(error)


@pytest.mark.parametrize("value", ["[1]", "7", "no JSON", '{"reason": 5}', "{}"])
def test_what_no_rank_publishes_is_refused(value: str) -> None:
    store = HashStore()
    store.set("join/call/1", value)
    with pytest.raises(DistStoreError, match=r"something unusable under 'join/call/1'"):
        meet_world(store, 1, 2, "host", timedelta(seconds=5))


@pytest.mark.usefixtures("waits_briefly")
@pytest.mark.parametrize("value", ["[1]", "null", '{"process": 1}', '{"protocol": 1}'])
@pytest.mark.parametrize("key", ["join/attempt/1", "join/served"])
def test_rank_0_refuses_what_no_rank_publishes(key: str, value: str) -> None:
    store = HashStore()
    announce_attempt(store, 1)
    store.set(key, value)
    with pytest.raises(DistStoreError, match=f"something unusable under '{key}'"):
        meet_world(store, 0, 2, "host", timedelta(seconds=5))


def test_rank_0_refuses_more_attempts_than_there_can_be_before_it_reads_them() -> None:
    store = HashStore()
    store.add("join/attempt", 1 << 40)
    with pytest.raises(
        DistStoreError, match=f"'join/attempt' of the store counts {1 << 40} announcements after 0"
    ):
        meet_world(store, 0, 2, "host", timedelta(seconds=5))


def test_a_process_that_a_newer_one_replaces_is_refused() -> None:
    store = dist.HashStore()
    older = announce_attempt(store, 1)  # and does not come yet

    def come_later() -> str:
        store.wait([f"join/call/{older}"], LIMIT)
        return meet_world(store, 1, 2, "x", LIMIT)

    one_world(on_threads(lambda: meet_world(store, 0, 2, "x", LIMIT), come_later))
    refusal = store.get(f"join/call/{older}").decode()
    assert re.search(r"two processes have come as rank 1: \S+ is taken for it, and host:1 refused", refusal)


def wait_for_key(store: dist.HashStore, end: str) -> None:
    """Waits for a key below the digits of a world that are not known here."""
    while not any(key.endswith(end) for key in store.list_keys()):
        time.sleep(0.001)


def test_a_process_that_comes_as_a_rank_that_is_there_is_refused() -> None:
    store = dist.HashStore()

    def come_second() -> str:
        wait_for_key(store, "/join/1")
        return meet_world(store, 1, 3, "x", LIMIT)

    short = timedelta(seconds=1)
    alone, first, second = on_threads(
        lambda: meet_world(store, 0, 3, "x", short), lambda: meet_world(store, 1, 3, "x", LIMIT), come_second
    )
    for error in (alone, first):
        assert isinstance(error, dist.DistStoreError)
        assert error.missing_ranks == (2,)
        assert "rank 2 did not come" in str(error)
    both = r"two processes have come as rank 1: \S+ is taken for it, and \S+ refused"
    for error in (alone, first, second):
        assert re.search(both, str(error))
    assert isinstance(second, ValueError)


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (1, "it has made a world of 2 ranks, of which another process is rank 1 and has not left"),
        (2, "it has made a world of 2 ranks, in which there is no rank 2; give all ranks the same world_s"),
    ],
)
def test_who_comes_when_the_world_is_made_is_told_so(
    rank: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(world_rendezvous, "_TELL_AFTER", timedelta(milliseconds=50))
    monkeypatch.setattr(world_rendezvous, "_ANSWER_GRACE", timedelta(milliseconds=100))
    store = dist.HashStore()
    one_world(world_of(store, 2))
    with pytest.raises(DistStoreError, match=re.escape(f"rank 0 did not answer within 0.2 s; {why}")):
        meet_world(store, rank, 3, "x", timedelta(milliseconds=200))
    assert f"[rank {rank}] init_process_group: rank 0 has not answered for 0.05 s; {why}" in caplog.text


def test_who_has_left_a_world_may_come_early_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_rendezvous, "_ANSWER_GRACE", timedelta(milliseconds=100))
    store = dist.HashStore()
    leave_world(PrefixStore(one_world(world_of(store, 2)), store), 1)
    with pytest.raises(DistStoreError, match="either it did not come, or it has taken another process"):
        meet_world(store, 1, 2, "x", timedelta(milliseconds=200))


@pytest.mark.usefixtures("waits_briefly")
def test_all_hear_of_what_no_rank_publishes_and_may_try_again() -> None:
    store = dist.HashStore()
    number = announce_attempt(store, 2)
    store.set(f"join/attempt/{number}", "nonsense")
    for error in on_ranks(2, lambda r: meet_world(store, r, 3, "x", LIMIT)):
        assert isinstance(error, DistStoreError)
        assert "init_process_group: the store holds something unusable under 'join/" in str(error)
    assert store.check([f"join/call/{number}"])
    one_world(world_of(store, 3))


def test_ranks_that_a_former_rank_0_has_called_join_the_next_one() -> None:
    store, digits = dist.HashStore(), "0f" * 16

    def come_as_rank_0() -> str:
        store.wait(["join/attempt/1"], LIMIT)
        nonce = json.loads(store.get("join/attempt/1"))["nonce"]
        store.set("join/call/1", json.dumps({"nonce": nonce, "world": digits}))
        store.wait([f"{digits}/join/1"], LIMIT)
        return meet_world(store, 0, 2, "x", LIMIT)

    one_world(on_threads(come_as_rank_0, lambda: meet_world(store, 1, 2, "x", LIMIT)))
    assert not [key for key in store.list_keys() if key.startswith(digits)]


def test_every_rank_may_come_as_late_as_rank_0_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_rendezvous, "_ANSWER_GRACE", timedelta(milliseconds=500))
    store, limit = dist.HashStore(), timedelta(seconds=2)

    def come_after(seconds: float, rank: int) -> str:
        time.sleep(seconds)
        return meet_world(store, rank, 3, "x", limit)

    one_world(
        on_threads(lambda: come_after(1.4, 0), lambda: come_after(0, 1), lambda: come_after(2.8, 2)),
    )


def test_a_rank_that_gave_up_before_rank_0_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_rendezvous, "_ANSWER_GRACE", timedelta(milliseconds=100))
    store = dist.HashStore()

    def come_twice() -> str:
        store.wait(["join/attempts/0"], LIMIT)
        with pytest.raises(DistStoreError, match="ranks 0, 2 did not come within"):
            meet_world(store, 1, 3, "x", timedelta(milliseconds=300))
        assert not store.check(["join/attempt/1"])
        return meet_world(store, 1, 3, "x", LIMIT)

    def come_last() -> str:
        store.wait(["join/attempt/2"], LIMIT)
        return meet_world(store, 2, 3, "x", LIMIT)

    one_world(on_threads(lambda: meet_world(store, 0, 3, "x", LIMIT), come_twice, come_last))


def test_nothing_of_joining_is_left_but_numbers() -> None:
    store = dist.HashStore()
    one_world(world_of(store, 3))
    numbers = {"join/attempt", "join/attempts/0", "join/served"}
    assert {*store.list_keys()} == numbers


def test_a_rank_of_the_next_larger_world_waits_for_it() -> None:
    store = dist.HashStore()
    number = announce_attempt(store, 2)
    one_world(world_of(store, 2))
    assert not store.check([f"join/call/{number}"])
    (alone,) = on_threads(lambda: meet_world(store, 0, 3, "x", timedelta(milliseconds=300)))
    assert isinstance(alone, dist.DistStoreError)
    assert store.check([f"join/call/{number}"])


def test_what_rank_0_asks_to_form_a_world_does_not_grow_with_the_number_of_ranks() -> None:
    most = []
    for size in (4, 24):
        plain = dist.HashStore()
        store = CountedStore("world", plain)
        others = PrefixStore("world", plain)
        waiting = [
            threading.Thread(target=meet_world, args=(others, r, size, "x", LIMIT)) for r in range(1, size)
        ]
        for each in waiting:
            each.start()
        others.wait([f"join/attempt/{size - 1}"], LIMIT)
        meet_world(store, 0, size, "x", LIMIT)
        most.append(store.take()[0])
        for each in waiting:
            each.join()
    assert most[1] <= most[0] + 30, "more looks, where threads are slow"


def test_short_waits_leave_no_lines_in_the_log_of_a_store_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = PrefixStore("a", torch_dist.PrefixStore("b", server))
    assert not wait_for_keys(store, ["key"], timedelta(milliseconds=200))
    store.set("key", "")
    assert wait_for_keys(store, ["key"], timedelta(milliseconds=200))
    assert capfd.readouterr().err == ""
