"""What the states of all hooks have in common: their group, their clock, agreement of the ranks, saving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collectives import ProcessGroup
from collectives.ddp.agreement import gather_records
from collectives.ddp.hooks.support.adapter import group_of
from collectives.ddp.hooks.support.error_feedback import ErrorMemory, ParameterKeys
from collectives.ddp.reducer.buckets import GradBucket
from collectives.dynamo import Uncompiled
from collectives.logs import Log

__all__ = ["FeedbackState", "HookState", "check_integer"]

_log = Log(__name__)


class HookState(Uncompiled):
    """State of a hook that counts iterations and must be alike on all ranks.

    Each rank has its own, and gives it to one model. Where the hook is called for the first time after the
    state was made or loaded, the ranks compare theirs, which blocks; where they differ, that pass fails on
    all of them.

    It can be pickled without its process group, which becomes the default group; assign ``process_group``
    after loading where that is another one.

    Attributes:
        process_group: the ranks, one of our groups or of torch's; ``None`` for the default group.
        iter: number of iterations, counted at the last bucket of each.

    Args:
        process_group: the ranks.
    """

    def __init__(self, process_group: object = None) -> None:
        self.process_group = process_group
        self.iter = 0
        self._world_size: int | None = None
        self._agreed = False

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, as plain values by name."""
        return {"iter": self.iter}

    def join(self, bucket: GradBucket) -> ProcessGroup:
        """Returns the group; compares the ranks' states where they have not done so yet, and then blocks.

        Args:
            bucket: the bucket at hand; all ranks call it for the same one.

        Raises:
            ValueError: the states differ, or were saved by another number of ranks; raised on all ranks.
        """
        group = group_of(self.process_group, bucket)
        if not self._agreed:
            self._agree(group, bucket.buffer().device)
            self._world_size = group.size()
            self._agreed = True
        return group

    def _agree(self, group: ProcessGroup, device: torch.device) -> None:
        facts = {
            "state": type(self).__name__,
            **self.facts(),
            "saved by": "no ranks" if self._world_size is None else f"{self._world_size} ranks",
        }
        rows = gather_records(group, facts, device)
        where = f"[rank {group.rank()}] {type(self).__name__} over {group.describe()}"
        different = [
            f"{name}: {', '.join(f'{row.get(name)!r} on rank {rank}' for rank, row in enumerate(rows))}"
            for name in facts
            if any(row.get(name) != rows[0].get(name) for row in rows)
        ]
        if different or any(row.keys() != facts.keys() for row in rows):
            raise ValueError(
                f"{where}: the ranks' states differ; make or load them alike. {'; '.join(different)}"
            )
        if self._world_size not in {None, group.size()}:
            raise ValueError(
                f"{where}: the state was saved by {self._world_size} ranks, but there are {group.size()}; "
                "call reset_memory() on all of them to go on without what it remembers of the gradients"
            )

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts an iteration where this is its last bucket.

        Args:
            bucket: the bucket at hand.
        """
        if bucket.is_last():
            self.iter += 1

    def reset_memory(self) -> None:
        """Forgets what it remembers of gradients, but not the number of iterations; called on all ranks."""
        self._world_size = None
        self._agreed = False

    def pass_failed(self) -> None:
        """Begins anew, on all ranks, after a pass that may have left different memories on them."""
        self.reset_memory()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves: all but the process group."""
        if self.process_group is not None:
            _log.of(self.process_group).warning(
                "the process group of %s cannot be saved; assign process_group after loading, or the "
                "default group is used",
                type(self).__name__,
            )
        state = dict(self.__dict__)
        del state["process_group"]
        state["_agreed"] = False
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restores what was saved, over the default group."""
        self.__dict__.update(state)
        self.process_group = None


class FeedbackState(HookState):
    """State of a hook with error feedback (:mod:`collectives.ddp.hooks.support.error_feedback`).

    The errors take as much memory as the gradients, at least in float32. An infinite gradient or one that is
    not a number is sent as such, so that a gradient scaler skips the step, and leaves no error behind.

    Args:
        process_group: the ranks.
        use_error_feedback: whether errors are kept.
    """

    def __init__(self, process_group: object = None, *, use_error_feedback: bool = True) -> None:
        super().__init__(process_group)
        self.use_error_feedback = use_error_feedback
        self.keys = ParameterKeys()
        self.errors = ErrorMemory()

    @property
    def error_dict(self) -> dict[str, torch.Tensor]:
        """The flat error of each parameter by its key: its name, or a number in torch's buckets."""
        return self.errors.as_dict()

    def join(self, bucket: GradBucket) -> ProcessGroup:
        """Returns the group; compares the ranks' states first, and names the parameters in time."""
        self.keys.of(bucket)  # torch's are numbered in their first order, before buckets are laid out again
        return super().join(bucket)

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {
            **super().facts(),
            "use_error_feedback": self.use_error_feedback,
            "remembered parameters": len(self.error_dict),
        }

    def reset_memory(self) -> None:
        """Forgets all errors; called on all ranks."""
        super().reset_memory()
        self.errors.clear()


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Checks a setting.

    Raises:
        TypeError: it is no ``int``.
        ValueError: it is out of its range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, but is {value!r} of type {type(value).__name__}")
    if value < least or (most is not None and value > most):
        limit = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {limit}, but is {value}")
