"""Calls of the CUDA runtime, on a library that answers as it does: there is no GPU here."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from harness import run_ranks

_SOURCE = """
#include <unistd.h>
static int last = 0;
static int mode = 0;
/* An event is its status; one above 1000 is asked for that many milliseconds and then done. */
extern "C" int cudaEventQuery(void* event) {
  long status = (long)event;
  if (mode != 2) return last = 901; /* cudaErrorStreamCaptureInvalidated: a thread captures a graph */
  if (status > 1000) { usleep((useconds_t)status * 1000); return 0; }
  return last = (int)status;
}
/* A stream is its flags and priority; there is no priority above 5. */
extern "C" int cudaStreamCreateWithPriority(void** made, unsigned flags, int priority) {
  if (mode != 2) return last = 901;
  if (priority > 5) return last = 2;
  *made = (void*)(long)(flags * 100 - priority);
  return 0;
}
extern "C" int cudaGetLastError(void) { int was = last; last = 0; return was; }
extern "C" const char* cudaGetErrorName(int) { return "cudaErrorLaunchFailure"; }
extern "C" const char* cudaGetErrorString(int) { return "unspecified launch failure"; }
extern "C" int cudaThreadExchangeStreamCaptureMode(int* given) {
  int was = mode; mode = *given; *given = was; return 0;
}
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda_runtime")
    source, path = folder / "cudart.cpp", folder / "libcudart.so.13"
    source.write_text(_SOURCE)
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run(command, check=True)
    return path


def asked(rank: int, size: int, path: Path) -> None:
    import ctypes

    from collectives.backends.nccl.device.cuda_runtime import loaded_runtime

    library = ctypes.CDLL(str(path))
    found = loaded_runtime()
    assert found is not None
    assert found.event_done(0) is True
    assert found.event_done(600) is False
    assert library.cudaGetLastError() == 0, "left behind for the next call of torch"
    with pytest.raises(RuntimeError, match=r"CUDA error 719: unspecified launch failure \(cudaErrorLaunch"):
        found.event_done(719)
    assert found.make_stream(-1) == 101
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        found.make_stream(6)
    assert library.cudaGetLastError() == 0
    mode = ctypes.c_int(7)
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 0, "the thread's own mode is there again"
    library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    # Python goes on while the driver is busy.
    asking = threading.Thread(target=found.event_done, args=(2000,))
    asking.start()
    turns = 0
    while asking.is_alive():
        time.sleep(0.01)
        turns += 1
    assert turns > 10


def test_events_are_asked_without_the_lock_of_python(runtime: Path) -> None:
    run_ranks(asked, 1, runtime, isolated=True)


def nothing_there(rank: int, size: int) -> None:
    from collectives.backends.nccl.device.cuda_runtime import loaded_runtime

    assert loaded_runtime() is None


without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")


@without_cuda
def test_no_runtime(runtime: Path) -> None:
    run_ranks(nothing_there, 1, isolated=True)


def incomplete(rank: int, size: int, path: Path) -> None:
    import ctypes

    from collectives.backends.nccl.device.cuda_runtime import loaded_runtime

    ctypes.CDLL(str(path))
    assert loaded_runtime() is None


@without_cuda
def test_a_runtime_without_the_functions(tmp_path: Path) -> None:
    source, path = tmp_path / "x.cpp", tmp_path / "libcudart.so.1"
    source.write_text("int nothing;")
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run(command, check=True)
    run_ranks(incomplete, 1, path, isolated=True)
