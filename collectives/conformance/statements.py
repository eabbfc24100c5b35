"""Whether a backend does what its capabilities state, by the answers that its ranks gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from collectives.conformance.examination import Answer, Question, Status
from collectives.conformance.functions import REDUCING
from collectives.core.capabilities import Capabilities
from collectives.core.types import ReduceOp

__all__ = ["is_stated", "unkept"]

_OPERATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_isend_irecv": ("send", "recv"),
    "isend, recv": ("send", "recv"),
    "isend, recv, tagged": ("send", "recv"),
    "object collectives": ("all_gather", "broadcast"),
    "recv from any rank": ("send", "recv_anysource"),
}
"""The operations behind functions, where their names differ."""


def is_stated(question: Question, op: ReduceOp, stated: Capabilities, device: str) -> bool:
    """Returns whether capabilities offer what a question is about.

    Args:
        question: a function and a data type.
        op: the reduction, for functions that reduce.
        stated: the capabilities.
        device: type of the device that the tensors are on.
    """
    if question.function == "isend, recv, tagged" and not stated.tags:
        return False
    if question.function == "all_to_all_single" and not stated.uneven:
        return False
    if question.function == "barrier":
        return stated.why_not("barrier") is None
    dtype = question.dtype or torch.uint8  # of objects
    return all(
        stated.why_not(name, device=device, dtype=dtype, op=op) is None
        for name in _OPERATIONS.get(question.function, (question.function,))
    )


def unkept(question: Question, answer: Answer, stated: Capabilities, device: str) -> dict[str, str]:
    """Returns what is stated and was refused, with the reason that was given.

    Args:
        question: what the ranks were asked.
        answer: what became of it.
        stated: the capabilities of their backend.
        device: type of the device that the tensors were on.

    Returns:
        By the name of the reduction, or of the function where it does not reduce.
    """
    if answer.status not in {Status.OK, Status.UNSUPPORTED}:
        return {}  # which is said of it, and the others were not asked
    found = {}
    for op in question.ops:
        name = op.name if question.function in REDUCING else question.function
        if name in answer.details and is_stated(question, op, stated, device):
            found[name] = answer.details[name]
    return found
