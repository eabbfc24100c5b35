"""States of communication hooks: their group, their clock, agreement of the ranks, error feedback, saving.

Error feedback keeps what compression left out of gradients for the next step: Seide et al., "1-bit stochastic
gradient descent and its application to data-parallel distributed training of speech DNNs", Interspeech 2014;
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from collectives import ProcessGroup
from collectives.ddp.agreement import gather_records
from collectives.ddp.hooks.adapter import group_of, is_torch_bucket, widths
from collectives.ddp.reducer.buckets import GradBucket
from collectives.dynamo import Uncompiled
from collectives.logs import Log

__all__ = ["FeedbackState", "HookState", "check_integer", "working_dtype"]

_log = Log(__name__)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the data type in which gradients of ``dtype`` are compressed, and errors kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class _ParameterKeys:
    """Keys that name the parameters of one model across the layouts of the buckets, and in a checkpoint.

    Our buckets know the names within the module. Those of torch do not: their parameters are numbered as they
    first appear, which is the same in every program that registers the hook on the same model before it is
    trained.
    """

    def __init__(self) -> None:
        self._numbers: Any = WeakTensorKeyDictionary()
        self._next = 0

    def of(self, bucket: GradBucket) -> tuple[str, ...]:
        """Returns the keys of a bucket's parameters, in order."""
        if not is_torch_bucket(bucket):
            return tuple(bucket.names())
        return tuple(f"parameter {self._number(parameter)}" for parameter in bucket.parameters())

    def _number(self, parameter: torch.Tensor) -> int:
        number: int | None = self._numbers.get(parameter)
        if number is None:
            number = self._numbers[parameter] = self._next
            self._next += 1
        return number

    def __getstate__(self) -> dict[str, Any]:
        """Returns nothing: the reader has other parameters, and numbers them in the same way."""
        return {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        _ParameterKeys.__init__(self)


class _ErrorMemory:
    """The errors of all parameters, in one flat tensor for each bucket.

    Where the buckets are laid out again, errors move to the new ones with their parameters.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}

    def of(self, keys: tuple[str, ...], bucket: GradBucket) -> torch.Tensor:
        """Returns the error of a bucket, at first zeros; the caller writes the next one there.

        Args:
            keys: keys of the bucket's parameters.
            bucket: the bucket.

        Raises:
            ValueError: a parameter has another size than the error that is kept for it.
        """
        flat = self._flats.get(keys)
        buffer = bucket.buffer()
        dtype = working_dtype(buffer.dtype.to_real())
        numel = buffer.numel() * (2 if buffer.is_complex() else 1)
        # A state may go on with a model of another data type, or be given another model by mistake.
        if (
            flat is not None
            and flat.numel() == numel
            and flat.dtype is dtype
            and flat.device == buffer.device
        ):
            return flat
        return self._lay_out(keys, widths(bucket), dtype, buffer.device)

    def _lay_out(
        self, keys: tuple[str, ...], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        for key, size in zip(keys, sizes, strict=True):
            kept = self._views.get(key)
            if kept is not None and kept.numel() != size:
                raise ValueError(
                    f"the state remembers an error of {kept.numel()} elements for {key}, whose gradient has "
                    f"{size}: it belongs to another model; call reset_memory() on it to begin anew"
                )
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        for key, view in zip(keys, flat.split_with_sizes(list(sizes)), strict=True):
            kept = self._views.get(key)
            if kept is not None:
                view.copy_(kept)
            self._views[key] = view
        moved = set(keys)
        self._flats = {old: kept for old, kept in self._flats.items() if moved.isdisjoint(old)}
        self._flats[keys] = flat
        return flat

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Returns the flat error of each parameter by key; they alias the memory."""
        return dict(self._views)

    def clear(self) -> None:
        """Forgets all errors."""
        self._flats.clear()
        self._views.clear()

    def __getstate__(self) -> dict[str, torch.Tensor]:
        """Returns a copy of each parameter's error by key."""
        return {key: view.clone() for key, view in self._views.items()}

    def __setstate__(self, errors: Mapping[str, torch.Tensor]) -> None:
        _ErrorMemory.__init__(self)
        self._views.update(errors)


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

    _SETTINGS: ClassVar[tuple[str, ...]] = ("iter",)
    """Attributes that must be the same on all ranks."""

    def __init__(self, process_group: object = None) -> None:
        self.process_group = process_group
        self.iter = 0
        self._world_size: int | None = None
        self._agreed = False

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks, as plain values by name."""
        return {name: getattr(self, name) for name in self._SETTINGS}

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
    """State of a hook with error feedback (:mod:`collectives.ddp.hooks.state`).

    The errors take as much memory as the gradients, at least in float32. An infinite gradient or one that is
    not a number is sent as such, so that a gradient scaler skips the step, and leaves no error behind.

    Args:
        process_group: the ranks.
        use_error_feedback: whether errors are kept.
    """

    _SETTINGS = (*HookState._SETTINGS, "use_error_feedback")

    def __init__(self, process_group: object = None, *, use_error_feedback: bool = True) -> None:
        super().__init__(process_group)
        self.use_error_feedback = use_error_feedback
        self.keys = _ParameterKeys()
        self.errors = _ErrorMemory()

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
        return {**super().facts(), "remembered parameters": len(self.error_dict)}

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
