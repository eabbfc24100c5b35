"""What callers of :class:`~collectives.ProcessGroup` may pass: one function for each operation.

Each takes the arguments of the public method, raises unless this rank may issue the operation with them, and
returns those of the backend's method: plain tensors and lists, and the operation's option record.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.core.arguments import validation as check
from collectives.core.arguments.option_records import record
from collectives.core.arguments.overloads import (
    first_given,
    inner_list,
    with_limit,
    with_reduction,
    with_root,
)
from collectives.core.membership import Membership
from collectives.core.types import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from collectives.errors import UnsupportedOperationError

__all__ = [
    "TensorLists",
    "Tensors",
    "allgather",
    "allgather_coalesced",
    "allgather_single",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_single",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
]

Tensors = torch.Tensor | Sequence[torch.Tensor]
TensorLists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]
_Tensors = list[torch.Tensor]


def allreduce(
    group: Membership, tensors: Any, opts: Any, op: ReduceOp | None, timeout: timedelta | None
) -> tuple[torch.Tensor, AllreduceOptions]:
    """Returns the tensor and the options of an all-reduce."""
    tensor = check.only_tensor(group, "all_reduce", tensors)
    options = with_reduction(AllreduceOptions, opts, op, timeout)
    group._admit("all_reduce", tensor, options.reduceOp, options.timeout)
    if not tensor.is_contiguous():
        check.check_outputs(group, "all_reduce", [tensor])
    return tensor, options


def allreduce_coalesced(
    group: Membership, tensors: Sequence[torch.Tensor], opts: AllreduceOptions | None
) -> AllreduceOptions:
    """Returns the options of each of several all-reduces."""
    opts = record(opts) or AllreduceCoalescedOptions()
    opts = AllreduceOptions(opts.timeout, opts.asyncOp, opts.reduceOp)
    admitted: tuple[Any, ...] = ()
    for tensor in tensors:
        if tensor.__class__ is not torch.Tensor:
            check.check_tensor(group, "all_reduce", tensor)
        about = tensor.dtype, tensor.device, tensor.layout
        if about != admitted:  # most lists are of one kind
            group._admit("all_reduce", tensor, opts.reduceOp, opts.timeout)
            admitted = about
        if not tensor.is_contiguous():
            check.check_outputs(group, "all_reduce", [tensor])
    return opts


def broadcast(
    group: Membership, tensors: Any, opts: Any, root: int | None, timeout: timedelta | None
) -> tuple[torch.Tensor, BroadcastOptions]:
    """Returns the tensor and the options of a broadcast."""
    tensor = check.only_tensor(group, "broadcast", tensors)
    opts = with_root(BroadcastOptions, opts, root, timeout)
    check.check_rank(group, "broadcast", opts.rootRank, "root")
    check.check_root_tensor(group, "broadcast", opts.rootTensor)
    group._admit("broadcast", tensor, None, opts.timeout)
    if group.rank() != opts.rootRank:
        check.check_outputs(group, "broadcast", [tensor])
    return tensor, opts


def reduce(
    group: Membership,
    tensors: Any,
    opts: Any,
    root: int | None,
    op: ReduceOp | None,
    timeout: timedelta | None,
) -> tuple[torch.Tensor, ReduceOptions]:
    """Returns the tensor and the options of a reduction to one rank."""
    tensor = check.only_tensor(group, "reduce", tensors)
    opts = record(opts)
    if not isinstance(opts, ReduceOptions):
        opts = ReduceOptions(
            timeout=timeout, reduceOp=ReduceOp.of(op or ReduceOp.SUM), rootRank=first_given(opts, root, 0)
        )
    check.check_rank(group, "reduce", opts.rootRank, "root")
    check.check_root_tensor(group, "reduce", opts.rootTensor)
    group._admit("reduce", tensor, opts.reduceOp, opts.timeout)
    if group.rank() == opts.rootRank:
        check.check_outputs(group, "reduce", [tensor])
    return tensor, opts


def allgather(
    group: Membership, output_tensors: Any, input_tensors: Any, opts: Any, timeout: timedelta | None
) -> tuple[_Tensors, torch.Tensor, AllgatherOptions]:
    """Returns the outputs, the input and the options of an all-gather."""
    what = "all_gather"
    tensor = check.only_tensor(group, what, input_tensors, "input")
    outputs = check.check_list(group, what, inner_list(output_tensors), "output list")
    check.check_same_dtype(group, what, [tensor, *outputs], "input and outputs")
    rank = group.rank()
    own = "the size of this rank's input"
    check.check_numel(group, what, outputs[rank], f"output {rank}", tensor.numel(), own)
    check.check_even(group, what, outputs, "outputs")
    opts = with_limit(AllgatherOptions, opts, timeout)
    group._admit(what, tensor, None, opts.timeout)
    check.check_outputs(group, what, outputs, "output")
    return outputs, tensor, opts


def allgather_single(
    group: Membership, output: torch.Tensor, input: torch.Tensor, opts: Any, timeout: timedelta | None
) -> tuple[torch.Tensor, torch.Tensor, AllgatherOptions]:
    """Returns the output, the input and the options of an all-gather into one tensor."""
    what = "all_gather_into_tensor"
    check.check_pair(group, what, output, input)
    size = group.size()
    parts = f"{input.numel()} from each of {size} ranks"
    check.check_numel(group, what, output, "output", input.numel() * size, parts)
    check.check_whole_bytes(group, what, input.dtype, [input.numel()], "parts")
    opts = with_limit(AllgatherOptions, opts, timeout)
    group._admit(what, input, None, opts.timeout)
    check.check_outputs(group, what, [output], "output")
    return output, input, opts


def allgather_coalesced(
    group: Membership, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor]
) -> list[tuple[_Tensors, torch.Tensor]]:
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


def gather(
    group: Membership,
    output_tensors: Any,
    input_tensors: Any,
    opts: Any,
    root: int | None,
    timeout: timedelta | None,
) -> tuple[_Tensors | None, torch.Tensor, GatherOptions]:
    """Returns the outputs (``None`` but on the root), the input and the options of a gather."""
    what = "gather"
    tensor = check.only_tensor(group, what, input_tensors, "input")
    opts = with_root(GatherOptions, opts, root, timeout)
    check.check_rank(group, what, opts.rootRank, "root")
    outputs = check.check_rooted_list(group, what, output_tensors, tensor, opts.rootRank, "output list")
    group._admit(what, tensor, None, opts.timeout)
    check.check_outputs(group, what, outputs or (), "output")
    return outputs, tensor, opts


def scatter(
    group: Membership,
    output_tensors: Any,
    input_tensors: Any,
    opts: Any,
    root: int | None,
    timeout: timedelta | None,
) -> tuple[torch.Tensor, _Tensors | None, ScatterOptions]:
    """Returns the output, the inputs (``None`` but on the root) and the options of a scatter."""
    what = "scatter"
    tensor = check.only_tensor(group, what, output_tensors, "output")
    opts = with_root(ScatterOptions, opts, root, timeout)
    check.check_rank(group, what, opts.rootRank, "root")
    inputs = check.check_rooted_list(group, what, input_tensors, tensor, opts.rootRank, "input list")
    group._admit(what, tensor, None, opts.timeout)
    check.check_outputs(group, what, [tensor], "output")
    return tensor, inputs, opts


def reduce_scatter(
    group: Membership,
    output_tensors: Any,
    input_tensors: Any,
    opts: Any,
    op: ReduceOp | None,
    timeout: timedelta | None,
) -> tuple[torch.Tensor, _Tensors, ReduceScatterOptions]:
    """Returns the output, the inputs and the options of a reduce-scatter."""
    what = "reduce_scatter"
    output = check.only_tensor(group, what, output_tensors, "output")
    inputs = check.check_list(group, what, inner_list(input_tensors), "input list")
    check.check_same_dtype(group, what, [output, *inputs], "output and inputs")
    rank = group.rank()
    check.check_numel(group, what, output, "output", inputs[rank].numel(), f"the size of input {rank}")
    check.check_even(group, what, inputs, "inputs")
    options = with_reduction(ReduceScatterOptions, opts, op, timeout)
    group._admit(what, output, options.reduceOp, options.timeout)
    check.check_outputs(group, what, [output], "output")
    return output, inputs, options


def reduce_scatter_single(
    group: Membership,
    output: torch.Tensor,
    input: torch.Tensor,
    opts: Any,
    op: ReduceOp | None,
    timeout: timedelta | None,
) -> tuple[torch.Tensor, torch.Tensor, ReduceScatterOptions]:
    """Returns the output, the input and the options of a reduce-scatter of one tensor."""
    what = "reduce_scatter_tensor"
    check.check_pair(group, what, output, input)
    size = group.size()
    parts = f"{output.numel()} for each of {size} ranks"
    check.check_numel(group, what, input, "input", output.numel() * size, parts)
    options = with_reduction(ReduceScatterOptions, opts, op, timeout)
    group._admit(what, output, options.reduceOp, options.timeout)
    check.check_outputs(group, what, [output], "output")
    return output, input, options


def alltoall(
    group: Membership, output_tensors: Any, input_tensors: Any, opts: Any, timeout: timedelta | None
) -> tuple[_Tensors, _Tensors, AllToAllOptions]:
    """Returns the outputs, the inputs and the options of an all-to-all."""
    what = "all_to_all"
    outputs = check.check_list(group, what, output_tensors, "output list")
    inputs = check.check_list(group, what, input_tensors, "input list")
    check.check_same_dtype(group, what, [*inputs, *outputs], "inputs and outputs")
    rank = group.rank()
    own = f"the size of input {rank}"
    check.check_numel(group, what, outputs[rank], f"output {rank}", inputs[rank].numel(), own)
    check.check_even(group, what, [*inputs, *outputs], "inputs and outputs")
    opts = with_limit(AllToAllOptions, opts, timeout)
    group._admit(what, inputs[0], None, opts.timeout)
    check.check_outputs(group, what, outputs, "output")
    return outputs, inputs, opts


def alltoall_single(
    group: Membership,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    opts: Any,
    timeout: timedelta | None,
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int], AllToAllOptions]:
    """Returns the output, the input, the elements received and sent, and the options of an all-to-all."""
    what = "all_to_all_single"
    check.check_pair(group, what, output, input)
    sent = check.check_splits(group, what, input, input_split_sizes, "input")
    received = check.check_splits(group, what, output, output_split_sizes, "output")
    check.check_whole_bytes(group, what, input.dtype, [*sent, *received], "parts")
    to_itself, from_itself = sent[group.rank()], received[group.rank()]
    if to_itself != from_itself:
        reason = f"this rank sends itself {to_itself} elements, but expects {from_itself}"
        check.fail(group, what, reason)
    if not group.capabilities.uneven and len({*sent, *received}) > 1:
        reason = f"parts of different sizes are not taken: {sent} sent, {received} received"
        check.fail(group, what, reason)
    opts = with_limit(AllToAllOptions, opts, timeout)
    group._admit(what, input, None, opts.timeout)
    check.check_outputs(group, what, [output], "output")
    return output, input, received, sent, opts


def barrier(group: Membership, opts: Any, timeout: timedelta | None) -> BarrierOptions:
    """Returns the options of a barrier."""
    reason = group.capabilities.why_not("barrier")
    if reason is not None:
        check.fail(group, "barrier", reason, UnsupportedOperationError)
    options = with_limit(BarrierOptions, opts, timeout)
    check.check_limit(group, "barrier", options.timeout)
    return options


def send(group: Membership, tensors: Any, destination: int, tag: int) -> torch.Tensor:
    """Returns the tensor of a message that is sent."""
    tensor = check.only_tensor(group, "send", tensors)
    check.check_rank(group, "send", destination, "destination")
    check.check_tag(group, "send", tag)
    group._admit("send", tensor)
    return tensor


def recv(group: Membership, tensors: Any, source: int, tag: int) -> torch.Tensor:
    """Returns the tensor that a message of a rank is received in."""
    tensor = check.only_tensor(group, "recv", tensors)
    check.check_rank(group, "recv", source, "source")
    return _received(group, "recv", tensor, tag)


def recv_anysource(group: Membership, tensors: Any, tag: int) -> torch.Tensor:
    """Returns the tensor that a message of whichever rank is received in."""
    return _received(group, "recv_anysource", check.only_tensor(group, "recv_anysource", tensors), tag)


def _received(group: Membership, what: str, tensor: torch.Tensor, tag: int) -> torch.Tensor:
    check.check_tag(group, what, tag)
    group._admit(what, tensor)
    check.check_outputs(group, what, [tensor])
    return tensor
