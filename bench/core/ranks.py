"""Ranks of a measurement: how they start and meet, their groups, and a barrier that belongs to no peer."""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

import collectives
from collectives.bench.core.arguments import at_least, option, parse_names
from collectives.bench.core.devices import DEVICES, check_device, cores_of_ranks, describe_machine, why_not_on
from collectives.bench.core.namespaces import INTERFACE, Machines, check_machines, enter
from collectives.ranks.mpirun import Mpirun, start_ranks
from collectives.ranks.processes import RankProcesses
from collectives.registry.backends import backend_spec, why_unavailable
from collectives.secret import provided
from collectives.store import TCPStore

LOCALHOST = "127.0.0.1"

TIMEOUT = timedelta(seconds=60)
"""Time limit of operations, so that a broken peer ends a run with an error."""


def parent_store(host: str = LOCALHOST) -> TCPStore:
    """Returns a store that this process serves on a free port; ranks :func:`initialize` with the port.

    Args:
        host: its address, where ranks can reach it.
    """
    return TCPStore(host, 0, is_master=True, timeout=TIMEOUT, wait_for_workers=False)


def split_lanes(name: str) -> tuple[str, dict[str, Any] | None]:
    """Returns the backend of a name, and the options that the name stands for.

    Args:
        name: of a backend, or ``round_robin:LANES`` or ``round_robin:LANES:BACKEND``.

    Raises:
        ValueError: the name has another form, or no such backend is known.
    """
    head, *rest = name.split(":")
    spec = backend_spec(head)
    if not rest:
        return spec.name, None
    if spec.name != "round_robin" or len(rest) > 2 or not rest[0].isdecimal() or int(rest[0]) < 1:
        raise ValueError(
            f"{name!r} names no backend; lanes and their backend are named round_robin:LANES or "
            "round_robin:LANES:BACKEND, such as round_robin:3:gloo"
        )
    lane = backend_spec(rest[1]).name if len(rest) == 2 else "host"
    return spec.name, {"lanes": int(rest[0]), "backend": lane}


def why_no_group(name: str, device: str) -> tuple[str | None, str]:
    """Returns why tensors on a device cannot go through a backend or lanes, and the command that adds it.

    Args:
        name: see :func:`split_lanes`.
        device: type of the device.
    """
    backend, options = split_lanes(name)
    spec = backend_spec(backend)
    lane = spec if options is None else backend_spec(options["backend"])
    return why_unavailable(spec.name) or why_not_on(device, lane), spec.install


