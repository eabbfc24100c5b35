"""Memory as MPI takes it: address, number of elements and data type; and whether a message filled it."""

from __future__ import annotations

import functools
from typing import Any

from collectives.backends._shared.operation import Operation
from collectives.errors import DistBackendError

__all__ = ["Buffers", "check_length"]

_MOST = 2**31 - 1
"""The largest number of elements that every MPI library takes; those before MPI 4 count in C's int."""

_BLOCK_BYTES = 2**30


class Buffers:
    """Makes buffers of bytes for one MPI library.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._of_address = mpi.buffer.fromaddress
        self._byte = mpi.BYTE

    def __call__(self, address: int, nbytes: int) -> list[Any]:
        """Returns memory as a message; whoever asks keeps it alive."""
        memory = self._of_address(address, nbytes)
        return [memory, nbytes, self._byte] if nbytes <= _MOST else [memory, 1, self._large(nbytes)]

    def parts(self, address: int, nbytes: int, ranks: int) -> list[Any]:
        """Returns memory that holds a part of ``nbytes`` bytes for each of so many ranks."""
        memory = self._of_address(address, nbytes * ranks)
        if nbytes * ranks <= _MOST:
            return [memory, nbytes, self._byte]
        return [memory, 1, self._large(nbytes)]

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one object for each MPI library, that is, one
    def _large(self, nbytes: int) -> Any:
        """Returns a data type of which one element is the whole; never freed, because operations may last."""
        blocks, rest = divmod(nbytes, _BLOCK_BYTES)
        block = self._byte.Create_contiguous(_BLOCK_BYTES)
        whole = block.Create_contiguous(blocks)
        made = self._mpi.Datatype.Create_struct(
            [1, rest], [0, blocks * _BLOCK_BYTES], [whole, self._byte]
        ).Commit()
        whole.Free()
        block.Free()
        return made


def check_length(where: str, operation: Operation, got: int, nbytes: int) -> None:
    """Raises a DistBackendError where a message is not as long as the tensor that received it."""
    if got != nbytes:
        raise DistBackendError(
            f"{where} {operation}: the message has {got} bytes, but the tensor that receives it {nbytes}",
            **operation.about,
        )
