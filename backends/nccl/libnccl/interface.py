"""NCCL's communicators and groups of calls, with the checks that NCCL leaves to its callers.

A call of a collective or a message returns when it has been put on a CUDA stream. A group is a stretch of
calls of one thread that NCCL starts together at its end (``ncclGroupStart``, ``ncclGroupEnd``).

Pointers and streams are integers: ``tensor.data_ptr()``, ``torch.cuda.Stream.cuda_stream``; stream 0 is the
legacy default stream. Counts are in elements. Types and reductions are NCCL's codes
(:mod:`collectives.backends.nccl.libnccl.codes`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import collectives._native as _native
from collectives.backends.nccl.libnccl.codes import UNIQUE_ID_BYTES, NcclError, NcclStatus
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.symbols import Symbols

__all__ = ["Communicator", "NcclConfig", "NcclError", "NcclLibrary"]

_LEAVING_SECONDS = 0.05
"""How long abort lets calls leave NCCL by themselves. Longer ones are stuck, which is what abort is for."""


class NcclLibrary:
    """NCCL as one provider has loaded it.

    Any thread may call. A group belongs to the thread that opened it. NCCL itself forbids that several
    threads issue operations on communicators of one device at the same time: the caller sees to it.

    Args:
        name: name of the provider.
        symbols: the loaded library's functions.

    Attributes:
        name: name of the provider.
        path: file of the loaded library.
    """

    def __init__(self, name: str, symbols: Symbols) -> None:
        self.name = name
        self.path = symbols.path
        self._symbols = symbols
        self._groups = symbols.groups()
        self._group = _Group(self._groups)

    def version(self) -> int:
        """Returns the version of the loaded NCCL, such as 22809 for 2.28.9."""
        return self._symbols.version

    def unique_id(self) -> bytes:
        """Returns the identifier of a new communicator, 128 bytes, zeros among them.

        One rank makes it and hands it to all ranks, which give it to :meth:`init`. It is good for one
        communicator.

        Raises:
            NcclError: NCCL found no usable network interface.
        """
        return self._symbols.unique_id()

    def check_config(self, config: NcclConfig) -> None:
        """Raises what :meth:`init` and splits would raise for settings; asks no other rank.

        To be called before ranks wait for each other: one that raises alone leaves the others in NCCL.

        Raises:
            ValueError: the loaded NCCL does not read a setting, or the environment asks for non-blocking
                communicators.
        """
        _refuse_nonblocking()
        self._symbols.check_config(config)

    def init(self, unique_id: bytes, size: int, rank: int, config: NcclConfig | None = None) -> Communicator:
        """Makes a communicator on the current CUDA device.

        Called by all ``size`` ranks, each on a device of its own. Blocks, without any time limit, until all
        have called; the GIL is released.

        Args:
            unique_id: what :meth:`unique_id` returned on one of the ranks.
            size: number of ranks.
            rank: this rank, from 0 to ``size - 1``.
            config: settings, equal on all ranks.

        Raises:
            ValueError: ``unique_id``, ``size`` or ``rank`` are none, the loaded NCCL does not read a setting,
                or the environment asks for non-blocking communicators.
            NcclError: NCCL refused, or a group is open on this thread.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"unique_id must have {UNIQUE_ID_BYTES} bytes, but has {len(unique_id)}")
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to size - 1 = {size - 1}, but is {rank}")
        _refuse_nonblocking()
        _refuse_open(self._groups, "ncclCommInitRankConfig")
        handle = self._symbols.init(unique_id, size, rank, config or NcclConfig())
        return Communicator(self._symbols, self._groups, handle, rank, size)

    def group_start(self) -> None:
        """Opens a group on this thread, within the one that is open if any. Does not block."""
        self._groups.start()

    def group_end(self) -> None:
        """Closes the group that this thread opened last; the outermost starts what the group holds.

        May block while connections are made; the GIL is released. Must be called even where an operation of
        the group failed (:meth:`group` does so).

        Raises:
            NcclError: no group is open, or an operation of the group failed: then none of it was started.
        """
        self._groups.end()

    def group(self) -> AbstractContextManager[None]:
        """Returns what opens a group for the length of a ``with`` block.

        An exception of the block closes the group and is the one that leaves; operations that it issued
        before may have been started.
        """
        return self._group


