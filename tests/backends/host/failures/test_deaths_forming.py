"""Ranks that die while a group forms or ends: those whom they met name them, before any time limit.

A victim that has met nobody when it dies can only be missed; the time limit says who did not come.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from census import census, growth
from harness import Died, current_store, run_ranks, run_world

import collectives as dist
from collectives.backends.host import ProcessGroupHost
from collectives.backends.host import rendezvous as host_bootstrap
from collectives.store import PrefixStore

LIMIT = timedelta(seconds=20)
SHORT = timedelta(seconds=1)
"""Time limit of a group whose victim meets nobody."""
LATE_S = 0.25
"""How much later than the victim the last rank comes, where there is one to wait for."""


def die(store):
    store.set("died", "")
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(call, store):
    """Makes this process die at a call of the bootstrap, such as ``"after _Forming._lead"``."""
    when, path = call.split()
    names = path.split(".")
    owner = host_bootstrap if names[0] in {"_Forming", "told"} else host_bootstrap._native
    for name in names[:-1]:
        owner = getattr(owner, name)
    function = getattr(owner, names[-1])

    def deadly(*arguments, **options):
        if when == "before":
            die(store)
        function(*arguments, **options)
        die(store)

    setattr(owner, names[-1], deadly)


def form(rank, size, victim, call, late, limit):
    store = current_store()
    store.check(["died"])  # opens the connection
    before = census()
    if rank == victim:
        die_at(call, store)
    elif rank == late:
        store.wait(["died"])
        time.sleep(LATE_S)
    group, error = None, None
    try:
        group = ProcessGroupHost(PrefixStore("group", store), rank, size, limit, group_name="group")
        group.allreduce([torch.ones(3)]).wait()
    except dist.DistError as caught:
        error = caught
    if group is not None:
        group.shutdown()
    assert error is not None, f"rank {rank} has a group without rank {victim}"
    kind, text, lost = type(error), str(error), getattr(error, "rank", None)
    group = error = None
    return kind, lost, text, growth(before)


def complaints_of(results, victim, kind, lost, said):
    found = []
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        is_kind, is_lost, text, left = result
        if (is_kind, is_lost) != (kind, lost) or not re.search(said, text) or left:
            found.append(f"rank {rank}, left {left}: {is_kind.__name__}({is_lost}): {text}")
    return "\n".join(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("placement", "victim", "call", "late"),
    [
        ("aaa", 1, "before told", 2),
        ("aaa", 0, "before told", 2),
        ("abb", 1, "before told", 2),
        ("aaa", 1, "before BootstrapFollower.answered", None),
        ("aaa", 1, "after BootstrapFollower.attach", None),
        ("aaa", 1, "after BootstrapFollower.await_release", None),
        ("aaa", 0, "after BootstrapLeader.accept", None),
        ("aaa", 0, "before BootstrapLeader.release", None),
        ("aaa", 0, "after BootstrapLeader.release", None),
        ("aab", 1, "before BootstrapFollower.answered", None),
        ("aab", 1, "after BootstrapFollower.await_release", None),
        ("aab", 0, "before _Forming.listen", None),
        ("aab", 1, "before _Forming.listen", None),
        ("aab", 1, "before _Forming.link", None),
        ("aab", 2, "before _Forming.link", None),
        ("abc", 0, "before _Forming.link", None),
    ],
)
def test_rank_that_dies_while_the_group_forms_is_named(placement, victim, call, late):
    arguments = (victim, call, late, LIMIT)
    results = run_ranks(form, 3, *arguments, isolated=True, lost=[victim], placement=placement)
    assert results[victim] == Died(-signal.SIGKILL)
    complaints = complaints_of(results, victim, dist.PeerLostError, victim, f"rank {victim} ")
    assert not complaints, complaints


def come_last_of_all(rank, size, victim, step):
    """A rank dies once it has published where it is, and the last one does not until that is known."""
    store = current_store()
    store.check(["died"])  # opens the connection
    before = census()
    forming = host_bootstrap._Forming
    tell = getattr(forming, step)

    def tell_and_die(*arguments):
        host_bootstrap.told = lambda *_: die(store)  # asked once the rank has published and waits
        return tell(*arguments)

    def come_after(*arguments):
        store.wait(["named"])
        return tell(*arguments)

    if rank == victim:
        setattr(forming, step, tell_and_die)
    elif rank == size - 1:
        setattr(forming, step, come_after)
    error = None
    try:
        ProcessGroupHost(PrefixStore("group", store), rank, size, LIMIT, group_name="group")
    except dist.DistError as caught:
        error = caught
    store.set("named", "")
    kind, text, lost = type(error), str(error), getattr(error, "rank", None)
    error = None
    return kind, lost, text, growth(before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("placement", "victim", "step"),
    [
        ("aaa", 1, "share_memory"),
        ("aab", 0, "share_memory"),
        ("abc", 1, "listen"),
        ("abb", 0, "listen"),
        ("aab", 1, "listen"),
    ],
)
def test_who_dies_is_named_though_another_rank_is_still_missing(placement, victim, step):
    results = run_ranks(come_last_of_all, 3, victim, step, isolated=True, lost=[victim], placement=placement)
    assert results[victim] == Died(-signal.SIGKILL)
    complaints = complaints_of(results, victim, dist.PeerLostError, victim, f"rank {victim} ")
    assert not complaints, complaints


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("placement", "victim", "call"),
    [
        ("aaa", 1, "before _Forming.share_memory"),
        ("abc", 0, "before _Forming.share_memory"),
        ("abb", 0, "before _Forming.listen"),
    ],
)
def test_rank_that_dies_before_it_met_others_is_missed(placement, victim, call):
    arguments = (victim, call, None, SHORT)
    results = run_ranks(form, 3, *arguments, isolated=True, lost=[victim], placement=placement)
    assert results[victim] == Died(-signal.SIGKILL)
    said = rf"rank {victim} did not come within 1 s"
    complaints = complaints_of(results, victim, dist.CollectiveTimeoutError, victim, said)
    assert not complaints, complaints


def aborted(group, store):
    group.fail(dist.GroupAbortedError("rank 0 has had enough", 0))


def dead(group, store):
    store.wait(["died"])


def precede(rank, size, happens):
    """Something happens on the machine of ranks 0 and 1 before rank 2 connects with its leader."""
    store = current_store()
    attempt, native_group = host_bootstrap._Forming, host_bootstrap._native.HostGroup

    def make(*arguments):
        if rank == 2:
            store.wait(["happened"])
            time.sleep(LATE_S)  # the leader's thread looks every tenth of a second
        group = native_group(*arguments)
        if rank == 1 and happens is dead:
            die(store)
        if rank == 0:
            happens(group, store)
            store.set("happened", "")
        return group

    host_bootstrap._native.HostGroup = make
    if rank != 2:
        attempt.link = lambda *_: None  # it would end what this rank is to tell rank 2 of
    error = None
    try:
        group = ProcessGroupHost(PrefixStore("group", store), rank, size, LIMIT, group_name="group")
        if rank == 2:
            group.allreduce([torch.ones(3)]).wait()
    except dist.DistError as caught:
        error = caught
    store.set(f"done{rank}", "")
    store.wait(["done2"])
    return type(error), str(error), getattr(error, "rank", None)


@pytest.mark.parametrize(
    ("happens", "kind", "said"),
    [(aborted, dist.GroupAbortedError, "rank 0 has had enough"), (dead, dist.PeerLostError, "rank 1 ")],
)
def test_a_machine_that_links_up_late_hears_what_happened_before(happens, kind, said):
    lost = [1] if happens is dead else []
    results = run_ranks(precede, 3, happens, isolated=True, lost=lost, placement="aab")
    found, text, rank = results[2]
    assert found is kind, text
    assert said in text
    assert rank == (1 if happens is dead else 0)


def make_another(rank, size, victim, delay, split):
    """Makes a group within a world while, or after, one of its members dies; returns how that ends."""
    store = current_store()
    store.check(["died"])
    dist.barrier()
    if rank == victim:
        time.sleep(delay)
        die(store)
    if delay == 0:
        store.wait(["died"])
    error = None
    try:
        dist.split_group(split_ranks=[[0, 1, 2]]) if split else dist.new_group([2, 1, 0])
    except dist.DistError as caught:
        error = caught
    alone = dist.new_group([rank], use_local_synchronization=True)  # needs nobody who has died
    assert alone.size() == 1
    return type(error), getattr(error, "rank", None), str(error)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("placement", "backend", "victim", "delay"),
    [
        ("aaa", "host", 2, 0.0),
        ("aaa", "cpu:host", 0, 0.3),
        ("aab", "host", 1, 0.3),
        ("aab", "host", 2, 0.0),
        ("aaa", "round_robin", 1, 0.0),
        ("aaa", "gloo", 1, 0.3),
    ],
)
def test_a_group_within_a_world_is_refused_where_a_member_has_died(placement, backend, victim, delay, split):
    arguments = (victim, delay, split)
    results = run_world(
        make_another, 3, *arguments, backend=backend, isolated=True, lost=[victim], placement=placement
    )
    assert results[victim] == Died(-signal.SIGKILL)
    for rank, result in enumerate(results):
        if rank != victim:
            kind, lost, text = result
            assert (kind, lost) == (dist.PeerLostError, victim), text


def leave(rank, size, victim, delay):
    """Ends a group in which a rank dies meanwhile; returns what a survivor saw."""
    store = current_store()
    store.check(["died"])
    before = census()
    group = ProcessGroupHost(PrefixStore("group", store), rank, size, LIMIT, group_name="group")
    group.barrier().wait()
    if rank == victim:
        threading.Timer(delay, die, (store,)).start()
        group.allreduce([torch.ones(400_000)])
        group.shutdown()
        time.sleep(5)
    work = group.allreduce([torch.ones(400_000)])
    begin = time.monotonic()
    group.shutdown()  # finishes what was issued, or fails it
    took = time.monotonic() - begin
    assert work.is_completed()
    error = work.exception()
    lost = error.rank if isinstance(error, dist.PeerLostError) else None
    told = None if error is None else f"{type(error).__name__}: {error}"
    del work, group, error
    return lost, told, took, growth(before)


@pytest.mark.parametrize(
    ("placement", "victim", "delay"), [("aaa", 0, 0.0), ("aaa", 1, 0.002), ("aab", 0, 0.001), ("abc", 1, 0.0)]
)
def test_rank_that_dies_while_the_group_ends_holds_nobody_up(placement, victim, delay):
    results = run_ranks(leave, 3, victim, delay, isolated=True, lost=[victim], placement=placement)
    for rank, result in enumerate(results):
        if rank != victim:
            lost, told, took, left = result
            assert took < LIMIT.total_seconds() / 2, result
            assert not left, result
            assert told is None or lost == victim, result
