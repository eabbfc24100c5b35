"""DistributedDataParallel: a module that averages its gradients over a process group."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from collectives import AllreduceOptions, ProcessGroup, ReduceOp, UnsupportedOperationError
from collectives.ddp.agreement import describe_model, verify_agreement
from collectives.ddp.broadcast import BufferSync, broadcast_coalesced, refuse_overlaps
from collectives.ddp.default_group import default_group_or_none, is_outside, resolve_group
from collectives.ddp.errors import GradientSyncError
from collectives.ddp.hooks.registration import BuiltinCommHookType
from collectives.ddp.join import JOINED, Join, Joinable, JoinHook, codes_of_all
from collectives.ddp.logging_data import Mark, construction_in_words, logging_data
from collectives.ddp.module.arguments import (
    FIRST_BUCKET_BYTES,
    Settings,
    bucket_limits,
    check_delayed,
    check_devices,
    check_hook,
    check_parameters,
    group_of,
)
from collectives.ddp.module.mixed_precision import CastParameters, MixedPrecision, cast_buffers
from collectives.ddp.module.structure import Structure
from collectives.ddp.module.sync_batch_norm import SyncBatchNorm
from collectives.ddp.module.trees import moved, tensors_in
from collectives.ddp.reducer.averaging import sparse_parameters
from collectives.ddp.reducer.backward_pass import Forward, UnevenForward
from collectives.ddp.reducer.buckets import GradBucket, Hook
from collectives.ddp.reducer.reducer import Reducer
from collectives.dynamo import compiler_is_loaded, leave_uncompiled
from collectives.errors import DistError
from collectives.logs import Log

_log = Log(__name__)

_MAX = AllreduceOptions(asyncOp=False, reduceOp=ReduceOp.MAX)


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module so that every backward pass leaves gradients averaged over all ranks in ``.grad``.

    PyTorch Distributed (VLDB 2020, sections 3 and 4), in the form of
    ``torch.nn.parallel.DistributedDataParallel``: the same arguments, methods and ``state_dict``, so that
    checkpoints go both ways. Gradients are reduced in buckets while the backward pass runs. All ranks start
    from rank 0's parameters and buffers and apply the same gradients, so that their models stay equal.

    All ranks make the module, run forward and run backward in the same order; each of the three communicates
    and blocks. The gradient of a mean over the global batch comes out where the ranks' batches are equal in
    size and the loss is a mean.

    What goes wrong in a backward pass raises :class:`~collectives.ddp.GradientSyncError` on all ranks at the
    end of that pass, with the names of the parameters and the ranks at fault. An exception in the user's own
    code ends the pass of that rank as it would without this module; the other ranks are told. In both cases
    the next iteration may go on, after gradients are zeroed.

    On CUDA devices no pass waits for the device. There the rank at fault raises at the end of its pass, and
    the others at a later synchronised forward, when an optimizer may have used the gradients. The same holds
    when a rank dies, which is logged at once. What went wrong in the last passes is raised when the group is
    destroyed, and logged when the process ends without that. All raise at the end of the pass where the
    group's waits block the host (``blocking_wait`` of nccl), unused parameters are found, within
    :meth:`join`, and in the first pass of a static graph.

    Forward and backward can be captured into a CUDA graph together, after eleven iterations on another stream
    than the default one, as torch asks for.

    Whether a backward pass averages is decided by the forward that it belongs to; see :meth:`no_sync`.
    Several forwards may come before their backward passes; a backward pass that forward runs itself, as
    manual optimization does, is averaged when it ends. Gradients are averaged as they stand in ``.grad``,
    with what was accumulated there before. ``torch.autograd.grad`` does not accumulate in ``.grad``: its
    results are this rank's alone. ``torch.distributed.autograd.backward`` is refused at its end. Sparse
    gradients, as of an embedding with ``sparse=True``, are averaged as they are and stay sparse;
    communication hooks do not see them.

    What hooks on the parameters make of a gradient, such as a clipped one, is what is averaged, where they
    were registered before forward.

    Parameters are frozen, added, replaced or given another data type before wrapping, not after: a backward
    pass in which that shows raises :class:`~collectives.ddp.GradientSyncError`. Buffers, and the memory of
    parameters, may be replaced on all ranks alike. Where ranks have different numbers of
    inputs, train within :meth:`join`.

    Args:
        module: the module; its parameters and buffers are used in place. Attribute :attr:`module`.
        device_ids: ``[device]`` to move inputs to the one device of a module; ``None`` for modules on the CPU
            or on several devices.
        output_device: device to move outputs to, for modules on one device; ``None`` leaves them.
        dim: kept as an attribute; one process drives one device, so that inputs are not split.
        broadcast_buffers: whether rank 0's buffers are sent to all ranks when the module is made and before
            each forward that follows a synchronised one. ``None`` for ``True``.
        init_sync: whether ranks check that they wrap the same model, and rank 0's parameters and buffers are
            sent to all; ``False`` where they are known to be equal.
        process_group: the ranks, as a group of this package or of torch over Gloo; ``None`` for the default
            group, of ``torch.distributed`` where there is none of this package.
        bucket_cap_mb: size in MiB at which a bucket is full; ``None`` for 25. The first bucket is full at 1
            MiB. Zero reduces every gradient by itself.
        find_unused_parameters: whether ranks may leave out parameters in the backward pass. Such a rank
            contributes what is in ``.grad``, else zeros. Where all ranks left a parameter out, its ``.grad``
            stays as it was. Costs one small all-reduce, and overlap in passes that leave out others than
            before.
        check_reduction: deprecated and without effect, as in torch; warns.
        gradient_as_bucket_view: whether ``.grad`` become views of the buckets in the first backward pass,
            which saves the memory of the gradients and a copy. Such gradients cannot be detached in place;
            use ``zero_grad(set_to_none=True)``. What takes their place, as by ``p.grad.data = ...``, is
            averaged, and ``.grad`` is a view again afterwards.
        static_graph: promise that every backward pass reaches the same parameters, each equally often. Allows
            for parameters whose gradient comes several times in a pass (reentrant activation checkpointing of
            shared layers) and for unused ones. The first synchronised pass communicates at its end only.
        delay_all_reduce_named_params: names and parameters whose gradients are averaged together, in one
            message for each data type that follows the buckets of the others. As in torch, no other argument
            applies to them, no communication hook sees them, they are averaged under :meth:`no_sync`, too,
            and where they are unused, zeros count. Not with :meth:`join`.
        param_to_hook_all_reduce: a parameter, of the module or not; the message leaves as soon as it and the
            delayed ones have their gradients, or else at the end of the pass.
        mixed_precision: a :class:`~collectives.ddp.MixedPrecision`, or torch's: data types for parameters and
            inputs in forward and backward, for the reduction, for buffers. Parameters, their gradients and
            ``state_dict`` keep their own types.
        device_mesh: a mesh of one dimension over such groups, instead of ``process_group``.
        skip_all_reduce_unused_params: whether gradients are not sent that no rank has, as where all ranks
            drop the same layers; implies ``find_unused_parameters``. With a communication hook, whole
            buckets only. What forward returns must lead to all parameters that get gradients. Walks the
            graph at the end of forward, but not where ``static_graph`` is set.
        bucket_cap_mb_list: sizes in MiB at which the first bucket is full, the second, and so on; the last
            holds for the rest. Not with ``bucket_cap_mb``.
        batched_grad_copy: whether gradients are copied to their bucket all at once when it is full: fewer
            kernels on a GPU. ``False`` copies each as it comes, while it is in cache.
        forward_sync_buffers: whether buffers are sent before forward; unlike ``broadcast_buffers``, they are
            sent when the module is made in any case. Not with ``broadcast_buffers``.

    Raises:
        RuntimeError: no parameter needs a gradient, or a parameter is not initialised.
        ValueError: arguments that do not fit each other or the module's devices, or elements of a parameter
            or buffer share their memory.
        UnsupportedOperationError: an argument that is not offered has another value than its default, the
            group cannot average these parameters, or an optimizer steps one of them within backward.
        ModelMismatchError: the ranks wrap different models; raised on all ranks.

    Example:
        With 2 ranks::

            from collectives.ddp import DistributedDataParallel

            model = DistributedDataParallel(torch.nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()  # averages the gradients
                optimizer.step()
    """

    _notifies_always = True

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object | None = None,
        device_mesh: object | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._divides_by_initial_world_size = True
        if broadcast_buffers is not None and forward_sync_buffers is not None:
            raise ValueError(
                "give broadcast_buffers or forward_sync_buffers, not both: got "
                f"{broadcast_buffers} and {forward_sync_buffers}"
            )
        if check_reduction:
            warnings.warn("check_reduction is deprecated and has no effect", FutureWarning, stacklevel=2)
        self.process_group = group_of(process_group, device_mesh)
        self._given_group: Any = self.process_group if process_group is None else process_group
        self.device_mesh = device_mesh
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        parameters = self._averaged_parameters()
        check_parameters(module, parameters)
        self._delayed = check_delayed(parameters, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._trigger = param_to_hook_all_reduce
        devices, inputs_to, outputs_to = check_devices(parameters.values(), device_ids, output_device)
        self.device = devices[0]
        self.device_type = self.device.type
        self.device_ids = None if inputs_to is None else [inputs_to.index]
        self.output_device = None if outputs_to is None else outputs_to.index
        self.is_multi_device_module = len(devices) > 1
        self._inputs_to, self._outputs_to = inputs_to, None if outputs_to == self.device else outputs_to
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.init_sync = init_sync
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = None if mixed_precision is None else MixedPrecision.of(mixed_precision)
        self.batched_grad_copy = batched_grad_copy
        self.forward_sync_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._bucket_limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list)
        self._comm_hooks: list[tuple[Hook, object]] = []
        self._make_parts()
        if self.forward_sync_buffers and not init_sync:
            refuse_overlaps(self._buffer_sync.named_buffers(), self._in_words())
        if init_sync:
            self._sync_init(parameters, with_buffers=broadcast_buffers is not False)
        if self.mixed_precision is not None:
            cast_buffers(module, self.mixed_precision.buffer_dtype, self.parameters_to_ignore)
        if _log.isEnabledFor(logging.INFO):
            _log.of(self.process_group).info("%s", construction_in_words(self))

    # ---- construction ------------------------------------------------------------------------------------

    def _in_words(self) -> str:
        return f"DistributedDataParallel({type(self.module).__name__})"

    def _averaged_parameters(self) -> dict[str, nn.Parameter]:
        named = self.module.named_parameters()
        return {name: p for name, p in named if name not in self.parameters_to_ignore}

    def _make_parts(self) -> None:
        """Makes all that works on the group and the module's parts, without communication."""
        precision, parameters = self.mixed_precision, self._averaged_parameters()
        self._casts: CastParameters | None = None
        if precision is not None and precision.param_dtype is not None:
            self._casts = CastParameters(precision.param_dtype)
            self._casts.find_parameters(self.module, self.parameters_to_ignore)
        sparse = sparse_parameters(self.module)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        delayed = {name: trained.pop(name) for name in self._delayed if name in trained}
        settings = Settings(
            model=self._in_words(),
            group=self.process_group,
            device=self.device,
            parameters=trained,
            sparse=[index for index, p in enumerate(trained.values()) if id(p) in sparse],
            delayed=delayed,
            trigger=self._trigger,
            frozen={name: p for name, p in parameters.items() if not p.requires_grad},
            limits=self._bucket_limits,
            find_unused=self.find_unused_parameters,
            skip_unused=self.skip_all_reduce_unused_params,
            static=self.static_graph,
            as_views=self.gradient_as_bucket_view,
            batched=self.batched_grad_copy,
            reduce_dtype=None if precision is None else precision.wire_dtype,
        )
        self.reducer = Reducer(settings, self._casts)
        self._note_structure()

    def _note_structure(self) -> None:
        self._structure = Structure(self)
        self._buffer_sync = BufferSync(self.module, self.process_group, self.parameters_to_ignore)

    def _sync_init(self, parameters: dict[str, nn.Parameter], *, with_buffers: bool) -> None:
        buffers = self._buffer_sync.named_buffers() if with_buffers else {}
        options = {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "delayed parameters": self._delayed,
            "mixed_precision": self.mixed_precision,
            "bucket caps in bytes": self._bucket_limits,
            "buffers are sent before forward": self.forward_sync_buffers,
            "errors are told before the next pass": self.reducer.defers_errors,
        }
        rows = describe_model(parameters, buffers, options)
        verify_agreement(self.process_group, rows, self.device, self._in_words())
        refuse_overlaps({**parameters, **buffers}, self._in_words())  # now alike on all ranks
        broadcast_coalesced(self.process_group, [*parameters.values(), *buffers.values()])

    def _follow_changes(self) -> None:
        """Takes in what a program has put in the place of modules, parameters and buffers."""
        if self.reducer.in_backward or not self._structure.has_changed():
            return
        self._note_structure()
        if self._casts is not None:
            self._casts.find_parameters(self.module, self.parameters_to_ignore)
        self.reducer.watch(self._averaged_parameters())

    # ---- training ----------------------------------------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Whether rank 0's buffers are sent to all ranks before forward."""
        return self.forward_sync_buffers

    @functools.partial(leave_uncompiled, callees=False)  # the module may be compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; called by all ranks. Blocks while buffers are sent.

        Buffers are sent from rank 0 where the forward before this one was synchronised (section 4.1 of the
        paper).

        Args:
            inputs: as the module's forward takes them; with one device id, tensors are moved to that device.
            kwargs: as ``inputs``.

        Returns:
            What the module's forward returns.
        """
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            forward, inputs, kwargs = self._before_forward(inputs, kwargs)
            casts = contextlib.nullcontext() if self._casts is None else self._casts.forward()
            try:
                with _splits_graphs(self._bucket_limits[-1]), casts:
                    output = _run_module(self.module, inputs, kwargs)
            finally:
                self.reducer.end_forward()
            return self._after_forward(forward, output)

    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
        with _outside_transforms():
            forward = self._communicate_before_forward()
        given = moved((inputs, kwargs), self._inputs_to)
        return (forward, *(given if self._casts is None else self._casts.inputs(given)))

    def _communicate_before_forward(self) -> Forward:
        sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._follow_changes()
        forward = Forward(self.require_backward_grad_sync)
        try:
            root = self._notify_forward(averages=sync)
            if torch.is_grad_enabled():
                forward = self.reducer.begin_forward(sync=sync)
            if self.will_sync_module_buffers():
                self._buffer_sync(root)
        except DistError as error:  # perhaps of a rank that is ahead, of which the backward pass has failed
            raise self.reducer.explain(error) from error.__cause__
        return forward

    def _after_forward(self, forward: Forward, output: Any) -> Any:
        grad_enabled = torch.is_grad_enabled()
        output = moved(output, self._outputs_to)
        self.require_forward_param_sync = grad_enabled and self.require_backward_grad_sync
        if grad_enabled:
            self.reducer.clock.mark(Mark.FORWARD_END)
            self.reducer.prepare_for_backward(forward, tensors_in(output), self.training)
        return output

    def will_sync_module_buffers(self) -> bool:
        """Returns whether the next forward sends rank 0's buffers to all ranks."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self._buffer_sync)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Context in which gradients add up on this rank without being averaged (section 3.2.4 of the paper).

        Decided when forward runs: the backward pass of a forward that ran inside does not communicate,
        wherever it runs itself, and one of a forward that ran outside does. The first backward pass of a
        forward after the context averages all that was accumulated.

        All ranks run the same number of passes inside. Torch lets them differ; here the synchronised pass
        raises :class:`~collectives.ddp.GradientSyncError` on all ranks, with what each of them ran: the rank
        with more passes would count for more, and nobody could tell that from ranks out of step.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # ---- communication hooks -----------------------------------------------------------------------------

    def register_comm_hook(
        self, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
    ) -> None:
        """Lets a hook average the gradients; called once, on all ranks, outside of a backward pass.

        The hook is called on every full bucket, in the order of the buckets, and returns a future of one
        tensor of the bucket's shape, such as made from ``Work.get_future()``. Gradients are not divided by
        the number of ranks; the hook does so. A hook that never communicates may say so by an attribute
        ``is_local = True``; the backward pass then does not communicate at all.

        A hook that raises, returns something else, or whose future fails, makes that backward pass raise
        :class:`~collectives.ddp.GradientSyncError` on all ranks, with its error, and leaves ``.grad`` as it
        was, but for gradients that are views of the buckets. Operations in flight on the groups that it uses
        fail, and these groups are connected anew, in place, by all ranks. That takes the groups' store, which
        all ranks must still reach. The guide on failures says which groups those are.

        After such a pass an attribute ``iter`` of the state, an int, becomes the highest of all ranks', and a
        method ``pass_failed()`` of the hook or the state is called on all ranks. It may communicate.

        Args:
            state: first argument of the hook; it belongs to this rank and is shared by all buckets.
            hook: ``hook(state, bucket) -> torch.futures.Future[torch.Tensor]``.

        Raises:
            TypeError: the hook is not callable.
            ValueError: its annotations name other types than a GradBucket and a Future of a tensor.
            RuntimeError: there is a hook already, or a backward pass is going on.
        """
        check_hook(hook)
        if self._comm_hooks:
            raise RuntimeError(
                f"register_comm_hook was called before, with {self._comm_hooks[0][0]!r}; a model takes one"
            )
        if self.reducer.in_backward:
            raise RuntimeError("register_comm_hook was called within a backward pass; call it before")
        self._comm_hooks.append((hook, state))
        self.reducer.register_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: int) -> None:
        """Registers a hook by its number in ``torch.distributed.BuiltinCommHookType``, or ours.

        Raises:
            ValueError: there is no such hook.
        """
        hook = BuiltinCommHookType(int(comm_hook_type)).hook
        self.register_comm_hook(self.process_group, hook)

    def _set_static_graph(self) -> None:
        """Same as ``static_graph=True``; called on all ranks before the first backward pass."""
        if self.reducer.passes:
            raise RuntimeError(
                f"_set_static_graph was called after {self.reducer.passes} backward passes; call it before"
            )
        self.static_graph = True
        self.reducer.set_static_graph()

    def _update_process_group(self, new_process_group: object) -> None:
        """Averages over other ranks from the next forward on, as after ranks have left or joined.

        Called by all ranks of the new group, outside of a backward pass; does not communicate, apart from
        where one of torch's own groups is given for the first time. Parameters, buffers and gradients stay as
        they are: all ranks have the same, or the program sends them. Buckets are laid out anew, and counts of
        passes begin again. Backward passes of forwards that came before reduce nothing. A hook stays
        registered; the group in its state is the program's to change, unless that is the former group itself.

        Args:
            new_process_group: as ``process_group`` of the constructor. On a rank that is not in it,
                ``NON_GROUP_MEMBER``, and the module stays as it is.

        Raises:
            RuntimeError: a backward pass is going on.
            TypeError: it is no group.
        """
        if self.reducer.in_backward:
            raise RuntimeError("_update_process_group was called within a backward pass; call it before")
        if is_outside(new_process_group):
            return
        former, rate = self.process_group, self.reducer.clock.sample_rate
        group = resolve_group(new_process_group)
        former_reducer, given = self.reducer, self._given_group
        try:
            self._use_group(group, new_process_group)
        except BaseException:
            self.process_group, self._given_group = former, given
            raise
        former_reducer.retire()
        self.require_forward_param_sync = True  # as on ranks that have not been in the former group
        self.reducer.clock.sample_rate = rate
        self._comm_hooks = [
            (hook, self.process_group if state is former else state) for hook, state in self._comm_hooks
        ]
        for hook, state in self._comm_hooks:
            self.reducer.register_hook(state, hook)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Times one of so many iterations after the first ten, for :meth:`_get_ddp_logging_data`.

        Raises:
            ValueError: the number is less than 1.
        """
        if sample_rate < 1:
            raise ValueError(f"sample_rate must be 1 or more, but is {sample_rate}")
        self.reducer.clock.sample_rate = sample_rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Returns facts about this module and its last pass, under the names that torch gives them."""
        return logging_data(self)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Names parameters and buffers of a module, before it is wrapped, that are left alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    # ---- uneven inputs -----------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context for a training loop that is longer on some ranks than on others; all enter it.

        A rank that leaves the loop early takes part in the forward and backward passes of the others with
        gradients of zero, and what it has accumulated under :meth:`no_sync`. It gets the averaged gradients
        as they do, so that an optimizer in the same :class:`~collectives.ddp.Join` can keep up. In the end,
        all ranks get parameters and buffers of the last one; the state of an optimizer that is not in the
        context stays what it was on each rank.

        While the loop runs, buffers are those of the lowest rank that has inputs. Each forward blocks for the
        time of two small all-reduces, each backward pass for that of one.

        Args:
            divide_by_initial_world_size: whether sums of gradients are divided by the number of all ranks, so
                that every sample counts the same; otherwise by the number of those that have inputs, as in
                a smaller job. What a communication hook returns is scaled to that.
            enable: whether the context does anything; ``False`` where inputs are known to be even.
            throw_on_early_termination: whether all ranks raise when one of them has left the loop. Needed for
                modules that communicate in forward, such as :class:`~collectives.ddp.SyncBatchNorm`.

        Raises:
            UnsupportedOperationError: on entering, parameters are delayed.
            ValueError: on entering, a layer communicates and nothing would be thrown, or what a hook returns
                cannot be scaled: it updates parameters, or averages over a part of the ranks.
            UnevenInputsError: ``throw_on_early_termination`` is set and a rank has left the loop.
            JoinError: a rank left the context by an exception, or ranks are out of step.
            GradientSyncError: ranks that have inputs use :meth:`no_sync` differently.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns what a rank without inputs does in place of this module; called by :class:`Join`.

        Args:
            kwargs: ``divide_by_initial_world_size``; see :meth:`join`. Others are for other joinables.
        """
        config = self._join_config
        if self._delayed and config.enable:
            raise UnsupportedOperationError(
                f"{self._in_words()} has delay_all_reduce_named_params, which are averaged in passes that "
                "ranks without inputs do not hear of; train on even inputs, or delay none"
            )
        if config.enable and not config.throw_on_early_termination:
            self._refuse_layers_that_communicate()
        by_initial = bool(kwargs.get("divide_by_initial_world_size", True))
        if not by_initial:
            self._refuse_hooks_that_cannot_be_scaled()
        self.reducer.enter_join()
        self._divides_by_initial_world_size = by_initial
        return _ModelJoinHook(self)

    def _refuse_layers_that_communicate(self) -> None:
        """Checks that no layer communicates by itself in training, which other ranks could not match."""
        layers = [
            name
            for name, layer in self.module.named_modules()
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) and layer.training
        ]
        if layers and self.process_group.size() > 1:
            raise ValueError(
                f"[rank {self.process_group.rank()}] {', '.join(layers)} of {type(self.module).__name__} "
                "normalise over all ranks in forward, which a rank without inputs cannot take part in; pass "
                "throw_on_early_termination=True, or use BatchNorm"
            )

    def _refuse_hooks_that_cannot_be_scaled(self) -> None:
        for trait, words in (
            ("updates_parameters", "updates parameters takes the mean over all ranks"),
            ("averages_a_part", "averages over a part of the ranks has no mean over those with inputs"),
        ):
            if any(getattr(hook, trait, False) for hook, _ in self._comm_hooks):
                raise ValueError(
                    f"[rank {self.process_group.rank()}] a hook that {words}; leave "
                    "divide_by_initial_world_size=True"
                )

    @property
    def join_device(self) -> torch.device:
        """Device of the module's first parameter."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The ranks, as torch's group where the module was given one."""
        return self._given_group

    def _common_state(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers that the ranks have in common."""
        parameters = [p for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]
        return [*parameters, *self._buffer_sync.named_buffers().values()]

    def _notify_forward(self, *, averages: bool) -> int:
        """Tells ranks that have joined what a forward communicates; returns whose buffers are sent."""
        config = self._join_config
        if not config.enable:
            self.reducer.take_uneven(None)
            return 0
        Join.notify_join_context(self)
        protocol = getattr(config, "protocol", None)  # the record of torch's context has none
        announce = None
        if protocol is not None and config.each_notifies:
            announce = functools.partial(protocol.announce_active, config.place, backward=True)
        buffers = self.will_sync_module_buffers() * _ForwardCollectives.BUFFERS
        mine = _ForwardCollectives.FORWARD | buffers | averages * _ForwardCollectives.AVERAGES
        return self._agree_on_collectives(mine, announce)[1]

    def _agree_on_collectives(
        self, code: int, announce: Callable[[], None] | None = None
    ) -> tuple[_ForwardCollectives, int]:
        """Returns what all active ranks communicate, and the first of them; called by all ranks, blocks.

        Args:
            code: of what this rank communicates; zero where it has joined.
            announce: tells the ranks that have joined of the backward pass.

        Raises:
            GradientSyncError: active ranks communicate different things; raised on all ranks.
        """
        group = self.process_group
        codes = codes_of_all(group, self.device, code)
        by_rank = {rank: _ForwardCollectives(code) for rank, code in enumerate(codes) if code}
        if len(set(by_rank.values())) > 1:
            reasons = {rank: f"its forward {agreed}" for rank, agreed in by_rank.items()}
            where = f"[rank {group.rank()}] {self._in_words()} over {group.describe()}"
            lines = [f"  rank {rank}: {reason}" for rank, reason in reasons.items()]
            advice = "Use no_sync() and torch.no_grad() alike on all ranks that have inputs."
            head = f"{where}: ranks differ in a forward under join:"
            raise GradientSyncError("\n".join([head, *lines, advice]), reasons)
        all_count = self._divides_by_initial_world_size or len(by_rank) == group.size()
        self.reducer.take_uneven(UnevenForward(announce, None if all_count else len(by_rank)))
        return next(iter(by_rank.values())), next(iter(by_rank))

    def _shadow_forward(self) -> bool:
        """Communicates what other ranks do in a forward; returns whether the backward pass comes at once."""
        agreed, root = self._agree_on_collectives(JOINED)
        averages = bool(agreed & _ForwardCollectives.AVERAGES)
        if averages:
            self.reducer.rebuild_buckets()
        if agreed & _ForwardCollectives.BUFFERS:
            self._buffer_sync(root)
        self.require_forward_param_sync = averages
        if averages:
            self.reducer.shadow_forward()
        return averages and not getattr(self._join_config, "each_notifies", False)

    # ---- copies ------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Returns a module over a copy of the wrapped one and the same group; all ranks make one."""
        if self._comm_hooks:
            raise TypeError(
                f"{self._in_words()} has a communication hook, whose state may not be copied; "
                "deep-copy .module and wrap the copy"
            )
        group = self.process_group
        state = self.__getstate__(any_group=True)
        clone = self.__new__(type(self))
        memo[id(self)] = clone
        clone._restore(copy.deepcopy(state, memo), group)
        return clone

    def __getstate__(self, *, any_group: bool = False) -> dict[str, Any]:
        """Returns what pickle saves; the reader's default group takes the place of this one.

        Raises:
            TypeError: the module has a communication hook, or a group of its own.
        """
        if self._comm_hooks:
            raise TypeError(
                f"{self._in_words()} with a communication hook cannot be pickled; save state_dict(), "
                "and hook and state by themselves"
            )
        if not any_group and self.process_group is not default_group_or_none():
            raise TypeError(
                f"{self._in_words()} over {self.process_group.describe()}, which is not the default group, "
                "cannot be pickled; save state_dict() or .module"
            )
        state = dict(self.__dict__)
        for name in (
            "process_group", "_given_group", "device_mesh", "reducer", "_buffer_sync", "_casts",
            "_join_config", "_structure",
        ):  # fmt: skip
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the module over the default group, without communication."""
        self._restore(state, resolve_group(None))

    def _restore(self, state: dict[str, Any], group: ProcessGroup) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self._use_group(group, group)

    def _use_group(self, group: ProcessGroup, given: object) -> None:
        self.process_group, self._given_group = group, given
        self.device_mesh = None
        self._make_parts()


# ---- uneven inputs -----------------------------------------------------------------------------------------


class _ForwardCollectives(enum.IntFlag):
    """What a forward and its backward pass communicate; the number that tells other ranks, never zero."""

    FORWARD = 1
    BUFFERS = 2
    AVERAGES = 4

    def __str__(self) -> str:
        buffers = "sends" if self & _ForwardCollectives.BUFFERS else "does not send"
        gradients = "averages" if self & _ForwardCollectives.AVERAGES else "does not average"
        return f"{buffers} buffers and {gradients} gradients"


class _ModelJoinHook(JoinHook):
    """Stands in for a model on a rank that has joined."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._has_gradients = False

    def main_hook(self) -> None:
        """Shadows a forward, and the backward pass where that does not announce itself."""
        if self._model._shadow_forward():
            self.backward_hook()

    def backward_hook(self) -> None:
        """Shadows a backward pass."""
        self._has_gradients = True
        self._model.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcasts the model of the last rank to join, the highest one in a tie.

        Gradients of the others' passes go, so that nothing is added to them later.
        """
        model, group = self._model, self._model.process_group
        if self._has_gradients:
            for parameter in model.reducer.gradients.parameters:
                parameter.grad = None
        root = torch.tensor([group.rank() if is_last_joiner else -1], device=model.device)
        group.allreduce([root], _MAX).wait()
        broadcast_coalesced(group, model._common_state(), int(group.to_host(root)))
        model.reducer.leave_join()


# ---- torch.compile -----------------------------------------------------------------------------------------


def _outside_transforms() -> AbstractContextManager[object]:
    """Returns a context whose operations no transform sees, for what communicates."""
    active: bool = torch._C._are_functorch_transforms_active()
    disabled: AbstractContextManager[object] = (
        torch._C._DisableFuncTorch() if active else contextlib.nullcontext()
    )
    return disabled


def _run_module(module: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a module from a frame that the compiler traces; it begins at no frame of torch's own modules."""
    return module(*inputs, **kwargs)


@contextlib.contextmanager
def _splits_graphs(bucket_bytes: int) -> Iterator[None]:
    """Context in which the compiler splits graphs at the boundaries of the buckets.

    One graph of a whole module would deliver all gradients at the end of its backward pass, with nothing left
    to hide communication behind. The compiler's optimizer for torch's own wrapper splits it where parameters
    fill a bucket; it looks for the wrapper in this attribute. ``torch._dynamo.config.optimize_ddp = False``
    turns it off.

    Args:
        bucket_bytes: cap of a bucket; the optimizer does not go below that of its first one, 1 MiB.
    """
    owner: Any = torch.nn.parallel.DistributedDataParallel
    if not compiler_is_loaded() or not hasattr(owner, "_active_ddp_module"):
        yield
        return
    before = owner._active_ddp_module
    owner._active_ddp_module = SimpleNamespace(bucket_bytes_cap=max(bucket_bytes, FIRST_BUCKET_BYTES))
    try:
        yield
    finally:
        owner._active_ddp_module = before
