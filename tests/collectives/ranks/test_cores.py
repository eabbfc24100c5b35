"""Cores of ranks: how they are shared out, and that ranks, with all their threads, stay on theirs."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

import collectives
from collectives.ranks.cores import shares, threads_of_a_rank

USABLE = sorted(os.sched_getaffinity(0))


def describe(folder: Path, cores: dict[int, tuple[int, int, int]]) -> Path:
    """Describes cores as the kernel does, each by its node, socket and physical core."""
    for number, (node, socket, physical) in cores.items():
        (folder / f"cpu{number}" / "topology").mkdir(parents=True)
        (folder / f"cpu{number}" / f"node{node}").mkdir()
        (folder / f"cpu{number}" / "topology" / "physical_package_id").write_text(f"{socket}\n", "utf-8")
        (folder / f"cpu{number}" / "topology" / "core_id").write_text(f"{physical}\n", "utf-8")
    return folder


def hyperthreaded(sockets: int, physical: int) -> dict[int, tuple[int, int, int]]:
    """Cores as Linux numbers them: first one thread of each physical core, then the other."""
    once = [(socket, socket, core) for socket in range(sockets) for core in range(physical)]
    return dict(enumerate([*once, *once]))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [{*range(8)}]),
        (2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (3, [{0, 4}, {1, 5}, {2, 6, 3, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (8, [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}]),
    ],
)
def test_threads_of_a_core_and_cores_of_a_socket_stay_together(tmp_path, monkeypatch, ranks, expected):
    folder = describe(tmp_path, hyperthreaded(sockets=2, physical=2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert shares(ranks, folder) == expected


def test_a_kernel_that_does_not_describe_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 4, 6})
    assert shares(2, tmp_path) == [{1}, {4, 6}]
    with pytest.raises(ValueError, match="4 ranks cannot have a core each: 3 can be used"):
        shares(4, tmp_path)


def places():
    """Returns on which cores a rank's threads may run, with one that it starts, and its OMP_NUM_THREADS."""
    found = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # that one has ended
            found.append(os.sched_getaffinity(int(task.name)))
    return set(map(frozenset, found)), os.environ["OMP_NUM_THREADS"]


@pytest.mark.skipif(len(USABLE) < 2, reason="one core here")
def test_ranks_stay_on_their_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first, second = shares(2)
    threads = str(min(len(first), len(second)))
    assert collectives.launch(places, bind=True) == [({frozenset(one)}, threads) for one in (first, second)]
    chosen = [{USABLE[1]}, {USABLE[0]}]
    assert collectives.launch(places, bind=chosen) == [({frozenset(one)}, "1") for one in chosen]
    assert os.sched_getaffinity(0) == set(USABLE)


@pytest.mark.usefixtures("preloaded_python")
def test_threads_of_ranks_that_are_not_bound(monkeypatch):
    everywhere = {frozenset(USABLE)}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert collectives.launch(places, nproc=1) == [(everywhere, str(len(USABLE)))]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert collectives.launch(places, nproc=1) == [(everywhere, "3")]


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ([[USABLE[0]]], "bind names the cores of 1 ranks, but nproc is 2"),
        ([[USABLE[0]], []], r"bind gives rank 1 the cores \[\], but must give it some of"),
        ([[USABLE[0]], [100_000]], r"bind gives rank 1 the cores \[100000\], but must give it some of"),
        ([[USABLE[0]], [USABLE[0]]], rf"bind gives the cores \[{USABLE[0]}\] to more than one rank"),
    ],
)
def test_cores_that_cannot_be(bind, message):
    with pytest.raises(ValueError, match=message):
        collectives.launch(places, nproc=2, bind=bind)


@pytest.mark.parametrize(
    ("told", "ranks", "threads"),
    [("max 100000", 2, 8), ("400000 100000", 2, 2), ("50000 100000", 1, 1), ("", 4, 4), (None, 1, 16)],
)
def test_a_containers_share_of_the_cores_counts(tmp_path, monkeypatch, told, ranks, threads) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    quota = tmp_path / "cpu.max"
    if told is not None:
        quota.write_text(told)
    assert threads_of_a_rank(ranks, quota) == threads
