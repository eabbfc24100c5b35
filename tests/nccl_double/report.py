"""What is right of a group over NCCL, or over its double."""

from __future__ import annotations

import torch
from conformance.oracle import INTS, Report, wrapped_mean

from collectives import ReduceOp


class NcclReport(Report):
    """Expects fewer cases, as NCCL computes with fewer data types, and its mean of integers that wrapped."""

    def reduced(self, case: str, actual: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> None:
        if op.name != "AVG" or actual.dtype not in INTS:
            super().reduced(case, actual, inputs, op)
        else:
            self.same(case, actual, wrapped_mean(inputs))

    def finish(self, at_least: int) -> None:
        super().finish(at_least // 2)
