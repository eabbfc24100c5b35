"""Records of the store, changed at random: each is refused with our error, or is what ranks can use."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from collectives import DistError, DistStoreError
from collectives.backends.host import rendezvous_records as records
from collectives.store.joining.standby import offer, succession
from collectives.store.records import as_bytes, as_text, error_of, read

SIZE = 3
COPIES = 600
LISTENER = {"leader": 0, "host": "a", "places": [["127.0.0.1", 80], ["::1", 65535]]}
LOCATION = {
    "place": "here",
    "system": "a net",
    "address": "name",
    "key": "",
    "encryption": 0,
    "tuning": {"one_shot_bytes": 1},
    "threads": 2,
    "chosen": False,
    "cores": "ff",
    "granted": 8,
}
ERROR = {
    "kind": "CollectiveTimeoutError",
    "text": "too late",
    "rank": 1,
    "missing_ranks": [1, 2],
    "operation": "all_reduce",
    "sequence": 7,
    "cause": None,
}
CORPUS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "location": (records.location, [LOCATION, {**LOCATION, "key": "00" * 32}]),
    "plan": (
        partial(records.plan, size=SIZE),
        [records.new_plan([LOCATION, {**LOCATION, "place": "there"}, LOCATION])],
    ),
    "listener": (partial(records.listener, size=SIZE), [LISTENER]),
    "addresses": (
        partial(records.addresses, size=SIZE),
        [records.address_book([LISTENER] * SIZE)],
    ),
    "error": (error_of, [ERROR, {**ERROR, "kind": "PeerLostError", "cause": ERROR}]),
    "offer": (offer, [{"serves": True, "standby": ["127.0.0.1", 80]}, {"serves": False, "standby": []}]),
    "succession": (partial(succession, size=SIZE), [{"server": 1, "addresses": [["a", 1], [], ["b", 2]]}]),
    "bytes": (as_bytes, ["00ff"]),
    "text": (as_text, ["all_reduce #2", "\u00e4"]),
}
"""By kind: what checks it, and records that ranks publish."""

ODD = [None, True, -1, 0, 3, 2**31, 2**63, 10**30, 1.5, 1e308, "", "x", [], [[]], {}, {"rank": 0}]


def changed(value: Any, chance: random.Random) -> Any:
    """Returns a copy in which a part is another one."""
    if chance.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        return chance.choice(ODD)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], *([changed(value[at], chance)] * chance.randrange(3)), *value[at + 1 :]]
    at = chance.choice(list(value))
    rest = {name: part for name, part in value.items() if name != at}
    return rest if chance.random() < 0.2 else {**value, at: changed(value[at], chance)}


def damaged(text: bytes, chance: random.Random) -> bytes:
    """Returns a copy with another byte, or without or with more of a part."""
    at, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    return chance.choice(
        [
            text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :],
            text[:at] + text[end:],
            text[:end] + text[at:],
            text[:at] + b"[" * 100_000 + text[at:],
        ]
    )


def numbers_of(error: DistError) -> Iterator[int]:
    yield from (error.rank, error.sequence, *error.missing_ranks)
    if isinstance(error.cause, DistError):
        yield from numbers_of(error.cause)


@pytest.mark.parametrize("kind", CORPUS)
def test_changed_records_do_no_harm(kind: str) -> None:
    check, published = CORPUS[kind]
    chance = random.Random(kind)  # the same changes in every run
    refused = 0
    for record in published:
        read(None, "key", json.dumps(record).encode(), check)
        for _ in range(COPIES // len(published)):
            value = json.dumps(changed(record, chance)).encode()
            if chance.random() < 0.3:
                value = damaged(value, chance)
            try:
                found = read(None, "key", value, check)
            except DistStoreError:
                refused += 1
                continue
            if isinstance(found, DistError):
                assert all(-1 <= number < 2**63 for number in numbers_of(found)), value
                assert all(number < 2**31 for number in (found.rank, *found.missing_ranks)), value
    assert refused > COPIES / 20
