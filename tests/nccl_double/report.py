"""What is right of a group over NCCL, or over its double."""

from __future__ import annotations

import numpy as np
import torch
from conformance.oracle import INTS, Report, reduced

from collectives import ReduceOp


class NcclReport(Report):
    """Expects fewer cases, as NCCL computes with fewer data types, and its mean of integers that wrapped."""

    def reduced(self, case: str, actual: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> None:
        if op.name != "AVG" or actual.dtype not in INTS:
            super().reduced(case, actual, inputs, op)
            return
        total = reduced(inputs, ReduceOp.SUM).numpy().astype(object)
        mean = [abs(one) // len(inputs) * (1 if one >= 0 else -1) for one in total]
        self.same(
            case, actual, torch.from_numpy(np.array(mean, dtype=str(actual.dtype).removeprefix("torch.")))
        )

    def finish(self, at_least: int) -> None:
        super().finish(at_least // 2)
