"""Keeps ``torch.compile`` away from code that communicates.

TorchDynamo, its front end, is not imported here: nothing in this module costs anything until somebody else
has done so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

__all__ = ["compiler_is_loaded", "eager", "leave_uncompiled"]

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T", bound=type)


def compiler_is_loaded() -> bool:
    """Returns whether this process has imported the compiler."""
    return "torch._dynamo" in sys.modules


def eager(function: _F) -> _F:
    """Returns a function that the compiler does not trace, nor what it calls; as ``torch.compiler.disable``.

    That one would import the compiler when a module is loaded, which takes longer than all the rest.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if not compiler_is_loaded():
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what breaks the graph of a traced caller
    call._torchdynamo_disable_msg = "it communicates"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def leave_uncompiled(cls: _T) -> _T:
    """Has the compiler run the methods of a class that C++ code calls, and all that they call, as they are.

    Where compiled code calls into C++ that calls back, as torch's gradient reducer calls the methods of a
    group, the compiler takes those up too. Groups are opaque to it, so that it fails at their first
    attribute.

    Unlike :func:`eager` this costs nothing when a method is called. It needs names of torch that are not
    public; where torch lacks one, methods become :func:`eager`.
    """
    mark = _marker()
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType):
            if mark is None:
                setattr(cls, name, eager(method))
            else:
                mark(method.__code__)
    return cls


def _marker() -> Callable[[CodeType], object] | None:
    """Returns what has the compiler leave a code object and its callees alone; ``None`` without such."""
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda code: set_strategy(code, strategy)
