"""Runs functions compiled and as they are, and compares the results; nothing of ours may be compiled."""

from __future__ import annotations

from pathlib import Path

import torch

import collectives
import collectives.backends.host
import collectives.ddp

PACKAGES = [
    Path(package.__file__).resolve().parent
    for package in (collectives, collectives.ddp, collectives.store, collectives.backends)
]
TRACED = {"distributed.py:_run_module"}
"""What is to be compiled, besides a layer: the frame around a user's module."""


def compare_compiled(programs, backend, calls=3):
    """Returns, by the name of a program, what went wrong with it.

    Args:
        programs: by name, functions without arguments that make a function to compile, with all that it
            trains; that one takes a tensor and returns one.
        backend: the compiler's.
        calls: number of calls, the last of which compile nothing.
    """
    import torch._dynamo

    rank, ours = collectives.get_rank(), []

    def note(code, compiled):
        path = Path(code.co_filename).resolve()
        name = f"{path.name}:{code.co_name}"
        if path.name == "sync_batch_norm.py" or name in TRACED:
            return
        if any(map(path.is_relative_to, PACKAGES)):
            ours.append(name)

    handle = torch._dynamo.convert_frame.register_bytecode_hook(note)
    wrong = {}
    try:
        for name, make in programs.items():
            expected = _results(make(), rank, calls)
            torch._dynamo.reset()
            ours.clear()
            found = _results(torch.compile(make(), backend=backend), rank, calls)
            if not all(map(torch.equal, found, expected)):
                wrong[name] = f"{found} instead of {expected}"
            elif ours:
                wrong[name] = f"compiled {ours}"
    finally:
        handle.remove()
    return wrong


def _results(function, rank, calls):
    return [function(torch.arange(4.0) + rank + call).detach().clone() for call in range(calls)]
