"""What the mpi backend does with CUDA tensors, for a GPU and for a double of one.

The double of a CUDA-aware MPI: tensors of the CPU that pass for those of a device.

What a test makes, and what comes of that, is the device's; what the package makes from nothing is the host's,
as is what ``cpu()`` copies. MPI reaches both. The double raises where a kernel of the host touches the
device's memory, and where MPI or a stream of another thread would find what the current stream has yet to do:
every operation on the device's memory is outstanding until its thread synchronises.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conformance.test_values import NAMES, right_values
from nccl_double.accesses import memory_of, new_memory, tensors_in
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import collectives._native as _native
import collectives.backends.mpi as product
from collectives import ProcessGroup
from collectives.backends._shared import dense_call
from collectives.backends.mpi import ProcessGroupMPI
from collectives.backends.mpi.engine import Engine
from collectives.backends.mpi.libmpi import CUDA_VARIABLE
from collectives.core.arguments import staging
from collectives.core.operations import OPERATIONS

_PRODUCT = (str(Path(product.__file__).parent), staging.__file__, dense_call.__file__)
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
        stack.enter_context(mock.patch.dict(os.environ, {CUDA_VARIABLE: "1"}))
        stack.enter_context(_modes())
        yield


def every_operation(group: ProcessGroup, device: str) -> None:
    """Runs a part of the cases of every collective, and messages, on tensors of a device."""
    for name in NAMES:
        right_values(group, name, device=device, every=61 if device == "cpu" else 31)
    me, size = group.rank(), group.size()
    for count in (0, 1, 5, 300_001):
        for target in ((me + 1) % size, me):
            got = torch.zeros(count, 2, device=device)[:, 0]
            sent = group.send(torch.full((count,), me + 1.0, device=device), target)
            source = me if target == me else (me - 1) % size
            group.recv(got, source).wait()
            sent.wait()
            assert torch.equal(got.cpu(), torch.full((count,), source + 1.0).cpu()), (count, source)
    group.barrier().wait()
