"""Collectives of small and middling tensors, issued and finished by the C++ core.

The core sends every rank's messages to each other one and reduces what comes with the package's kernels
(``backends/native/mpi``). It calls the MPI library that mpi4py has loaded, by address: what MPI takes from
C costs a few hundred nanoseconds a message, from Python some microseconds.

A synchronous call tests its messages for at most two milliseconds in the core. What is not over by then, and
every asynchronous call, becomes a Work that the engine drives, with its time limits and its look at other
ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

import collectives._native as _native
from collectives.backends.mpi.libmpi import Library
from collectives.backends.mpi.messages import CHUNK_BYTES
from collectives.backends.mpi.work import Steps, Until

__all__ = ["MOST_RANKS", "NativeExchange", "steps_of"]

MOST_RANKS = 16
"""Up to here every rank sends small tensors to each other one; beyond, MPI's own collectives do."""

_AT_ONCE_BYTES = 64 << 10
"""Where all ranks' tensors take no more than this together, every rank gets and reduces them all."""

_WHOLE_BYTES = 256 << 10
"""The largest tensor that is broadcast, or gathered by all, by messages from each rank to each other."""

_LOCAL_BYTES = 8 << 20
"""The most bytes for the fast path, all tensors of a call on this rank together."""

_SPINS = 2000
"""Tests in a row."""

_SPINS_OVERSUBSCRIBED = 20

for _type in (torch.Tensor, torch.nn.Parameter):
    _native.register_tensor_type(_type)


class NativeExchange:
    """Collectives of one group on a communicator, by messages that the core sends.

    Attributes:
        fast_collective: runs a collective for :meth:`collectives.ProcessGroup.fast_collective`; returns
            ``True`` where it is done, ``False`` where nothing is, and else what is under way.
        fast_message: the same for :meth:`collectives.ProcessGroup.fast_message`.
        serves: whether a collective goes over the wire as here, by its number in ``_native.COLLECTIVES``, the
            bytes of the whole tensor and those of an element; the same on all ranks.
        set_timeout: sets the time limit that the flight record shows of what goes the fast way, in
            nanoseconds.

    Args:
        library: the MPI library.
        communicator: MPI's, on which the numbers of exchanges make the tags.
        messages: MPI's, for users' messages.
        rank: this process's rank.
        size: number of ranks.
        largest_tag: the library's largest tag.
        operations: gives the number of the next collective, for messages.
        message_numbers: the same of messages.
        exchanges: gives the number of the next exchange, which is the same on all ranks.
        record: gets what goes the fast way.
        timeout_ns: see ``set_timeout``.
        unfinished: gets what the fast calls have begun and not finished.
    """

    def __init__(
        self,
        library: Library,
        communicator: Any,
        messages: Any,
        rank: int,
        size: int,
        largest_tag: int,
        operations: Iterator[int],
        message_numbers: Iterator[int],
        exchanges: Iterator[int],
        record: _native.OperationRecord,
        timeout_ns: int,
        unfinished: list[_native.MpiInFlight],
    ) -> None:
        mpi = library.mpi
        # The extension was linked with the library, so that its own search for names finds the same one.
        functions = ctypes.CDLL(mpi.__file__)
        isend, irecv, test, testall, get_count = (
            ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0
            for name in ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Testall", "MPI_Get_count")
        )
        exchange = _native.MpiFastPath(
            (isend, irecv, test, testall, get_count),
            (mpi._sizeof(mpi.Request), mpi._sizeof(mpi.Status)),
            communicator.handle,
            messages.handle,
            mpi.BYTE.handle,
            rank,
            size,
            largest_tag,
            operations,
            message_numbers,
            exchanges,
            (_AT_ONCE_BYTES, _WHOLE_BYTES, MOST_RANKS, CHUNK_BYTES, _LOCAL_BYTES),
            _SPINS_OVERSUBSCRIBED if library.oversubscribed else _SPINS,
            record,
            timeout_ns,
            unfinished,
        )
        # Where calls of MPI must not meet, they are made under the engine's lock, which this has not.
        self.fast_collective = exchange.fast_collective if library.concurrent else _never
        self.fast_message = exchange.fast_message if library.concurrent else _never
        self.serves = exchange.serves
        self.set_timeout = exchange.set_timeout
        self._issue = exchange.issue
        self._mpi = mpi

    def steps(self, **what: Any) -> Steps:
        """The stages of a collective; the first begins it.

        Args:
            **what: the collective, as ``_native.MpiFastPath.issue`` takes it.
        """
        begun: list[_native.MpiInFlight] = []

        def is_over() -> bool:
            if not begun:
                begun.append(self._issue(**what))
            return _is_over(begun[0], self._mpi)

        return Until(is_over)


def steps_of(in_flight: _native.MpiInFlight, mpi: Any) -> Steps:
    """The stages of an operation that the core has begun."""
    return Until(lambda: _is_over(in_flight, mpi))


def _is_over(in_flight: _native.MpiInFlight, mpi: Any) -> bool:
    """Moves it on; raises MPI's error."""
    over = not in_flight.error and in_flight.advance()
    if in_flight.error:
        raise mpi.Exception(in_flight.error)
    return over


def _never(*_: object) -> bool:
    return False
