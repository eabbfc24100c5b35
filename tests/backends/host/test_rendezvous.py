"""How the ranks of a host group find each other: what they publish, whom they take in, who listens."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from counted_store import CountedStore
from harness import current_store, run_ranks

from collectives import DistError, DistNetworkError, DistStoreError
from collectives.backends.host import ProcessGroupHost, rendezvous
from collectives.backends.host import rendezvous_records as records
from collectives.backends.host.rendezvous import group_key
from collectives.errors import PeerLostError
from collectives.store import PrefixStore
from collectives.store.encryption import Encryption
from collectives.store.joining import agreement
from collectives.store.joining.known_listeners import KnownListeners
from collectives.store.records import read

SECRET = "a secret that all ranks of this job share"
LIMIT = timedelta(seconds=30)
POLLS = 10
"""Requests of a rank that looks again while others are slow."""

# ---- what is published -------------------------------------------------------------------------------------

LOCATION = {
    "place": "here",
    "system": "kernel net",
    "address": "a-name",
    "key": "0f" * 32,
    "encryption": 0,
    "tuning": {},
    "threads": 2,
    "chosen": False,
    "cores": "ff",
    "granted": 8,
}
PLAN = records.new_plan([LOCATION, {**LOCATION, "place": "there"}, LOCATION])
LISTENER = {"leader": 0, "host": "a", "places": [["127.0.0.1", 80]]}
OTHER = {**LISTENER, "leader": 1}
ADDRESSES = records.address_book([LISTENER, OTHER, LISTENER])

location = records.location
plan = partial(records.plan, size=3)
listener = partial(records.listener, size=3)
addresses = partial(records.addresses, size=3)


@pytest.mark.parametrize(("check", "record"), [(plan, PLAN), (listener, LISTENER), (location, LOCATION)])
def test_records_that_ranks_publish_are_taken(check: Callable[[Any], Any], record: Any) -> None:
    assert read(None, "key", json.dumps(record).encode(), check) == record


def test_a_plan_tells_machines_and_counts_the_ranks_of_each_host_in_all_its_containers() -> None:
    systems = ["kernel net:[1]", "kernel net:[2]", "another net:[1]"]
    made = records.new_plan([{**LOCATION, "place": one, "system": one} for one in systems])
    assert (made["one_system"], made["ranks_on_host"]) == (False, [2, 2, 1])
    assert PLAN["one_system"]
    assert (PLAN["machines"], PLAN["ranks_on_host"]) == ([[0, 2], [1]], [3, 3, 3])


def test_a_plan_encrypts_between_systems_where_there_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [LOCATION, {**LOCATION, "place": "there", "system": "another net"}]
    monkeypatch.delenv("COLLECTIVES_SECRET", raising=False)
    assert not records.new_plan(apart)["encrypts"]
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    assert records.new_plan(apart)["encrypts"]
    assert not records.new_plan([{**one, "encryption": Encryption.OFF} for one in apart])["encrypts"]
    together = [LOCATION, {**LOCATION, "place": "there"}]
    assert not records.new_plan(together)["encrypts"]
    assert records.new_plan([{**one, "encryption": Encryption.ON} for one in together])["encrypts"]


def test_addresses_are_told_by_machine_and_rank() -> None:
    two = [["10.0.0.1", 80], ["10.1.0.1", 81]], [["10.0.0.2", 80], ["10.1.0.2", 82]]
    ranks = [
        {"leader": 0, "host": "a", "places": two[0]},
        {"leader": 1, "host": "b", "places": two[1]},
        {"leader": 0, "host": "another name of a", "places": two[0]},
    ]
    record = json.dumps(records.address_book(ranks)).encode()
    assert read(None, "key", record, addresses) == {
        "machines": [[0, 2], [1]],
        "hosts": ["a", "b"],
        "places": [[tuple(place) for place in two[number]] for number in (0, 1, 0)],
    }


@pytest.mark.parametrize(
    ("check", "record", "found"),
    [
        (location, [], r"\[\] instead of a record"),
        (location, {"place": "here", "system": "this"}, "address = None"),
        (plan, {**PLAN, "machines": [[0, 2], [1, 2]]}, r"ranks \[0, 1, 2, 2\] in a group of 3"),
        (plan, {**PLAN, "machines": [[0, 2]]}, r"ranks \[0, 2\] in a group of 3"),
        (plan, {**PLAN, "machines": [[0, 2], [-1]]}, "rank -1"),
        (plan, {**PLAN, "machines": [[0, 2], ["1"]]}, "rank '1'"),
        (plan, {**PLAN, "machines": [[0, 1, 2], []]}, "a machine without ranks"),
        (plan, {**PLAN, "one_system": 1}, "one_system = 1"),
        (plan, {**PLAN, "encrypts": 1}, "encrypts = 1"),
        (plan, {**PLAN, "ranks_on_host": [2, 1]}, r"\[2, 1\] ranks on the hosts of 3"),
        (plan, {**PLAN, "ranks_on_host": [2, 4, 2]}, r"\[2, 4, 2\] ranks on the hosts"),
        (plan, {**PLAN, "ranks_on_host": [2, True, 2]}, r"\[2, True, 2\] ranks on the hosts"),
        (plan, {**PLAN, "tuning": {"one_shot_bytes": "1"}}, "thresholds that are no numbers"),
        (listener, {**LISTENER, "leader": 3}, "rank 3 in a group of 3"),
        (listener, {**LISTENER, "leader": True}, "leader = True"),
        (listener, {**LISTENER, "places": []}, "no address"),
        (listener, {**LISTENER, "places": [["127.0.0.1"]]}, "the address"),
        (listener, {**LISTENER, "places": [["127.0.0.1", 2**16]]}, "the port 65536"),
        (addresses, {**ADDRESSES, "leaders": [0, 1]}, "the leaders of 2 ranks"),
        (addresses, {**ADDRESSES, "leaders": [0, 0, 1]}, r"leaders \[0, 0, 1\] that are led"),
        (addresses, {**ADDRESSES, "leaders": [0, 1, 3]}, "rank 3 in a group of 3"),
        (addresses, {**ADDRESSES, "leaders": [0, 1, [0]]}, r"rank \[0\] in a group of 3"),
        (addresses, {**ADDRESSES, "hosts": ["a"]}, "the hosts of 1 of 2 machines"),
        (addresses, {**ADDRESSES, "hosts": ["a", None]}, r"hosts \['a', None\] and"),
        (addresses, {**ADDRESSES, "addresses": ["a", "b"]}, "3 ports of 3 ranks"),
        (
            addresses,
            {**ADDRESSES, "addresses": ["a", "b", 1]},
            r"hosts \['a', 'a'\] and addresses \['a', 'b', 1\] that",
        ),
        (addresses, {**ADDRESSES, "addresses": [], "ports": []}, "0 ports of 3 ranks"),
        (addresses, {**ADDRESSES, "addresses": ["a"] * 4, "ports": [1] * 4}, "4 ports of 3 ranks"),
        (addresses, {**ADDRESSES, "ports": [1, 2, True]}, r"\[1, 2, True\], which are not"),
        (addresses, {**ADDRESSES, "ports": [1, 2, 2**16]}, r"\[1, 2, 65536\], which are not"),
        (addresses, {**ADDRESSES, "ports": [0, 1, 2]}, r"\[0, 1, 2\], which are not"),
        (location, {**LOCATION, "key": 7}, "key = 7"),
        (location, {**LOCATION, "key": "00"}, "a key of another length"),
        (location, {**LOCATION, "encryption": 3}, "encryption 3"),
        (location, {**LOCATION, "address": "a/../b"}, "the address 'a/../b'"),
        (location, {**LOCATION, "tuning": {"one_shot_bytes": "1"}}, "thresholds that are no numbers"),
        (plan, {**PLAN, "addresses": ["a", "b", ""]}, "the address ''"),
        (plan, {**PLAN, "addresses": ["a"]}, "1 addresses of 3 ranks"),
        (plan, {**PLAN, "keys": [""]}, "1 keys of 2 machines"),
        (plan, {**PLAN, "keys": ["", "00"]}, "a key of another length"),
    ],
)
def test_other_records_are_refused(check: Callable[[Any], Any], record: Any, found: str) -> None:
    with pytest.raises(DistStoreError, match=rf"unusable under 'key': it has {found}"):
        read(None, "key", json.dumps(record).encode(), check)


@pytest.mark.parametrize("value", [b"\xff{", b"[" * 100_000])
def test_what_is_no_json_is_refused(value: bytes) -> None:
    with pytest.raises(DistStoreError, match="unusable under 'key'"):
        read(None, "key", value, plan)


def _form_after_another_program(rank: int, size: int) -> str:
    store = current_store()
    if rank:
        store.set("host/places/outcome", json.dumps([1, 2]))
        with pytest.raises(DistError) as caught:
            ProcessGroupHost(store, rank, size)
        return str(caught.value)
    return ""


def test_a_group_does_not_form_on_what_another_program_left() -> None:
    message = run_ranks(_form_after_another_program, 2)[1]
    assert message.startswith(
        "[rank 1] host group '' of 2: the store holds something unusable under 'host/places/outcome'"
    )


# ---- by which key ranks recognise each other ---------------------------------------------------------------


def test_keys_without_a_secret_come_of_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLLECTIVES_SECRET", "COLLECTIVES_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    keys = {group_key(attempt, digits * 32) for attempt in ("one", "another") for digits in ("00", "01")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_keys_with_a_secret_are_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    assert group_key("attempt", "") == group_key("attempt", "00" * 32) != group_key("another attempt", "")


def form_on_several_systems(rank: int, size: int) -> str:
    rendezvous.system = lambda: f"kernel net:[{rank}]"
    try:
        ProcessGroupHost(current_store(), rank, size, LIMIT).shutdown()
    except DistNetworkError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("variable", "value"), [("", ""), ("COLLECTIVES_SECRET", SECRET), ("COLLECTIVES_INSECURE", "1")]
)
def test_without_a_secret_ranks_stay_on_one_system(variable: str, value: str) -> None:
    environment = {variable: value} if variable else {}
    for text in run_ranks(form_on_several_systems, 2, isolated=True, placement="ab", env=environment):
        assert bool(text) == (not variable)
        assert not text or "run on different machines and have no job secret; make a secret" in text


# ---- who listens no more -----------------------------------------------------------------------------------

LONG_AGO = float("-inf")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def known(listener: socket.socket) -> KnownListeners:
    listeners = KnownListeners(0)
    listeners.places[3] = [listener.getsockname()]
    return listeners


def check_until_lost(listeners: KnownListeners) -> None:
    while True:
        listeners.check([3], LONG_AGO)


def test_who_listens_no_more_is_named(listener: socket.socket) -> None:
    listeners = known(listener)
    listener.close()
    with pytest.raises(PeerLostError, match=r"rank 3 has died .*127\.0\.0\.1") as caught:
        check_until_lost(listeners)
    assert caught.value.rank == 3


def test_a_single_refusal_says_nothing(listener: socket.socket) -> None:
    listeners = known(listener)
    listener.close()
    listeners.check([3], LONG_AGO)


def test_who_listens_gets_connections_without_a_word(listener: socket.socket) -> None:
    known(listener).check([3], LONG_AGO)
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("ranks", "since"),
    [
        pytest.param([2], LONG_AGO, id="a rank that this one does not wait for"),
        pytest.param([3], float("inf"), id="too early"),
    ],
)
def test_who_need_not_be_asked_gets_no_connection(
    listener: socket.socket, ranks: list[int], since: float
) -> None:
    listener.setblocking(False)
    known(listener).check(ranks, since)
    with pytest.raises(BlockingIOError):
        listener.accept()


# ---- a leader that waits for those who share its memory --------------------------------------------------


class FailingStore(PrefixStore):
    """Fails who asks it whether a rank goes apart."""

    kind: type[Exception]

    def check(self, keys: Any) -> bool:
        if keys == [rendezvous._APART]:
            raise self.kind("the connection has ended")
        return super().check(keys)


def lose_the_store(rank: int, size: int, kind: type[Exception]) -> tuple[type, int, str]:
    store = current_store()
    group_store = FailingStore("group", store)
    group_store.kind = kind

    def never_follow(*_: Any) -> None:
        store.wait(["lost"])
        raise PeerLostError("enough", 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous._Forming, "_follow", never_follow)
        with pytest.raises(DistError) as caught:
            ProcessGroupHost(group_store, rank, size, LIMIT, group_name="group")
    store.set("lost", "")
    store.set(f"done{rank}", "")
    store.wait([f"done{each}" for each in range(size)])
    return type(caught.value), caught.value.rank, str(caught.value)


@pytest.mark.parametrize("kind", [DistNetworkError, torch_dist.DistNetworkError, RuntimeError])
def test_a_rank_is_not_at_fault_where_the_store_fails(kind: type[Exception]) -> None:
    found, rank, text = run_ranks(lose_the_store, 2, kind)[0]
    assert (found, rank) == (DistNetworkError, -1)
    assert text.startswith("[rank 0] ")
    assert "the store failed; whoever kept it may have died: the connection has ended" in text


def go_apart_late(rank: int, size: int) -> float:
    store = current_store()
    group_store = PrefixStore("group", store)

    def follow_nobody(*_: Any) -> None:
        store.wait(["looked"])

    def see_the_socket_close(address: str) -> bool:
        store.set("looked", "")
        group_store.wait([f"{rendezvous._APART}/1", rendezvous._APART])
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous._Forming, "_follow", follow_nobody)
        if rank == 0:
            patch.setattr(rendezvous, "socket_has_gone", see_the_socket_close)
        group = ProcessGroupHost(group_store, rank, size, LIMIT, group_name="group")
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    group.shutdown()
    return tensor.item()


def test_a_rank_that_goes_apart_is_not_taken_for_dead() -> None:
    assert run_ranks(go_apart_late, 2) == [2.0, 2.0]


# ---- what it asks of the store -----------------------------------------------------------------------------


def form(rank: int, size: int) -> tuple[int, int, int]:
    store = current_store()
    counted = CountedStore("counted", store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_LOOK_AGAIN", LIMIT)  # else whoever waits long asks more
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
        # The last ones of the two exchanges look for all.
        most = [sorted(found[what] for found in results)[-3] for results in (few, many)]
        assert most[1] <= most[0] + POLLS
