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
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from collectives.backends.nccl.device import why_no_cuda
from collectives.bench.allreduce import Options, available_backends, measure
from collectives.bench.core.arguments import at_least
from collectives.bench.core.devices import describe_machine, usable_cores
from collectives.bench.core.records import Skipped
from collectives.errors import DistBackendError
from collectives.ranks.cores import threads_of_a_rank
from collectives.ranks.processes import RankFailedError
from collectives.registry.backends import backend_names
from collectives.secret import SECRET
from collectives.store.encryption import check_libcrypto

SMOKE_COUNTS = (1, 1009, 300_007)
"""Elements of the tensors that two ranks reduce: within a flag's line, a chunk, many chunks."""

ESTIMATED_BYTES = 1 << 20
BUDGET_S = 1.0
"""Size of the all-reduce whose time is estimated, and about how long all those of a backend are repeated."""

SIOCGIFADDR = 0x8915


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the doctor's only option."""
    parser.add_argument(
        "--nproc",
        type=at_least(1),
        default=os.environ.get("LOCAL_WORLD_SIZE", "2"),
        help="ranks that are to run on this machine, to which the advice on threads is fitted "
        "(default: LOCAL_WORLD_SIZE, else 2)",
    )


def run(arguments: argparse.Namespace) -> int:
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
    for line in (*advise(seconds, skipped, arguments.nproc), *_untested()):
        print(line)
    return 1 if failures else 0


def _untested() -> Iterator[str]:
    """Yields what was not tested here of the machine's GPUs, and the command that does."""
    if why_no_cuda() is None:
        yield (
            f"Not tested here: the nccl backend on the {torch.cuda.device_count()} GPUs with every function "
            "and data type, and what its ranks see when one dies, stops or leaves. This command does that:"
        )
        yield "    collectives accept --json report.json"


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
    sizes = (*(4 * count for count in SMOKE_COUNTS), ESTIMATED_BYTES)
    report = measure(Options(backends=(backend,), sizes=tuple(sorted(sizes)), budget_s=BUDGET_S))
    if report.skipped:
        raise RuntimeError(report.skipped[0].reason)
    wrong = sum(record.wrong_elements for record in report.records)
    if wrong:
        raise RuntimeError(f"{wrong} elements of the results are wrong")
    for record in report.records:
        if record.size_bytes == ESTIMATED_BYTES:
            seconds[backend] = record.cold.median_us / 1e6
    library = "".join(f"; {version}" for version in report.environment["peers"].values())
    return f"right for {', '.join(map(str, SMOKE_COUNTS))} elements{library}"


def advise(seconds: Mapping[str, float], skipped: Sequence[Skipped], ranks: int = 2) -> Iterator[str]:
    """Yields lines of advice.

    Args:
        seconds: by backend that works here, the time of an all-reduce of 1 MiB between two ranks.
        skipped: backends that cannot be used here.
        ranks: how many are to run on this machine.
    """
    yield "Which backend for what:"
    yield from _of_cpu_tensors(seconds)
    reasons = {entry.peer: entry.reason for entry in skipped}
    if "nccl" in reasons:
        yield f"  CUDA tensors: none here; nccl {reasons['nccl']}"
    elif "nccl" in seconds:
        yield '  CUDA tensors: nccl, the only one that uses NVLink; "collectives" takes it by itself'
    if "mpi" in seconds:
        yield "  ranks that mpirun starts: mpi, which needs no address and no store"
    yield f"  ranks on this machine: up to {usable_cores()}, a core for each; more take turns"
    if torch.get_num_threads() > threads_of_a_rank(ranks):
        said = f"{ranks} ranks with {torch.get_num_threads()} each for {usable_cores()} cores"
        yield f"  threads: too many, {said}; ranks that compute wait for cores"
    # The command gives its own ranks a secret, so that it cannot tell whether the user has one.
    yield "  several machines: host, with the same secret on all of them, made by"
    yield f"    export {SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
    try:
        check_libcrypto()
    except DistBackendError as error:
        yield f"    {error}"
    else:
        yield "    what they send each other is encrypted"
    lines = list(_to_copy(skipped, ranks))
    if lines:
        yield "Lines to copy for what is missing:"
        yield from lines


def _of_cpu_tensors(seconds: Mapping[str, float]) -> Iterator[str]:
    """Yields what serves tensors on the CPU, and how quick each backend was."""
    if not seconds:
        yield "  CPU tensors: no backend works here; see the checks that failed"
        return
    ranked = sorted(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3g} ms" for name in ranked)
    best = "host" if "host" in seconds else ranked[0]
    if best == ranked[0]:
        why = "the quickest here"
    else:
        why = f"it finds dead ranks and ranks out of step; {ranked[0]} was quicker at this size"
    name = '"collectives" under torch.distributed' if best == "host" else "host failed"
    yield f"  CPU tensors: {best} ({name}), {why}"
    yield f"    all-reduce of 1 MiB, 2 ranks, estimated within {BUDGET_S:g} s each: {times}"


def _to_copy(skipped: Sequence[Skipped], ranks: int) -> Iterator[str]:
    """Yields commands and settings, each with what it is for."""
    for entry in skipped:
        if entry.install:
            yield f"  {entry.install}  # {entry.peer}"
    if torch.get_num_threads() > (fitting := threads_of_a_rank(ranks)):
        yield f"  export OMP_NUM_THREADS={fitting}  # threads of torch on each of {ranks} ranks"
