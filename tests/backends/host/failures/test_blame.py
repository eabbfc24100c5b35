"""Who is named when something goes wrong: the rank at fault with its reason, never one that merely lives."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from harness import Died, current_store, run_ranks
from no_threads import no_threads
from ports import free_port

import collectives as dist
import collectives._native as _native
from collectives.backends.host import ProcessGroupHost
from collectives.backends.host import rendezvous as host_rendezvous
from collectives.store import PrefixStore
from collectives.store.records import publish, record_of

pytestmark = pytest.mark.usefixtures("preloaded_python")

LIMIT = timedelta(seconds=30)
RECORD = _native.OperationRecord(0)
SOON_S = 15.0
"""Seconds within which errors must be known; far below the time limit."""


def outcome(call):
    """Returns the error of a call and whether it came before the time limit."""
    began = time.monotonic()
    try:
        call()
    except dist.DistError as error:
        return type(error), error.rank, str(error), error.missing_ranks, time.monotonic() - began < SOON_S
    return None


def form_world(rank, size, port, spoil, operate=False):
    """Forms a world whose store lives with rank 0; ``spoil`` makes a rank fail in that."""
    spoil(rank)

    def join():
        dist.init_process_group(
            "host", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=LIMIT
        )
        if operate:
            dist.barrier()

    return outcome(join)


class Fails:
    """Makes a rank fail at a step of forming a group."""

    def __init__(self, victim, step, error):
        self.victim, self.step, self.error = victim, step, error

    def __call__(self, rank):
        def fail(*_):
            raise self.error

        if rank == self.victim:
            setattr(host_rendezvous._Forming, self.step, fail)


class HasFewDescriptors:
    """Leaves a rank, or all (``None``), room for few more open files."""

    def __init__(self, victim, more):
        self.victim, self.more = victim, more

    def __call__(self, rank):
        if self.victim in {None, rank}:
            highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
            for _ in range(highest):  # fill the gaps below
                if (fd := os.dup(0)) > highest:
                    os.close(fd)
                    break
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + self.more, hard))


@pytest.mark.parametrize(
    ("placement", "victim", "step"),
    [
        ("aaa", 0, "share_memory"),
        ("aaa", 0, "_lead"),
        ("aaa", 1, "_follow"),
        ("aab", 0, "listen"),
        ("aab", 2, "_lead"),
        ("abc", 0, "listen"),
    ],
)
@pytest.mark.parametrize(
    "error",
    [dist.errors.DistBackendError("no memory here"), OSError(12, "no memory here")],
    ids=["own", "os"],
)
@pytest.mark.sampled(3)
def test_all_hear_why_a_rank_fails_while_a_group_forms(placement, victim, step, error):
    spoil = Fails(victim, step, error)
    results = run_ranks(form_world_or_os_error, 3, free_port(), spoil, isolated=True, placement=placement)
    for rank, found in enumerate(results):
        if rank == victim and isinstance(error, OSError):
            assert found == "OSError"
            continue
        kind, named, text, _, soon = found
        assert (kind, named) == (dist.errors.DistBackendError, victim), (rank, found)
        assert f"[rank {victim}]" in text, (rank, text)
        assert "no memory here" in text, (rank, text)
        assert soon, (rank, found)


class HasNoThreads:
    """Gives a rank no thread when it has its part of the group's memory."""

    def __init__(self, victim):
        self.victim = victim

    def __call__(self, rank):
        if rank != self.victim:
            return
        native = host_rendezvous._native
        make = native.HostGroup

        def made(*arguments):
            with no_threads():
                return make(*arguments)

        native.HostGroup = made


