"""What a comparison measures, and which peers can run here; checked before any rank is started."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from collectives.backends.nccl.libnccl import providers
from collectives.bench.comparison import mpi4py_peer, torch_peer
from collectives.bench.comparison.goals import parse_goal
from collectives.bench.comparison.mpi4py_peer import MPI4PY, is_mpi4py
from collectives.bench.comparison.operations import OPERATIONS, rounded_count
from collectives.bench.comparison.peers import split_name
from collectives.bench.comparison.worker import Workload, memory_bytes
from collectives.bench.core.devices import DEVICES, check_device, why_not_on
from collectives.bench.core.machine import cores_of_ranks
from collectives.bench.core.namespaces import check_machines
from collectives.bench.core.records import Skipped
from collectives.bench.core.sizes import format_bytes, parse_sizes
from collectives.ranks.mpirun import needs_mpirun
from collectives.registry.backends import backend_names, backend_spec, why_unavailable

__all__ = ["DTYPES", "Options", "available_backends"]

DTYPES = tuple(
    sorted(
        name
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    )
)
"""Names of torch's data types."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured.

    Attributes:
        backends: names of backends, and of peers such as ``torch:gloo`` and ``host:ring``; ``None`` for all
            backends that serve tensors on the device, and plain mpi4py or ``torch:nccl``.
        ranks: numbers of ranks; one run each.
        sizes: sizes of the arrays in bytes, ascending; rounded up to a whole part for each rank.
        operations: names of the operations.
        dtype: name of the data type.
        redop: name of the reduction.
        in_place: whether an all-reduce reduces the user's tensor itself, else a copy of it, with the copy in
            the time.
        calls: cold and hot calls of each peer at each size; ``None`` adapts to the budget.
        warmup: calls before; ``None`` adapts to the budget.
        budget_s: seconds that each run should take.
        limit: whether to measure ``tensor.add_(0)`` on all ranks, too.
        imports: modules that register further backends; imported here and on every rank.
        bind: whether each rank stays on a core of its own.
        goals: what is asked of the times, as :mod:`collectives.bench.comparison.goals` reads it.
        machines: number of network namespaces that play machines, with equal shares of the ranks; 1 for
            none.
        link: what each of them can send, in the units of ``tc``; ``None`` does not limit it.
        device: type of the device that the tensors are on, a name of
            :data:`~collectives.bench.core.devices.DEVICES`.
        provider: package that loads NCCL for the nccl backend; ``None`` leaves it to the environment.
        mpis: further installations of MPI, each a peer ``mpi4py:NAME``: names and folders with ``bin`` and
            ``lib``.

    Raises:
        ValueError: a backend, an MPI or an operation is not known, a goal cannot be read, a size is no
            multiple of the element's, there is no such device or provider, too little memory or too few
            cores, or the machines do not fit the ranks or the device.
    """

    backends: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = tuple(parse_sizes("8:64M"))
    operations: tuple[str, ...] = ("all_reduce",)
    dtype: str = "float32"
    redop: str = "sum"
    in_place: bool = True
    calls: int | None = None
    warmup: int | None = None
    budget_s: float = 40.0
    limit: bool = False
    imports: tuple[str, ...] = ()
    bind: bool = False
    goals: tuple[str, ...] = ()
    machines: int = 1
    link: str | None = None
    device: str = "cpu"
    provider: str | None = None
    mpis: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for module in self.imports:
            importlib.import_module(module)
        self._check_backends()
        for name in self.operations:
            if name not in OPERATIONS:
                raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
        for goal in self.goals:
            parse_goal(goal)
        item_bytes = getattr(torch, self.dtype).itemsize
        for size in self.sizes:
            if size % item_bytes:
                raise ValueError(
                    f"size {size} is no multiple of the {item_bytes} bytes of a {self.dtype} element; "
                    f"begin the sizes at {item_bytes} or more"
                )
        if self.bind:
            cores_of_ranks(max(self.ranks))
        self._check_machines()
        self._check_device()
        for ranks in self.ranks:
            needed = memory_bytes(self.workload((), ranks))
            available = DEVICES[self.device].memory_per_rank_bytes(ranks)
            if needed > available:
                raise ValueError(
                    f"{ranks} ranks with tensors of {format_bytes(max(self.sizes))} need "
                    f"{ranks * needed / 2**30:.1f} GiB of memory, but {ranks * available / 2**30:.1f} GiB "
                    "are available"
                )

    def _check_backends(self) -> None:
        for name in self.backends or ():
            if _is_own_backend(name):
                backend_spec(split_name(name)[0])
            elif is_mpi4py(name) and name not in {MPI4PY, *(f"{MPI4PY}:{mpi}" for mpi, _ in self.mpis)}:
                raise ValueError(f"{name} names an MPI without a folder; say where it is (--mpi)")

    def _check_machines(self) -> None:
        for ranks in self.ranks:
            check_machines(ranks, self.machines, self.link)
        if self.machines > 1 and self.device != "cpu":
            raise ValueError(f"machines are played for tensors on the CPU, not on {self.device}")

    def _check_device(self) -> None:
        check_device(self.device)
        if self.provider is not None and self.provider not in providers.PROVIDERS:
            raise ValueError(
                f"unknown provider {self.provider!r} of NCCL; known are {', '.join(providers.PROVIDERS)}"
            )
        if self.provider is not None and self.device == "cpu":
            raise ValueError("a provider of NCCL serves tensors on cuda; ask for that device")

    def workload(self, backends: Sequence[str], ranks: int) -> Workload:
        """Returns what ranks are told to measure.

        Args:
            backends: the peers, by name.
            ranks: number of ranks.
        """
        item_bytes = getattr(torch, self.dtype).itemsize
        return Workload(
            self.dtype,
            self.redop,
            self.in_place,
            item_bytes
            * max(
                rounded_count(OPERATIONS[name], max(self.sizes), item_bytes, ranks)
                for name in self.operations
            ),
            tuple(backends),
            self.operations,
            self.limit,
            self.imports,
            cores_of_ranks(ranks) if self.bind else (),
            self.machines,
            self.link,
            device=self.device,
            provider=self.provider,
        )


def available_backends(
    names: Sequence[str] | None,
    device: str = "cpu",
    provider: str | None = None,
    mpis: Mapping[str, str] | None = None,
) -> tuple[list[str], list[Skipped]]:
    """Returns the backends that this machine can run, and the others with reasons.

    Args:
        names: backends and other peers to look at, in order; ``None`` for all backends, and plain mpi4py or
            torch's NCCL.
        device: type of the tensors' device, which must be there.
        provider: package that loads NCCL for the nccl backend; ``None`` leaves it to the environment.
        mpis: folders of further installations of MPI, by name.

    Raises:
        ValueError: a name is not known.
    """
    mpis = mpis or {}
    if names is None:
        first, other = {"cpu": ("host", MPI4PY), "cuda": ("nccl", torch_peer.NCCL)}[device]
        names = [*sorted(backend_names(), key=lambda name: (name != first, name)), other]
        names += [f"{MPI4PY}:{name}" for name in mpis] if device == "cpu" else []
    available: list[str] = []
    skipped: list[Skipped] = []
    for name in dict.fromkeys(names):
        peer = _full_name(name) if _is_own_backend(name) else name
        reason, install = _why_not_here(peer, device, provider, mpis)
        if reason is None:
            available.append(peer)
        else:
            skipped.append(Skipped(peer, reason, install))
    return available, skipped


def _full_name(name: str) -> str:
    backend, algorithm = split_name(name)
    spelled = backend_spec(backend).name
    return spelled if algorithm is None else f"{spelled}:{algorithm}"


def _why_not_here(
    name: str, device: str, provider: str | None, mpis: Mapping[str, str]
) -> tuple[str | None, str]:
    """Returns why a peer cannot be measured, ``None`` where it can, and the command that would add it."""
    if name.startswith(torch_peer.PREFIX):
        return torch_peer.why_unavailable(name, device), ""
    here = "the CPU" if device == "cpu" else device
    if is_mpi4py(name):
        if device != "cpu":
            return f"serves tensors on cpu, and this measures tensors on {here}", ""
        return mpi4py_peer.why_unavailable(mpis.get(name.partition(":")[2])), mpi4py_peer.INSTALL
    backend, algorithm = split_name(name)
    spec = backend_spec(backend)
    chosen = spec.name == "nccl" and provider is not None
    reason = providers.unavailable(provider) if chosen else why_unavailable(spec.name)
    if reason is None:
        reason = why_not_on(device, spec)
    if reason is None and algorithm is not None and device != "cpu":
        reason = f"reduces tensors on the CPU, and this measures tensors on {here}"
    if reason is None and needs_mpirun(name):
        reason = mpi4py_peer.why_unavailable()
    return reason, spec.install


def _is_own_backend(name: str) -> bool:
    """Returns whether a peer's name is that of a backend of ours, or of an algorithm over it."""
    return not is_mpi4py(name) and not name.startswith(torch_peer.PREFIX)
