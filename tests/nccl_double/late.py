"""torch's operations that return before they are carried out: shapes of their results need no values.

Run on tensors without memory first, an operation says which tensors it makes. These are given memory at
once, which a stream fills when it gets there, as a device does. What needs values to know its shapes, or
draws random numbers in the order of the calls, is none of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from nccl_double import accesses
from nccl_double.accesses import Range
from nccl_double.calls import enqueue
from nccl_double.memory import give_out

__all__ = ["carry_out", "enqueue_operation", "written_by"]

_WAITS = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
"""What operations are tagged with that the host has to wait for."""

_DEVICE = torch.device("cpu")
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class _MustWait(Exception):  # noqa: N818 - no error
    pass


def carry_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operation that autograd knows of since it was put on its stream."""
    with torch._C._ExcludeDispatchKeyGuard(_VERSIONS):
        return func(*args, **kwargs)


@cache
def _spare_the_compiler() -> None:
    """Lets operations without memory run as they are: many would import torch's compiler, for seconds."""
    about_meta = global_decomposition_table["meta"], global_decomposition_table["post_autograd"]
    waiting: list[Any] = [function for table in about_meta for function in table.values()]
    seen = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
        waiting += inside
        if function.__code__.co_filename == torch._compile.__file__:
            for one in inside:
                if isinstance(one, FunctionType):
                    one.__dynamo_disable = one  # type: ignore[attr-defined]


def _without_memory(tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(tensor) not in known:
        size, stride = tensor.size(), tensor.stride()
        known[id(tensor)] = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
    return known[id(tensor)]


def _tensors(values: object) -> list[torch.Tensor]:
    return [one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor)]


def _is_plain(tensor: torch.Tensor, device: str) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != device or tensor.dtype in _QUANTISED:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def _rehearse(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the results of an operation as tensors without memory.

    Raises:
        _MustWait: they are not known before, so that the host has to wait.
    """
    elsewhere = kwargs.get("device") not in (None, _DEVICE) or kwargs.get("pin_memory")
    if elsewhere or "quantize" in func._schema.name or not _WAITS.isdisjoint(func.tags):
        raise _MustWait  # what is quantised is not so without memory
    given = _tensors((args, kwargs))
    if not all(_is_plain(one, _DEVICE.type) for one in given):
        raise _MustWait
    known: dict[int, torch.Tensor] = {}
    stand_ins, named = tree_map_only(
        torch.Tensor, lambda tensor: _without_memory(tensor, known), (args, kwargs)
    )
    if any(one.name == "device" for one in func._schema.arguments):
        named = {**named, "device": torch.device("meta")}
    _spare_the_compiler()
    try:
        results = func(*stand_ins, **named)
    except Exception as error:  # it cannot do without memory, or raises for its caller with it, too
        raise _MustWait from error
    if any(known[id(tensor)].size() != tensor.size() for tensor in given):
        raise _MustWait  # it gives an output more memory
    if not func._schema.is_mutable:
        made, shared = _tensors(results), {one.untyped_storage()._cdata for one in known.values()}
        if not made or not all(_is_plain(one, "meta") for one in made):
            raise _MustWait
        if any(one.untyped_storage()._cdata in shared for one in made):
            raise _MustWait
    return results


def _fill(func: Any, args: Any, kwargs: Any, into: Sequence[Any]) -> None:
    computed = tree_flatten(carry_out(func, args, kwargs))[0]
    for tensor, values in zip(into, computed, strict=True):
        if isinstance(tensor, torch.Tensor):
            carry_out(torch.ops.aten.copy_.default, (tensor, values), {})


def written_by(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation that writes to its arguments returns."""
    about = func._schema.arguments
    if not func._schema.returns:
        return None
    written = [given for given, one in zip(args, about, strict=False) if one.is_write]
    written += [kwargs[one.name] for one in about if one.is_out]
    return written[0] if len(written) == 1 else tuple(written)


def enqueue_operation(
    stream: int, func: Any, args: Any, kwargs: Any, ranges: list[Range]
) -> tuple[bool, Any]:
    """Puts an operation on a stream, where it can be late; returns whether it can, and its results.

    Args:
        stream: the stream.
        func: the operation.
        args: its arguments.
        kwargs: those by name.
        ranges: what it accesses of them.
    """
    try:
        rehearsed = _rehearse(func, args, kwargs)
    except _MustWait:
        return False, None
    if func._schema.is_mutable:
        enqueue(stream, partial(carry_out, func, args, kwargs), str(func), ranges)
        return True, written_by(func, args, kwargs)
    shapes, spec = tree_flatten(rehearsed)
    into = [
        torch.empty_strided(one.size(), one.stride(), dtype=one.dtype)
        if isinstance(one, torch.Tensor)
        else one
        for one in shapes
    ]
    made = _tensors(into)
    for tensor in made:
        give_out(tensor, stream)
    call = partial(_fill, func, args, kwargs, into)
    enqueue(stream, call, str(func), ranges + accesses.of_new(func, made))
    return True, tree_unflatten(into, spec)
