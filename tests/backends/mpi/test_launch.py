"""Scripts under mpirun: where rank and store come from, thread levels, many groups, other default groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mpi_team import Teams

pytestmark = pytest.mark.usefixtures("preloaded_python")

HEAD = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch
import collectives as dist
"""

MEETING = """
for life in range(2):
    dist.init_process_group("mpi", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 3 and dist.get_backend() == "mpi"
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 6.0
    if life == 0:
        # Only members make a group with local synchronization; ranks of a group may stand in any order.
        if rank:
            pair = dist.new_group([2, 1], use_local_synchronization=True, sort_ranks=False)
            y = torch.tensor([float(rank)])
            dist.broadcast(y, 2, group=pair)
            assert y.item() == 2.0 and dist.get_rank(pair) == 2 - rank
        mixed = dist.new_group(backend="cpu:mpi")
        dist.all_reduce(x, group=mixed)
        assert x.item() == 18.0
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(size)]
    dist.destroy_process_group()
"""

UNDER_HOST = """
dist.init_process_group("host", "mpi://", timeout=timedelta(seconds=30))
rank = dist.get_rank()
group = dist.new_group([0, 2], backend="mpi")
if rank != 1:
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, group=group)
    assert x.item() == 4.0 and dist.get_backend(group) == "mpi"
dist.destroy_process_group()
"""

# MPI_Init returns on no process before all of mpirun's have called it, so ranks that stay out call it, too.
STAYING_OUT = """
from collectives.ranks.mpirun import world_rank
rank = world_rank()
address = "file://" + os.path.join(os.environ["TMPDIR"], "store")
dist.init_process_group("host", address, rank=rank, world_size=3, timeout=timedelta(seconds=30))
assert "mpi4py.MPI" not in sys.modules
lanes = {"lanes": 2, "backend": "mpi"}
group = {
    "new": lambda: dist.new_group([0, 2], backend="mpi"),
    "lanes": lambda: dist.new_group([0, 2], backend="round_robin", pg_options=lanes),
    "mixed": lambda: dist.new_group([0, 2], backend="cpu:mpi"),
}[sys.argv[1]]()
if rank == 1:
    assert group == dist.GroupMember.NON_GROUP_MEMBER
else:
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, group=group)
    assert x.item() == 4.0
dist.destroy_process_group()
"""

UNDER_TORCH = """
import torch.distributed as torch_dist
torch_dist.init_process_group("collectives_mpi", init_method="mpi://")
rank = torch_dist.get_rank()
x = torch.full((5,), rank + 1.0, dtype=torch.bfloat16)
work = torch_dist.all_reduce(x, async_op=True)
work.wait()
assert x.tolist() == [6.0] * 5
torch_dist.destroy_process_group()
"""

GROUPS = """
dist.init_process_group("mpi", timeout=timedelta(seconds=60))
from mpi4py import MPI
groups = [dist.new_group(group_desc=f"group {turn}") for turn in range(20)]
works = []
for turn, group in enumerate(groups):
    x = torch.full((3,), float(turn))
    works.append((dist.all_reduce(x, group=group, async_op=True), x, turn))
for work, x, turn in reversed(works):
    work.wait()
    assert x.tolist() == [2.0 * turn] * 3
for group in groups:
    mine = [value for value in vars(group).values() if isinstance(value, MPI.Intracomm)]
    assert len(mine) == 2
    dist.destroy_process_group(group)
    assert mine == [MPI.COMM_NULL] * 2  # they are freed
dist.destroy_process_group()
"""

THREADS = """
import mpi4py
level = sys.argv[1]
mpi4py.rc.thread_level = level
dist.init_process_group("mpi", timeout=timedelta(seconds=20))
from mpi4py import MPI
got = MPI.Query_thread()
assert got <= getattr(MPI, f"THREAD_{level.upper()}"), got
groups = [dist.new_group() for _ in range(2)]
works = [dist.all_reduce(torch.full((200_000,), float(turn)), async_op=True) for turn in range(4)]
for work in works:
    work.wait()
failures = []
def talk(group, turn):
    try:
        for _ in range(30):
            x = torch.full((3 + 100_000 * (turn % 2),), 1.0)
            dist.all_reduce(x, group=group)
            assert x.unique().tolist() == [2.0]
    except Exception as error:
        failures.append(error)
threads = [threading.Thread(target=talk, args=pair) for pair in zip(groups, range(2))]
for thread in threads: thread.start()
for thread in threads: thread.join()
if got >= MPI.THREAD_SERIALIZED:
    assert not failures, failures
else:
    assert len(failures) == 2
    assert all("only the thread that started it may call it" in str(error) for error in failures), failures
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2
if level == "funneled":  # a group that only one rank ends: no other thread may wait for MPI
    from collectives.backends.mpi import group
    group._FREE_SECONDS = 1.0
    alone = dist.new_group()
    dist.all_reduce(x, group=alone)
    if dist.get_rank() == 0:
        alone.shutdown()
    dist.barrier()
dist.destroy_process_group()
"""

OVERLAP = """
dist.init_process_group("mpi", timeout=timedelta(seconds=20))
rank = dist.get_rank()
tensors = [torch.full((300_000,), float(turn)) for turn in range(6)]
issued = Path(os.environ["TMPDIR"], "issued")
while rank == 1 and not issued.exists():
    time.sleep(0.01)
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
works.append(dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4), async_op=True))
assert not (rank == 0 and any(work.is_completed() for work in works))  # issued before the peer has come
issued.touch()
for work in reversed(works):
    work.wait()
for turn, tensor in enumerate(tensors):
    assert tensor.unique().tolist() == [2.0 * turn]
# Nobody waits: the last one is done all the same, and its future's callback runs.
called = threading.Event()
work = dist.all_reduce(tensors[1], async_op=True)
work.get_future().add_done_callback(lambda _: called.set())
assert called.wait(10)
dist.destroy_process_group()
"""


def launch(mpi: Teams, folder: Path, script: str, size: int, *words: str) -> None:
    """Runs a script on so many ranks; all of them must end well, and soon."""
    file = folder / "script.py"
    file.write_text(HEAD + script)
    done = subprocess.run(
        [*mpi.installation.command(size), sys.executable, str(file), *words],
        env=mpi.installation.environment(str(folder)),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("scripts", "size"),
    [((MEETING, UNDER_HOST, UNDER_TORCH), 3), ((GROUPS, OVERLAP), 2)],
    ids=["default_groups", "many_at_a_time"],
)
def test_scripts(mpi: Teams, tmp_path: Path, scripts: tuple[str, ...], size: int) -> None:
    launch(mpi, tmp_path, "".join(scripts), size)


@pytest.mark.full
@pytest.mark.parametrize("level", ["multiple", "serialized", "funneled"])
def test_thread_levels(mpi: Teams, tmp_path: Path, level: str) -> None:
    launch(mpi, tmp_path, THREADS, 2, level)


@pytest.mark.full
@pytest.mark.parametrize("way", ["new", "lanes", "mixed"])
def test_ranks_that_stay_out_of_the_first_group_of_mpi(mpi: Teams, tmp_path: Path, way: str) -> None:
    launch(mpi, tmp_path, STAYING_OUT, 3, way)
