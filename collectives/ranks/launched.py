"""The program of a rank that :func:`collectives.launch` starts.

``python -m collectives.ranks.launched ADDRESS RANK``
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import cloudpickle
from torch.distributed import DistError

from collectives.ranks.launching import Failed
from collectives.ranks.processes import connect, signal_at_end_of_parent


def _main(words: Sequence[str]) -> None:
    address, rank = words
    signal_at_end_of_parent(signal.SIGCONT)  # a stopped one must go on to end, with what it has started
    with connect(address, int(rank)) as connection:
        working = threading.Event()
        watch = (connection.fileno(), working)
        threading.Thread(target=_end_with_parent, args=watch, daemon=True).start()
        with contextlib.suppress(EOFError, ConnectionResetError):  # the parent wants nothing more
            while True:
                work = connection.recv_bytes()
                working.set()
                answer = _pickled(_answer(work))
                working.clear()
                connection.send_bytes(answer)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _signal_group(signal.SIGTERM)  # a parent that lives ends what is left then


def _answer(work: bytes) -> Any:
    """Returns what the function returns, or a :class:`Failed`."""
    try:
        sys.path[:], variables, called = pickle.loads(work)
        os.environ.update(variables)
        function, args = pickle.loads(called)  # which may need the modules there
        result = function(*args)
        _destroy_groups()
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return _failed(error)
    return result


def _destroy_groups() -> None:
    for name in ("collectives", "torch.distributed"):
        module: Any = sys.modules.get(name)
        if module is not None and module.is_initialized():
            module.destroy_process_group()


def _failed(error: BaseException) -> Failed:
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001 - an exception may hold anything
        pickled = None
    what = f"failed:\n\n{''.join(traceback.format_exception(error))}"
    return Failed(time.monotonic_ns(), what, pickled, isinstance(error, DistError))


def _pickled(answer: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 - what the function returns may hold anything
        pickled = cloudpickle.dumps(_failed(error))
    return pickled


def _end_with_parent(descriptor: int, working: threading.Event) -> None:
    """Ends this process where the parent ends, or wants no answer any more, while a function runs."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    if working.is_set():
        _signal_group(signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_group(number: int) -> None:
    """Sends a signal to this process and what it has started, which the parent has made a group of."""
    with contextlib.suppress(ProcessLookupError):  # it was started in another's
        os.killpg(os.getpid(), number)


if __name__ == "__main__":
    _main(sys.argv[1:])
