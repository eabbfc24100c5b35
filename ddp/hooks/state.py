"""What hooks share: their states, with agreement of the ranks, error feedback, phases and saving.

Error feedback keeps what compression left out of gradients for the next step: Seide et al., "1-bit stochastic
gradient descent and its application to data-parallel distributed training of speech DNNs", Interspeech 2014;
Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.

A hook in *phases* exchanges more than one message for a bucket, each of which is made of what the last one
brought. A pass works on its buckets by turns: while the message of one travels, the next one is begun. All
ranks issue the messages in the same order, which the order of the buckets fixes, and no thread but the
caller's does.

torch's DistributedDataParallel over one of this package's backends in ``torch.distributed`` hands a hook a
``torch.distributed.GradBucket``, whose methods are those of ours, and takes errors in another form.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary

from collectives import ProcessGroup, Work
from collectives.core.work import chain
from collectives.ddp.agreement import differences
from collectives.ddp.default_group import resolve_group
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import GradBucket
from collectives.dynamo import Uncompiled
from collectives.logs import Log

_log = Log(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def comm_hook(function: _Function) -> _Function:
    """Lets torch's ``register_comm_hook`` take a hook: it compares annotations with its own classes."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    empty = inspect.Signature.empty
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=bare, return_annotation=empty
    )
    return function


def is_torch_bucket(bucket: object) -> bool:
    """Returns whether a bucket comes from torch's DistributedDataParallel."""
    return isinstance(bucket, TorchBucket)


def group_of(process_group: object, bucket: object) -> ProcessGroup:
    """Returns the group that a hook averages over.

    Args:
        process_group: one of ours, or one of torch's that is carried out by one of ours; ``None`` for the
            default group, which is torch's for a bucket of torch's.
        bucket: the bucket.

    Raises:
        TypeError: it is another kind of group.
        ValueError: it is ``None`` and there is no default group.
    """
    if process_group is None and is_torch_bucket(bucket):
        process_group = torch.distributed.group.WORLD
    return resolve_group(process_group)


