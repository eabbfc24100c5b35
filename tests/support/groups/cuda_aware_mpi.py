"""What the mpi backend does with CUDA tensors, for a GPU and for a double of one.

The double of a CUDA-aware MPI: tensors of the CPU that pass for those of a device.

What a test makes, and what comes of that, is the device's; what the package makes from nothing is the host's,
as is what ``cpu()`` copies. MPI reaches both. The double raises where a kernel of the host touches the
device's memory, and where MPI or a stream of another thread would find what the current stream has yet to do:
every operation on the device's memory is outstanding until its thread synchronises.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nccl_double.accesses import memory_of, new_memory, tensors_in
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import collectives._native as _native
import collectives.backends.mpi as product
from collectives import ProcessGroup
from collectives.backends.mpi import ProcessGroupMPI, cuda
from collectives.backends.mpi.engine import Engine
from collectives.core import operations
from collectives.core.arguments import staging
from collectives.core.operations import OPERATIONS, Call, Operation

_PRODUCT = (str(Path(product.__file__).parent), staging.__file__)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_REDUCES = {operation.opcode for operation in OPERATIONS if operation.reduces}

_device: dict[int, tuple[int, StorageWeakRef]] = {}
"""The device's memory: from where to where, and its owner."""
_lock = threading.Lock()


class _Thread(threading.local):
    """Of each thread: the memory that its stream has yet to see to, and whether it ends an operation."""

    def __init__(self) -> None:
        self.outstanding: set[int] = set()
        self.writes_back = False


_thread = _Thread()


def _is_of_device(tensor: torch.Tensor) -> bool:
    known = _device.get(memory_of(tensor)[0])
    return known is not None and not known[1].expired()


def _touches_device(address: int, nbytes: int) -> bool:
    with _lock:
        for begin in [begin for begin, (_, owner) in _device.items() if owner.expired()]:
            del _device[begin]
        return any(begin < address + nbytes and address < end for begin, (end, _) in _device.items())


def _give_to_device(tensor: torch.Tensor) -> None:
    begin, end = memory_of(tensor)
    with _lock:
        _device.pop(begin, None)
        if begin != end:
            _device[begin] = end, StorageWeakRef(tensor.untyped_storage())


def _give_to_host(tensor: torch.Tensor) -> torch.Tensor:
    begin = memory_of(tensor)[0]
    _thread.outstanding.discard(begin)
    with _lock:
        _device.pop(begin, None)
    return tensor


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the whole storage: some data types have no kernel that copies elements."""
    _thread.outstanding.clear()  # it waits for the stream
    if tensor.is_quantized:
        return _give_to_host(tensor.detach().clone())
    copy = torch.empty(0, dtype=tensor.dtype)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return _give_to_host(copy)


def _is_asked_by_product(depth: int) -> bool:
    frame = sys._getframe(depth)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (torch.__path__[0], __file__, "<")
    ):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_PRODUCT)


class _Operations(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if func.is_view:
            return results
        given = tensors_in((args, kwargs))
        from_device = any(map(_is_of_device, given))
        made = new_memory(func, args, kwargs, results)
        for tensor in made:
            if from_device or (not given and not _is_asked_by_product(2)):
                _give_to_device(tensor)
            else:
                _give_to_host(tensor)  # another tensor may have been there
        _thread.outstanding.update(memory_of(one)[0] for one in (*given, *made) if _is_of_device(one))
        return results


class _Questions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA and _is_asked_by_product(2):
            return _is_of_device(args[0])
        if func is torch.Tensor.cpu and _is_of_device(args[0]):
            return _copy_to_host(args[0])
        return func(*args, **(kwargs or {}))


class _Stream:
    def synchronize(self) -> None:
        _thread.outstanding.clear()


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    with _Questions(), _Operations():
        yield


@contextlib.contextmanager
def _writing_back(_device: torch.device) -> Iterator[None]:
    """Stands for ``torch.cuda.device``, in which the last step of an operation runs, on any thread."""
    before, _thread.outstanding, _thread.writes_back = _thread.outstanding, set(), True
    with _modes():
        yield
    assert not _thread.outstanding, "an operation ends before its results are in the device's memory"
    _thread.outstanding, _thread.writes_back = before, False


def _written(original: Callable[..., None]) -> Callable[..., None]:
    def write(output: torch.Tensor, values: torch.Tensor) -> None:
        if _is_of_device(output):
            assert _thread.writes_back, "results are written on whatever stream is current"
        original(output, values)

    return write


def _issued(original: Callable[..., Any]) -> Callable[..., Any]:
    def issue(self: Engine, operation: Any, begin: Any, asynchronous: bool, keep: Any, *about: Any) -> Any:
        used = {memory_of(tensor)[0] for tensor in keep}
        assert _thread.outstanding.isdisjoint(used), f"{operation}: MPI may find what is not there yet"
        return original(self, operation, begin, asynchronous, keep, *about)

    return issue


def _carried_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """The core reduces, and copies the own part, in the host's memory."""

    def issue(
        self: Any, opcode: int, data: int, given: int, count: int, dtype: int, op: int, factor: float,
        root: int, outputs: list[tuple[int, int]], inputs: list[tuple[int, int]],
    ) -> Any:  # fmt: skip
        written = {data} - {0} or {address for address, nbytes in outputs if nbytes}
        read = {given} - {0} or {address for address, nbytes in inputs if nbytes}
        if any(_touches_device(address, 1) for address in (*written, *read)):
            assert opcode not in _REDUCES, "a reduction on the host touches the device's memory"
            assert not written or not read or written & read, "the core would copy the own part"
        return original(self, opcode, data, given, count, dtype, op, factor, root, outputs, inputs)

    return issue


