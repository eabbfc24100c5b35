"""What a comparison measures, as its user asks and every rank is told, and the memory that it takes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from collectives.backends.host.threads import MOST
from collectives.bench.comparison.operations import OPERATIONS, REDUCTIONS, rounded_count
from collectives.bench.comparison.peers import MPI4PY, is_mpi4py, is_own_backend, split_name
from collectives.bench.core.arguments import (
    at_least,
    option,
    parse_counts,
    parse_names,
    parse_sizes_argument,
    positive,
)
from collectives.bench.core.devices import DEVICES
from collectives.bench.core.machine import cores_of_ranks
from collectives.bench.core.ranks import PlacementOptions
from collectives.bench.core.text import format_bytes, parse_sizes
from collectives.cli.mpi_job import usual_ranks
from collectives.ranks.cores import shares
from collectives.registry.backends import backend_spec

DTYPES = tuple(
    sorted(
        name
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
    )
)
"""Names of torch's data types."""

SIZES = "8:64M"

ARENA_MIN_BYTES = 64 << 20
"""Memory that buffers rotate through: beyond the caches of a core on today's machines."""


SLICE_GAP_BYTES = 4096 + 64
"""Distance between two buffers: another page, and another set of the first-level cache."""


def stride(size_bytes: int) -> int:
    """Returns the distance between the beginnings of two buffers; each begins at a cache line."""
    return -(-size_bytes // 64) * 64 + SLICE_GAP_BYTES


def _parse_mpis(text: str) -> tuple[tuple[str, str], ...]:
    """Converts the argument of ``--mpi``."""
    pairs = tuple((name, folder) for name, _, folder in (part.partition("=") for part in parse_names(text)))
    if not all(name and folder for name, folder in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FOLDER,...")
    return pairs


def _parse_operations(text: str) -> tuple[str, ...]:
    """Converts the argument of ``--ops``."""
    return tuple(OPERATIONS) if text == "all" else parse_names(text)


@dataclass(frozen=True, slots=True)
class Options(PlacementOptions):
    """What is measured.

    Attributes:
        backends: names of backends; BACKEND:ALGORITHM for an all-reduce made of a backend's messages or
            broadcasts (naive, gather, ring, tree); host:clear for host without encryption between machines;
            torch:NAME for torch's functions on its backend NAME; mpi4py for plain mpi4py under mpirun (where
            none are named, nor threads, all backends usable here, and mpi4py or torch:nccl).
        ranks: numbers of ranks; one run each.
        sizes: bytes of the arrays: SIZE,... or FIRST:LAST[:FACTOR]; K, M, G; rounded up to a whole part for
            each rank.
        operations: names of the operations, or all: all_reduce, reduce, broadcast, all_gather,
            reduce_scatter, all_to_all, gather, scatter, sendrecv, barrier.
        dtype: data type.
        redop: reduction.
        in_place: whether an all-reduce reduces the user's tensor itself; the option has it reduce a copy,
            with the copy in the time.
        calls: cold and hot calls of each peer at each size (where it is not named, 5 to 200, as the budget
            allows).
        warmup: how many calls come before, not timed (where it is not named, 2 to 5, as the budget allows).
        budget_s: seconds that each run should take.
        mpis: further installations of MPI, folders with ``bin`` and ``lib``, each a peer mpi4py:NAME.
        threads: numbers of threads of a rank, each a peer host:NUMBER besides; a bound rank has an equal
            share of the cores then, and peers that need more are left out.

    Raises:
        ValueError: a backend, an MPI or an operation is not known, a size is no multiple of the element's,
            there is no such device, too little memory or too few cores, or the machines do not fit the ranks
            or the device.
    """

    backends: tuple[str, ...] | None = option(None, "--backends", type=parse_names, metavar="NAME,...")
    ranks: tuple[int, ...] = option(
        (2,), "--nproc", type=parse_counts(1), default=lambda: (usual_ranks(),), metavar="N,..."
    )
    sizes: tuple[int, ...] = option(
        tuple(parse_sizes(SIZES)), "--sizes", type=parse_sizes_argument, metavar="SIZES"
    )
    operations: tuple[str, ...] = option(("all_reduce",), "--ops", type=_parse_operations, metavar="NAME,...")
    dtype: str = option("float32", "--dtype", choices=DTYPES, metavar="TYPE")
    redop: str = option("sum", "--op", choices=REDUCTIONS)
    in_place: bool = option(True, "--out-of-place", action="store_false")
    calls: int | None = option(None, "--iters", type=at_least(1), metavar="N")
    warmup: int | None = option(None, "--warmup", type=at_least(2), metavar="N")
    budget_s: float = option(40.0, "--budget", type=positive, metavar="SECONDS")
    mpis: tuple[tuple[str, str], ...] = option((), "--mpi", type=_parse_mpis, metavar="NAME=FOLDER,...")
    threads: tuple[int, ...] = option((), "--threads", type=parse_counts(1), metavar="N,...")

    def __post_init__(self) -> None:
        for ranks in self.ranks:
            self.check_placement(ranks)
        for name in self.backends or ():
            if is_own_backend(name):
                backend_spec(split_name(name)[0])
            elif is_mpi4py(name) and name not in {MPI4PY, *(f"{MPI4PY}:{mpi}" for mpi, _ in self.mpis)}:
                raise ValueError(f"{name} names an MPI without a folder; say where it is (--mpi)")
        if max(self.threads, default=1) > MOST:
            raise ValueError(f"a rank has at most {MOST} threads, not {max(self.threads)}")
        for name in self.operations:
            if name not in OPERATIONS:
                raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
        for size in self.sizes:
            if size % self.item_bytes:
                raise ValueError(
                    f"size {size} is no multiple of the {self.item_bytes} bytes of a {self.dtype} element; "
                    f"begin the sizes at {self.item_bytes} or more"
                )
        for ranks in self.ranks:
            needed, available = self._memory_bytes(ranks), DEVICES[self.device].memory_per_rank_bytes(ranks)
            if needed > available:
                raise ValueError(
                    f"{ranks} ranks with tensors of {format_bytes(max(self.sizes))} need "
                    f"{ranks * needed / 2**30:.1f} GiB of memory, but {ranks * available / 2**30:.1f} GiB "
                    "are available"
                )

    def peers(self) -> tuple[str, ...] | None:
        """Returns the names of the peers; ``None`` for the usual ones."""
        threaded = tuple(f"host:{threads}" for threads in self.threads)
        return self.backends if not threaded else (*(self.backends or ()), *threaded)

    def cores_to_bind(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the cores of each rank: one, or with several threads all that there are for it.

        Args:
            ranks: number of ranks.

        Raises:
            ValueError: there are fewer cores than ranks.
        """
        one_each = tuple((core,) for core in cores_of_ranks(ranks))
        return tuple(tuple(sorted(one)) for one in shares(ranks)) if self.threads else one_each

    @property
    def item_bytes(self) -> int:
        """The size of an element."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    def largest_bytes(self, ranks: int) -> int:
        """Returns the size of the largest array of so many ranks, whole parts included.

        Args:
            ranks: number of ranks.
        """
        counts = (
            rounded_count(OPERATIONS[name], max(self.sizes), self.item_bytes, ranks)
            for name in self.operations
        )
        return self.item_bytes * max(counts)

    def buffers(self) -> int:
        """Returns the buffers that a call needs: one where all operations work in place."""
        return 1 if self.in_place and all(OPERATIONS[name].in_place for name in self.operations) else 2

    def arena_bytes(self, ranks: int) -> int:
        """Returns the memory that buffers rotate through; two calls of the largest always fit.

        Args:
            ranks: number of ranks.
        """
        return max(2 * self.buffers() * stride(self.largest_bytes(ranks)), ARENA_MIN_BYTES)

    def _memory_bytes(self, ranks: int) -> int:
        """Returns the memory of each rank's tensors."""
        parts = any(OPERATIONS[name].parts for name in self.operations)  # put together from parts
        return (2 + self.buffers() + parts) * self.largest_bytes(ranks) + self.arena_bytes(ranks)
