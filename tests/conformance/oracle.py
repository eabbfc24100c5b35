"""The oracle that the package ships, and reports of many cases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from collectives import ProcessGroup, ReduceOp
from collectives.conformance.oracle import *  # noqa: F403
from collectives.conformance.oracle import INTS, Placed, close, raw, reduced, same, wrapped_mean


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha1(raw(tensor).numpy().tobytes()).hexdigest()


class Report:
    """The failures of many cases, so that one call tests them all and names those that failed."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.failures: list[str] = []
        self.cases = 0

    @property
    def exact(self) -> bool:
        """Whether the group promises the rules of numerics of the package; Gloo and NCCL cannot."""
        lanes = getattr(self.group, "lanes", (self.group,))
        return all(lane.name() not in {"gloo", "nccl"} for lane in lanes)

    def run(self, case: str, issue: Callable[[], None]) -> None:
        """Runs one case; an error of the group ends it all, because the ranks are no longer in step."""
        self.cases += 1
        try:
            issue()
        except Exception as error:
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error

    def expect(self, case: str, difference: str | None) -> None:
        if difference is not None:
            self.failures.append(f"{case}: {difference}")

    def same(self, case: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self.expect(case, same(actual, expected))

    def reduced(
        self,
        case: str,
        actual: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceOp,
        machines: Sequence[Sequence[int]] = (),
    ) -> None:
        expected = reduced(inputs, op, machines)
        self.expect(case, same(actual, expected) if self.exact else close(actual, expected, inputs, op))

    def whole(self, case: str, *placed: Placed) -> None:
        for one in placed:
            if not one.margin_is_whole():
                self.failures.append(f"{case}: elements outside of the tensor were written")

    def finish(self, at_least: int) -> None:
        """Raises with all failures; also if fewer cases than stated ran, as from an empty loop."""
        assert self.cases >= at_least, f"only {self.cases} cases ran"
        shown = self.failures[:12]
        if self.failures:
            raise AssertionError(f"{len(self.failures)} of {self.cases} cases failed:\n" + "\n".join(shown))


class NcclReport(Report):
    """Expects fewer cases, as NCCL computes with fewer data types, and its mean of integers that wrapped."""

    def reduced(
        self, case: str, actual: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, *_: object
    ) -> None:
        if op.name != "AVG" or actual.dtype not in INTS:
            super().reduced(case, actual, inputs, op)
        else:
            self.same(case, actual, wrapped_mean(inputs))

    def finish(self, at_least: int) -> None:
        super().finish(at_least // 2)
