"""A model averager over groups within groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from collectives import ProcessGroup
from collectives.ddp.default_group import neighbours, resolve_group
from collectives.ddp.model_averaging.averagers import ModelAverager, check_warmup, warn_of_period
from collectives.ddp.model_averaging.utils import average_parameters_or_parameter_groups
from collectives.logs import Log

__all__ = ["HierarchicalModelAverager"]

_log = Log(__name__)


class HierarchicalModelAverager(ModelAverager):
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
        super().__init__(process_group)
        self.warmup_steps = check_warmup(warmup_steps)
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
            warn_of_period()
        self.period_process_group_dict: dict[int, ProcessGroup] = {}
        for period, value in groups.items():
            if not isinstance(value, int):
                group = resolve_group(value)
            else:
                group = whole if value == whole.size() else neighbours(whole, value)
            self.period_process_group_dict[period] = group
            _log.of(group).info("%s ranks average their parameters every %s steps", group.size(), period)

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]) -> None:
        """Counts a step, and averages those parameters that have a gradient where it is time to."""
        if self.step >= self.warmup_steps:
            group = self._group_of_step()
            if group is not None:
                average_parameters_or_parameter_groups(params, group)
        self.step += 1

    def _group_of_step(self) -> ProcessGroup | None:
        """Returns the group to average over at this step; ``None`` for none."""
        fitting = [p for p in self.period_process_group_dict if self.step % p == 0]
        return self.period_process_group_dict[fitting[-1]] if fitting else None
