"""What callers of a group may pass: torch's overloads, and checks before anything is sent.

Each failure names both values and the rank.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch

from collectives.core import operations
from collectives.core.arguments.option_records import time_limit_of
from collectives.core.arguments.staging import clusters, repeats_elements
from collectives.core.capabilities import Capabilities
from collectives.core.native_dtypes import elements_per_byte
from collectives.core.operations import Call, Operand, Operation
from collectives.core.types import ReduceOp
from collectives.errors import UnsupportedOperationError
from collectives.time_limits import time_limit

_PLAIN: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that have memory of their own."""


class Group(Protocol):
    """What the checks ask a group for."""

    @property
    def capabilities(self) -> Capabilities:
        """What the group can do."""

    def rank(self) -> int:
        """Returns this process's rank within the group."""

    def size(self) -> int:
        """Returns the number of ranks."""

    def describe(self) -> str:
        """Returns the group in words, for messages."""

    def note_refusal(self) -> None:
        """Takes note that this rank refuses an operation that the others may wait in."""

    def _admit(self, operation: str, tensor: torch.Tensor, op: ReduceOp | None = None) -> None:
        """Raises unless the group can run the operation on such a tensor."""


def fail(group: Group, operation: str, reason: str, kind: type[Exception] = ValueError) -> NoReturn:
    """Raises ``kind`` with the group, the rank and the operation in front of ``reason``."""
    group.note_refusal()
    raise kind(f"[rank {group.rank()}] {operation} on {group.describe()}: {reason}")


def check_tensor(group: Group, operation: str, value: object, what: str = "tensor") -> torch.Tensor:
    """Returns ``value`` where it is a tensor.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, torch.Tensor):
        fail(group, operation, f"{what} must be a tensor, but is of type {type(value).__name__}", TypeError)
    if type(value) not in _PLAIN or not _has_address(value):
        _check_memory(group, operation, value, what)
    return value


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _check_memory(group: Group, operation: str, tensor: torch.Tensor, what: str) -> None:
    """Refuses stand-ins without memory of their own: fake tensors, those made of others, or of torch.func."""
    if tensor.is_meta or (tensor.layout is not torch.strided and type(tensor) in _PLAIN):
        return  # what a group can do with these, it says itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        missing = tensor.numel() > 0 and not _has_address(tensor)
    if missing:
        kind, way_out = type(tensor).__name__, "; give the tensors inside it"
        if type(tensor) in _PLAIN:
            way_out = ", as within torch.func, or after its storage was freed; give one that has memory"
        fail(group, operation, f"{what} is a {kind} without memory of its own{way_out}", TypeError)


def only_tensor(group: Group, operation: str, tensors: object, what: str = "tensors") -> torch.Tensor:
    """Returns the tensor in a list of one, or a tensor given as it is."""
    tensor: Any = tensors
    if tensors.__class__ is not torch.Tensor and not isinstance(tensors, torch.Tensor):
        if not isinstance(tensors, (list, tuple)):
            kind = type(tensors).__name__
            fail(group, operation, f"{what} must be a tensor or a list of one, but is {kind}", TypeError)
        if len(tensors) != 1:
            reason = "must hold one tensor, because a process drives one device"
            fail(group, operation, f"{what} {reason}, but holds {len(tensors)}")
        tensor = tensors[0]
    if tensor.__class__ is torch.Tensor:
        try:  # what _has_address says, without its frame
            if tensor.data_ptr():
                return tensor
        except RuntimeError:
            pass
    return check_tensor(group, operation, tensor, what)


def check_list(group: Group, operation: str, tensors: object, what: str) -> list[torch.Tensor]:
    """Returns a list of tensors with one entry for each rank.

    Raises:
        TypeError: it is no list of tensors.
        ValueError: its length is not the size of the group.
    """
    if not isinstance(tensors, (list, tuple)):
        reason = f"{what} must be a list of tensors, but is of type {type(tensors).__name__}"
        fail(group, operation, reason, TypeError)
    if len(tensors) != group.size():
        reason = f"{what} must hold one tensor for each of {group.size()} ranks, but holds {len(tensors)}"
        fail(group, operation, reason)
    return [check_tensor(group, operation, tensor, f"{what}[{i}]") for i, tensor in enumerate(tensors)]


def check_outputs(
    group: Group, operation: str, tensors: Sequence[torch.Tensor], what: str = "tensor"
) -> None:
    """Checks that each element of the strided tensors has memory of its own, so that it can be written.

    Args:
        group: whose operation it is.
        operation: its name.
        tensors: what it writes.
        what: how they are called, in the singular.

    Raises:
        ValueError: elements share their memory, as after ``expand``, or tensors do.
    """
    if len(tensors) > 1:
        check_apart(group, operation, [tensors])
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous() and repeats_elements(tensor):
            number = f" {i}" if len(tensors) > 1 else ""
            reason = (
                f"{what}{number} has the shape {list(tensor.shape)} and the strides {list(tensor.stride())}: "
                "its elements share their memory, so that no result can be written there; give its clone()"
            )
            fail(group, operation, reason)


def check_apart(
    group: Group,
    operation: str,
    outputs: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[Sequence[torch.Tensor]] = (),
) -> None:
    """Checks that operations that run together write to no memory twice, and to none that another one reads.

    Args:
        group: whose operations they are.
        operation: their name.
        outputs: what each of them writes.
        inputs: what each of them reads.

    Raises:
        ValueError: outputs share memory, or one shares it with the input of another operation.
    """
    used = [(i, True, tensor) for i, tensors in enumerate(outputs) for tensor in tensors]
    used += [(i, False, tensor) for i, tensors in enumerate(inputs) for tensor in tensors]
    for cluster in clusters([tensor for _, _, tensor in used]):
        for (i, i_writes, one), (j, j_writes, other) in itertools.combinations([used[n] for n in cluster], 2):
            writes = (i_writes and j_writes) if i == j else (i_writes or j_writes)
            if writes and _share_memory(one, other):
                reason = (
                    f"tensors of the shapes {list(one.shape)} and {list(other.shape)} share memory, and "
                    "what is written there would be up to chance; give each memory of its own"
                )
                fail(group, operation, reason)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors share memory; of those with gaps, only whether they begin alike."""
    first, second = one.data_ptr(), other.data_ptr()
    if not (one.is_contiguous() and other.is_contiguous()):
        return first == second
    return first < second + other.nbytes and second < first + one.nbytes


