"""NCCL's numbers for statuses, element types and reductions, and the error that carries a status."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import torch

from collectives.core.types import ReduceOp

__all__ = [
    "DATA_TYPES",
    "REDUCTIONS",
    "UNIQUE_ID_BYTES",
    "NcclDataType",
    "NcclError",
    "NcclRedOp",
    "NcclStatus",
    "version_text",
]

UNIQUE_ID_BYTES: Final = 128
"""Length of the identifier by which the ranks of a communicator find each other."""


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


DATA_TYPES: Final[Mapping[torch.dtype, NcclDataType]] = MappingProxyType(
    {
        torch.bool: NcclDataType.UINT8,
        torch.int8: NcclDataType.INT8,
        torch.uint8: NcclDataType.UINT8,
        torch.int32: NcclDataType.INT32,
        torch.uint32: NcclDataType.UINT32,
        torch.int64: NcclDataType.INT64,
        torch.uint64: NcclDataType.UINT64,
        torch.float16: NcclDataType.FLOAT16,
        torch.float32: NcclDataType.FLOAT32,
        torch.float64: NcclDataType.FLOAT64,
        torch.bfloat16: NcclDataType.BFLOAT16,
        torch.float8_e4m3fn: NcclDataType.FLOAT8E4M3,
        torch.float8_e5m2: NcclDataType.FLOAT8E5M2,
    }
)
"""The code of every dtype that NCCL computes with; others can only be moved, as bytes."""

REDUCTIONS: Final[Mapping[ReduceOp, NcclRedOp]] = MappingProxyType(
    {
        ReduceOp.SUM: NcclRedOp.SUM,
        ReduceOp.PRODUCT: NcclRedOp.PROD,
        ReduceOp.MAX: NcclRedOp.MAX,
        ReduceOp.MIN: NcclRedOp.MIN,
        ReduceOp.AVG: NcclRedOp.AVG,
    }
)
"""The code of every reduction that NCCL has built in."""

_MEANINGS = {
    NcclStatus.UNHANDLED_CUDA_ERROR: "a call of CUDA failed",
    NcclStatus.SYSTEM_ERROR: "a call of the operating system failed",
    NcclStatus.INTERNAL_ERROR: "an internal check failed",
    NcclStatus.INVALID_ARGUMENT: "an argument has a value that NCCL does not take",
    NcclStatus.INVALID_USAGE: "the call is not allowed here",
    NcclStatus.REMOTE_ERROR: "the network failed or another rank ended",
    NcclStatus.IN_PROGRESS: "the communicator is not blocking",
    NcclStatus.TIMEOUT: "a time limit of NCCL passed",
}


class NcclError(RuntimeError):
    """A call of NCCL failed.

    Attributes:
        status: NCCL's status, 1 to 8 or a number that a newer NCCL knows.
        function: the function that failed, such as ``ncclAllReduce``.
        detail: what more is known, such as the last error that NCCL wrote down; may be empty.
    """

    def __init__(self, status: int, function: str, detail: str = "") -> None:
        self.status = status
        self.function = function
        self.detail = detail
        known = _MEANINGS.get(NcclStatus(status)) if status in NcclStatus._value2member_map_ else None
        text = f"{function} failed with {self.status_name} ({status})"
        super().__init__(": ".join(part for part in (text, known, detail) if part))

    @property
    def status_name(self) -> str:
        """The status as NCCL spells it, such as ``ncclInvalidUsage``; else ``"an unknown status"``."""
        try:
            name = NcclStatus(self.status).name
        except ValueError:
            return "an unknown status"
        return "nccl" + "".join(word.capitalize() for word in name.split("_"))

    def __reduce__(self) -> tuple[type[NcclError], tuple[int, str, str]]:
        return type(self), (self.status, self.function, self.detail)


def version_text(version: int) -> str:
    """Returns NCCL's version number as people write it: 22809 is ``"2.28.9"``.

    Up to 2.8 the major version counted thousands, since then ten thousands.
    """
    major = 10000 if version >= 10000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"
