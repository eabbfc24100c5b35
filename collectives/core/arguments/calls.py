"""What callers of a group may pass: torch's overloads, and checks before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.core import operations
from collectives.core.arguments import validation as check
from collectives.core.arguments.option_records import time_limit_of
from collectives.core.membership import Membership
from collectives.core.operations import Call, Operand, Operation
from collectives.core.types import ReduceOp
from collectives.errors import UnsupportedOperationError

__all__ = [
    "TensorLists",
    "Tensors",
    "allgather_coalesced",
    "checked_call",
    "overload_arguments",
    "received",
    "sent",
]

Tensors = torch.Tensor | Sequence[torch.Tensor]
TensorLists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


def overload_arguments(
    operation: Operation, opts: Any, op: Any = None, root: Any = None, timeout: Any = None
) -> dict[str, Any]:
    """Returns the keyword arguments of :func:`checked_call` that an overload of ``torch.distributed`` gives.

    A method has an option record, torch's or ours, as its first optional argument. Its overloads without one
    give a part of the record there, and the rest after it.

    Args:
        operation: the collective.
        opts: a record, or the root, else the reduction, else the time limit, whichever the collective has.
        op: the reduction, for the form without a record.
        root: the root, for the form without a record.
        timeout: the time limit, for the form without a record.
    """
    if opts is not None and hasattr(opts, "asyncOp"):
        if getattr(opts, "sparseIndices", None) is not None:
            raise UnsupportedOperationError(
                "all_reduce: sparseIndices of the option record are not taken; give the sparse tensor itself"
            )
        return {
            "op": getattr(opts, "reduceOp", None),
            "root": getattr(opts, "rootRank", 0),
            "timeout": time_limit_of(opts),
            "async_op": opts.asyncOp,
            "root_tensor": getattr(opts, "rootTensor", 0),
            "device": _device(opts) if operation is operations.BARRIER else None,
        }
    if opts is not None:
        if operation.rooted:
            root = opts
        elif operation.reduces:
            op = opts
        else:
            timeout = opts
    return {"op": op, "root": 0 if root is None else root, "timeout": timeout}


def _device(opts: Any) -> torch.device | int | None:
    """Returns the device that the record of a barrier names."""
    numbers = getattr(opts, "device_ids", None)
    device: torch.device | None = getattr(opts, "device", None)
    if not numbers or (device is not None and device.index is not None):
        return device
    return int(numbers[0]) if device is None else torch.device(device.type, numbers[0])


def checked_call(
    group: Membership,
    operation: Operation,
    outputs: Any = None,
    inputs: Any = None,
    *,
    op: ReduceOp | None = None,
    root: int = 0,
    timeout: timedelta | None = None,
    async_op: bool = True,
    root_tensor: int = 0,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    device: torch.device | int | None = None,
) -> Call:
    """Returns the call of a collective; raises unless this rank may issue it.

    Args:
        group: the group.
        operation: the collective.
        outputs: what it writes: a tensor, a list of tensors, or one of these in a list of one.
        inputs: what it only reads, likewise.
        op: the reduction; ``None`` for the sum.
        root: the root, counted within the group.
        timeout: time limit; ``None`` for the group's.
        async_op: whether the caller goes on before it is done.
        root_tensor: which of the root's tensors; there is one, 0.
        output_split_sizes: rows of each part of the output; ``None`` or empty for equal parts.
        input_split_sizes: rows of each part of the input; likewise.
        device: of a barrier.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a wrong shape, size, rank or time limit.
        UnsupportedOperationError: the group does not offer this.
    """
    reduction = ReduceOp.SUM if op is None else op if op.__class__ is ReduceOp else ReduceOp.of(op)
    if timeout is not None:
        timeout = check.check_limit(group, operation.name, timeout)
    call = Call(operation, (), (), reduction, root, timeout, async_op, device=device)
    if operation is operations.BARRIER:
        reason = group.capabilities.why_not("barrier")
        if reason is not None:
            check.fail(group, "barrier", reason, UnsupportedOperationError)
        return call
    if operation is operations.ALL_REDUCE_COALESCED:
        return _coalesced(group, call, outputs)
    name = operation.name
    form = operation.output, operation.input
    if Operand.PARTS in form:
        _PAIRS[form](group, call, outputs, inputs, output_split_sizes, input_split_sizes)
    else:
        _take_operands(group, call, outputs, inputs, root_tensor)
    group._admit(name, call.tensor, reduction if operation.reduces else None)
    if operation.writes == "all" or call.writes_on(group.rank()):
        check.check_outputs(group, name, call.outputs, "tensor" if operation.in_place else "output")
    return call


def _take_operands(group: Membership, call: Call, outputs: Any, inputs: Any, root_tensor: int) -> None:
    """Takes single tensors, and lists of one for each rank."""
    operation = call.operation
    name = operation.name
    if operation.output is Operand.ONE:
        what = "tensors" if operation.in_place else "output"
        call.outputs = (check.only_tensor(group, name, outputs, what),)
    if operation.input is Operand.ONE:
        call.inputs = (check.only_tensor(group, name, inputs, "input"),)
    if operation.rooted:
        check.check_rank(group, name, call.root, "root")
        if operation in {operations.BROADCAST, operations.REDUCE}:
            check.check_root_tensor(group, name, root_tensor)
        elif operation is operations.GATHER:
            call.outputs = check.check_rooted_list(group, name, outputs, call.input, call.root, "output list")
        else:
            call.inputs = check.check_rooted_list(group, name, inputs, call.output, call.root, "input list")
        return
    if operation.in_place:
        return
    if operation.output is Operand.EACH:
        call.outputs = check.check_list(group, name, check.inner_list(outputs), "output list")
    if operation.input is Operand.EACH:
        call.inputs = check.check_list(group, name, check.inner_list(inputs), "input list")
    _check_sizes(group, call)


def _check_sizes(group: Membership, call: Call) -> None:
    """Checks an output and an input, each a single tensor or a list of one for each rank."""
    operation, rank = call.operation, group.rank()
    name = operation.name
    output, own, because = "output", call.outputs[0], "the size of this rank's input"
    single, lists = {"input": call.inputs, "output": call.outputs}, {}
    size = call.inputs[0].numel()
    if operation.input is Operand.EACH:
        lists["inputs"] = single.pop("input")
        size, because = call.inputs[rank].numel(), f"the size of input {rank}"
    if operation.output is Operand.EACH:
        lists["outputs"] = single.pop("output")
        own, output = call.outputs[rank], f"output {rank}"
    tensors = [tensor for operand in (single | lists).values() for tensor in operand]
    check.check_same_dtype(group, name, tensors, " and ".join(single | lists))
    check.check_numel(group, name, own, output, size, because)
    if operation is operations.ALL_REDUCE_INTO_TENSOR and own.data_ptr() != call.input.data_ptr():
        check.check_apart(group, name, [[own], []], [[], call.inputs])
    listed = [tensor for operand in lists.values() for tensor in operand]
    check.check_even(group, name, listed, " and ".join(lists))


def _take_gathered(group: Membership, call: Call, output: Any, input: Any, *_: Any) -> None:
    name = call.operation.name
    check.check_pair(group, name, output, input)
    parts = f"{input.numel()} from each of {group.size()} ranks"
    check.check_numel(group, name, output, "output", input.numel() * group.size(), parts)
    check.check_whole_bytes(group, name, input.dtype, [input.numel()], "parts")
    call.outputs, call.inputs = (output,), (input,)


def _take_scattered(group: Membership, call: Call, output: Any, input: Any, *_: Any) -> None:
    name = call.operation.name
    check.check_pair(group, name, output, input)
    parts = f"{output.numel()} for each of {group.size()} ranks"
    check.check_numel(group, name, input, "input", output.numel() * group.size(), parts)
    call.outputs, call.inputs = (output,), (input,)


def _take_exchanged(
    group: Membership, call: Call, output: Any, input: Any, output_splits: Any, input_splits: Any
) -> None:
    name = call.operation.name
    check.check_pair(group, name, output, input)
    sends = check.check_splits(group, name, input, input_splits, "input")
    receives = check.check_splits(group, name, output, output_splits, "output")
    check.check_whole_bytes(group, name, input.dtype, [*sends, *receives], "parts")
    to_itself, from_itself = sends[group.rank()], receives[group.rank()]
    if to_itself != from_itself:
        reason = f"this rank sends itself {to_itself} elements, but expects {from_itself}"
        check.fail(group, name, reason)
    if not group.capabilities.uneven and len({*sends, *receives}) > 1:
        reason = f"parts of different sizes are not taken: {sends} sent, {receives} received"
        check.fail(group, name, reason)
    call.outputs, call.inputs = (output,), (input,)
    call.output_splits, call.input_splits = receives, sends


_PAIRS: dict[tuple[Operand, Operand], Callable[..., None]] = {
    (Operand.PARTS, Operand.ONE): _take_gathered,
    (Operand.ONE, Operand.PARTS): _take_scattered,
    (Operand.PARTS, Operand.PARTS): _take_exchanged,
}
"""What takes two single tensors, of which at least one has a part for each rank."""


def _coalesced(group: Membership, call: Call, tensors: Any) -> Call:
    """Returns the call of several all-reduces."""
    admitted: tuple[Any, ...] = ()
    for tensor in tensors:
        if tensor.__class__ is not torch.Tensor:
            check.check_tensor(group, "all_reduce", tensor)
        about = tensor.dtype, tensor.device, tensor.layout
        if about != admitted:  # most lists are of one kind
            group._admit("all_reduce", tensor, call.op)
            admitted = about
        if not tensor.is_contiguous():
            check.check_outputs(group, "all_reduce", [tensor])
    call.outputs = tensors
    return call


def allgather_coalesced(
    group: Membership, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Returns the outputs and the input of each of several all-gathers."""
    what = "all_gather_coalesced"
    if len(output_lists) != group.size():
        reason = (
            f"output_lists must have a list for each of {group.size()} ranks, but has {len(output_lists)}"
        )
        check.fail(group, what, reason)
    for r, outputs in enumerate(output_lists):
        if len(outputs) != len(input_list):
            reason = f"output_lists[{r}] has {len(outputs)} tensors, but input_list has {len(input_list)}"
            check.fail(group, what, reason)
    gathered = [[outputs[i] for outputs in output_lists] for i in range(len(input_list))]
    check.check_apart(group, what, gathered, [[tensor] for tensor in input_list])
    return list(zip(gathered, input_list, strict=True))


def sent(group: Membership, tensors: Any, destination: int, tag: int) -> torch.Tensor:
    """Returns the tensor of a message that is sent."""
    tensor = check.only_tensor(group, "send", tensors)
    check.check_rank(group, "send", destination, "destination")
    check.check_tag(group, "send", tag)
    group._admit("send", tensor)
    return tensor


def received(group: Membership, tensors: Any, source: int | None, tag: int) -> torch.Tensor:
    """Returns the tensor that a message is received in, of a rank or of whichever sends one."""
    name = "recv_anysource" if source is None else "recv"
    tensor = check.only_tensor(group, name, tensors)
    if source is not None:
        check.check_rank(group, name, source, "source")
    check.check_tag(group, name, tag)
    group._admit(name, tensor)
    check.check_outputs(group, name, [tensor])
    return tensor