@pytest.mark.parametrize(("placement", "victim"), [("aab", 0), ("aab", 1), ("abc", 2)])
@pytest.mark.sampled(1)
def test_all_hear_of_a_rank_that_cannot_start_its_thread(placement, victim):
    spoil = HasNoThreads(victim)
    # Who has linked up before learns it by the first operation.
    results = run_ranks(form_world, 3, free_port(), spoil, True, isolated=True, placement=placement)
    for rank, (kind, named, text, _, soon) in enumerate(results):
        assert issubclass(kind, dist.errors.DistBackendError), (rank, text)
        assert kind is not dist.PeerLostError, (rank, text)
        assert named == victim, (rank, text)
        assert "no thread could be started" in text, (rank, text)
        assert soon, (rank, text)


class Gone(dist.HashStore):
    """A store whose server has ended."""

    def add(self, *_):
        raise dist.DistNetworkError("nobody listens")


def test_a_rank_does_not_blame_itself_for_the_end_of_the_store():
    store = Gone()
    with pytest.raises(dist.DistNetworkError, match="the store failed; whoever kept it may have") as caught:
        host_rendezvous.form(store, 1, 2, LIMIT, "host group 'x'", RECORD)
    assert caught.value.rank == -1


class Uncounted(dist.HashStore):
    """A store that goes when a rank counts itself among the readers of a failure."""

    def add(self, key, amount):
        if key.endswith("left"):
            raise dist.DistNetworkError("nobody listens")
        return super().add(key, amount)


def test_a_failure_that_was_heard_is_raised_though_the_store_goes_then():
    store = Uncounted()
    failed = {"error": record_of(dist.DistBackendError("[rank 0] no memory here", 0))}
    publish(store, "host/outcome", failed)
    with pytest.raises(dist.DistBackendError, match=r"^\[rank 0\] no memory here$") as caught:
        host_rendezvous.form(store, 1, 2, LIMIT, "host group 'x'", RECORD)
    assert caught.value.rank == 0


def form_world_or_os_error(rank, size, port, spoil):
    try:
        return form_world(rank, size, port, spoil)
    except OSError as error:
        return type(error).__name__


def form_group(rank, size, spoil):
    store = current_store()
    store.check(["x"])  # opens the connection
    spoil(rank)

    def form():
        group = ProcessGroupHost(PrefixStore("group", store), rank, size, LIMIT)
        try:
            group.allreduce([torch.ones(3)]).wait()
        finally:
            group.shutdown()

    return outcome(form)


