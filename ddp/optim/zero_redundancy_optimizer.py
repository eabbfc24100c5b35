"""ZeroRedundancyOptimizer: each rank updates a part of the parameters, and keeps the state of that part only.

Stage 1 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"). A rank owns the parameters that it updates, by an inner optimizer of its own; its shard is their
optimizer state. The global state is that of one optimizer for all parameters, in its form.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from collectives import ProcessGroup
from collectives.ddp.agreement import describe_model, gather_bytes, verify_agreement
from collectives.ddp.broadcast import CoalescedBroadcast
from collectives.ddp.default_group import resolve_group
from collectives.ddp.join import Join, Joinable, JoinHook
from collectives.ddp.reducer.buckets import flat_by_kind

Group = dict[str, Any]
"""A parameter group of an optimizer."""


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wraps an optimizer and deals its state out to the ranks of a group.

    In the form of ``torch.distributed.optim.ZeroRedundancyOptimizer``. Each rank updates about
    ``1 / world_size`` of the parameters, whole ones, and sends the result to all. It keeps optimizer state
    for these only: no more than an equal share of the whole plus that of the largest parameter. The update of
    a parameter is that of the wrapped optimizer, bit for bit, where that treats parameters by themselves. All
    ranks end with the same parameters.

    All ranks make the optimizer with the same parameters in the same order, which is checked, and call
    :meth:`step` alike. Both communicate and block. Gradients must be equal on all ranks, as
    :class:`~collectives.ddp.DistributedDataParallel` leaves them. ``param_groups`` are those of all
    parameters, for schedulers and such; ``state`` is this rank's shard.

    Checkpoints are in the form of the wrapped optimizer, for any number of ranks: on all ranks
    :meth:`consolidate_state_dict`, then ``state_dict()`` on one; ``load_state_dict()`` on all.

    Args:
        params: parameters, pairs of name and parameter, or parameter groups; dense, of one data type and kind
            of device.
        optimizer_class: the optimizer to wrap; called with this rank's part of ``params``.
        process_group: the ranks; ``None`` for the default group.
        parameters_as_bucket_view: whether the parameters of a rank are moved into one tensor, at the first
            step, and ``.data`` become views of it: one message for each rank then, without copies. Those that
            a program gives other memory are moved back at the next step. Otherwise parameters of less than 1
            MiB are copied together to be sent.
        overlap_with_ddp: whether the update is done by a communication hook of DistributedDataParallel during
            the backward pass, made by :func:`~collectives.ddp.hooks.ddp_zero_hook.hook_with_zero_step`;
            :meth:`step` then does nothing. For optimizers whose update of one parameter does not depend on
            the others. Unlike torch's, it updates from the first pass on. Not with
            ``parameters_as_bucket_view``.
        **defaults: arguments of ``optimizer_class``.

    Raises:
        TypeError: ``params`` are of another kind.
        ValueError: there is no parameter, or they are of different data types or layouts, or the optimizer
            cannot be dealt out.
        ModelMismatchError: ranks have different parameters; raised on all ranks.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel
            from collectives.ddp.optim import ZeroRedundancyOptimizer

            model = DistributedDataParallel(torch.nn.Linear(8, 4))
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            model(torch.randn(16, 8)).sum().backward()
            optimizer.step()
            optimizer.consolidate_state_dict(to=0)
            state = optimizer.state_dict() if rank == 0 else None
    """

    _notifies_always = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self._ready = self._shadows = False
        self.process_group = resolve_group(process_group)
        self._given_group: Any = self.process_group if process_group is None else process_group
        _check_class(optimizer_class)
        if overlap_with_ddp and parameters_as_bucket_view:
            raise ValueError(
                "give overlap_with_ddp or parameters_as_bucket_view, not both: updates during the backward "
                "pass are sent by buckets of the gradients"
            )
        Joinable.__init__(self)
        super().__init__(params if isinstance(params, torch.Tensor) else list(params), defaults)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError(
                f"[rank {self.process_group.rank()}] ZeroRedundancyOptimizer: there is no parameter in any "
                "group; give at least one"
            )
        _check_kinds(self.param_groups)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self._agree(self.param_groups)
        self._partition = _Partition(self.process_group.size())
        self._owners: dict[torch.Tensor, int] = {}
        self._global_state: dict[int, Any] | None = None
        self._messages: list[CoalescedBroadcast] | None = None
        self._flattened: list[_FlatParameters] = []
        self._trained: list[bool] = []
        self._has_state = False  # on any rank; this one may own nothing
        self.has_hook = False
        """Whether a communication hook updates the parameters."""
        for group in self.param_groups:
            self._deal(group["params"])
        self.optim = optimizer_class([self._own_part(group) for group in self.param_groups], **defaults)
        self.defaults = {**self.optim.defaults, **defaults}
        self._take_options()
        self._ready = True

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer, which is this rank's shard."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._ready:  # torch's constructor sets it, too
            self.optim.state = state

    @property
    def _device(self) -> torch.device:
        return self._parameters()[0].device

    # ---- parameters and ranks ----------------------------------------------------------------------------

    def _parameters(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def _agree(self, groups: Sequence[Group]) -> None:
        """Checks that all ranks have the same parameters."""
        tensors = {
            f"{place}.{index}": parameter
            for place, group in enumerate(groups)
            for index, parameter in enumerate(group["params"])
        }
        options = {
            "parameters_as_bucket_view": self.parameters_as_bucket_view,
            "overlap_with_ddp": self.overlap_with_ddp,
        }
        rows = describe_model(tensors, {}, options)
        verify_agreement(self.process_group, rows, self._device, type(self).__name__)

    def _deal(self, parameters: Sequence[torch.Tensor], parts: Sequence[Sequence[int]] = ()) -> None:
        """Gives parameters to ranks.

        Args:
            parameters: the parameters.
            parts: places of those that stay together; empty to deal out each by itself.
        """
        parts = parts or [[place] for place in range(len(parameters))]
        sizes = [sum(parameters[place].numel() for place in part) for part in parts]
        kinds = [parameters[part[0]].requires_grad for part in parts]
        for part, owner in zip(parts, self._partition.deal(sizes, kinds), strict=True):
            self._owners.update({parameters[place]: owner for place in part})

    def _own_part(self, group: Group) -> Group:
        """Returns a parameter group of what this rank owns of another one."""
        rank = self.process_group.rank()
        return {**_options(group), "params": [p for p in group["params"] if self._owners[p] == rank]}

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Returns the rank, within the group, that updates a parameter; ``None`` where none does.

        Args:
            parameter: the parameter itself, not an equal tensor.
        """
        return self._owners.get(parameter)

    def assign_together(self, parts: Iterable[Sequence[torch.Tensor]]) -> None:
        """Deals the parameters out anew, so that one rank owns all of each part; called on all ranks.

        Args:
            parts: parameters that stay together; those that are in none are dealt out by themselves.

        Raises:
            RuntimeError: there was a step or ``load_state_dict()``, so that state might have to move; raised
                on all ranks, those that own nothing among them.
        """
        if self._has_state:
            raise RuntimeError(
                f"[rank {self.process_group.rank()}] parameters cannot be dealt out anew, as there may be "
                "optimizer state; do so before the first step and before load_state_dict()"
            )
        parameters = self._parameters()
        places = {parameter: place for place, parameter in enumerate(parameters)}
        together = [[places[p] for p in part if p in places] for part in parts]
        alone = sorted(set(range(len(parameters))).difference(*together))
        self._partition = _Partition(self.process_group.size())
        self._deal(parameters, [part for part in together if part] + [[place] for place in alone])
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            own["params"] = self._own_part(group)["params"]
        self._messages = None

    def add_param_group(self, param_group: Group) -> None:
        """Adds a parameter group; called by all ranks. Blocks. What ranks own already stays theirs.

        Args:
            param_group: ``"params"`` and options, as for any optimizer.

        Raises:
            ValueError: a parameter is in another group, or is of another kind.
            ModelMismatchError: ranks add different parameters; raised on all ranks.
        """
        super().add_param_group(param_group)
        if not self._ready:
            return
        group = self.param_groups[-1]
        try:
            _check_kinds(self.param_groups)
            self._agree([group])
        except Exception:
            self.param_groups.pop()
            raise
        self._deal(group["params"])
        self.optim.add_param_group(self._own_part(group))
        self._take_options()
        self._global_state = None
        self._messages = None

    def _give_options(self) -> None:
        """Gives the inner optimizer the options that the user, or a scheduler, has set."""
        _copy_options(self.param_groups, self.optim.param_groups)

    def _take_options(self) -> None:
        """Takes over options that the inner optimizer has set."""
        _copy_options(self.optim.param_groups, self.param_groups)

    # ---- step --------------------------------------------------------------------------------------------

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Updates this rank's part of the parameters and gives all ranks all parameters; called by all.

        Blocks until all parameters are here. With ``overlap_with_ddp``, nothing is left to do. Where the
        wrapped optimizer of one rank raises, so does that rank alone, after it has sent its parameters as
        they are: no rank waits for it, and all have the same parameters.

        Args:
            closure: computes the gradients and returns the loss; called once, before the update. What cannot
                be called goes to the wrapped optimizer as it is.
            kwargs: further arguments for the wrapped optimizer.

        Returns:
            What the wrapped optimizer returns: the loss where there is a closure.

        Raises:
            RuntimeError: ``overlap_with_ddp`` is set, but no communication hook was made.
        """
        loss = None
        if closure is not None and not callable(closure):
            kwargs["closure"] = closure
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
            kwargs["closure"] = lambda: loss
        if self.overlap_with_ddp:
            if not self.has_hook:
                raise RuntimeError(
                    f"[rank {self.process_group.rank()}] overlap_with_ddp is set, but nothing updates the "
                    "parameters: register a hook from hook_with_zero_step() on the model"
                )
            return loss
        if not self._shadows:
            Join.notify_join_context(self)
        return self._step(**kwargs)

    def _step(self, **kwargs: Any) -> Any:
        self._has_state = True
        self._check_owners()
        self._give_options()
        try:
            result = self.optim.step(**kwargs)
        except Exception:
            self.send_parameters()
            raise
        self._take_options()
        self.send_parameters()
        return result

    @torch.no_grad()
    def send_parameters(self) -> None:
        """Gives all ranks the parameters of their owners, wherever these lie by now; for hooks.

        Called by all of them. Blocks.
        """
        trained = [parameter.requires_grad for parameter in self._parameters()]
        for flattened in self._flattened:
            if not flattened.put_back():
                self._messages = None
        if self._messages is None or trained != self._trained:
            self._messages = self._make_messages()
            self._trained = trained
        for message in self._messages:
            message.start()
        for message in self._messages:
            message.finish()

    def _check_owners(self) -> None:
        """Checks that no parameter has come into the groups by itself, which no rank would update.

        Raises:
            ValueError: one has.
        """
        if all(map(self._owners.__contains__, self._parameters())):
            return
        place, index = next(
            (place, index)
            for place, group in enumerate(self.param_groups)
            for index, parameter in enumerate(group["params"])
            if parameter not in self._owners
        )
        raise ValueError(
            f"[rank {self.process_group.rank()}] parameter {index} of group {place} is another one than was "
            "dealt out to the ranks; add parameters by add_param_group(), or make the optimizer again"
        )

    def _make_messages(self) -> list[CoalescedBroadcast]:
        messages = []
        self._flattened = []
        for rank in range(self.process_group.size()):
            own = [p for p in self._parameters() if p.requires_grad and self._owners[p] == rank]
            if self.parameters_as_bucket_view:
                flattened = _FlatParameters(own)
                self._flattened.append(flattened)
                own = flattened.flats
            messages.append(CoalescedBroadcast(self.process_group, own, rank))
        return messages

    @torch.no_grad()
    def update(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Updates those parameters that this rank owns; does not communicate. For communication hooks.

        Args:
            gradients: averaged gradients by parameter, used instead of ``.grad``.
        """
        self._has_state = True
        mine = {p: grad for p, grad in gradients.items() if self._owners.get(p) == self.process_group.rank()}
        if not mine:
            return
        self._give_options()
        owned = [group["params"] for group in self.optim.param_groups]
        kept = {parameter: parameter.grad for parameter in mine}
        try:
            for group, parameters in zip(self.optim.param_groups, owned, strict=True):
                group["params"] = [parameter for parameter in parameters if parameter in mine]
            for parameter, grad in mine.items():
                parameter.grad = grad.to(parameter.dtype)
            self.optim.step()
        finally:
            for group, parameters in zip(self.optim.param_groups, owned, strict=True):
                group["params"] = parameters
            for parameter, before in kept.items():
                parameter.grad = before
        self._take_options()

    # ---- checkpoints -------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the shards of all ranks on one, for :meth:`state_dict` there; called by all ranks. Blocks.

        They are kept in CPU memory until the next call, or until ``load_state_dict()``.

        Args:
            to: rank within the group that gets them.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= to < self.process_group.size():
            raise ValueError(
                f"[rank {self.process_group.rank()}] consolidate_state_dict: rank {to} is not in "
                f"{self.process_group.describe()}"
            )
        places = {parameter: place for place, parameter in enumerate(self._parameters())}
        shard = {places[parameter]: state for parameter, state in self.state.items()}
        file = io.BytesIO()
        torch.save(_on_cpu(shard), file)
        merged: dict[int, Any] = {}
        for saved in gather_bytes(self.process_group, file.getvalue(), self._device, to):
            merged |= torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        self._global_state = dict(sorted(merged.items())) if self.process_group.rank() == to else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the last consolidated state of all parameters, in the form of the wrapped optimizer's.

        Raises:
            RuntimeError: the state was not consolidated on this rank.
        """
        if self._global_state is None:
            rank = self.process_group.rank()
            raise RuntimeError(
                f"[rank {rank}] this rank has only its part of the optimizer state; call "
                f"consolidate_state_dict(to={rank}) on all ranks before, or state_dict() on the rank that it "
                "was consolidated on"
            )
        state = super().state_dict()
        state["state"] = dict(self._global_state)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads this rank's part of a global state; called by all ranks, does not communicate.

        Args:
            state_dict: what :meth:`state_dict` returned, of any number of ranks, or the wrapped optimizer's
                own; it is not kept.

        Raises:
            ValueError: it is for other parameter groups.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self._has_state = True
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        keys = dict(zip(self._parameters(), saved, strict=True))
        own = [parameter for group in self.optim.param_groups for parameter in group["params"]]
        shard = {
            place: copy.deepcopy(state_dict["state"][keys[parameter]])
            for place, parameter in enumerate(own)
            if keys[parameter] in state_dict["state"]
        }
        self._give_options()
        form = self.optim.state_dict()["param_groups"]
        self.optim.load_state_dict({"state": shard, "param_groups": form})
        self._take_options()
        self._global_state = None

    def __getstate__(self) -> dict[str, Any]:
        """Refuses to be pickled or copied: that would need the group.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"{type(self).__name__} cannot be pickled or copied; save state_dict()")

    # ---- uneven inputs -----------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ARG002
        """Returns what a rank without inputs does in place of this optimizer; called by :class:`Join`.

        It updates its part of the parameters by the gradients that stand in ``.grad``, as those of a
        DistributedDataParallel in the same context, which is to be shadowed before.

        Args:
            kwargs: for other joinables.
        """
        return _StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the first parameter."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks, as torch's group where the optimizer was given one."""
        return self._given_group


class _StepHook(JoinHook):
    """Stands in for an optimizer on a rank that has joined."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Takes part in a step, with the step hooks that users have registered."""
        optimizer = self._optimizer
        if optimizer.overlap_with_ddp:
            return
        optimizer._shadows = True
        try:
            optimizer.step()
        finally:
            optimizer._shadows = False


def _check_class(optimizer_class: object) -> None:
    """Checks that an optimizer can be dealt out.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            f"{optimizer_class.__name__} looks at all parameters together and evaluates the model as often "
            "as it needs, which differs between ranks; use another optimizer"
        )


def _options(group: Group) -> Group:
    """Returns a parameter group without parameters."""
    return {key: value for key, value in group.items() if key not in {"params", "param_names"}}


def _copy_options(sources: Sequence[Group], targets: Sequence[Group]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.update(_options(source))


def _check_kinds(groups: Iterable[Group]) -> None:
    """Checks that parameters can be dealt out.

    Raises:
        ValueError: they are not all dense, of one data type, on one kind of device.
    """
    kinds: dict[str, str] = {}
    for place, group in enumerate(groups):
        for index, parameter in enumerate(group["params"]):
            name = f"parameter {index} of group {place}"
            if parameter.layout is not torch.strided:
                raise ValueError(f"{name} has layout {parameter.layout}; parameters must be dense")
            kinds.setdefault(f"{parameter.dtype} on {parameter.device.type}", name)
    if len(kinds) > 1:
        raise ValueError(
            "parameters must be of one data type and on one kind of device, but "
            + ", ".join(f"{name} is {kind}" for kind, name in kinds.items())
            + "; make an optimizer for each"
        )


def _on_cpu(value: Any) -> Any:
    """Returns a copy of nested containers with all tensors on the CPU, each with memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_cpu, value))
    return value


