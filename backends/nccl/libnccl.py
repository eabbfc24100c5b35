"""NCCL's communicators and groups of calls, with the checks that NCCL leaves to its callers.

A call of a collective or a message returns when it has been put on a CUDA stream. A group is a stretch of
calls of one thread that NCCL starts together at its end (``ncclGroupStart``, ``ncclGroupEnd``).

Pointers and streams are integers: ``tensor.data_ptr()``, ``torch.cuda.Stream.cuda_stream``; stream 0 is the
legacy default stream. Counts are in elements. Types and reductions are NCCL's codes. Signatures and the
layout of ``ncclConfig_t`` are those of ``nccl.h``. The structure grows at its end: NCCL reads as much of it
as it knows, and as the version that stands in it had.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from enum import IntEnum
from typing import Any, Final

import torch

import collectives._native as _native
from collectives.backends.nccl.options import NcclConfig
from collectives.core.types import ReduceOp

UNIQUE_ID_BYTES: Final = 128
"""Length of the identifier by which the ranks of a communicator find each other."""

_LEAVING_SECONDS = 0.05
"""How long abort lets calls leave NCCL by themselves. Longer ones are stuck, which is what abort is for."""

_UNDEFINED: Final = -(2**31)
_MAGIC: Final = 0xCAFEBEEF
_HOST_IMMEDIATE: Final = 1
_MOST_CTAS: Final = 64
"""The most thread blocks that NCCL gives a kernel."""

_OLDEST: Final = 21400
"""The version from which on NCCL has all that is needed, but for splits."""


class NcclStatus(IntEnum):
    """What a call of NCCL comes to (``ncclResult_t``)."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


class NcclDataType(IntEnum):
    """Element types (``ncclDataType_t``). The two of 8-bit floats need NCCL 2.24."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8E4M3 = 10
    FLOAT8E5M2 = 11


class NcclRedOp(IntEnum):
    """Built-in reductions (``ncclRedOp_t``); :meth:`Communicator.premul_sum` makes further ones.

    AVG of integers truncates.
    """

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


_TYPES: Final = (
    torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16,
    torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""What NCCL computes with, in the order of its codes."""

DATA_TYPES: Final = {
    torch.bool: NcclDataType.UINT8,
    **dict(zip(_TYPES, NcclDataType, strict=True)),
}
"""The code of every dtype that NCCL computes with; others can only be moved, as bytes."""

REDUCTIONS: Final = dict(
    zip((ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG), NcclRedOp, strict=True)
)
"""The code of every reduction that NCCL has built in."""

_MEANINGS: Final = {
    NcclStatus.UNHANDLED_CUDA_ERROR: "a call of CUDA failed",
    NcclStatus.SYSTEM_ERROR: "a call of the operating system failed",
    NcclStatus.INTERNAL_ERROR: "an internal check failed",
    NcclStatus.INVALID_ARGUMENT: "an argument has a value that NCCL does not take",
    NcclStatus.INVALID_USAGE: "the call is not allowed here",
    NcclStatus.REMOTE_ERROR: "the network failed or another rank ended",
    NcclStatus.IN_PROGRESS: "the communicator is not blocking",
    NcclStatus.TIMEOUT: "a time limit of NCCL passed",
}

_WAYS_OUT: Final = {
    "Duplicate GPU": "give each rank a GPU of its own, as by torch.cuda.set_device(local_rank) before the "
    "group is made",
    "Mismatched NCCL version": "install the same NCCL for all ranks",
}
"""What to do, by a part of what NCCL says."""

_SETTINGS: Final = {one.name: one.metadata["since"] for one in dataclasses.fields(NcclConfig) if one.metadata}
"""The settings of a communicator in their order, and the version of NCCL that reads each first."""

_ATTRIBUTES: Final = [*_SETTINGS]
"""The attributes of ``ncclConfig_t`` that are settings, in their order."""
_ATTRIBUTES.insert(_ATTRIBUTES.index("nvls_ctas"), "shrink_share")

_CONFIG_VERSION: Final = max(_SETTINGS.values())
"""The version of NCCL whose settings stand here; those of later ones keep their defaults."""

_texts: dict[str, bytes] = {}
"""Texts of settings, kept for good: NCCL reads the name of a communicator while it or a split of it lives."""


class _UniqueId(Structure):
    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


class _Config(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        *((name, c_char_p if name.endswith("_name") else c_int) for name in _ATTRIBUTES),
    )


