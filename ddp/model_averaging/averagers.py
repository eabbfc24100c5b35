"""Model averagers that average over one group."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from collectives import ProcessGroup
from collectives.ddp.default_group import resolve_group
from collectives.ddp.model_averaging.utils import average_parameters_or_parameter_groups
from collectives.dynamo import Uncompiled

__all__ = ["ModelAverager", "PeriodicModelAverager", "check_warmup", "warn_of_period"]


class ModelAverager(Uncompiled, ABC):
    """Averages parameters at some of the steps at which it is called.

    Attributes:
        process_group: the ranks.
        step: number of calls of :meth:`average_parameters`; may be set, as from a checkpoint.

    Args:
        process_group: the ranks; ``None`` for the default group.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.process_group = resolve_group(process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]) -> None:
        """Counts a step, and averages those parameters that have a gradient where it is time to.

        Called by all ranks after each step of their optimizers; blocks where it averages.

        Args:
            params: parameters of a model, or parameter groups of an optimizer; those that have a gradient
                must be the same on all ranks.
        """


class PeriodicModelAverager(ModelAverager):
    """Averages parameters at every ``period``-th step after a warm-up.

    Local SGD and post-local SGD (Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"): the warm-up
    lasts as long as gradients are averaged over all ranks.

    Args:
        period: number of steps from one average to the next.
        warmup_steps: number of steps without an average; the first one comes right after them.
        process_group: the ranks; ``None`` for the default group.

    Raises:
        ValueError: ``period`` is less than 1, or ``warmup_steps`` is negative.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self.warmup_steps = check_warmup(warmup_steps)
        if period < 1:
            raise ValueError(f"period must be 1 or more, but is {period}")
        if period == 1:
            warn_of_period()
        self.period = period

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]) -> None:
        """Counts a step, and averages those parameters that have a gradient where it is time to."""
        since = self.step - self.warmup_steps
        if since >= 0 and since % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


def check_warmup(steps: int) -> int:
    """Returns a number of steps.

    Raises:
        ValueError: it is negative.
    """
    if steps < 0:
        raise ValueError(f"warmup_steps must be 0 or more, but is {steps}")
    return steps


def warn_of_period() -> None:
    """Warns that parameters are averaged at every step."""
    warnings.warn(
        "parameters are averaged at every step, which costs as much as to average gradients: "
        "DistributedDataParallel alone does better",
        stacklevel=3,
    )