def new_group(name: str, ranks: Sequence[int]) -> Any:
    """Returns a group of some ranks; called by all ranks of the default group.

    Args:
        name: of a backend, see :func:`split_lanes`.
        ranks: the members.
    """
    backend, options = split_lanes(name)
    return collectives.new_group(ranks, timeout=TIMEOUT, backend=backend, pg_options=options)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where ranks of a measurement are, and how they meet; each gets it.

    Attributes:
        size: number of ranks.
        port: of the store that the parent serves.
        memory: path of the memory for :class:`SpinBarrier`.
        device: type of the device that their tensors are on.
        host: where the parent's store listens.
        namespaces: the network namespace of each rank, where some play machines; empty where none do.
        cores: those on which each rank stays with all its threads; empty where the kernel chooses.
        imports: modules to import first, which register further backends.
    """

    size: int
    port: int
    memory: str
    device: str
    host: str = LOCALHOST
    namespaces: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    imports: tuple[str, ...] = ()

    def take(self, rank: int) -> None:
        """Puts this process where a rank is, before it makes a group; it has one thread from now on."""
        torch.set_num_threads(1)
        DEVICES[self.device].take(rank, self.size)
        if self.namespaces:
            enter(self.namespaces[rank])
            os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE  # Gloo would take the address of the host's name
        if self.cores:
            os.sched_setaffinity(0, self.cores[rank])
        for module in self.imports:
            importlib.import_module(module)

    def _store(self) -> TCPStore:
        return TCPStore(self.host, self.port, is_master=False, timeout=TIMEOUT)

    def initialize(self, rank: int, backend: str) -> None:
        """Makes the default group, named as by :func:`split_lanes`; called by all ranks."""
        name, options = split_lanes(backend)
        collectives.init_process_group(
            name, store=self._store(), rank=rank, world_size=self.size, timeout=TIMEOUT, pg_options=options
        )

    def initialize_torch(self, rank: int, backend: str) -> None:
        """Makes the default group of ``torch.distributed``; called by all ranks."""
        # Not torch's own client, which cannot prove the job's secret.
        store = c10d.PrefixStore("torch", self._store())
        torch_dist.init_process_group(backend, store=store, rank=rank, world_size=self.size, timeout=TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Where ranks are, as a user asks for it.

    Attributes:
        device: where the tensors are; on ``cuda`` a time is the device's, and ranks share GPUs where there
            are fewer.
        machines: number of network namespaces that play machines, with equal shares of the ranks; several
            need the rights of an administrator.
        link: what each of these machines can send, in the units of ``tc`` such as ``1gbit``, where that is
            limited.
        imports: modules that register further backends; imported here and on every rank.
        bind: keep each rank, with all its threads, on a core of its own.
    """

    device: str = option("cpu", "--device", choices=tuple(DEVICES))
    machines: int = option(1, "--machines", type=at_least(1), metavar="N")
    link: str | None = option(None, "--link", metavar="RATE")
    imports: tuple[str, ...] = option((), "--import", type=parse_names, metavar="MODULE,...")
    bind: bool = option(False, "--bind", action="store_true")

    def check_placement(self, ranks: int) -> None:
        """Imports modules that register backends, and checks that so many ranks can be placed so.

        Args:
            ranks: number of ranks.

        Raises:
            ValueError: there are too few cores, no such device or link, or the machines do not fit the ranks
                or the device.
        """
        for module in self.imports:
            importlib.import_module(module)
        if self.bind:
            self.cores_to_bind(ranks)
        check_machines(ranks, self.machines, self.link)
        check_device(self.device)
        if self.machines > 1 and self.device != "cpu":
            raise ValueError(f"machines are played for tensors on the CPU, not on {self.device}")

    def cores_to_bind(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the cores that each of so many ranks stays on.

        Args:
            ranks: number of ranks.

        Raises:
            ValueError: there are fewer cores than ranks.
        """
        return tuple((core,) for core in cores_of_ranks(ranks))

    def environment(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Returns machine, devices and versions.

        Args:
            ranks: numbers of ranks of the runs.
        """
        return {**describe_machine(), **DEVICES[self.device].describe(ranks)}

    def make_machines(self) -> AbstractContextManager[Machines | None]:
        """Returns a context with the machines; ``None`` for this one.

        Raises:
            NamespacesUnavailableError: there can be no network namespaces here.
        """
        return Machines(self.machines, self.link) if self.machines > 1 else nullcontext()

    @contextmanager
    def start(
        self,
        body: Callable[..., None],
        size: int,
        *args: Any,
        backends: Sequence[str] = (),
        machines: Machines | None = None,
        mpirun: Mpirun | None = None,
    ) -> Iterator[RankProcesses]:
        """Context with ranks placed so that run ``body(rank, connection, placement, *args)``.

        Args:
            body: function at the top level of a module.
            size: number of ranks.
            args: its further arguments; pickled.
            backends: names of what they use; ``mpirun`` starts them where one of these needs it.
            machines: that they share equally; ``None`` for this one.
            mpirun: what starts them where a backend needs it; ``None`` for the usual one.

        Returns:
            The context; it gives the ranks.

        Raises:
            RankFailedError: they could not be started.
            FileNotFoundError: a backend needs ``mpirun``, and there is none.
        """
        host = LOCALHOST if machines is None else machines.host
        with provided(), barrier_memory(size) as memory, closing(parent_store(host)) as store:
            placement = Placement(
                size,
                store.port,
                memory,
                self.device,
                host,
                () if machines is None else machines.namespaces_of(size),
                self.cores_to_bind(size) if self.bind else (),
                self.imports,
            )
            with start_ranks(backends, size, body, (placement, *args), mpirun) as processes:
                yield processes


_T = TypeVar("_T")


def rounds_of(peers: Sequence[_T], rounds: int) -> Iterator[tuple[int, list[_T]]]:
    """Yields each round and the peers: it begins with another one, so that noise meets all alike."""
    for this in range(rounds if peers else 0):
        first = this % len(peers)
        yield this, [*peers[first:], *peers[:first]]


def share_of(total: int, this: int, rounds: int) -> int:
    """Returns how many of so many calls are made in a round."""
    return total * (this + 1) // rounds - total * this // rounds


@contextmanager
def without_collection() -> Iterator[None]:
    """Context in which no garbage is collected, which would take the time of a call."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


LINE_BYTES = 128
"""Distance of the ranks' cells: two cache lines, because processors fetch lines in pairs."""

SPINS_BEFORE_YIELD = 100
"""Reads of the waiting loop, about 5 us, before the processor is offered to others: the rank that is waited
for may need it."""


@contextmanager
def barrier_memory(size: int) -> Iterator[str]:
    """Context with the path of fresh shared memory for :class:`SpinBarrier`.

    Processes of the same user can open it meanwhile. Nothing is left in a file system.

    Args:
        size: number of ranks.
    """
    try:
        descriptor = os.memfd_create("collectives-bench", os.MFD_CLOEXEC)
    except OSError:  # the doctor measures on kernels without it, too
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size * LINE_BYTES)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


class SpinBarrier:
    """Barrier; call it on every rank.

    Each rank counts its arrivals in a cell of its own and spins until no other count is behind. The rank that
    arrives last goes on at once, and the others as soon as they see it: far closer together than any peer's
    own barrier would let them go, and the same for all peers.

    Args:
        path: of :func:`barrier_memory`.
        rank: the rank that this process is.
        size: number of ranks.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size * LINE_BYTES)
        self._counts = memoryview(self._map).cast("q")
        stride = LINE_BYTES // 8
        self._mine = rank * stride
        self._others = [other * stride for other in range(size) if other != rank]
        self._count = 0
        available = len(os.sched_getaffinity(0))
        self._spins = SPINS_BEFORE_YIELD if size <= available else 0

    def __call__(self) -> None:
        """Blocks, spinning, until every rank has called as often as this one."""
        counts = self._counts
        self._count = count = self._count + 1
        counts[self._mine] = count
        for other in self._others:
            spins = self._spins
            while counts[other] < count:
                if spins:
                    spins -= 1
                else:
                    os.sched_yield()

    def close(self) -> None:
        """Gives the memory back."""
        self._counts.release()
        self._map.close()