def _for_host_only(original: Callable[..., Any], first: int) -> Callable[..., Any]:
    """The core takes no CUDA tensor the fast way."""

    def call(self: ProcessGroupMPI, *args: Any, **kwargs: Any) -> Any:
        if any(map(_is_of_device, tensors_in((args[first:], kwargs)))):
            return None
        return original(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def cuda_aware() -> Iterator[None]:
    """Lets groups of mpi, made within, take this thread's tensors for CUDA's."""
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (torch.cuda, "current_stream", lambda _device: _Stream()),
            (torch.cuda, "device", _writing_back),
            (staging, "write", _written(staging.write)),
            (Engine, "issue", _issued(Engine.issue)),
            (_native.MpiGroup, "issue", _carried_out(_native.MpiGroup.issue)),
            (ProcessGroupMPI, "fast_collective", _for_host_only(ProcessGroupMPI.fast_collective, 1)),
            (ProcessGroupMPI, "fast_message", _for_host_only(ProcessGroupMPI.fast_message, 1)),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(mock.patch.dict(os.environ, {cuda.VARIABLE: "1"}))
        stack.enter_context(_modes())
        yield


def every_operation(group: ProcessGroup, device: str) -> None:
    """Runs every operation on tensors of a device, dense and apart, at once and in the background."""
    me, size = group.rank(), group.size()
    ranks = list(range(size))

    def made(dtype: torch.dtype, count: int, layout: str, *given: int) -> list[torch.Tensor]:
        """Returns a tensor for each value; what a rank does with it comes later on the stream."""
        if device == "cuda":
            torch.cuda._sleep(2_000_000)
        whole = [torch.full((2 * count + 1,), value, dtype=dtype, device=device) for value in given]
        if layout == "dense":
            return [tensor[:count].clone() for tensor in whole]
        return [tensor[1::2] if layout == "apart" else tensor[1 : count + 1] for tensor in whole]

    def holds(tensors: Sequence[torch.Tensor], expected: Sequence[int]) -> None:
        found = [tensor.cpu().float() for tensor in tensors]
        wanted = [torch.full_like(one, value) for one, value in zip(found, expected, strict=True)]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), (
            about,
            found,
            expected,
        )

    total, root = sum(ranks), size - 1
    for about in itertools.product(
        (torch.float32, torch.bfloat16, torch.int8),
        (0, 1, 5, 300_001),
        ("dense", "apart", "within"),
        (True, False),
    ):
        dtype, count, layout, background = about
        make = partial(made, dtype, count, layout)

        def done(operation: Operation, outputs: Sequence[torch.Tensor], inputs: Sequence[Any] = ()) -> None:
            call = Call(operation, outputs, inputs, root=root, async_op=background)  # noqa: B023
            if operation is operations.ALL_TO_ALL_SINGLE:
                call.output_splits = call.input_splits = [count] * size  # noqa: B023
            group.issue(call).wait()

        done(operations.ALL_REDUCE, x := make(me))
        holds(x, [total])
        done(operations.REDUCE, x := make(me))
        holds(x, [total if me == root else me])
        done(operations.BROADCAST, x := make(me))
        holds(x, [root])
        done(operations.ALL_GATHER, x := make(*[9] * size), make(me))
        holds(x, ranks)
        done(operations.GATHER, x := make(*[9] * size) if me == root else [], make(me))
        holds(x, ranks if me == root else [])
        done(operations.SCATTER, x := make(9), make(*ranks) if me == root else [])
        holds(x, [me])
        done(operations.REDUCE_SCATTER, x := make(9), make(*ranks))
        holds(x, [size * me])
        done(operations.ALL_TO_ALL, x := make(*[9] * size), make(*[me] * size))
        holds(x, ranks)

        done(operations.ALL_GATHER_INTO_TENSOR, x := made(dtype, count * size, layout, 9), make(me))
        holds(x[0].split(max(count, 1)), ranks if count else [9])
        parts = [torch.cat(make(*ranks))]
        done(operations.REDUCE_SCATTER_TENSOR, x := make(9), parts)
        holds(x, [size * me])
        done(
            operations.ALL_TO_ALL_SINGLE,
            x := made(dtype, count * size, layout, 9),
            [torch.cat(make(*[me] * size))],
        )
        holds(x[0].split(max(count, 1)), ranks if count else [9])

        sent = group.send(make(me), (me + 1) % size)
        group.recv(x := make(9), (me - 1) % size).wait()
        sent.wait()
        holds(x, [(me - 1) % size])
        group.send(make(me + 3), me)
        group.recv(x := make(9), me).wait()
        holds(x, [me + 3])
    group.barrier().wait()
