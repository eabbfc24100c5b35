"""CUDA tensors on MPI: whether the library takes their addresses, and what is done so that it may.

An MPI is *CUDA-aware* where it takes addresses of device memory. Open MPI and MPICH tell by
``MPIX_Query_cuda_support``; ``COLLECTIVES_MPI_CUDA`` (``1`` or ``0``) overrules what they tell, for libraries
that tell nothing, or the wrong thing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from collectives.backends._shared.tensor_memory import Part, as_bytes
from collectives.backends.mpi.libmpi import Library

VARIABLE = "COLLECTIVES_MPI_CUDA"

_WORDS = {"1": True, "0": False, "": None}
_WAY_OUT = (
    f"take an MPI that is built for CUDA, or the nccl backend, or copy the tensor to the CPU; {VARIABLE}=1 "
    "says that this one takes device memory all the same"
)


def why_no_cuda(library: Library) -> str | None:
    """Returns why CUDA tensors are refused, a clause without a full stop; ``None`` where they are taken.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    given = os.environ.get(VARIABLE, "")
    if given not in _WORDS:
        raise ValueError(f"{VARIABLE} must be 1 or 0, but is {given!r}")
    said = _WORDS[given]
    if said is not None:
        return None if said else f"{VARIABLE} is 0; {_WAY_OUT}"
    query: Any = getattr(ctypes.CDLL(library.mpi.__file__), "MPIX_Query_cuda_support", None)
    if query is None:
        return (
            f"{library.version} does not tell (MPIX_Query_cuda_support) whether it is CUDA-aware; {_WAY_OUT}"
        )
    if not query():
        return f"{library.version} is not CUDA-aware (MPIX_Query_cuda_support says so); {_WAY_OUT}"
    return None


def synchronize_streams(tensors: Iterable[Any]) -> None:
    """Blocks until the current streams of CUDA tensors have passed what they hold; others are left out.

    MPI knows no streams: what it is given must be in memory.
    """
    for device in {
        tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda
    }:
        torch.cuda.current_stream(device).synchronize()


def copy_own(target: torch.Tensor, place: Part, source: torch.Tensor, part: Part) -> None:
    """Copies a part of one dense CUDA tensor to a part of another, on the current stream."""
    if part.nbytes and place.address != part.address:
        whole, given = as_bytes(target), as_bytes(source)
        begin, first = place.address - target.data_ptr(), part.address - source.data_ptr()
        whole[begin : begin + part.nbytes].copy_(given[first : first + part.nbytes])


def on_device(outputs: Iterable[torch.Tensor], after: Callable[[], None] | None) -> Callable[[], None] | None:
    """Returns a last step after which CUDA outputs are in memory, whatever thread and stream it runs on."""
    device = next((tensor.device for tensor in outputs if tensor.is_cuda), None)
    if after is None or device is None:
        return after

    def step() -> None:
        with torch.cuda.device(device):
            after()
            torch.cuda.current_stream(device).synchronize()

    return step
