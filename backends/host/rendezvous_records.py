"""What ranks publish in the store while a host group is formed, checked before it is used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from collectives.store.process import kernel_of
from collectives.store.records import Checked, demand, error_of, fields

__all__ = [
    "address",
    "address_book",
    "addresses",
    "apart",
    "failure",
    "invitation",
    "listener",
    "location",
    "new_plan",
    "plan",
]

_KEY = re.compile("([0-9a-f]{64})?")
_ADDRESS = re.compile("[a-z0-9-]{1,100}")
_MOST_PORTS = 2**16


def invitation(record: Any) -> Checked:
    """Checks rank 0's record: where it runs, on which system, its unix socket, the digits of the group's key.

    Instead, it may say why it failed. The digits are left out where the job has a secret.
    """
    if isinstance(record, dict) and "failed" in record:
        return {"failed": failure(record["failed"])}
    found = fields(record, place=str, system=str, address=str, key=str)
    address(found["address"])
    demand(_KEY.fullmatch(found["key"]) is not None, "a key of another length")
    return found


def address(record: Any) -> str:
    """Checks the unix socket of a machine's leader."""
    demand(isinstance(record, str) and _ADDRESS.fullmatch(record) is not None, f"the address {record!r}")
    return str(record)


def location(record: Any, size: int) -> Checked:
    """Checks where a rank runs that does not share rank 0's memory."""
    return apart(record, size) | fields(record, place=str, system=str)


def apart(record: Any, size: int) -> Checked:
    """Checks which rank cannot share its leader's memory."""
    return {"rank": _rank(fields(record, rank=int)["rank"], size)}


def new_plan(machines: list[list[int]], systems: Sequence[str], tuning: dict[str, int]) -> Checked:
    """Returns what :func:`plan` takes.

    Args:
        machines: the ranks of each.
        systems: on which each rank runs.
        tuning: thresholds, the same for all: ranks that took different ways would wait for ever.
    """
    kernels = [kernel_of(system) for system in systems]
    counts = Counter(kernels)
    return {
        "machines": machines,
        "one_system": len({*systems}) == 1,  # so that loopback reaches everyone
        "ranks_on_host": [counts[kernel] for kernel in kernels],
        "tuning": tuning,
    }


def plan(record: Any, size: int) -> Checked:
    """Checks which ranks may share memory, each of them in one machine, and how many ranks its host runs."""
    found = fields(record, machines=list, one_system=bool, ranks_on_host=list, tuning=dict)
    machines = found["machines"]
    demand(all(isinstance(one, list) and one for one in machines), "a machine without ranks")
    ranks = [_rank(rank, size) for one in machines for rank in one]
    demand(sorted(ranks) == list(range(size)), f"ranks {sorted(ranks)} in a group of {size}")
    counts = found["ranks_on_host"]
    plausible = len(counts) == size and all(_is_number(count) and 0 < count <= size for count in counts)
    demand(plausible, f"{counts} ranks on the hosts of {size}")
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


def address_book(ranks: Sequence[Checked]) -> Checked:
    """Returns what :func:`addresses` takes: lists, so that each rank checks those of many with few calls.

    Args:
        ranks: the listeners of all ranks, equally many addresses of each.
    """
    leaders = [one["leader"] for one in ranks]
    places = [place for one in ranks for place in one["places"]]
    return {
        "leaders": leaders,
        "hosts": [ranks[leader]["host"] for leader in dict.fromkeys(leaders)],
        "addresses": [address for address, _ in places],
        "ports": [port for _, port in places],
    }


def addresses(record: Any, size: int) -> Checked:
    """Checks who leads each rank, the machines' hosts and the listeners of all ranks.

    Returns:
        ``machines``, the ranks of each; ``hosts``, one for each; and ``places`` of each rank.
    """
    found = fields(record, leaders=list, hosts=list, addresses=list, ports=list)
    machines: dict[int, list[int]] = {}
    for rank, leader in enumerate(found["leaders"]):
        machines.setdefault(_rank(leader, size), []).append(rank)
    led = found["leaders"]
    demand(len(led) == size, f"the leaders of {len(led)} ranks in a group of {size}")
    if not all(led[leader] == leader for leader in machines):
        demand(False, f"leaders {led} that are led themselves")
    hosts, ports, texts = found["hosts"], found["ports"], found["addresses"]
    demand(len(hosts) == len(machines), f"the hosts of {len(hosts)} of {len(machines)} machines")
    lanes = len(ports) // size
    demand(lanes > 0 and len(ports) == len(texts) == lanes * size, f"{len(ports)} ports of {size} ranks")
    if {*map(type, hosts), *map(type, texts)} != {str}:
        demand(False, f"hosts {hosts} and addresses {texts} that are not all text")
    if {*map(type, ports)} != {int} or not 0 < min(ports) <= max(ports) < _MOST_PORTS:
        demand(False, f"{ports}, which are not all ports")
    places = list(zip(texts, ports, strict=True))
    return {
        "machines": list(machines.values()),
        "hosts": hosts,
        "places": [places[at : at + lanes] for at in range(0, len(places), lanes)],
    }


def failure(record: Any) -> Checked:
    """Checks the error of a rank."""
    error_of(record)
    return dict(record)


def _rank(rank: Any, size: int) -> int:
    if not (_is_number(rank) and 0 <= rank < size):
        demand(False, f"rank {rank!r} in a group of {size}")
    return int(rank)


def _is_number(value: Any) -> bool:
    return type(value) is int
