"""NCCL's C functions in the library that a provider has loaded: its operations, and what the provider lacks.

Signatures and the layout of ``ncclConfig_t`` are those of ``nccl.h``. The structure grows at its end: NCCL
reads as much of it as it knows.
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
_CONFIG_VERSION: Final = 22800
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
}
"""The field of each setting, and the version of NCCL that reads it first."""

_FUNCTIONS: Final[dict[str, tuple[tuple[Any, ...], int]]] = {
    "ncclCommInitRankConfig": ((POINTER(c_void_p), c_int, _UniqueId, c_int, c_void_p), 21400),
    "ncclCommSplit": ((c_void_p, c_int, c_int, POINTER(c_void_p), c_void_p), 21800),
    "ncclRedOpCreatePreMulSum": ((POINTER(c_int), c_void_p, c_int, c_int, c_void_p), 21100),
    "ncclRedOpDestroy": ((c_int, c_void_p), 21100),
}
"""Argument types of each function, and the version of NCCL that has it first."""

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
        version: its version.
    """

    def __init__(self, path: str, version: int) -> None:
        self.path = path
        self.version = version
        # An object of its own, so that types set here touch nobody else's functions of the same library.
        self._library = ctypes.CDLL(path)

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

    def create_premul_sum(self, handle: int, scalar: float, dtype: int) -> int:
        """Returns the code of a new reduction; see ``Communicator.premul_sum``."""
        op = c_int()
        value = ctypes.create_string_buffer(_packed(scalar, dtype))
        self._call("ncclRedOpCreatePreMulSum", byref(op), value, dtype, _HOST_IMMEDIATE, handle)
        return op.value

    def destroy_op(self, handle: int, op: int) -> None:
        """Gives a reduction back."""
        self._call("ncclRedOpDestroy", op, handle)

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
        for name in given:
            since = _SETTINGS[name][1]
            if self.version < since:
                raise ValueError(
                    f"{name} needs NCCL {version_text(since)}, but {self.path} is NCCL "
                    f"{version_text(self.version)}"
                )
        made = _Config(size=ctypes.sizeof(_Config), magic=_MAGIC, version=min(_CONFIG_VERSION, self.version))
        for name, kind in _Config._fields_[3:]:
            setattr(made, name, None if kind is c_char_p else _UNDEFINED)
        made.blocking = 1
        for name, value in given.items():
            setattr(made, _SETTINGS[name][0], value.encode() if isinstance(value, str) else int(value))
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