def check_same_dtype(group: Group, operation: str, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Checks that all tensors have the data type, the device and the layout of the first."""
    if not tensors:
        return
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dtype is not first.dtype:
            reason = (
                f"{what} must have one data type, but entry 0 is {first.dtype} and entry {i} {tensor.dtype}"
            )
            fail(group, operation, reason)
        if tensor.device != first.device:
            reason = f"{what} must be on one device, but 0 is on {first.device} and {i} on {tensor.device}"
            fail(group, operation, reason)
        if tensor.layout is not first.layout:
            reason = f"{what} must have one layout, but entry 0 is {first.layout} and {i} {tensor.layout}"
            fail(group, operation, reason)


def check_numel(
    group: Group, operation: str, tensor: torch.Tensor, what: str, numel: int, because: str
) -> None:
    """Checks the number of elements of a tensor."""
    if tensor.numel() != numel:
        reason = f"{what} has {tensor.numel()} elements (shape {list(tensor.shape)}), not {numel}: {because}"
        fail(group, operation, reason)


def check_rank(group: Group, operation: str, rank: object, what: str) -> int:
    """Returns ``rank`` where it is a rank of the group."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        reason = f"{what} must be an int, but is {rank!r} of type {type(rank).__name__}"
        fail(group, operation, reason, TypeError)
    if not 0 <= rank < group.size():
        fail(group, operation, f"{what} is {rank}, but the ranks of this group are 0 to {group.size() - 1}")
    return rank


def check_tag(group: Group, operation: str, tag: object) -> int:
    """Returns ``tag`` where it is a non-negative 32-bit int, and 0 where the group has no tags."""
    if isinstance(tag, bool) or not isinstance(tag, int):
        fail(group, operation, f"tag must be an int, but is {tag!r} of type {type(tag).__name__}", TypeError)
    if not 0 <= tag < 2**31:
        fail(group, operation, f"tag is {tag}, but must be in 0 to {2**31 - 1}")
    if tag and not group.capabilities.tags:
        fail(group, operation, f"tags are not offered, but tag is {tag}", UnsupportedOperationError)
    return tag


def check_limit(group: Group, operation: str, timeout: object, *, positive: bool = True) -> timedelta | None:
    """Returns the time limit of one operation, as :func:`time_limit`; ``None`` is the group's."""
    if timeout is None:
        return None
    try:
        return time_limit(timeout, positive=positive)
    except (TypeError, ValueError) as error:
        fail(group, operation, str(error), type(error))


def check_offered(group: Group, operation: str, tensor: torch.Tensor, op: ReduceOp | None) -> None:
    """Checks that the group's capabilities have an operation, with its reduction, for such a tensor.

    Raises:
        UnsupportedOperationError: they have not; says what they have.
    """
    if tensor.layout is not torch.strided:
        reason: str | None = f"tensors of layout {tensor.layout} are not taken; densify it first"
    elif tensor.is_quantized and op is not None:
        reason = f"{tensor.dtype} cannot be reduced"
    else:
        reason = group.capabilities.why_not(operation, device=tensor.device.type, dtype=tensor.dtype, op=op)
    if reason is not None:
        fail(group, operation, reason, UnsupportedOperationError)


def check_factor(group: Group, operation: str, op: ReduceOp) -> None:
    """Checks that a PREMUL_SUM has its factor."""
    if op.factor is None and op.code == ReduceOp.PREMUL_SUM.code:
        fail(group, operation, "PREMUL_SUM has no factor; make the reduction with make_premul_sum(factor)")


def check_pair(group: Group, operation: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Checks that input and output are tensors of one data type and layout on one device."""
    check_tensor(group, operation, output, "output")
    check_tensor(group, operation, input, "input")
    if output.dtype is not input.dtype:
        fail(group, operation, f"output is {output.dtype}, but input is {input.dtype}")
    if output.device != input.device:
        fail(group, operation, f"output is on {output.device}, but input on {input.device}")
    if output.layout is not input.layout:
        fail(group, operation, f"output is {output.layout}, but input is {input.layout}")


def check_even(group: Group, operation: str, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Checks that tensors are equal in size where the group takes no others."""
    if not group.capabilities.uneven and len({tensor.numel() for tensor in tensors}) > 1:
        sizes = [tensor.numel() for tensor in tensors]
        reason = f"{what} of different sizes are not taken: {sizes}"
        fail(group, operation, reason, UnsupportedOperationError)


def check_pairs(
    group: Group, operation: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns each output with its input; there must be as many, and none shares memory with another pair."""
    if len(outputs) != len(inputs):
        fail(group, operation, f"{len(outputs)} outputs were given for {len(inputs)} inputs")
    check_apart(group, operation, [[output] for output in outputs], [[tensor] for tensor in inputs])
    return list(zip(outputs, inputs, strict=True))


def check_rooted_list(
    group: Group, operation: str, tensors: Any, own: torch.Tensor, root: int, what: str
) -> list[torch.Tensor]:
    """Returns the list that only the root gives, checked; every entry has the size and data type of ``own``.

    It is empty on the other ranks.
    """
    # Not by the truth of what is given, which may be a tensor by mistake.
    absent = tensors is None or (isinstance(tensors, (list, tuple)) and not tensors)
    if group.rank() != root:
        if not absent:
            reason = f"{what} is for the root, rank {root} of the group; give None on this rank"
            fail(group, operation, reason)
        return []
    if absent:
        ranks = f"{group.size()} ranks"
        fail(group, operation, f"this rank is the root and must give {what}, a tensor for each of {ranks}")
    entries = check_list(group, operation, tensors, what)
    check_same_dtype(group, operation, [own, *entries], f"{what} and the single tensor")
    for i, entry in enumerate(entries):
        check_numel(
            group,
            operation,
            entry,
            f"entry {i} of {what}",
            own.numel(),
            "all ranks' tensors are equal in size",
        )
    return entries


def check_whole_bytes(
    group: Group, operation: str, dtype: torch.dtype, counts: Sequence[int], what: str
) -> None:
    """Checks that parts of a tensor begin and end at bytes.

    Raises:
        ValueError: elements of ``dtype`` share bytes, and one of the ``counts`` of elements ends within one.
    """
    shared = elements_per_byte(dtype)
    if shared > 1 and any(count % shared for count in counts):
        reason = (
            f"{what} of {dtype} must have a multiple of {shared} elements, which share a byte, but have "
            f"{list(counts)}"
        )
        fail(group, operation, reason)


def check_splits(
    group: Group, operation: str, tensor: torch.Tensor, splits: Sequence[int] | None, what: str
) -> list[int]:
    """Returns the number of ELEMENTS of each rank's part of ``tensor``; ``splits`` counts along dimension 0.

    Raises:
        TypeError: the splits are no list of int.
        ValueError: the splits do not add up, are negative or not one per rank; or, without splits, dimension
            0 does not divide.
    """
    size = group.size()
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            reason = (
                f"dimension 0 of {what} is {rows} (shape {list(tensor.shape)}), not a multiple of {size}; "
                "give split sizes"
            )
            fail(group, operation, reason)
        return [tensor.numel() // size] * size
    try:
        splits = [operator.index(split) for split in splits]
    except TypeError:
        fail(group, operation, f"split sizes of {what} must be a list of int, but are {splits!r}", TypeError)
    if len(splits) != size:
        reason = f"split sizes of {what} must be one for each of {size} ranks, but are {len(splits)}"
        fail(group, operation, reason)
    if any(split < 0 for split in splits):
        fail(group, operation, f"split sizes of {what} must not be negative, but are {list(splits)}")
    if sum(splits) != rows:
        reason = (
            f"split sizes of {what} add up to {sum(splits)} ({list(splits)}), but its dimension 0 is {rows}"
        )
        fail(group, operation, reason)
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]


# ---- calls -------------------------------------------------------------------------------------------------

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
    group: Group,
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
    listed: str = "",
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
        listed: what the user calls the list of a tensor for each rank, which is then not in a list of one.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a wrong shape, size, rank or time limit.
        UnsupportedOperationError: the group does not offer this.
    """
    reduction = ReduceOp.SUM if op is None else op if op.__class__ is ReduceOp else ReduceOp.of(op)
    if timeout is not None:
        timeout = check_limit(group, operation.name, timeout)
    call = Call(operation, (), (), reduction, root, timeout, async_op, device=device)
    if operation is operations.BARRIER:
        reason = group.capabilities.why_not("barrier")
        if reason is not None:
            fail(group, "barrier", reason, UnsupportedOperationError)
        return call
    if operation is operations.ALL_REDUCE_COALESCED:
        return _coalesced(group, call, outputs)
    name = operation.name
    form = operation.output, operation.input
    if Operand.PARTS in form:
        _PAIRS[form](group, call, outputs, inputs, output_split_sizes, input_split_sizes)
    else:
        if not listed and operation.output is Operand.EACH:
            outputs = _unwrapped(outputs)
        if not listed and operation.input is Operand.EACH:
            inputs = _unwrapped(inputs)
        _take_operands(group, call, outputs, inputs, root_tensor, listed)
    group._admit(name, call.tensor, reduction if operation.reduces else None)
    if operation.writes == "all" or call.writes_on(group.rank()):
        check_outputs(group, name, call.outputs, "tensor" if operation.in_place else "output")
    return call


def _unwrapped(tensors: Any) -> Any:
    """Returns the list in a list of one list, as torch wraps them; anything else as it is."""
    wraps = isinstance(tensors, (list, tuple)) and len(tensors) == 1
    return tensors[0] if wraps and isinstance(tensors[0], (list, tuple)) else tensors


def _take_operands(
    group: Group, call: Call, outputs: Any, inputs: Any, root_tensor: int, listed: str
) -> None:
    """Takes single tensors, and lists of one for each rank."""
    operation = call.operation
    name = operation.name
    if operation.output is Operand.ONE:
        what = "tensors" if operation.in_place else "output"
        call.outputs = (only_tensor(group, name, outputs, what),)
    if operation.input is Operand.ONE:
        call.inputs = (only_tensor(group, name, inputs, "input"),)
    if operation.rooted:
        check_rank(group, name, call.root, "root")
        if operation in {operations.BROADCAST, operations.REDUCE}:
            if root_tensor:  # one process drives one device
                fail(group, name, f"rootTensor is {root_tensor}, but there is only tensor 0")
        elif operation is operations.GATHER:
            call.outputs = check_rooted_list(
                group, name, outputs, call.input, call.root, listed or "the output list"
            )
        else:
            call.inputs = check_rooted_list(
                group, name, inputs, call.output, call.root, listed or "the input list"
            )
        return
    if operation.in_place:
        return
    if operation.output is Operand.EACH:
        call.outputs = check_list(group, name, outputs, listed or "output list")
    if operation.input is Operand.EACH:
        call.inputs = check_list(group, name, inputs, listed or "input list")
    _check_sizes(group, call)


def _check_sizes(group: Group, call: Call) -> None:
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
    check_same_dtype(group, name, tensors, " and ".join(single | lists))
    check_numel(group, name, own, output, size, because)
    into_another = operation is operations.ALL_REDUCE_INTO_TENSOR and own.layout is torch.strided
    if into_another and own.data_ptr() != call.input.data_ptr():
        check_apart(group, name, [[own], []], [[], call.inputs])
    listed = [tensor for operand in lists.values() for tensor in operand]
    check_even(group, name, listed, " and ".join(lists))


def _take_whole(group: Group, call: Call, output: Any, input: Any, *_: Any) -> None:
    """Takes a tensor of which each rank has, or gives, the whole, and one with this rank's part."""
    name = call.operation.name
    check_pair(group, name, output, input)
    gathers = call.operation.output is Operand.PARTS
    whole, part = (output, input) if gathers else (input, output)
    what, each = ("output", "from") if gathers else ("input", "for")
    parts = f"{part.numel()} {each} each of {group.size()} ranks"
    check_numel(group, name, whole, what, part.numel() * group.size(), parts)
    if gathers:
        check_whole_bytes(group, name, input.dtype, [input.numel()], "parts")
    call.outputs, call.inputs = (output,), (input,)


def _take_exchanged(
    group: Group, call: Call, output: Any, input: Any, output_splits: Any, input_splits: Any
) -> None:
    name = call.operation.name
    check_pair(group, name, output, input)
    sends = check_splits(group, name, input, input_splits, "input")
    receives = check_splits(group, name, output, output_splits, "output")
    check_whole_bytes(group, name, input.dtype, [*sends, *receives], "parts")
    to_itself, from_itself = sends[group.rank()], receives[group.rank()]
    if to_itself != from_itself:
        reason = f"this rank sends itself {to_itself} elements, but expects {from_itself}"
        fail(group, name, reason)
    if not group.capabilities.uneven and len({*sends, *receives}) > 1:
        reason = f"parts of different sizes are not taken: {sends} sent, {receives} received"
        fail(group, name, reason)
    call.outputs, call.inputs = (output,), (input,)
    call.output_splits, call.input_splits = receives, sends


_PAIRS: dict[tuple[Operand, Operand], Callable[..., None]] = {
    (Operand.PARTS, Operand.ONE): _take_whole,
    (Operand.ONE, Operand.PARTS): _take_whole,
    (Operand.PARTS, Operand.PARTS): _take_exchanged,
}
"""What takes two single tensors, of which at least one has a part for each rank."""


def _coalesced(group: Group, call: Call, tensors: Any) -> Call:
    """Returns the call of several all-reduces."""
    admitted: tuple[Any, ...] = ()
    call.outputs = list(tensors)
    for tensor in call.outputs:
        try:  # what check_tensor says, without its frame
            plain = tensor.__class__ is torch.Tensor and tensor.data_ptr() != 0
        except RuntimeError:
            plain = False
        if not plain:
            check_tensor(group, "all_reduce", tensor)
        about = tensor.dtype, tensor.device, tensor.layout
        if about != admitted:  # most lists are of one kind
            group._admit("all_reduce", tensor, call.op)
            admitted = about
        if not tensor.is_contiguous():
            check_outputs(group, "all_reduce", [tensor])
    return call


def allgather_coalesced(
    group: Group,
    output_lists: Sequence[Sequence[torch.Tensor]],
    input_list: Sequence[torch.Tensor],
) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Returns the outputs and the input of each of several all-gathers."""
    what = "all_gather_coalesced"
    if len(output_lists) != group.size():
        reason = (
            f"output_lists must have a list for each of {group.size()} ranks, but has {len(output_lists)}"
        )
        fail(group, what, reason)
    for r, outputs in enumerate(output_lists):
        if len(outputs) != len(input_list):
            reason = f"output_lists[{r}] has {len(outputs)} tensors, but input_list has {len(input_list)}"
            fail(group, what, reason)
    gathered = [[outputs[i] for outputs in output_lists] for i in range(len(input_list))]
    check_apart(group, what, gathered, [[tensor] for tensor in input_list])
    return list(zip(gathered, input_list, strict=True))


def sent(group: Group, tensors: Any, destination: int, tag: int) -> torch.Tensor:
    """Returns the tensor of a message that is sent."""
    tensor = only_tensor(group, "send", tensors)
    check_rank(group, "send", destination, "destination")
    check_tag(group, "send", tag)
    group._admit("send", tensor)
    return tensor


def received(group: Group, tensors: Any, source: int | None, tag: int) -> torch.Tensor:
    """Returns the tensor that a message is received in, of a rank or of whichever sends one."""
    name = "recv_anysource" if source is None else "recv"
    tensor = only_tensor(group, name, tensors)
    if source is not None:
        check_rank(group, name, source, "source")
    check_tag(group, name, tag)
    group._admit(name, tensor)
    check_outputs(group, name, [tensor])
    return tensor