@pytest.mark.parametrize("victim", [0, 1, None])
@pytest.mark.parametrize("more", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("placement", ["aaa", "aab"])
@pytest.mark.full
def test_nobody_is_called_dead_for_lack_of_descriptors(victim, more, placement):
    spoil = HasFewDescriptors(victim, more)
    results = run_ranks(form_group, 3, spoil, isolated=True, placement=placement)
    assert None not in results or set(results) == {None}, results
    for found in results:
        if found is not None:  # so few may be enough
            kind, named, text, _, soon = found
            assert kind is not dist.PeerLostError, text
            assert soon, text
            assert "died" not in text, text
            assert "open files" in text, text
            assert victim in {None, named}, text


def die_while_forming(rank, size, port, step, late):
    """Rank 0 dies, once the others have reached its store: who has not cannot know that there was one.

    Rank 2 may come to its leader ``late`` seconds later, when that has failed, and still has its exception.
    """
    attempt, store = host_rendezvous._Forming, current_store()
    share_memory = attempt.share_memory

    def come(self):
        store.set(f"rank {rank} has come", "")
        return share_memory(self)

    def die(*_):
        store.wait([f"rank {other} has come" for other in range(1, size)])
        os.kill(os.getpid(), signal.SIGKILL)

    follow = attempt._follow

    def follow_late(self, leader):
        time.sleep(late)
        return follow(self, leader)

    if rank == 0:
        setattr(attempt, step, die)
    else:
        attempt.share_memory = come
        attempt._follow = follow_late
    return form_world(rank, size, port, lambda _: None)


@pytest.mark.parametrize(
    ("placement", "step", "late"),
    [
        ("aaa", "share_memory", 0),
        ("aaa", "_lead", 0),
        ("aaa", "_accept", 0),
        ("aab", "listen", 0),
        ("abb", "listen", 0),
        ("abb", "listen", 0.5),
    ],
)
def test_nobody_waits_for_a_rank_that_dies_with_the_store(placement, step, late):
    results = run_ranks(
        die_while_forming, 3, free_port(), step, late, isolated=True, lost=[0], placement=placement
    )
    assert results[0] == Died(-signal.SIGKILL)
    for found in results[1:]:
        assert found is not None
        kind, named, text, _, soon = found
        assert soon, text
        assert issubclass(kind, dist.DistNetworkError | dist.DistStoreError | dist.PeerLostError), text
        assert named in {0, -1} or kind is not dist.PeerLostError, text


def stopped_leader(group, victim):
    store = current_store()
    group.barrier().wait()
    if group.rank() == victim:
        store.set("stopped", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    store.wait(["stopped"])
    options = dist.AllreduceOptions(timedelta(seconds=2), False)
    return outcome(lambda: group.allreduce([torch.ones(5)], options))


@pytest.mark.parametrize(("placement", "victim"), [("aabb", 2), ("aab", 0), ("aabb", 3), ("aaaa", 1)])
@pytest.mark.full
def test_a_stopped_rank_is_blamed_on_all_machines(placement, victim):
    arguments = {"backend": "host", "isolated": True, "lost": [victim], "placement": placement}
    for rank, found in enumerate(run_ranks(stopped_leader, len(placement), victim, **arguments)):
        if rank != victim:
            kind, named, text, missing, _ = found
            assert (kind, named) == (dist.CollectiveTimeoutError, victim), text
            assert victim in missing, (missing, text)


PROGRAM = """
import sys
import torch
import collectives as dist

rank = int(sys.argv[1])
dist.init_process_group("host", init_method=sys.argv[2], rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    sys.exit(3)
try:
    dist.all_reduce(torch.ones(3))
except dist.GroupAbortedError as error:
    print(error.rank, error.cause, "|", error)
"""


@pytest.mark.full
@pytest.mark.usefixtures("preloaded_python")
def test_peers_hear_that_a_program_has_ended():
    url = f"tcp://127.0.0.1:{free_port()}"
    commands = [[sys.executable, "-c", PROGRAM, str(rank), url] for rank in range(2)]
    first, second = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands)
    said = first.communicate(timeout=60)[0]
    second.communicate(timeout=60)
    assert second.returncode == 3
    assert said.startswith("1 the end of its program | "), said
    assert "rank 1 aborted it, after the end of its program" in said


def replaced(group):
    group.barrier().wait()
    if group.rank() == 1:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(30)"])
    return outcome(lambda: group.allreduce([torch.ones(5)], dist.AllreduceOptions(asyncOp=False)))


@pytest.mark.parametrize("placement", ["aaa", "aab", "abb"])
@pytest.mark.full
def test_a_rank_that_runs_another_program_is_lost(placement):
    arguments = {"backend": "host", "isolated": True, "lost": [1], "placement": placement}
    for rank, found in enumerate(run_ranks(replaced, 3, **arguments)):
        if rank != 1:
            kind, named, text, _, soon = found
            assert (kind, named, soon) == (dist.PeerLostError, 1, True), text


def descriptors_of_groups(rank, size):
    store = current_store()
    groups = []

    def make():
        name = str(len(groups))
        groups.append(ProcessGroupHost(PrefixStore(name, store), rank, size, LIMIT, group_name=name))
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = [make() for _ in range(4)]
    for group in groups:
        group.allreduce([torch.ones(3)]).wait()
        group.shutdown()
    return counts


def test_groups_share_the_descriptors_of_processes():
    for counts in run_ranks(descriptors_of_groups, 4):
        more = [after - before for before, after in itertools.pairwise(counts)]
        assert all(count < 3 for count in more), more