class _Partition:
    """Deals items out to ranks, so that these get about the same amount of each kind.

    The largest item goes first, each to the rank that has least of its kind, and of those to the one that has
    least of all kinds (greedy scheduling by size,
    Graham 1969, "Bounds on Multiprocessing Timing Anomalies"): no rank gets more than the mean plus the
    largest item. Items dealt out before stay where they are.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._loads: dict[Hashable, list[int]] = {}
        self._totals = [0] * size

    def deal(self, sizes: Sequence[int], kinds: Sequence[Hashable]) -> list[int]:
        """Returns the rank that gets each item; the same on all ranks.

        Args:
            sizes: amounts, by item.
            kinds: kinds of the items.
        """
        owners = [0] * len(sizes)
        for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            loads = self._loads.setdefault(kinds[item], [0] * self._size)
            owner = min(range(self._size), key=lambda rank: (loads[rank], self._totals[rank]))
            owners[item] = owner
            loads[owner] += sizes[item]
            self._totals[owner] += sizes[item]
        return owners


class _FlatParameters:
    """Parameters that lie in one flat tensor for each device and data type.

    Values, shapes and strides stay; ``.data`` of each parameter becomes a view.

    Attributes:
        flats: the flat tensors.

    Args:
        parameters: the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        kinds = flat_by_kind(parameters)
        self.flats = [flat for flat, _, _ in kinds]
        self._places = [pair for _, alike, views in kinds for pair in zip(alike, views, strict=True)]
        self.put_back()

    def put_back(self) -> bool:
        """Moves those parameters back that a program has given other memory.

        Returns:
            Whether all are in their places now; one of another shape, data type or device does not fit.
        """
        fits = True
        for parameter, view in self._places:
            if parameter.is_set_to(view):
                continue
            if (parameter.shape, parameter.dtype, parameter.device) == (view.shape, view.dtype, view.device):
                view.copy_(parameter.detach())
                parameter.data = view
            else:
                fits = False
        return fits