class _Group(AbstractContextManager[None]):
    """Opens a group and closes it; the same for all threads, as the core knows the groups of each.

    A class, because a generator's context manager takes twice as many frames of Python.
    """

    def __init__(self, calls: _native.NcclGroups) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.start()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self._calls.end()
        except NcclError:
            if kind is None:  # else it repeats the failure of the operation, or comes from it
                raise


def _refusal(function: str, end: str) -> NcclError:
    """Returns the error of a call that uses a communicator which ends or has ended."""
    return NcclError(NcclStatus.INVALID_USAGE, function, f"this rank has {end} the communicator")


def _refuse_open(groups: _native.NcclGroups, function: str) -> None:
    """Raises an NcclError where this thread has a group open."""
    if groups.open:
        raise NcclError(NcclStatus.INVALID_USAGE, function, "a group is open on this thread; close it first")


def _refuse_nonblocking() -> None:
    """Raises a ValueError where NCCL would make communicators whose calls return before they are done."""
    value = os.environ.get("NCCL_COMM_BLOCKING", "")
    try:
        blocking = not value or int(value, 0) != 0
    except ValueError:
        blocking = True  # NCCL, too, passes over what is no number
    if not blocking:
        raise ValueError(
            f"NCCL_COMM_BLOCKING={value} asks for communicators that are not blocking, but only blocking "
            "ones are made here; unset it before NCCL is used"
        )


