"""torch's operations, as those on tensors of a device: put on streams, captured, and looked at for races.

Operations of a thread go to its current stream, and return before they are carried out. Run on tensors
without memory first, an operation says which tensors it makes. These are given memory at once, which a stream
fills when it gets there, as a device does. Those that draw random numbers in the order of the calls, need
values for the shapes of their results, or do not work without memory, block the host until the stream is
idle, as no device would: nothing is ordered by that. Who reads what another stream has yet to write, reads
too early.

The double finds, however it happens to run, what no stream, event or wait of the host orders: memory that two
operations access, one of which writes.

While the current stream is captured, no operation is carried out, but each is noted in the graph, and what
would read values on the host raises.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch._decomp import global_decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from collectives.core import work
from nccl_double import accesses, ask, do
from nccl_double.accesses import Range
from nccl_double.calls import current_stream, enqueue, is_capturing, noted, take_failures, thread
from nccl_double.cuda import DEVICE
from nccl_double.futures import DoubleFuture, collect_all
from nccl_double.memory import forget, give_out

_READS = frozenset({torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})
"""Methods that need the values on the host, and read them without an operation."""

_IS_ON_DEVICE = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
"""What Works ask of their tensors."""

_ANSWERS = frozenset(
    {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}
)
"""Operations that tell the host something about values, for which it waits."""


_WAITS = frozenset(
    {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)
"""What operations are tagged with that the host has to wait for."""

_DEVICE = torch.device("cpu")
_QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


class _MustWait(Exception):  # noqa: N818 - no error
    pass


def _carry_out(func: Any, args: Any, kwargs: Any) -> Any:
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


def _form(value: Any, seen: dict[int, int]) -> Any:
    """Returns what an operation without memory depends on of an argument; the same objects count as such."""
    if isinstance(value, torch.Tensor):
        place = seen.setdefault(id(value), len(seen))
        if value.layout is not torch.strided:
            return place, value.layout
        where = value.device, value.is_conj(), value.is_neg()
        return place, value.size(), value.stride(), value.dtype, *where
    if isinstance(value, (list, tuple)):
        return type(value), *(_form(one, seen) for one in value)
    return type(value), value


def _tensors(values: object) -> list[torch.Tensor]:
    return [one for one in tree_flatten(values)[0] if isinstance(one, torch.Tensor)]


def _is_plain(tensor: torch.Tensor, device: str) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != device or tensor.dtype in _QUANTISED:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


_rehearsed: dict[Any, Any] = {}
"""Results of :func:`_rehearse`, by operation and form of its arguments; ``None`` where it must wait."""


def _rehearse(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the results of an operation as tensors without memory.

    Raises:
        _MustWait: they are not known before, so that the host has to wait.
    """
    seen: dict[int, int] = {}
    form = func, _form(args, seen), *((name, _form(value, seen)) for name, value in kwargs.items())
    if form not in _rehearsed:
        try:
            _rehearsed[form] = (_call_without_memory(func, args, kwargs),)
        except _MustWait:
            _rehearsed[form] = None
    if (found := _rehearsed[form]) is None:
        raise _MustWait
    return found[0]


def _call_without_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns and raises as :func:`_rehearse`, for arguments of a new form."""
    elsewhere = kwargs.get("device") not in (None, _DEVICE) or kwargs.get("pin_memory")
    if elsewhere or "quantize" in func._schema.name or not _WAITS.isdisjoint(func.tags):
        raise _MustWait  # what is quantised is not so without memory
    given = _tensors((args, kwargs))
    if not all(_is_plain(one, _DEVICE.type) for one in given):
        raise _MustWait
    known = {
        id(one): torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")
        for one in given
    }
    stand_ins, named = tree_map_only(torch.Tensor, lambda tensor: known[id(tensor)], (args, kwargs))
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
    computed = tree_flatten(_carry_out(func, args, kwargs))[0]
    for tensor, values in zip(into, computed, strict=True):
        if isinstance(tensor, torch.Tensor):
            _carry_out(torch.ops.aten.copy_.default, (tensor, values), {})


def _written_by(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation that writes to its arguments returns."""
    about = func._schema.arguments
    if not func._schema.returns:
        return None
    written = [given for given, one in zip(args, about, strict=False) if one.is_write]
    written += [kwargs[one.name] for one in about if one.is_out]
    return written[0] if len(written) == 1 else tuple(written)


