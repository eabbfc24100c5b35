"""DiLoCo: ranks train on their own, and an outer optimizer steps on the mean of what they have changed.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models": every ``period``
steps, the ranks average how far each has come from the parameters that all share, and step from these by SGD
with Nesterov momentum. Douillard et al. 2025, "Streaming DiLoCo with overlapping communication": the model in
fragments that are exchanged at different steps, while the ranks train on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from collectives import ProcessGroup, ReduceOp, Work
from collectives.core import quantized
from collectives.core.work import CoalescedWork
from collectives.ddp.agreement import describe_model, gather_records, verify_agreement
from collectives.ddp.broadcast import broadcast_coalesced
from collectives.ddp.hooks.state import check_integer
from collectives.ddp.model_averaging.averagers import ModelAverager
from collectives.ddp.model_averaging.utils import parameters_of
from collectives.ddp.reducer.averaging import average
from collectives.ddp.reducer.buckets import layout


class _Part:
    """Parameters of one fragment, of one device and data type.

    Attributes:
        shared: their values that all ranks share, flat, in single precision at least.
        momentum: of the outer optimizer.
        change: how far this rank has come from the shared values, then the mean over all ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        own = self._own()
        count = sum(tensor.numel() for tensor in own)
        self.shared = torch.empty(count, dtype=dtype.to_real(), device=own[0].device)
        self.change = torch.empty_like(self.shared)
        self.momentum = torch.zeros_like(self.shared)
        self._shared_views = layout(own, self.shared)
        self._change_views = layout(own, self.change)
        torch._foreach_copy_(self._shared_views, own)

    def give_up(self) -> None:
        """Leaves the change to an exchange that may still write to it, and takes other memory."""
        self.change = torch.empty_like(self.change)
        self._change_views = layout(self._own(), self.change)

    def _own(self) -> list[torch.Tensor]:
        """Returns the memory that the parameters have now, complex numbers as pairs of real ones."""
        return [torch.view_as_real(p) if p.is_complex() else p.detach() for p in self._parameters]

    def take_shared(self) -> None:
        """Gives the parameters the values that all share."""
        torch._foreach_copy_(self._own(), self._shared_views)

    def begin(self, group: ProcessGroup, dtype: torch.dtype | None) -> Work:
        """Begins to average the changes of all ranks, in messages of 8 bits where there is a data type."""
        torch._foreach_copy_(self._change_views, self._own())
        torch.sub(self.shared, self.change, out=self.change)
        if dtype is None:
            return average(group, self.change)
        return quantized.allreduce(group, self.change, ReduceOp.AVG, dtype=dtype)

    def step(self, lr: float, momentum: float, alpha: float) -> None:
        """Steps from the shared values by the mean change, then mixes them with the rank's own."""
        self.momentum.mul_(momentum).add_(self.change)
        self.shared.sub_(self.change.add_(self.momentum, alpha=momentum), alpha=lr)
        if alpha == 0:
            self.take_shared()
            return
        torch._foreach_copy_(self._change_views, self._own())
        self.change.lerp_(self.shared, 1 - alpha)
        torch._foreach_copy_(self._own(), self._change_views)


