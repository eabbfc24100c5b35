"""What ranks publish in the store while a host group is formed, checked before it is used."""

from __future__ import annotations

import re
from typing import Any

from collectives.store.error_records import error_of
from collectives.store.records import Checked, demand, fields

__all__ = [
    "addresses",
    "apart",
    "failure",
    "invitation",
    "listener",
    "location",
    "plan",
]

_KEY = re.compile("([0-9a-f]{64})?")
_MOST_PORTS = 2**16


def invitation(record: Any) -> Checked:
    """Checks rank 0's record: where it runs, on which system, its unix socket; or why it failed."""
    if isinstance(record, dict) and "failed" in record:
        return {"failed": failure(record["failed"])}
    return fields(record, place=str, system=str, address=str)


def location(record: Any, size: int) -> Checked:
    """Checks where a rank runs that does not share rank 0's memory."""
    return apart(record, size) | fields(record, place=str, system=str)


def apart(record: Any, size: int) -> Checked:
    """Checks which rank cannot share its leader's memory."""
    return {"rank": _rank(fields(record, rank=int)["rank"], size)}


def plan(record: Any, size: int) -> Checked:
    """Checks which ranks may share memory: each of them stands in one machine."""
    found = fields(record, machines=list, one_system=bool, tuning=dict)
    machines = found["machines"]
    demand(all(isinstance(one, list) and one for one in machines), "a machine without ranks")
    ranks = [_rank(rank, size) for one in machines for rank in one]
    demand(sorted(ranks) == list(range(size)), f"ranks {sorted(ranks)} in a group of {size}")
    demand(all(_is_number(number) for number in found["tuning"].values()), "thresholds that are no numbers")
    return found


def listener(record: Any, size: int) -> Checked:
    """Checks a rank's leader, its host and where it listens."""
    found = fields(record, leader=int, host=str, places=list)
    _rank(found["leader"], size)
    demand(bool(found["places"]), "no address")
    for place in found["places"]:
        demand(isinstance(place, list) and len(place) == 2, f"the address {place!r}")
        address, port = place
        demand(isinstance(address, str), f"the address {address!r}")
        demand(_is_number(port) and 0 < port < _MOST_PORTS, f"the port {port!r}")
    return found


def addresses(record: Any, size: int) -> Checked:
    """Checks the listeners of all ranks and the group's key, which is empty where the job has a secret."""
    found = fields(record, ranks=list, key=str)
    demand(_KEY.fullmatch(found["key"]) is not None, "a key of another length")
    ranks = [listener(one, size) for one in found["ranks"]]
    demand(len(ranks) == size, f"the addresses of {len(ranks)} ranks in a group of {size}")
    led = [one["leader"] for one in ranks]
    demand(all(led[leader] == leader for leader in led), f"leaders {led} that are led themselves")
    return found


def failure(record: Any) -> Checked:
    """Checks the error of a rank."""
    error_of(record)
    return dict(record)


def _rank(rank: Any, size: int) -> int:
    demand(_is_number(rank) and 0 <= rank < size, f"rank {rank!r} in a group of {size}")
    return int(rank)


def _is_number(value: Any) -> bool:
    return type(value) is int