def dense_buffer(bucket: GradBucket) -> torch.Tensor:
    """Returns the flat gradients as real numbers, complex ones as pairs; shares the bucket's memory.

    Raises:
        TypeError: the bucket holds a sparse gradient, as one of torch's may.
    """
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided:
        raise TypeError(
            f"a gradient of layout {buffer.layout} and shape {list(buffer.shape)} cannot be compressed; let "
            "collectives.ddp.DistributedDataParallel average it, which keeps sparse gradients away from hooks"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def widths(bucket: GradBucket) -> list[int]:
    """Returns the number of real elements of each parameter of a bucket, in order."""
    width = 2 if bucket.buffer().is_complex() else 1
    return [parameter.numel() * width for parameter in bucket.parameters()]


def completed(value: torch.Tensor) -> Future[torch.Tensor]:
    """Returns a future that holds a tensor already."""
    future = pending(value)
    future.set_result(value)
    return future


def pending(like: torch.Tensor) -> Future[torch.Tensor]:
    """Returns an empty future for a tensor on the device of ``like``."""
    devices: Sequence[torch.device] = [like.device] if like.is_cuda else []
    return Future(devices=list(devices))


def average_exactly(group: ProcessGroup, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket in place; bitwise the same as without a hook. Does not block.

    Args:
        group: the ranks.
        bucket: the bucket.
    """
    buffer = bucket.buffer()
    return after(average(group, buffer), lambda: buffer)


def after(work: Work, function: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
    """Returns a future of what ``function`` returns when a Work has ended well."""

    @torch.no_grad()
    def complete(done: Future[Any]) -> torch.Tensor:
        done.value()
        return function()

    return chain(work.get_future(), complete)


# ---- states ---------------------------------------------------------------------------------------------


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the data type in which gradients of ``dtype`` are compressed, and errors kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


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
        lines = differences(group, [(name, repr(value)) for name, value in facts.items()], device)
        where = f"[rank {group.rank()}] {type(self).__name__} over {group.describe()}"
        if lines:
            raise ValueError(
                f"{where}: the ranks' states differ; make or load them alike: "
                f"{'; '.join(line.strip() for line in lines)}"
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


Phases = Generator[None, None, "torch.Tensor | Future[torch.Tensor] | Exception"]
"""Yields when a message is on its way of which another one is made, and waits for that when it goes on.

Returns the averages, or a future of them, or what a phase after the first one failed with. Knows no object
that holds its future: they would hold each other, and with them the memory of the bucket, where a pass breaks
off.
"""


class InPhases:
    """One bucket on its way from gradients to averages.

    Attributes:
        index: of the bucket.
        future: of the average.
        failure: what a phase after the first one failed with.

    Args:
        bucket: the bucket.
        phases: what is done with it.
    """

    def __init__(self, bucket: GradBucket, phases: Phases) -> None:
        self.index = bucket.index()
        self.future: Future[torch.Tensor] = pending(bucket.buffer())
        self.failure: Exception | None = None
        self._phases = phases
        self._is_torch = is_torch_bucket(bucket)
        self._is_over = False
        self._is_awaited = False

    def advance(self) -> None:
        """Runs the next phase, where one is left; what it returns as a failure, the future raises."""
        if self._is_over:
            return
        try:
            next(self._phases)
        except StopIteration as end:
            self._is_over = True
            self._conclude(end.value)

    def finish(self) -> None:
        """Runs all phases that are left."""
        while not self._is_over:
            self.advance()

    def outcome(self) -> Future[torch.Tensor]:
        """Returns the future, from now on always the same one.

        Raises:
            Exception: a phase has failed, of a bucket of torch's, which would take it for a value.
        """
        if self.failure is not None and self._is_torch:
            raise self.failure
        self._is_awaited = True
        return self.future

    def _conclude(self, outcome: torch.Tensor | Future[torch.Tensor] | Exception) -> None:
        if isinstance(outcome, Exception):
            self.failure = outcome
            _fail(self.future, outcome)
        elif not isinstance(outcome, Future):
            self.future.set_result(outcome)
        elif self._is_awaited:
            _follow(outcome, self.future)
        else:
            self.future = outcome


def _fail(future: Future[torch.Tensor], failure: Exception) -> None:
    traceback.clear_frames(failure.__traceback__)  # torch's future may keep it for ever
    future.set_exception(failure)  # type: ignore[arg-type]


def _follow(inner: Future[torch.Tensor], outer: Future[torch.Tensor]) -> None:
    """Completes a future as another one ends."""

    def complete(done: Future[torch.Tensor]) -> None:
        try:
            value = done.value()
        except Exception as failure:  # noqa: BLE001 - handed on
            _fail(outer, failure)
        else:
            outer.set_result(value)

    inner.add_done_callback(complete)


class FeedbackState(HookState):
    """State of a hook with error feedback, which may work in phases (:mod:`collectives.ddp.hooks.state`).

    The errors take as much memory as the gradients, at least in float32. An infinite gradient or one that is
    not a number is sent as such, so that a gradient scaler skips the step, and leaves no error behind.

    Parameters have keys, across the layouts of the buckets and in a checkpoint. Our buckets know the names
    within the module. Those of torch do not: their parameters are numbered as they first appear, which is the
    same in every program that registers the hook on the same model before it is trained.

    Args:
        process_group: the ranks.
        use_error_feedback: whether errors are kept.
    """

    _SETTINGS = (*HookState._SETTINGS, "use_error_feedback")

    def __init__(self, process_group: object = None, *, use_error_feedback: bool = True) -> None:
        super().__init__(process_group)
        self.use_error_feedback = bool(use_error_feedback)
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}  # the errors of each bucket
        self._views: dict[str, torch.Tensor] = {}  # of each parameter, in those
        self._under_way: InPhases | None = None
        self._number_anew()

    def _number_anew(self) -> None:
        self._numbers: Any = WeakTensorKeyDictionary()
        self._next_number = 0

    @property
    def error_dict(self) -> dict[str, torch.Tensor]:
        """The flat error of each parameter by its key: its name, or a number in torch's buckets."""
        return dict(self._views)

    def keys_of(self, bucket: GradBucket) -> tuple[str, ...]:
        """Returns the keys of a bucket's parameters, in order.

        Args:
            bucket: the bucket.
        """
        if not is_torch_bucket(bucket):
            return tuple(bucket.names())
        keys = []
        for parameter in bucket.parameters():
            number = self._numbers.get(parameter)
            if number is None:
                number = self._numbers[parameter] = self._next_number
                self._next_number += 1
            keys.append(f"parameter {number}")
        return tuple(keys)

    def error_of(self, bucket: GradBucket, keys: tuple[str, ...]) -> torch.Tensor | None:
        """Returns the error of a bucket, at first zeros; the caller writes the next one there.

        Errors move with their parameters where the buckets are laid out again.

        Args:
            bucket: the bucket.
            keys: of its parameters, from :meth:`keys_of`.

        Returns:
            A flat tensor, ``None`` where errors are not kept.

        Raises:
            ValueError: a parameter has another size than the error that is kept for it.
        """
        if not self.use_error_feedback:
            return None
        buffer = bucket.buffer()
        dtype = working_dtype(buffer.dtype.to_real())
        numel = buffer.numel() * (2 if buffer.is_complex() else 1)
        flat = self._flats.get(keys)
        # A state may go on with a model of another data type, or be given another model by mistake.
        if (
            flat is not None
            and flat.numel() == numel
            and flat.dtype is dtype
            and flat.device == buffer.device
        ):
            return flat
        sizes = widths(bucket)
        for key, size in zip(keys, sizes, strict=True):
            kept = self._views.get(key)
            if kept is not None and kept.numel() != size:
                raise ValueError(
                    f"the state remembers an error of {kept.numel()} elements for {key}, whose gradient has "
                    f"{size}: it belongs to another model; call reset_memory() on it to begin anew"
                )
        flat = torch.zeros(sum(sizes), dtype=dtype, device=buffer.device)
        for key, view in zip(keys, flat.split_with_sizes(sizes), strict=True):
            kept = self._views.get(key)
            if kept is not None:
                view.copy_(kept)
            self._views[key] = view
        self._flats = {old: kept for old, kept in self._flats.items() if set(keys).isdisjoint(old)}
        self._flats[keys] = flat
        return flat

    def join(self, bucket: GradBucket) -> ProcessGroup:
        """Returns the group; compares the ranks' states first, and names the parameters in time."""
        self.keys_of(bucket)  # torch's are numbered in their first order, before buckets are laid out again
        return super().join(bucket)

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {**super().facts(), "remembered parameters": len(self._views)}

    def reset_memory(self) -> None:
        """Forgets all errors; called on all ranks."""
        super().reset_memory()
        self._flats.clear()
        self._views.clear()

    def pass_failed(self) -> None:
        """Begins anew, on all ranks, after a pass that may have left different memories on them."""
        super().pass_failed()
        self._under_way = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns what pickle saves between two passes: each parameter's error by key, and no parameters."""
        errors = {key: view.clone() for key, view in self._views.items()}
        kept = {"_flats": {}, "_views": errors, "_numbers": None, "_under_way": None}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restores what was saved, over the default group."""
        super().__setstate__(state)
        self._number_anew()

    def enter(self, bucket: GradBucket, phases: Phases) -> InPhases:
        """Runs as much of all buckets' phases as can be without waiting idly for messages.

        Args:
            bucket: the bucket to begin.
            phases: what is done with it; what the first phase fails with is raised.

        Returns:
            The bucket on its way, whose :meth:`InPhases.outcome` the hook returns.
        """
        this = InPhases(bucket, phases)
        before, self._under_way = self._under_way, None
        if before is not None and before.index >= this.index:  # of a pass that was broken off
            before = None
        if before is not None:
            before.advance()
        try:
            this.advance()
        finally:
            if before is not None:
                before.finish()
        # torch may leave out the last bucket, so that its buckets cannot wait for one another.
        if bucket.is_last() or is_torch_bucket(bucket):
            this.finish()
        else:
            self._under_way = this
        return this

    @torch.no_grad()
    def flush(self, index: int) -> None:
        """Finishes the bucket under way, if any, so that its future is complete; waits for its messages.

        For who waits for a future before the next bucket's hook has run, as hooks around this one may. All
        ranks do so at the same place.

        Args:
            index: of the next bucket.
        """
        this, self._under_way = self._under_way, None
        if this is not None and this.index < index:  # else it is of a pass that was broken off
            this.finish()


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
