"""Model averagers, over one group, and over groups within groups."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from collectives import ProcessGroup
from collectives.ddp.default_group import neighbours, resolve_group
from collectives.ddp.model_averaging.utils import average_parameters_or_parameter_groups
from collectives.dynamo import Uncompiled
from collectives.logs import Log

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager"]

_log = Log(__name__)


class ModelAverager(Uncompiled, ABC):
    """Averages parameters at some of the steps at which it is called.

    Attributes:
        process_group: the ranks.
        step: number of calls of :meth:`average_parameters`; may be set, as from a checkpoint.
        STATE: names in :meth:`state_dict`; ``"step"`` is one.

    Args:
        process_group: the ranks; ``None`` for the default group.
    """

    STATE: tuple[str, ...] = ("step",)

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

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the step; averagers with more state add theirs, and name it in ``STATE``."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned.

        Args:
            state_dict: the same on all ranks.
        """
        self.step = state_dict["step"]


class _AfterWarmup(ModelAverager):
    """Averages over a group that depends on the step, after a warm-up."""

    def __init__(self, warmup_steps: int, process_group: ProcessGroup | None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more, but is {warmup_steps}")
        self.warmup_steps = warmup_steps

    @abstractmethod
    def _group_of_step(self) -> ProcessGroup | None:
        """Returns the group to average over at a step after the warm-up; ``None`` for none."""

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]) -> None:
        """Counts a step, and averages those parameters that have a gradient where it is time to."""
        group = self._group_of_step() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1


class PeriodicModelAverager(_AfterWarmup):
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
        super().__init__(warmup_steps, process_group)
        if period < 1:
            raise ValueError(f"period must be 1 or more, but is {period}")
        if period == 1:
            _warn_of_period()
        self.period = period

    def _group_of_step(self) -> ProcessGroup | None:
        return None if (self.step - self.warmup_steps) % self.period else self.process_group


class HierarchicalModelAverager(_AfterWarmup):
    """Averages parameters often over small groups of ranks, and seldom over large ones, after a warm-up.

    Hierarchical SGD (Wang et al. 2022, "Demystifying Why Local Aggregation Helps: Convergence Analysis of
    Hierarchical SGD"). At each step, at most one average is taken: that of the largest period which
    divides the number of the step. All ranks make the averager; that communicates and blocks.

    Attributes:
        period_process_group_dict: the group of this rank for each period, in ascending order.

    Args:
        period_group_size_dict: for each period, in ascending order, the size of the groups of neighbouring
            ranks that average then, or this rank's group itself. The last one is the whole group's.
        warmup_steps: number of steps without an average.
        process_group: all ranks; ``None`` for the default group. Groups of some ranks can be made by their
            size where it is one of :func:`collectives.new_group` or the default group.

    Raises:
        ValueError: the dictionary is empty or not in order, a size does not divide the number of ranks, or
            the last one is not that number; ``warmup_steps`` is negative.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int | ProcessGroup] | None = None,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(warmup_steps, process_group)
        whole = self.process_group
        where = f"[rank {whole.rank()}] period_group_size_dict"
        groups = dict(period_group_size_dict or {})
        if not groups:
            raise ValueError(f"{where} is empty; give at least one period and size")
        periods = list(groups)
        if periods != sorted(periods) or periods[0] < 1:
            raise ValueError(f"{where}: periods must be 1 or more, in ascending order, but are {periods}")
        sizes = [size if isinstance(size, int) else resolve_group(size).size() for size in groups.values()]
        if any(size < 1 or whole.size() % size for size in sizes):
            raise ValueError(f"{where}: sizes must divide the {whole.size()} ranks, but are {sizes}")
        if sizes[-1] != whole.size():
            raise ValueError(
                f"{where}: the last size must be {whole.size()}, that of {whole.describe()}, but is "
                f"{sizes[-1]}"
            )
        if periods[-1] == 1:
            _warn_of_period()
        self.period_process_group_dict: dict[int, ProcessGroup] = {}
        for period, value in groups.items():
            if not isinstance(value, int):
                group = resolve_group(value)
            else:
                group = whole if value == whole.size() else neighbours(whole, value)
            self.period_process_group_dict[period] = group
            _log.of(group).info("%s ranks average their parameters every %s steps", group.size(), period)

    def _group_of_step(self) -> ProcessGroup | None:
        fitting = [p for p in self.period_process_group_dict if self.step % p == 0]
        return self.period_process_group_dict[fitting[-1]] if fitting else None


def _warn_of_period() -> None:
    """Warns that parameters are averaged at every step."""
    warnings.warn(
        "parameters are averaged at every step, which costs as much as to average gradients: "
        "DistributedDataParallel alone does better",
        stacklevel=3,
    )
