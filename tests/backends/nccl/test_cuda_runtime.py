"""The device: calls of the CUDA runtime, on a library that answers as it does, and turns of threads."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from harness import run_ranks

from collectives.backends.nccl.device import Issuing

_SOURCE = """
#include <unistd.h>
static int last = 0;
static int mode = 0;
static long made = 0;
static long recorded = 0;
static int fail(int status) { return last = status; }
extern "C" {
int cudaGetDevice(int* device) { *device = 3; return 0; }
/* Events are numbers from 1 on. */
int cudaEventCreateWithFlags(void** event, unsigned flags) {
  if (mode != 2) return fail(901); /* cudaErrorStreamCaptureInvalidated: a thread captures a graph */
  if (flags != 2) return fail(1);
  *event = (void*)++made;
  return 0;
}
/* An event is the stream that it is on, and that the status of the event; one above 1000 lasts so many ms. */
static long streams[100];
int cudaEventRecord(void* event, void* stream) {
  ++recorded;
  if ((long)stream == 77) return fail(400);
  streams[(long)event] = (long)stream;
  return 0;
}
int cudaEventQuery(void* event) {
  long status = streams[(long)event];
  if (mode != 2) return fail(901);
  if (status > 1000) { usleep((useconds_t)status * 1000); return 0; }
  return status ? fail((int)status) : 0;
}
int cudaEventSynchronize(void* event) { return streams[(long)event] ? fail(719) : 0; }
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return stream == (void*)8 && event && !flags ? 0 : fail(1);
}
int cudaStreamIsCapturing(void* stream, int* status) {
  if ((long)stream < 2) return fail(906); /* cudaErrorStreamCaptureImplicit */
  *status = (long)stream == 5;
  return 0;
}
/* A stream is its flags and priority; there is no priority above 5. */
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  if (mode != 2) return fail(901);
  if (priority > 5) return fail(2);
  *stream = (void*)(long)(flags * 100 - priority);
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, unsigned long bytes, int kind, void* stream) {
  if (kind != 4 || stream != (void*)8) return fail(1);
  for (unsigned long i = 0; i < bytes; ++i) ((char*)to)[i] = ((const char*)from)[i];
  return 0;
}
int cudaGetLastError(void) { int was = last; last = 0; return was; }
const char* cudaGetErrorName(int) { return "cudaErrorLaunchFailure"; }
const char* cudaGetErrorString(int) { return "unspecified launch failure"; }
int cudaThreadExchangeStreamCaptureMode(int* given) { int was = mode; mode = *given; *given = was; return 0; }
long made_events(void) { return made; }
}
"""


def compiled(folder: Path, name: str, source: str) -> Path:
    written, path = folder / "source.cpp", folder / name
    written.write_text(source)
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(path), str(written)], check=True
    )
    return path


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda_runtime"), "libcudart.so.13", _SOURCE)


def asked(rank: int, size: int, path: Path) -> None:
    import ctypes

    from collectives import _native
    from collectives.backends.nccl.device import runtime_functions

    library = ctypes.CDLL(str(path))
    streams = _native.CudaStreams(runtime_functions(), 3)
    assert streams.is_current()
    assert not _native.CudaStreams(runtime_functions(), 0).is_current()
    assert streams.record(0).done() is True
    pending = streams.record(600)
    assert pending.done() is False
    assert library.cudaGetLastError() == 0, "left behind for the next call of torch"
    for call in (lambda: streams.record(719).done(), lambda: streams.record(719).synchronize()):
        with pytest.raises(
            RuntimeError, match=r"CUDA error 719: unspecified launch failure \(cudaErrorLaunch"
        ):
            call()
    with pytest.raises(RuntimeError, match="CUDA error 400"):
        streams.record(77)
    assert library.cudaGetLastError() == 0
    assert streams.make_stream(-1) == 101
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        streams.make_stream(6)
    mode = ctypes.c_int(7)
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0, "the thread's own mode is there again"
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    # Nobody may ask for the default stream while another one is captured.
    assert [streams.is_capturing(stream) for stream in (0, 1, 4, 5)] == [False, False, False, True]
    streams.order(8, 0)
    streams.record(0).wait(8)
    with pytest.raises(RuntimeError, match="CUDA error 1:"):
        streams.order(9, 0)
    given, got = ctypes.c_int64(1234567890123), ctypes.c_int64()
    streams.copy(ctypes.addressof(got), ctypes.addressof(given), 8, 8)
    assert got.value == given.value

    # An event that nobody has is used again.
    assert library.made_events() == 2
    del pending
    kept = [streams.record(0) for _ in range(5)]
    assert library.made_events() == 5
    del kept

    # Python goes on while the driver is busy.
    event = streams.record(2000)
    asking = threading.Thread(target=event.done)
    asking.start()
    turns = 0
    while asking.is_alive():
        time.sleep(0.01)
        turns += 1
    assert turns > 10
    with pytest.raises(ValueError, match="cudaEventQuery has no address"):
        _native.CudaStreams([0 if name == "cudaEventQuery" else 1 for name in streams.functions()], 0)
    with pytest.raises(ValueError, match="an address is missing"):
        _native.CudaStreams([1], 0)


def test_streams_and_events(runtime: Path) -> None:
    run_ranks(asked, 1, runtime, isolated=True)


def refused(rank: int, size: int, path: Path | None, why: str) -> None:
    import ctypes

    from collectives.backends.nccl.device import runtime_functions

    if path is not None:
        ctypes.CDLL(str(path))
    with pytest.raises(RuntimeError, match=f"the CUDA runtime that torch uses cannot be called: {why}"):
        runtime_functions()


without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")


@without_cuda
def test_no_runtime() -> None:
    run_ranks(refused, 1, None, "none of libcudart.so, libc10_cuda.so is loaded", isolated=True)


@without_cuda
def test_a_runtime_without_the_functions(tmp_path: Path) -> None:
    path = compiled(tmp_path, "libcudart.so.1", "int nothing;")
    run_ranks(refused, 1, path, ".*cudaGetDevice", isolated=True)


def found_by_another(rank: int, size: int, path: Path) -> None:
    import ctypes

    from collectives.backends.nccl.device import runtime_functions

    ctypes.CDLL(str(path))
    assert all(runtime_functions())


def of_torch(rank: int, size: int) -> None:
    """The device of the product asks torch for a context, and refuses a number that there is not."""
    from unittest import mock

    from collectives.backends.nccl.device import CudaDevice

    made: list[torch.device] = []
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch, "zeros", side_effect=lambda _, device: made.append(device)),
        mock.patch.object(CudaDevice, "_functions", return_value=[1] * 13),
    ):
        for index in range(2):
            device = CudaDevice.shared(torch.device("cuda", index))
            assert CudaDevice.shared(torch.device("cuda", index)) is device
        assert made == [torch.device("cuda", index) for index in range(2)]
        with pytest.raises(ValueError, match="there is no cuda:2: this process sees 2 GPUs"):
            CudaDevice.shared(torch.device("cuda", 2))
        assert [CudaDevice.of_rank(rank).index for rank in range(4)] == [0, 1, 0, 1]


@without_cuda
def test_the_context_of_a_device() -> None:
    run_ranks(of_torch, 1, isolated=True)


@without_cuda
def test_a_runtime_that_another_library_needs(runtime: Path, tmp_path: Path) -> None:
    """As torch's, where the runtime's own file has another name."""
    compiled(tmp_path, "libhidden.so", _SOURCE)
    source, path = tmp_path / "c10.cpp", tmp_path / "libc10_cuda.so"
    source.write_text("int nothing;")
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(path), str(source)]
    linked = ["-Wl,--no-as-needed", f"-L{tmp_path}", "-lhidden", f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([*command, *linked], check=True)
    run_ranks(found_by_another, 1, path, isolated=True)


def in_turn(turns: Issuing, *communicators: str) -> tuple[threading.Thread, threading.Event, threading.Event]:
    """Starts a thread that takes a turn; returns it, what tells that it has its turn, and what ends that."""
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with turns.turn(*communicators):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, inside, leave


def test_a_signal_breaks_the_wait_off() -> None:
    turns = Issuing()
    thread, inside, leave = in_turn(turns, "a")
    assert inside.wait(20)

    def interrupt(*_: object) -> None:
        raise ZeroDivisionError

    before = signal.signal(signal.SIGUSR2, interrupt)
    later = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2))
    later.start()
    try:
        with pytest.raises(ZeroDivisionError), turns.turn("a"):
            pytest.fail("two threads on one communicator")
    finally:
        later.join()
        signal.signal(signal.SIGUSR2, before)
        leave.set()
        thread.join()
    with turns.turn("a"):  # what was broken off is no turn
        pass


def interrupted(turns: Issuing) -> None:
    with turns.turn("a"):
        raise ZeroDivisionError


def test_an_error_ends_the_turn() -> None:
    turns = Issuing()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            interrupted(turns)
