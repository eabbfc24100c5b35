"""What ranks of the host backend read from the store is checked before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from harness import current_store, run_ranks

from collectives import DistError, DistStoreError
from collectives.backends.host import ProcessGroupHost
from collectives.backends.host import rendezvous_records as records
from collectives.store.records import read

PLAN = records.new_plan([[0, 2], [1]], ["kernel net"] * 3, {"one_shot_bytes": 1})
LISTENER = {"leader": 0, "host": "a", "places": [["127.0.0.1", 80]]}
OTHER = {**LISTENER, "leader": 1}
INVITATION = {"place": "here", "system": "this", "address": "a-name", "key": "0f" * 32}
ADDRESSES = records.address_book([LISTENER, OTHER, LISTENER])

invitation = records.invitation
plan = partial(records.plan, size=3)
listener = partial(records.listener, size=3)
addresses = partial(records.addresses, size=3)


@pytest.mark.parametrize(("check", "record"), [(plan, PLAN), (listener, LISTENER), (invitation, INVITATION)])
def test_records_that_ranks_publish_are_taken(check: Callable[[Any], Any], record: Any) -> None:
    assert read(None, "key", json.dumps(record).encode(), check) == record


def test_a_plan_counts_the_ranks_of_each_host_in_all_its_containers() -> None:
    made = records.new_plan([[0], [1], [2]], ["kernel net:[1]", "kernel net:[2]", "another net:[1]"], {})
    assert (made["one_system"], made["ranks_on_host"]) == (False, [2, 2, 1])
    assert PLAN["one_system"]
    assert PLAN["ranks_on_host"] == [3, 3, 3]


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
        (records.invitation, [], r"\[\] instead of a record"),
        (records.invitation, {"place": "here", "system": "this"}, "address = None"),
        (plan, {**PLAN, "machines": [[0, 2], [1, 2]]}, r"ranks \[0, 1, 2, 2\] in a group of 3"),
        (plan, {**PLAN, "machines": [[0, 2]]}, r"ranks \[0, 2\] in a group of 3"),
        (plan, {**PLAN, "machines": [[0, 2], [-1]]}, "rank -1"),
        (plan, {**PLAN, "machines": [[0, 2], ["1"]]}, "rank '1'"),
        (plan, {**PLAN, "machines": [[0, 1, 2], []]}, "a machine without ranks"),
        (plan, {**PLAN, "one_system": 1}, "one_system = 1"),
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
        (records.invitation, {**INVITATION, "key": 7}, "key = 7"),
        (records.invitation, {**INVITATION, "key": "00"}, "a key of another length"),
        (records.invitation, {**INVITATION, "address": "a/../b"}, "the address 'a/../b'"),
        (records.address, "", "the address ''"),
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
        store.set("host/address", json.dumps([1, 2]))
        with pytest.raises(DistError) as caught:
            ProcessGroupHost(store, rank, size)
        return str(caught.value)
    return ""


def test_a_group_does_not_form_on_what_another_program_left() -> None:
    message = run_ranks(_form_after_another_program, 2)[1]
    assert message.startswith(
        "[rank 1] host group '' of 2: the store holds something unusable under 'host/address'"
    )
