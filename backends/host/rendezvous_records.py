"""What ranks publish in the store while a host group is formed, checked before it is used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from collectives.backends.host import threads
from collectives.errors import DistNetworkError
from collectives.store.encryption import ENCRYPTION, Encryption
from collectives.store.process import kernel_of
from collectives.store.records import Checked, demand, fields

_KEY = re.compile("([0-9a-f]{64})?")
_ADDRESS = re.compile("[a-z0-9-]{1,100}")
_CORES = re.compile("[0-9a-f]{1,4096}")
_MOST_PORTS = 2**16


def location(record: Any) -> Checked:
    """Checks where a rank runs: its place, system, unix socket, and the random digits of a key.

    The digits are left out where the job has a secret. With it come which connections the rank encrypts, its
    threads and cores, and, of rank 0, thresholds.
    """
    found = fields(
        record,
        place=str,
        system=str,
        address=str,
        key=str,
        encryption=int,
        tuning=dict,
        threads=int,
        chosen=bool,
        cores=str,
        granted=int,
    )
    _demand_name(found["address"])
    _demand_key(found["key"])
    known = [*map(int, Encryption)]
    demand(found["encryption"] in known, f"encryption {found['encryption']}")
    _demand_tuning(found["tuning"])
    demand(0 < found["threads"] <= threads.MOST, f"{found['threads']} threads")
    demand(_CORES.fullmatch(found["cores"]) is not None, f"the cores {found['cores']!r}")
    demand(found["granted"] > 0, f"the time of {found['granted']} cores")
    return found


def new_plan(locations: Sequence[Checked]) -> Checked:
    """Returns what :func:`plan` takes, from the locations of all ranks.

    Raises:
        DistNetworkError: a rank would encrypt what it sends to others, and rank 0 would not, or the other way
            round.
    """
    machines: dict[str, list[int]] = {}
    for rank, one in enumerate(locations):
        machines.setdefault(one["place"], []).append(rank)
    kernels = [kernel_of(one["system"]) for one in locations]
    counts = Counter(kernels)
    one_system = len({one["system"] for one in locations}) == 1  # so that loopback reaches everyone
    encrypts = [Encryption(one["encryption"]).encrypts(not one_system) for one in locations]
    if len({*encrypts}) > 1:
        rank = encrypts.index(not encrypts[0])
        first, other = ("encrypts", "does not") if encrypts[0] else ("does not encrypt", "does")
        raise DistNetworkError(
            f"rank 0 {first} its connections with other machines, and rank {rank} {other}; set {ENCRYPTION} "
            "to the same on all ranks",
            rank,
        )
    return {
        "machines": list(machines.values()),
        "addresses": [one["address"] for one in locations],
        "keys": [locations[leader]["key"] for leader, *_ in machines.values()],
        "one_system": one_system,
        "encrypts": encrypts[0],
        "ranks_on_host": [counts[kernel] for kernel in kernels],
        "tuning": locations[0]["tuning"],
        "threads": threads.agreed(locations),
        "cores": threads.shares(locations),
    }


def plan(record: Any, size: int) -> Checked:
    """Checks which ranks may share memory, each of them in one machine, and how many ranks its host runs.

    With it come the unix sockets of all ranks, the digits of each machine's first, the threads of each rank,
    and the cores that it has for itself.
    """
    found = fields(
        record,
        machines=list,
        addresses=list,
        keys=list,
        one_system=bool,
        encrypts=bool,
        ranks_on_host=list,
        tuning=dict,
        threads=list,
        cores=list,
    )
    machines = found["machines"]
    demand(all(isinstance(one, list) and one for one in machines), "a machine without ranks")
    ranks = [_rank(rank, size) for one in machines for rank in one]
    demand(sorted(ranks) == list(range(size)), f"ranks {sorted(ranks)} in a group of {size}")
    demand(len(found["addresses"]) == size, f"{len(found['addresses'])} addresses of {size} ranks")
    for address in found["addresses"]:
        _demand_name(address)
    demand(len(found["keys"]) == len(machines), f"{len(found['keys'])} keys of {len(machines)} machines")
    for key in found["keys"]:
        _demand_key(key)
    counts = found["ranks_on_host"]
    plausible = len(counts) == size and all(_is_number(count) and 0 < count <= size for count in counts)
    demand(plausible, f"{counts} ranks on the hosts of {size}")
    _demand_tuning(found["tuning"])
    for name, most in (("threads", threads.MOST), ("cores", 4 * 4096)):
        numbers = found[name]
        plausible = len(numbers) == size and all(_is_number(one) and 0 < one <= most for one in numbers)
        demand(plausible, f"{name} of {size} ranks: {numbers}")
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
        ranks: the listeners of all ranks.

    Raises:
        DistNetworkError: a rank has another number of addresses than rank 0.
    """
    for rank, one in enumerate(ranks):
        if len(one["places"]) != len(ranks[0]["places"]):
            raise DistNetworkError(
                f"rank {rank} on {one['host']!r} offers {len(one['places'])} network addresses and "
                f"rank 0 on {ranks[0]['host']!r} {len(ranks[0]['places'])}; "
                "COLLECTIVES_SOCKET_IFNAME must name equally many interfaces on all ranks",
                rank,
            )
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


def _demand_name(address: Any) -> None:
    right = isinstance(address, str) and _ADDRESS.fullmatch(address) is not None
    demand(right, f"the address {address!r}")


def _demand_key(key: Any) -> None:
    demand(isinstance(key, str) and _KEY.fullmatch(key) is not None, "a key of another length")


def _demand_tuning(tuning: dict[str, Any]) -> None:
    demand(all(map(_is_number, tuning.values())), "thresholds that are no numbers")


def _rank(rank: Any, size: int) -> int:
    if not (_is_number(rank) and 0 <= rank < size):
        demand(False, f"rank {rank!r} in a group of {size}")
    return int(rank)


def _is_number(value: Any) -> bool:
    return type(value) is int