_FUNCTIONS: Final[dict[str, tuple[tuple[Any, ...], int]]] = {
    "ncclGetVersion": ((POINTER(c_int),), 21400),
    "ncclGetUniqueId": ((POINTER(_UniqueId),), 21400),
    "ncclCommAbort": ((c_void_p,), 21400),
    "ncclCommDestroy": ((c_void_p,), 21400),
    "ncclCommGetAsyncError": ((c_void_p, POINTER(c_int)), 21400),
    "ncclCommCount": ((c_void_p, POINTER(c_int)), 21400),
    "ncclCommUserRank": ((c_void_p, POINTER(c_int)), 21400),
    "ncclCommInitRankConfig": ((POINTER(c_void_p), c_int, _UniqueId, c_int, c_void_p), 21400),
    "ncclCommSplit": ((c_void_p, c_int, c_int, POINTER(c_void_p), c_void_p), 21800),
    "ncclRedOpCreatePreMulSum": ((POINTER(c_int), c_void_p, c_int, c_int, c_void_p), 21100),
    "ncclRedOpDestroy": ((c_int, c_void_p), 21100),
}
"""Argument types of each function that is called here, and a version of NCCL that has it."""


class ProviderError(RuntimeError):
    """A provider cannot be used here; the message tells why and what would mend it."""


class NcclError(RuntimeError):
    """A call of NCCL failed.

    Attributes:
        status: NCCL's status, 1 to 8 or a number that a newer NCCL knows.
        function: the function that failed, such as ``ncclAllReduce``.
        detail: what more is known, such as the last error that NCCL wrote down; may be empty.
        status_name: the status as NCCL spells it, such as ``ncclInvalidUsage``; else ``"an unknown status"``.
    """

    def __init__(self, status: int, function: str, detail: str = "") -> None:
        self.status = status
        self.function = function
        self.detail = detail
        self.status_name, known = "an unknown status", ""
        if status in NcclStatus._value2member_map_:
            words = NcclStatus(status).name.split("_")
            self.status_name = "nccl" + "".join(word.capitalize() for word in words)
            known = _MEANINGS.get(NcclStatus(status), "")
        text = f"{function} failed with {self.status_name} ({status})"
        super().__init__(": ".join(part for part in (text, known, detail) if part))

    def __reduce__(self) -> tuple[type[NcclError], tuple[int, str, str]]:
        return type(self), (self.status, self.function, self.detail)


def version_text(version: int) -> str:
    """Returns NCCL's version number as people write it: 22809 is ``"2.28.9"``.

    Up to 2.8 the major version counted thousands, since then ten thousands.
    """
    major = 10000 if version >= 10000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