def _enqueue_operation(
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
        enqueue(stream, partial(_carry_out, func, args, kwargs), str(func), ranges)
        return True, _written_by(func, args, kwargs)
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


def _capture(func: Any, args: Any, kwargs: Any) -> Any:
    """Notes an operation in the graph; returns tensors that each replay writes to."""
    call = partial(_carry_out, func, args, kwargs)
    name, ranges = str(func), accesses.of_call(func, args, kwargs)
    if func in _ANSWERS:
        raise RuntimeError("reading a value on the host is not permitted when a stream is captured")
    if func._schema.is_mutable:
        enqueue(current_stream(), call, name, ranges)
        return _written_by(func, args, kwargs)
    results = call()  # shapes, and memory; their values are those of now
    into, spec = tree_flatten(results)

    def replay() -> None:
        for old, new in zip(into, tree_flatten(call())[0], strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)

    made = accesses.new_memory(func, args, kwargs, results)
    for tensor in made:
        forget(tensor)
    enqueue(current_stream(), replay, name, ranges + accesses.of_new(func, made))
    return tree_unflatten(into, spec)


def _wait_for_host_memory(stream: int, func: Any, args: Any, kwargs: Any) -> None:
    """Waits for a copy between memory of the host and of the device, unless it was asked not to block."""
    if any(map(accesses.is_on_host, accesses.tensors_in((args, kwargs)))):
        copies = func is torch.ops.aten.copy_.default
        if not (copies and kwargs.get("non_blocking", args[2:] == (True,))):
            do("stream_synchronize", stream)


def _pinned(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Returns new memory of the host, which torch takes from CUDA."""
    made: torch.Tensor = func(*args, **{**kwargs, "pin_memory": False})
    forget(made)
    accesses.keep_on_host(made)
    return made


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor(), which has made it unseen
                forget(args[0])
            return func(*args, **kwargs)
        if func.namespace.startswith(("c10d", "_c10d")) or func is torch.ops.aten.is_set_to.default:
            return func(*args, **kwargs)  # no kernel: what it calls is looked at, or what the host knows
        if kwargs.get("pin_memory"):
            return _pinned(func, args, kwargs)
        stream, given = current_stream(), accesses.tensors_in((args, kwargs))
        ranges = accesses.of_call(func, args, kwargs)
        if given and all(accesses.is_on_host(tensor) for tensor in given):
            do("access", 0, *noted(str(func), ranges))
            return func(*args, **kwargs)
        if is_capturing():
            return _capture(func, args, kwargs)
        if func in _ANSWERS:
            do("stream_synchronize", stream)
        elif func.overloadpacket.__name__ not in accesses.MAKES_EMPTY:
            late, results = _enqueue_operation(stream, func, args, kwargs, ranges)
            if late:
                _wait_for_host_memory(stream, func, args, kwargs)
                return results
            if given:
                do("stream_settle", stream)
        results = func(*args, **kwargs)
        made = accesses.new_memory(func, args, kwargs, results)
        for tensor in made:
            give_out(tensor, stream)
        do("access", stream, *noted(str(func), ranges + accesses.of_new(func, made)))
        return results


class Steps(TorchDispatchMode):
    """Notes what operations access that a stream carries out one after the other as one task."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if not func.is_view:
            made = accesses.new_memory(func, args, kwargs, results)
            for tensor in made:
                forget(tensor)
            ranges = accesses.of_call(func, args, kwargs) + accesses.of_new(func, made)
            do("access_more", *noted(str(func), ranges))
        return results


class _Reads(TorchFunctionMode):
    """Lets the host wait for what it reads, and Works take tensors for those of a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Others that ask go on to use CUDA.
        if func == _IS_ON_DEVICE and sys._getframe(1).f_code.co_filename == work.__file__:
            return not accesses.is_on_host(args[0])
        if func in _READS:
            ranges = list(accesses.of_tensor(args[0], False))
            if accesses.is_on_host(args[0]):
                do("access", 0, *noted(func.__name__, ranges))
            else:
                do("access", current_stream(), *noted(func.__name__, ranges))
                do("stream_synchronize", current_stream())  # raises in a capture
        return func(*args, **(kwargs or {}))


_engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Runs a backward pass within the mode, which torch leaves for it: its hooks would read too early."""
    reads = getattr(thread, "reads", None)
    with contextlib.nullcontext() if reads is None else reads:
        return _engine(*args, **kwargs)


_watches = 0
"""How many contexts of :func:`tensors_on_device` there are."""
_watching = threading.Lock()


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    global _watches
    with _watching:
        if _watches == 0:
            do("watch_accesses", 1)
        _watches += 1
    try:
        yield
    except BaseException:
        sys.stderr.write(races())  # what may have led to it
        raise
    finally:
        with _watching:
            _watches -= 1
            found = races()
            if _watches == 0:
                do("watch_accesses", 0)
    assert not found, found


def on_device() -> bool:
    """Returns whether torch's operations of this thread run as those on tensors of a device.

    They do not within an operation of ``c10d``, which torch carries out outside the mode.
    """
    within = torch._C._len_torch_dispatch_stack() > 0  # type: ignore[attr-defined]
    return within and getattr(thread, "reads", None) is not None


def races() -> str:
    """Returns accesses in no order and errors of streams that were not returned before, a line each."""
    return str(ask("races")) + take_failures()


@contextlib.contextmanager
def tensors_on_device() -> Iterator[None]:
    """Lets torch's operations of this thread run as those on tensors of a device, and futures of Works so.

    Raises:
        AssertionError: at the end: operations accessed memory in no order, or one of a stream has failed.
    """
    before, thread.reads = getattr(thread, "reads", None), _Reads()
    try:
        with (
            _watched(),
            mock.patch.object(work, "Future", DoubleFuture),
            mock.patch.object(work, "CollectiveFuture", DoubleFuture),
            mock.patch.object(torch.futures, "Future", DoubleFuture),
            mock.patch.object(torch.cuda, "is_initialized", return_value=True),
            mock.patch.object(torch.cuda, "current_device", return_value=DEVICE),
            mock.patch.object(torch.futures, "collect_all", collect_all),
            mock.patch.object(torch.autograd, "_engine_run_backward", _run_backward),
            thread.reads,
            _Operations(),
        ):
            yield
    finally:
        thread.reads = before
