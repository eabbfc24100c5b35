"""Tests what this machine offers, that two ranks can communicate with every usable backend, and advises."""

from __future__ import annotations

import argparse
import fcntl
import functools
import importlib
import os
import platform
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import torch

import collectives
from collectives.backends.nccl.device import why_no_cuda
from collectives.bench.comparison import operations
from collectives.bench.comparison.measurement import available_backends
from collectives.bench.core.groups import initialize, parent_store
from collectives.bench.core.machine import describe_machine, mpi_file, mpi_version
from collectives.bench.core.records import Skipped
from collectives.bench.doctor import advice
from collectives.ranks.mpirun import start_ranks
from collectives.ranks.processes import RankFailedError
from collectives.registry.backends import backend_names
from collectives.secret import SECRET

__all__ = ["add_arguments", "run"]

SMOKE_COUNTS = (1, 1009, 300_007)
"""Elements of the tensors that two ranks reduce: within a flag's line, a chunk, many chunks."""

SIOCGIFADDR = 0x8915


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the doctor has no options."""


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001
    """Prints a line for every check, and advice; returns 0 where all went well, else 1."""
    machine = describe_machine()
    print(f"collectives {machine['collectives']}, torch {machine['torch']}, Python {machine['python']}")
    cores = f"{machine['cores_usable']} of {machine['cores_online']} cores usable"
    print(f"{machine['cpu']}, {cores}, {machine['system']}")
    for line in _settings():
        print(line)
    failures = 0
    available, skipped = available_backends(backend_names())
    seconds: dict[str, float] = {}
    for name, check in _checks(available, skipped, seconds):
        try:
            told = check()
        except (OSError, ImportError, RuntimeError, ValueError, RankFailedError) as error:
            failures += 1
            told = f"{type(error).__name__}: {error}"
            mark = "FAIL"
        else:
            mark = "ok"
        print(f"{mark:4}  {name}: {told}", flush=True)
    print(f"\n{failures} of the checks failed." if failures else "\nAll is well.")
    print()
    for line in (*advice.advise(seconds, skipped), *_untested()):
        print(line)
    return 1 if failures else 0


def _untested() -> Iterator[str]:
    """Yields what was not tested here of the machine's GPUs, and the command that does."""
    if why_no_cuda() is None:
        yield (
            f"Not tested here: the nccl backend on the {torch.cuda.device_count()} GPUs with every function "
            "and data type, and what its ranks see when one dies, stops or leaves. This command does that:"
        )
        yield "    collectives accept --markdown report.md"


def _settings() -> Iterator[str]:
    """Yields the environment variables that change how ranks find each other or how the runtime works."""
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "GLOO_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
    )
    for name in sorted({*names, *(key for key in os.environ if key.startswith("COLLECTIVES_"))}):
        if name in os.environ:
            yield f"      {name}={os.environ[name] if name != SECRET else '(not shown)'}"


def _checks(
    available: Sequence[str], skipped: Sequence[Skipped], seconds: dict[str, float]
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields checks by name; those of backends note in ``seconds`` how long an all-reduce takes."""
    yield "native core", _native
    yield "shared memory without a name (memfd)", _memfd
    yield "unix sockets with credentials and descriptors", _unix_socket
    yield "process handles (pidfd)", _pidfd
    yield "open files", _open_files
    yield "network interfaces", _interfaces
    yield "own host name", _own_name
    for name in available:
        yield f"all_reduce of 2 ranks, {name}", functools.partial(_smoke, name, seconds)
    for entry in skipped:
        yield f"backend {entry.peer}", functools.partial("not usable here: {}".format, entry.reason)


def _native() -> str:
    module = importlib.import_module("collectives._native")
    return str(module.__file__)


def _memfd() -> str:
    descriptor = os.memfd_create("collectives-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    finally:
        os.close(descriptor)
    return "created and allocated"


def _unix_socket() -> str:
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        socket.send_fds(left, [b"x"], [0])
        _, received, _, _ = socket.recv_fds(right, 1, 1)
        for descriptor in received:
            os.close(descriptor)
        pid, _, _ = struct.unpack("3i", right.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if len(received) != 1 or pid != os.getpid():
        raise RuntimeError(
            f"{len(received)} descriptors of 1 arrived, from process {pid} instead of {os.getpid()}"
        )
    return "passed"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "opened"


def _open_files() -> str:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"up to {soft} (hard limit {hard})"


def _interfaces() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = []
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # no IPv4 address
                found.append(name)
            else:
                found.append(f"{name} {socket.inet_ntoa(answer[20:24])}")
    if not found:
        raise RuntimeError("there is none, not even a loopback interface")
    return ", ".join(found)


def _own_name() -> str:
    name = platform.node()
    return f"{name} is {socket.gethostbyname(name)}"


def _smoke(backend: str, seconds: dict[str, float]) -> str:
    store = parent_store()
    with start_ranks([backend], 2, _reduce, (backend, store.port)) as processes:
        wrong, (measured, _), (library, _) = zip(*processes.gather(), strict=True)
    if sum(wrong):
        raise RuntimeError(f"{sum(wrong)} elements of the results are wrong")
    seconds[backend] = measured
    return f"right for {', '.join(map(str, SMOKE_COUNTS))} elements{library}"


def _reduce(rank: int, connection: Connection, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    initialize(rank, 2, port, backend)
    wrong = 0
    for count in SMOKE_COUNTS:
        tensor = operations.source("sum", torch.float32, count, rank, 2)
        collectives.all_reduce(tensor)
        wrong += operations.count_wrong(tensor, operations.expected("sum", torch.float32, count, 2))
    estimate = advice.estimate_all_reduce()
    collectives.barrier()
    collectives.destroy_process_group()
    library = f"; {mpi_version()}, {mpi_file()}" if backend == "mpi" else ""
    connection.send((wrong, estimate, library))