class Communicator:
    """One rank's end of a set of ranks on different devices.

    Every operation is called by all its ranks with equal counts, types, reductions and roots, in the same
    order on all ranks, with the communicator's device as the current one; NCCL checks none of this between
    ranks. A call returns when the operation is on ``stream`` (within a group: when it is noted), and
    completes there; the first ones make connections and may block until the peers call, with the GIL
    released. Buffers must stay until the stream has passed. Send and receive buffers are the same (in place,
    with the offsets given) or apart.

    :meth:`abort` and :meth:`async_error` may be called by any thread at any time, also while another thread
    is blocked in an operation. Never left to the garbage collector: :meth:`abort` or :meth:`destroy` ends
    it.

    The core issues the operations by the addresses of the loaded library's functions, and knows which calls
    are inside NCCL (``backends/native/nccl``).

    All operations raise:
        NcclError: NCCL refused, or the communicator has been ended.
        ValueError: a count is negative or beyond 63 bits.

    Args:
        symbols: the loaded library's functions.
        groups: the library's groups of calls.
        handle: the ``ncclComm_t``.
        rank: this rank.
        size: number of ranks.

    Attributes:
        rank: this rank.
        size: number of ranks.
        all_reduce: reduces ``count`` elements of all ranks into ``recv`` of every rank.
        reduce: reduces ``count`` elements of all ranks into ``recv`` of ``root``; ``recv`` may be 0
            elsewhere.
        broadcast: copies ``count`` elements from ``send`` of ``root`` to ``recv`` of every rank. Elsewhere
            ``send`` is not read and may be 0.
        all_gather: copies ``count`` elements of rank i to element ``i * count`` of ``recv`` on every rank. In
            place where ``send`` is ``recv`` plus ``rank * count`` elements.
        reduce_scatter: reduces ``size * recv_count`` elements of all ranks; rank i gets the i-th
            ``recv_count`` of them. In place where ``recv`` is ``send`` plus ``rank * recv_count`` elements.
        send: sends ``count`` elements to rank ``peer``, which receives as many. To the own rank only in a
            group that has the receive too: else it waits for ever.
        recv: receives ``count`` elements from rank ``peer``, in the order in which that rank sends them.
    """

    def __init__(
        self, symbols: Symbols, groups: _native.NcclGroups, handle: int, rank: int, size: int
    ) -> None:
        self.rank = rank
        self.size = size
        self._symbols = symbols
        self._groups = groups
        self._handle = handle
        self._calls = calls = symbols.calls(handle, _refusal)
        # The core's own methods, as each frame of Python takes half a microsecond.
        self.all_reduce = calls.all_reduce
        self.reduce = calls.reduce
        self.broadcast = calls.broadcast
        self.all_gather = calls.all_gather
        self.reduce_scatter = calls.reduce_scatter
        self.send = calls.send
        self.recv = calls.recv

    @property
    def handle(self) -> int:
        """The ``ncclComm_t``; 0 once the communicator has been ended."""
        return self._handle

    def split(self, color: int, key: int, config: NcclConfig | None = None) -> Communicator | None:
        """Makes one communicator of all ranks that give the same ``color``, ordered by ``key``, then rank.

        Called by all ranks of this communicator, with no operation under way and no group open. Blocks until
        all have called; the GIL is released.

        Args:
            color: the part that this rank joins, 0 or more; -1 for none.
            key: place within the part.
            config: settings, equal on all ranks of a part; ``None`` takes those of this communicator.

        Returns:
            The new communicator, ``None`` with ``color=-1``.

        Raises:
            ValueError: ``color`` is below -1, or the loaded NCCL does not read a setting.
            NcclError: NCCL refused (it needs 2.18), a group is open on this thread, or the communicator has
                been ended.
        """
        if color < -1:
            raise ValueError(f"color must be 0 or more, or -1 for no communicator, but is {color}")
        _refuse_open(self._groups, "ncclCommSplit")
        with self._entered("ncclCommSplit"):
            handle = self._symbols.split(self.handle, color, key, config)
            if not handle:
                return None
            rank, size = self._symbols.place(handle)
            return Communicator(self._symbols, self._groups, handle, rank, size)

    def premul_sum(self, scalar: float, dtype: int) -> int:
        """Returns the code of a reduction that multiplies this rank's input by ``scalar`` and sums.

        Local to this rank and communicator; good for elements of type ``dtype`` until :meth:`destroy_op`.

        Args:
            scalar: the factor, rounded to the type; an integer for integer types.
            dtype: type of the elements; 8-bit floats are not supported.

        Raises:
            TypeError: ``dtype`` has no such factor.
            ValueError: ``scalar`` does not fit ``dtype``.
            NcclError: NCCL refused (it needs 2.11), or the communicator has been ended.
        """
        with self._entered("ncclRedOpCreatePreMulSum"):
            return self._symbols.create_premul_sum(self.handle, scalar, dtype)

    def destroy_op(self, op: int) -> None:
        """Gives back a reduction of :meth:`premul_sum`, as soon as the last call that names it has returned.

        Does nothing once the communicator has been ended, which gives all of them back.
        """
        try:
            with self._entered("ncclRedOpDestroy"):
                self._symbols.destroy_op(self.handle, op)
        except NcclError:
            if not self.ended:
                raise

    def async_error(self) -> NcclError | None:
        """Returns the error that an operation met after its call returned, ``None`` where none did.

        Does not block. ``None`` once the communicator has been ended.
        """
        try:
            with self._entered("ncclCommGetAsyncError"):
                return self._symbols.async_error(self.handle)
        except NcclError:
            if self.ended:
                return None
            raise

    @property
    def ended(self) -> bool:
        """Whether the communicator has been aborted or destroyed, or that is under way."""
        return bool(self._calls.end)

    def abort(self) -> None:
        """Ends the communicator at once: operations under way stop, and calls that are blocked return.

        Buffers of stopped operations hold anything. Needs no other rank, but theirs go on waiting until they
        abort, too. A second call does nothing.
        """
        if self._calls.close(aborts=True, patience=_LEAVING_SECONDS):
            self._symbols.abort(self._take_handle())

    def destroy(self) -> None:
        """Ends the communicator after its operations; called by all ranks, and may block until they do.

        A second call does nothing, nor one after :meth:`abort`.

        Raises:
            NcclError: NCCL refused.
        """
        if self._calls.close(aborts=False):
            self._symbols.destroy(self._take_handle())

    @contextmanager
    def _entered(self, function: str) -> Iterator[None]:
        """Announces a call of NCCL that the core does not make, for the length of a ``with`` block."""
        self._calls.enter(function)
        try:
            yield
        finally:
            self._calls.leave()

    def _take_handle(self) -> int:
        """Returns the handle for the call that ends the communicator, the last one that has it."""
        handle, self._handle = self._handle, 0
        return handle
