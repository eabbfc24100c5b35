"""What ranks publish in the store while a host group is formed, checked before it is used.

Whoever reaches the store can write to it, and another program may use the same keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.errors import DistBackendError

__all__ = [
    "Checked",
    "addresses",
    "failure",
    "invitation",
    "listener",
    "location",
    "plan",
    "read",
    "socket_address",
]

Checked = dict[str, Any]
"""A record whose fields have been checked."""

_T = TypeVar("_T")
_MOST_PORTS = 2**16


def read(value: bytes, key: str, check: Callable[[Any], _T]) -> _T:
    """Returns what a key holds, as ``check`` returns it.

    Raises:
        DistBackendError: it is not as ranks publish it.
    """
    try:
        return check(json.loads(value))
    except ValueError as error:
        raise DistBackendError(
            f"the store holds something unusable under {key!r}: {error}; no other program may use the same "
            "store and prefix, and all ranks must run the same version"
        ) from error


def invitation(record: Any) -> Checked:
    """Checks rank 0's record: where it runs, and the address of its unix socket."""
    return _fields(record, place=str, address=str)


def socket_address(record: Any) -> str:
    """Checks the address of a leader's unix socket."""
    _demand(isinstance(record, str), f"the address {record!r}")
    return str(record)


def location(record: Any) -> Checked:
    """Checks where a rank runs that does not share rank 0's memory."""
    return _fields(record, place=str, system=str)


def plan(record: Any, size: int) -> Checked:
    """Checks which ranks may share memory: each of them stands in one machine."""
    fields = _fields(record, machines=list, one_system=bool, tuning=dict)
    machines = fields["machines"]
    _demand(all(isinstance(one, list) and one for one in machines), "a machine without ranks")
    ranks = [_rank(rank, size) for one in machines for rank in one]
    _demand(sorted(ranks) == list(range(size)), f"ranks {sorted(ranks)} in a group of {size}")
    _demand(all(_is_number(number) for number in fields["tuning"].values()), "thresholds that are no numbers")
    return fields


def listener(record: Any, size: int) -> Checked:
    """Checks a rank's leader, its host and where it listens."""
    fields = _fields(record, leader=int, host=str, places=list)
    _rank(fields["leader"], size)
    _demand(bool(fields["places"]), "no address")
    for place in fields["places"]:
        _demand(isinstance(place, list) and len(place) == 2, f"the address {place!r}")
        address, port = place
        _demand(isinstance(address, str), f"the address {address!r}")
        _demand(_is_number(port) and 0 < port < _MOST_PORTS, f"the port {port!r}")
    return fields


def addresses(record: Any, size: int) -> Checked:
    """Checks the listeners of all ranks and the group's secret."""
    fields = _fields(record, ranks=list, secret=str)
    ranks = [listener(one, size) for one in fields["ranks"]]
    _demand(len(ranks) == size, f"the addresses of {len(ranks)} ranks in a group of {size}")
    led = [one["leader"] for one in ranks]
    _demand(all(led[leader] == leader for leader in led), f"leaders {led} that are led themselves")
    return fields


def failure(record: Any) -> Checked:
    """Checks the failure of a rank: the name of its error's class, the lost rank or -1, and the text."""
    return _fields(record, kind=str, rank=int, text=str)


def _fields(record: Any, **kinds: type) -> Checked:
    """Returns the fields of a record, each of its type."""
    _demand(isinstance(record, dict), f"{record!r} instead of a record")
    for name, kind in kinds.items():
        _demand(type(record.get(name)) is kind, f"{name} = {record.get(name)!r}")
    return {name: record[name] for name in kinds}


def _rank(rank: Any, size: int) -> int:
    _demand(_is_number(rank) and 0 <= rank < size, f"rank {rank!r} in a group of {size}")
    return int(rank)


def _is_number(value: Any) -> bool:
    return type(value) is int


def _demand(true: bool, found: str) -> None:
    if not true:
        raise ValueError(f"it has {found}")