@dataclass
class _Exchange:
    """The exchange of a fragment, on its way.

    Attributes:
        fragment: number of the fragment.
        due: the step after which it ends.
        work: its messages; ``None`` where they have come.
    """

    fragment: int
    due: int
    work: Work | None

    def wait(self) -> None:
        """Blocks until the mean is there."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class DiLoCoAverager(ModelAverager):
    """Steps an outer optimizer on the mean change of all ranks, now and then; between, each trains alone.

    DiLoCo and Streaming DiLoCo (the module names the papers). Call :meth:`average_parameters` after each step
    of the ranks' own optimizers, or let :class:`~collectives.ddp.optim.PostLocalSGDOptimizer` do so, with any
    optimizer inside. The model is not in DistributedDataParallel, or in one over fewer ranks, such as those
    of one machine.

    Every ``period`` steps, each fragment is exchanged once, at steps of its own. Its exchange begins after a
    step, runs beside the next ``delay`` ones, and ends with the outer step: the shared values move against
    the mean change by SGD with Nesterov momentum, bitwise alike on all ranks, and the rank's parameters
    become ``alpha * own + (1 - alpha) * shared``.

    Memory: three times the parameters, in single precision at least. Buffers of the model stay each rank's
    own.

    When an exchange fails, as by the death of a rank, every rank gets the error from
    :meth:`average_parameters`, with parameters and shared values as they were. Once the group has its new
    members, :meth:`synchronize` sets all of them going again.

    Attributes:
        step: number of calls of :meth:`average_parameters`.

    Args:
        params: parameters to train, or parameter groups of an optimizer; floating or complex, the same shapes
            and data types on all ranks. Here they get the values of the first rank.
        period: number of steps from one exchange of a fragment to its next.
        fragments: into how many parts of similar size the parameters are divided, in order.
        delay: number of steps beside which an exchange runs; less than ``period``.
        alpha: share of a rank's own parameters that stays in the outer step, at least 0 and less than 1. The
            paper takes 0 without a delay, and 0.5 with one.
        lr: learning rate of the outer optimizer.
        momentum: of the outer optimizer.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn`` for changes that travel in 8 bits, by
            :func:`~collectives.quantized_all_reduce`; an exchange then begins by blocking until this rank's
            part is averaged. ``None`` for changes as they are.
        process_group: the ranks, all of which call this; ``None`` for the default group.

    Raises:
        ValueError: an option is out of its range, or there are fewer parameters than fragments.
        TypeError: a parameter is neither floating nor complex, or an option is no integer that must be one.
        ModelMismatchError: ranks give different parameters or options.

    Example:
        With any number of ranks::

            from collectives.ddp.model_averaging import DiLoCoAverager
            from collectives.ddp.optim import PostLocalSGDOptimizer

            model = torch.nn.Linear(8, 1)
            inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
            optimizer = PostLocalSGDOptimizer(inner, DiLoCoAverager(model.parameters(), period=4))
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
            optimizer.averager.finish()
    """

    STATE = ("step", "shared", "momentum", "under_way")

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]],
        period: int,
        *,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        lr: float = 0.7,
        momentum: float = 0.9,
        dtype: torch.dtype | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self._parameters = parameters_of(params)
        check_integer("period", period, 1)
        check_integer("fragments", fragments, 1, min(period, len(self._parameters)))
        check_integer("delay", delay, 0, period - 1)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be at least 0 and less than 1, but is {alpha}")
        for name, value in (("lr", lr), ("momentum", momentum)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be 0 or more, but is {value}")
        wrong = None if dtype is None else quantized.why_not(dtype, quantized.BLOCK)
        if wrong is not None:
            raise wrong
        for parameter in self._parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise TypeError(f"parameters must be floating or complex, but one is of {parameter.dtype}")
        self.period = period
        self.delay = delay
        self._alpha = alpha
        self._lr = lr
        self._momentum = momentum
        self._dtype = dtype
        self._options = {
            "period": period,
            "fragments": fragments,
            "delay": delay,
            "alpha": alpha,
            "lr": lr,
            "momentum": momentum,
            "dtype": dtype,
        }
        with torch.no_grad():
            self._fragments = [
                [_Part(list(alike)) for _, alike in groupby(some, lambda p: (p.device, p.dtype))]
                for some in _divide(self._parameters, fragments)
            ]
        self._under_way: list[_Exchange] = []
        self._is_new = True
        self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Gives all ranks the shared values, the momentum and the step of the one that is furthest.

        Called by all ranks, when the group's members have changed; blocks. The constructor calls it, which is
        how a rank that comes later takes part. A new rank's parameters become the shared values; those of
        others stay. Exchanges under way are given up, and begin again when their fragment's turn comes.

        Raises:
            ModelMismatchError: ranks give different parameters or options.
        """
        self._give_up()
        group, device = self.process_group, self._parameters[0].device
        rows = describe_model(
            {str(place): parameter for place, parameter in enumerate(self._parameters)}, {}, self._options
        )
        verify_agreement(group, rows, device, "DiLoCo")
        steps = [
            -1 if record["new"] else record["step"]
            for record in gather_records(group, {"step": self.step, "new": self._is_new}, device)
        ]
        first = steps.index(max(steps))
        broadcast_coalesced(group, list(self._state_tensors()), first)
        self.step = max(steps[first], 0)
        if self._is_new:
            self._take_shared()
            self._is_new = False

    @torch.no_grad()
    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]) -> None:
        """Counts a step, ends exchanges that are due, and begins those whose turn has come.

        Called by all ranks after each step of their optimizers; blocks where an exchange ends before its
        messages have come.

        Args:
            params: those that the averager was made for.

        Raises:
            ValueError: they are others.
            DistError: an exchange failed.
        """
        if [id(p) for p in parameters_of(params)] != [id(p) for p in self._parameters]:
            raise ValueError(
                f"[rank {self.process_group.rank()}] params are not those that this {type(self).__name__} "
                "was made for; give it the same ones, in the same order"
            )
        self.step += 1
        self._end_due()
        for number in range(len(self._fragments)):
            if (self.step - number * self.period // len(self._fragments)) % self.period == 0:
                self._under_way.append(self._begin(number))
        self._end_due()

    @torch.no_grad()
    def finish(self) -> None:
        """Ends all exchanges under way, and gives the parameters the values that all ranks share.

        Called by all ranks at the end of training, or before the shared model is evaluated or saved; blocks.

        Raises:
            DistError: an exchange failed.
        """
        self._end_due(whether_due=False)
        self._take_shared()

    def _begin(self, number: int) -> _Exchange:
        parts = self._fragments[number]
        try:
            works = [part.begin(self.process_group, self._dtype) for part in parts]
        except BaseException:
            for part in parts:  # of which some may be on their way
                part.give_up()
            self._give_up()
            raise
        return _Exchange(number, self.step + self.delay, CoalescedWork(works))

    def _end_due(self, whether_due: bool = True) -> None:
        while self._under_way and not (whether_due and self._under_way[0].due > self.step):
            exchange = self._under_way[0]
            try:
                exchange.wait()
            except BaseException:
                self._give_up()
                raise
            del self._under_way[0]
            for part in self._fragments[exchange.fragment]:
                part.step(self._lr, self._momentum, self._alpha)

    def _give_up(self) -> None:
        """Forgets the exchanges under way, which may not have ended."""
        for exchange in self._under_way:
            for part in self._fragments[exchange.fragment]:
                part.give_up()
        self._under_way.clear()

    def _parts(self) -> Iterator[_Part]:
        for parts in self._fragments:
            yield from parts

    def _take_shared(self) -> None:
        for part in self._parts():
            part.take_shared()

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for part in self._parts():
            yield part.shared
            yield part.momentum

    def state_dict(self) -> dict[str, Any]:
        """Returns the step, shared values, momentum, and means of exchanges under way, for which this waits.

        The tensors are the averager's own. A checkpoint holds the rank's parameters as well: where ranks go
        on exactly as they were, each saves its own.

        Raises:
            DistError: an exchange under way failed.
        """
        for exchange in self._under_way:
            exchange.wait()
        return {
            "step": self.step,
            "shared": [part.shared for part in self._parts()],
            "momentum": [part.momentum for part in self._parts()],
            "under_way": [
                {
                    "fragment": exchange.fragment,
                    "due": exchange.due,
                    "means": [part.change for part in self._fragments[exchange.fragment]],
                }
                for exchange in self._under_way
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, on an averager of the same parameters and options.

        Called on all ranks with the state of the same step. Copies the tensors; parameters stay.

        Args:
            state_dict: the state.

        Raises:
            ValueError: it is of other parameters or fragments.
        """
        parts = list(self._parts())
        sizes = [part.shared.numel() for part in parts]
        for name in ("shared", "momentum"):
            given = [tensor.numel() for tensor in state_dict[name]]
            if given != sizes:
                raise ValueError(
                    f"the state's {name!r} has tensors of {given} elements, but this averager's parameters "
                    f"and fragments need {sizes}"
                )
        self.step = state_dict["step"]
        for name in ("shared", "momentum"):
            torch._foreach_copy_([getattr(part, name) for part in parts], list(state_dict[name]))
        self._give_up()
        for saved in state_dict["under_way"]:
            changes = [part.change for part in self._fragments[saved["fragment"]]]
            torch._foreach_copy_(changes, list(saved["means"]))
            self._under_way.append(_Exchange(saved["fragment"], saved["due"], None))
        self._is_new = False


def _divide(parameters: Sequence[torch.Tensor], fragments: int) -> list[list[torch.Tensor]]:
    """Returns consecutive parts of similar numbers of elements, with at least one parameter each."""
    parts: list[list[torch.Tensor]] = []
    left = sum(parameter.numel() for parameter in parameters)
    start = 0
    for remaining in range(fragments, 0, -1):
        end, count = start + 1, parameters[start].numel()
        while end <= len(parameters) - remaining and (
            remaining == 1 or count + parameters[end].numel() / 2 <= left / remaining
        ):
            count += parameters[end].numel()
            end += 1
        parts.append(list(parameters[start:end]))
        left -= count
        start = end
    return parts
