"""NCCL's C functions in the library that a provider has loaded.

Signatures and the layout of ``ncclConfig_t`` are those of ``nccl.h``. The structure grows at its end: NCCL
reads as much of it as it knows, and as the version that stands in it had.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, Final

import collectives._native as _native
from collectives.backends.nccl.libnccl.codes import (
    UNIQUE_ID_BYTES,
    NcclDataType,
    NcclError,
    NcclStatus,
    version_text,
)
from collectives.backends.nccl.libnccl.config import NcclConfig
from collectives.backends.nccl.libnccl.libnccl_file import ProviderError

__all__ = ["Symbols"]

_UNDEFINED: Final = -(2**31)
_MAGIC: Final = 0xCAFEBEEF
_HOST_IMMEDIATE: Final = 1
_MOST_CTAS: Final = 64
"""The most thread blocks that NCCL gives a kernel."""


class _UniqueId(Structure):
    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


class _Config(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
        ("trafficClass", c_int),
        ("commName", c_char_p),
        ("collnetEnable", c_int),
        ("CTAPolicy", c_int),
        ("shrinkShare", c_int),
        ("nvlsCTAs", c_int),
        ("nChannelsPerNetPeer", c_int),
        ("nvlinkCentricSched", c_int),
        ("graphUsageMode", c_int),
        ("numRmaCtx", c_int),
        ("maxP2pPeers", c_int),
        ("graphStreamOrdering", c_int),
    )


_SETTINGS: Final = {
    "cga_cluster_size": ("cgaClusterSize", 21700),
    "min_ctas": ("minCTAs", 21700),
    "max_ctas": ("maxCTAs", 21700),
    "net_name": ("netName", 21700),
    "split_share": ("splitShare", 21800),
    "traffic_class": ("trafficClass", 22600),
    "comm_name": ("commName", 22700),
    "collnet_enable": ("collnetEnable", 22700),
    "cta_policy": ("CTAPolicy", 22700),
    "nvls_ctas": ("nvlsCTAs", 22700),
    "n_channels_per_net_peer": ("nChannelsPerNetPeer", 22800),
    "nvlink_centric_sched": ("nvlinkCentricSched", 22800),
    "graph_usage_mode": ("graphUsageMode", 22900),
    "num_rma_ctx": ("numRmaCtx", 22900),
    "max_p2p_peers": ("maxP2pPeers", 23000),
    "graph_stream_ordering": ("graphStreamOrdering", 23005),
}
"""The field of each setting, and the version of NCCL that reads it first."""

_CONFIG_VERSION: Final = max(since for _, since in _SETTINGS.values())
"""The version of NCCL whose settings stand here; those of later ones keep their defaults."""

_texts: dict[str, bytes] = {}
"""Texts of settings, kept for good: NCCL reads the name of a communicator while it or a split of it lives."""

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
"""Argument types of each function, and a version of NCCL that has it."""

_WAYS_OUT: Final = {
    "Duplicate GPU": "give each rank a GPU of its own, as by torch.cuda.set_device(local_rank) before the "
    "group is made",
    "Mismatched NCCL version": "install the same NCCL for all ranks",
}
"""What to do, by a part of what NCCL says."""

_OLDEST: Final = 21400
"""The version from which on NCCL has all that is needed, but for splits."""

_SCALARS: Final[dict[int, str]] = {
    NcclDataType.INT8: "=b",
    NcclDataType.UINT8: "=B",
    NcclDataType.INT32: "=i",
    NcclDataType.UINT32: "=I",
    NcclDataType.INT64: "=q",
    NcclDataType.UINT64: "=Q",
    NcclDataType.FLOAT16: "=e",
    NcclDataType.FLOAT32: "=f",
    NcclDataType.FLOAT64: "=d",
}


_OPERATIONS: Final = (
    "ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter", "ncclSend",
    "ncclRecv",
)  # fmt: skip
"""The functions that the core calls, in the order in which it takes their addresses."""


class Symbols:
    """Functions of a loaded NCCL. Every call releases the GIL.

    Attributes:
        path: file of the library.
        version: its version.

    Args:
        path: file of the library, which is in this process already.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # An object of its own, so that types set here touch nobody else's functions of the same library.
        self._library = ctypes.CDLL(path)
        self.version = self._version()

    def _version(self) -> int:
        return self._integer("ncclGetVersion")

    def check_complete(self) -> None:
        """Raises unless the library has all that is needed of it.

        Raises:
            ProviderError: it is too old, or lacks functions that its version should have.
        """
        said = f"{self.path} is NCCL {version_text(self.version)}"
        if self.version < _OLDEST:
            raise ProviderError(f"{said}, but {version_text(_OLDEST)} is needed")
        expected = [*_OPERATIONS, "ncclGroupStart", "ncclGroupEnd"]
        expected += [name for name, (_, since) in _FUNCTIONS.items() if since <= self.version]
        lacking = [name for name in expected if not hasattr(self._library, name)]
        if lacking:
            raise ProviderError(f"{said}, but lacks {', '.join(lacking)}; install NVIDIA's library")

    def error(self, status: int, function: str) -> NcclError:
        """Returns the error for a status, with what NCCL has to say about it on this thread."""
        describe = self._library.ncclGetErrorString
        describe.restype = c_char_p
        texts = [bytes(describe(c_int(status)) or b"")]
        last = getattr(self._library, "ncclGetLastError", None)  # since 2.13
        if last is not None:
            last.restype = c_char_p
            texts.append(bytes(last(c_void_p(None)) or b""))
        said = "; ".join(text.decode(errors="replace").strip() for text in texts if text.strip())
        ways_out = [way for what, way in _WAYS_OUT.items() if what in said]
        if status == NcclStatus.IN_PROGRESS:
            ways_out.append("set NCCL_COMM_BLOCKING=1")
        about = "".join(f"{way}; " for way in ways_out)
        return NcclError(status, function, f"{about}NCCL {version_text(self.version)} says: {said}")

    def check(self, status: int, function: str) -> None:
        """Raises the error for a status other than success."""
        if status != NcclStatus.SUCCESS:
            raise self.error(status, function)

    def groups(self) -> _native.NcclGroups:
        """Returns the core's calls that open and close groups of calls."""
        return _native.NcclGroups(self._address("ncclGroupStart"), self._address("ncclGroupEnd"), self.error)

    def calls(self, handle: int, refusal: Callable[[str, str], NcclError]) -> _native.NcclCommunicator:
        """Returns the core's calls on a communicator.

        Args:
            handle: the ``ncclComm_t``.
            refusal: returns the error of a call by its function's name and how the communicator ends.
        """
        return _native.NcclCommunicator(
            [self._address(name) for name in _OPERATIONS], handle, self.error, refusal
        )

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    def check_config(self, config: NcclConfig) -> None:
        """Raises a ValueError for settings that the library does not know."""
        self._config(config)

    def unique_id(self) -> bytes:
        """Returns the identifier of a new communicator; see ``NcclLibrary.unique_id``."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", byref(made))
        return bytes(made)

    def init(self, unique_id: bytes, size: int, rank: int, config: NcclConfig) -> int:
        """Returns the handle of a new communicator; see ``NcclLibrary.init``."""
        handle = c_void_p()
        identifier = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRankConfig", byref(handle), size, identifier, rank, self._config(config))
        return handle.value or 0

    def split(self, handle: int, color: int, key: int, config: NcclConfig | None) -> int:
        """Returns the handle of the new communicator, 0 for none; see ``Communicator.split``."""
        made = c_void_p()
        settings = None if config is None else self._config(config)
        self._call("ncclCommSplit", handle, color, key, byref(made), settings)
        return made.value or 0

    def place(self, handle: int) -> tuple[int, int]:
        """Returns the rank and the size of a communicator."""
        return self._integer("ncclCommUserRank", handle), self._integer("ncclCommCount", handle)

    def async_error(self, handle: int) -> NcclError | None:
        """Returns the asynchronous error of a communicator; see ``Communicator.async_error``."""
        function = "ncclCommGetAsyncError"
        status = self._integer(function, handle)
        if status in (NcclStatus.SUCCESS, NcclStatus.IN_PROGRESS):
            return None
        return self.error(status, function)

    def abort(self, handle: int) -> None:
        """Ends a communicator at once; see ``Communicator.abort``."""
        self._call("ncclCommAbort", handle)

    def destroy(self, handle: int) -> None:
        """Ends a communicator in order; see ``Communicator.destroy``."""
        self._call("ncclCommDestroy", handle)

    def create_premul_sum(self, handle: int, scalar: float, dtype: int) -> int:
        """Returns the code of a new reduction; see ``Communicator.premul_sum``."""
        op = c_int()
        value = ctypes.create_string_buffer(_packed(scalar, dtype))
        self._call("ncclRedOpCreatePreMulSum", byref(op), value, dtype, _HOST_IMMEDIATE, handle)
        return op.value

    def destroy_op(self, handle: int, op: int) -> None:
        """Gives a reduction back."""
        self._call("ncclRedOpDestroy", op, handle)

    def _integer(self, name: str, *arguments: int) -> int:
        """Returns the number that a function writes where its last argument leads."""
        value = c_int()
        self._call(name, *arguments, byref(value))
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        types, since = _FUNCTIONS[name]
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NcclError(
                NcclStatus.INVALID_USAGE,
                name,
                f"{self.path} is NCCL {version_text(self.version)}, but the function came with "
                f"{version_text(since)}",
            ) from None
        function.argtypes = types
        function.restype = c_int
        self.check(function(*arguments), name)

    def _config(self, config: NcclConfig) -> Any:
        given = config.given()
        made = _Config(size=ctypes.sizeof(_Config), magic=_MAGIC, version=min(_CONFIG_VERSION, self.version))
        for name, kind in _Config._fields_[3:]:
            setattr(made, name, None if kind is c_char_p else _UNDEFINED)
        made.blocking = 1
        for name, value in given.items():
            field, since = _SETTINGS[name]
            if name == "cta_policy" and value not in (0, 1):
                since = 22800  # for the zero policy
            if self.version < since:
                raise ValueError(
                    f"{name}={value!r} needs NCCL {version_text(since)}, but {self.path} is NCCL "
                    f"{version_text(self.version)}"
                )
            encoded = _texts.setdefault(value, value.encode()) if isinstance(value, str) else int(value)
            setattr(made, field, encoded)
        if given.get("graph_stream_ordering") in (False, 0) and given.get("graph_usage_mode") not in (0, 1):
            raise ValueError(
                "graph_stream_ordering=False needs graph_usage_mode=0 or 1; with 2, its default, NCCL keeps "
                "the order"
            )
        if made.minCTAs != _UNDEFINED and made.maxCTAs == _UNDEFINED:
            made.maxCTAs = max(made.minCTAs, _MOST_CTAS)  # NCCL takes no lower bound without an upper one
        return byref(made)


def _packed(scalar: float, dtype: int) -> bytes:
    """Returns a factor as an element of the type.

    Raises:
        TypeError: factors of this type are not supported.
        ValueError: the factor does not fit it.
    """
    layout = "bfloat16" if dtype == NcclDataType.BFLOAT16 else _SCALARS.get(dtype)
    if layout is None:
        raise TypeError(f"a sum with a factor is not supported for elements of NCCL's type {dtype}")
    try:
        if layout == "bfloat16":
            return _bfloat16(scalar)
        if layout[-1] in "efd":
            return struct.pack(layout, scalar)
        if int(scalar) == scalar:
            return struct.pack(layout, int(scalar))
    except (OverflowError, ValueError, struct.error):
        pass  # said below
    raise ValueError(f"the factor {scalar} does not fit elements of type {NcclDataType(dtype).name}")


def _bfloat16(scalar: float) -> bytes:
    """Returns the nearest bfloat16, ties to even: the upper half of a float32."""
    bits = struct.unpack("=I", struct.pack("=f", scalar))[0]
    if scalar == scalar:  # not NaN, whose bits must not be rounded to infinity
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("=H", bits >> 16)