class NcclLibrary:
    """NCCL as one provider has loaded it. Every call releases the GIL.

    Any thread may call. A group belongs to the thread that opened it. NCCL itself forbids that several
    threads issue operations on communicators of one device at the same time: the caller sees to it.

    Args:
        name: name of the provider.
        path: file of the library, which is in this process already.

    Raises:
        ProviderError: the library is too old, or lacks functions that its version should have.

    Attributes:
        name: name of the provider.
        path: file of the loaded library.
        group: opens a group for the length of a ``with`` block, within the one that is open if any. Its end
            starts what the outermost group holds, and may block while connections are made. An exception of
            the block closes the group and is the one that leaves; operations that it issued before may have
            been started. Where an operation of the group failed, none of it is started.
    """

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        # An object of its own, so that types set here touch nobody else's functions of the same library.
        self._library = ctypes.CDLL(path)
        self._version = self.integer("ncclGetVersion")
        self._check_complete()
        start, end = self._address("ncclGroupStart"), self._address("ncclGroupEnd")
        self.group = _native.NcclGroups(start, end, self.error)

    def version(self) -> int:
        """Returns the version of the loaded NCCL, such as 22809 for 2.28.9."""
        return self._version

    def _check_complete(self) -> None:
        said = f"{self.path} is NCCL {version_text(self._version)}"
        if self._version < _OLDEST:
            raise ProviderError(f"{said}, but {version_text(_OLDEST)} is needed")
        expected = [*_native.NcclCommunicator.functions(), "ncclGroupStart", "ncclGroupEnd"]
        expected += [name for name, (_, since) in _FUNCTIONS.items() if since <= self._version]
        lacking = [name for name in expected if not self._address(name)]
        if lacking:
            raise ProviderError(f"{said}, but lacks {', '.join(lacking)}; install NVIDIA's library")

    def unique_id(self) -> bytes:
        """Returns the identifier of a new communicator, 128 bytes, zeros among them.

        One rank makes it and hands it to all ranks, which give it to :meth:`init`. It is good for one
        communicator.

        Raises:
            NcclError: NCCL found no usable network interface.
        """
        made = _UniqueId()
        self.call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def check_config(self, config: NcclConfig) -> None:
        """Raises what :meth:`init` and splits would raise for settings; asks no other rank.

        To be called before ranks wait for each other: one that raises alone leaves the others in NCCL.

        Raises:
            ValueError: the loaded NCCL does not read a setting, or the environment asks for non-blocking
                communicators.
        """
        self._refuse_nonblocking()
        self.settings(config)

    def init(self, unique_id: bytes, size: int, rank: int, config: NcclConfig | None = None) -> Communicator:
        """Makes a communicator on the current CUDA device.

        Called by all ``size`` ranks, each on a device of its own. Blocks, without any time limit, until all
        have called.

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
        self._refuse_nonblocking()
        self.refuse_open("ncclCommInitRankConfig")
        handle, given = c_void_p(), _UniqueId.from_buffer_copy(unique_id)
        settings = self.settings(config or NcclConfig())
        self.call("ncclCommInitRankConfig", byref(handle), size, given, rank, settings)
        return Communicator(self, handle.value or 0, rank, size)

    # ---- for communicators -------------------------------------------------------------------------------

    def calls(self, handle: int) -> _native.NcclCommunicator:
        """Returns the core's calls on a communicator."""
        functions = [self._address(name) for name in _native.NcclCommunicator.functions()]
        return _native.NcclCommunicator(functions, handle, self.error, _refusal)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        Raises:
            NcclError: it failed, or this NCCL does not have it.
        """
        types, since = _FUNCTIONS[name]
        function = getattr(self._library, name, None)
        if function is None:
            came = f"the function came with {version_text(since)}"
            text = f"{self.path} is NCCL {version_text(self._version)}, but {came}"
            raise NcclError(NcclStatus.INVALID_USAGE, name, text)
        function.argtypes = types
        function.restype = c_int
        status = function(*arguments)
        if status != NcclStatus.SUCCESS:
            raise self.error(status, name)

    def integer(self, name: str, *arguments: int) -> int:
        """Returns the number that a function writes where its last argument leads."""
        value = c_int()
        self.call(name, *arguments, byref(value))
        return value.value

    def error(self, status: int, function: str) -> NcclError:
        """Returns the error for a status, with what NCCL has to say about it on this thread."""
        texts = []
        for name, argument in (("ncclGetErrorString", c_int(status)), ("ncclGetLastError", c_void_p(None))):
            describe = getattr(self._library, name, None)
            if describe is not None:
                describe.restype = c_char_p
                texts.append(bytes(describe(argument) or b"").decode(errors="replace").strip())
        said = "; ".join(filter(None, texts))
        ways_out = [way for what, way in _WAYS_OUT.items() if what in said]
        if status == NcclStatus.IN_PROGRESS:
            ways_out.append("set NCCL_COMM_BLOCKING=1")
        about = "".join(f"{way}; " for way in ways_out)
        return NcclError(status, function, f"{about}NCCL {version_text(self._version)} says: {said}")

    def refuse_open(self, function: str) -> None:
        """Raises an NcclError where this thread has a group open."""
        if self.group.open:
            text = "a group is open on this thread; close it first"
            raise NcclError(NcclStatus.INVALID_USAGE, function, text)

    def settings(self, config: NcclConfig) -> Any:
        """Returns settings as NCCL takes them.

        Raises:
            ValueError: the loaded NCCL does not read one.
        """
        given = config.given()
        version = min(_CONFIG_VERSION, self._version)
        made = _Config(size=ctypes.sizeof(_Config), magic=_MAGIC, version=version, blocking=1)
        for name in _ATTRIBUTES:
            setattr(made, name, None if name.endswith("_name") else _UNDEFINED)
        for name, value in given.items():
            since = _SETTINGS[name]
            if name == "cta_policy" and value not in (0, 1):
                since = 22800  # for the zero policy
            if self._version < since:
                raise ValueError(
                    f"{name}={value!r} needs NCCL {version_text(since)}, but {self.path} is NCCL "
                    f"{version_text(self._version)}"
                )
            encoded = _texts.setdefault(value, value.encode()) if isinstance(value, str) else int(value)
            setattr(made, name, encoded)
        if given.get("graph_stream_ordering") in (False, 0) and given.get("graph_usage_mode") not in (0, 1):
            raise ValueError(
                "graph_stream_ordering=False needs graph_usage_mode=0 or 1; with 2, its default, NCCL keeps "
                "the order"
            )
        if made.min_ctas != _UNDEFINED and made.max_ctas == _UNDEFINED:
            made.max_ctas = max(made.min_ctas, _MOST_CTAS)  # NCCL takes no lower bound without an upper one
        return byref(made)

    def _address(self, name: str) -> int:
        """Returns the address of a function, 0 where there is none."""
        function = getattr(self._library, name, None)
        return 0 if function is None else ctypes.cast(function, c_void_p).value or 0

    def _refuse_nonblocking(self) -> None:
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


def _refusal(function: str, end: str) -> NcclError:
    """Returns the error of a call that uses a communicator which ends or has ended."""
    return NcclError(NcclStatus.INVALID_USAGE, function, f"this rank has {end} the communicator")


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
        library: the loaded library.
        handle: the ``ncclComm_t``.
        rank: this rank.
        size: number of ranks.

    Attributes:
        handle: the ``ncclComm_t``; 0 once the communicator has been ended.
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
        send: sends ``count`` elements to rank ``peer``, which receives as many. A send to this
            rank itself must be in the same group as its receive; otherwise it deadlocks.
        recv: receives ``count`` elements from rank ``peer``, in the order in which that rank sends them.
    """

    def __init__(self, library: NcclLibrary, handle: int, rank: int, size: int) -> None:
        self.handle = handle
        self.rank = rank
        self.size = size
        self._library = library
        self._calls = calls = library.calls(handle)
        # The core's own methods, as each frame of Python takes half a microsecond.
        self.all_reduce = calls.all_reduce
        self.reduce = calls.reduce
        self.broadcast = calls.broadcast
        self.all_gather = calls.all_gather
        self.reduce_scatter = calls.reduce_scatter
        self.send = calls.send
        self.recv = calls.recv

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
        self._library.refuse_open("ncclCommSplit")
        made = c_void_p()
        settings = None if config is None else self._library.settings(config)
        self._call("ncclCommSplit", self.handle, color, key, byref(made), settings)
        if not made.value:
            return None
        rank = self._library.integer("ncclCommUserRank", made.value)
        return Communicator(
            self._library, made.value, rank, self._library.integer("ncclCommCount", made.value)
        )

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
        op, factor = c_int(), _element(scalar, dtype)
        name = "ncclRedOpCreatePreMulSum"
        self._call(name, byref(op), factor.data_ptr(), dtype, _HOST_IMMEDIATE, self.handle)
        return op.value

    def destroy_op(self, op: int) -> None:
        """Gives back a reduction of :meth:`premul_sum`, as soon as the last call that names it has returned.

        Does nothing once the communicator has been ended, which gives all of them back.
        """
        try:
            self._call("ncclRedOpDestroy", op, self.handle)
        except NcclError:
            if not self.ended:
                raise

    def async_error(self) -> NcclError | None:
        """Returns the error that an operation met after its call returned, ``None`` where none did.

        Does not block. ``None`` once the communicator has been ended.
        """
        name, status = "ncclCommGetAsyncError", c_int()
        try:
            self._call(name, self.handle, byref(status))
        except NcclError:
            if self.ended:
                return None
            raise
        if status.value in (NcclStatus.SUCCESS, NcclStatus.IN_PROGRESS):
            return None
        return self._library.error(status.value, name)

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
            self._end("ncclCommAbort")

    def destroy(self) -> None:
        """Ends the communicator after its operations; called by all ranks, and may block until they do.

        A second call does nothing, nor one after :meth:`abort`.

        Raises:
            NcclError: NCCL refused.
        """
        if self._calls.close(aborts=False):
            self._end("ncclCommDestroy")

    def _end(self, function: str) -> None:
        handle, self.handle = self.handle, 0  # the last call that has it
        self._library.call(function, handle)

    def _call(self, function: str, *arguments: Any) -> None:
        """Calls a function that the core does not call, and announces that to it."""
        self._calls.enter(function)
        try:
            self._library.call(function, *arguments)
        finally:
            self._calls.leave()


def _element(scalar: float, dtype: int) -> torch.Tensor:
    """Returns a factor as an element of NCCL's type.

    Raises:
        TypeError: factors of this type are not supported.
        ValueError: the factor does not fit it.
    """
    if not 0 <= dtype < NcclDataType.FLOAT8E4M3:
        raise TypeError(f"a sum with a factor is not supported for elements of NCCL's type {dtype}")
    kind = _TYPES[dtype]
    if kind.is_floating_point:
        fits = not math.isfinite(scalar) or abs(scalar) <= torch.finfo(kind).max
    else:
        limits = torch.iinfo(kind)
        fits = limits.min <= scalar <= limits.max and int(scalar) == scalar
    if not fits:
        raise ValueError(f"the factor {scalar} does not fit elements of type {NcclDataType(dtype).name}")
    return torch.tensor(scalar, dtype=kind, device="cpu")
