"""Which cores a rank has, of those that this process may run on."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from collectives.threads import QUOTA, granted_cores

_CPUS = Path("/sys/devices/system/cpu")


def threads_of_a_rank(ranks: int, quota: Path = QUOTA) -> int:
    """Returns how many threads each of several ranks can have a core for; at least 1.

    Args:
        ranks: number of ranks on this machine.
        quota: where the kernel tells how much time of cores a container gets.
    """
    return max(1, int(granted_cores(len(os.sched_getaffinity(0)), quota) / ranks))


def shares(ranks: int, described: Path = _CPUS) -> list[set[int]]:
    """Shares the cores out: each rank gets neighbours, which have a socket and a node of memory in common.

    The threads of a physical core stay together where there is a physical core for each rank.

    Args:
        ranks: number of ranks.
        described: where the kernel describes the cores.

    Raises:
        ValueError: there are fewer cores than ranks.
    """
    usable = sorted(os.sched_getaffinity(0))
    if ranks > len(usable):
        raise ValueError(
            f"{ranks} ranks cannot have a core each: {len(usable)} can be used; leave bind=True out"
        )
    physical: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for core in usable:
        physical[_place(described / f"cpu{core}", core)].append(core)
    whole = [physical[place] for place in sorted(physical)]
    if len(whole) < ranks:
        whole = [[core] for cores in whole for core in cores]
    ends = [len(whole) * rank // ranks for rank in range(ranks + 1)]
    return [{core for cores in whole[ends[r] : ends[r + 1]] for core in cores} for r in range(ranks)]


def _place(folder: Path, core: int) -> tuple[int, int, int]:
    """Returns node of memory, socket and physical core; the core itself where the kernel does not tell."""
    node = next((int(link.name[4:]) for link in folder.glob("node[0-9]*")), 0)
    try:
        socket, physical = (
            int((folder / "topology" / name).read_text("utf-8"))
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return node, 0, core
    return node, socket, physical


def checked(cores: Sequence[Collection[int]], ranks: int) -> list[set[int]]:
    """Returns the cores that a user names for each rank.

    Raises:
        ValueError: they are not disjoint sets for all ranks, of cores that this process may run on.
    """
    if len(cores) != ranks:
        raise ValueError(f"bind names the cores of {len(cores)} ranks, but nproc is {ranks}")
    chosen = [set(one) for one in cores]
    usable = os.sched_getaffinity(0)
    for rank, one in enumerate(chosen):
        if not one or not one <= usable:
            raise ValueError(
                f"bind gives rank {rank} the cores {sorted(one)}, but must give it some of {sorted(usable)}"
            )
    twice = sorted(
        core for core, count in Counter(core for one in chosen for core in one).items() if count > 1
    )
    if twice:
        raise ValueError(f"bind gives the cores {twice} to more than one rank")
    return chosen


@contextlib.contextmanager
def starting_on(cores: Collection[int] | None) -> Iterator[None]:
    """Has processes that this thread starts run on some cores only; ``None`` for all of this thread's."""
    if cores is None:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
