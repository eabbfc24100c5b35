"""Keeps ``torch.compile`` away from code that communicates.

TorchDynamo, its front end, is not imported here: nothing in this module costs anything until somebody else
has done so.

The compiler meets a function of ours in two ways. Where it traces a caller, an attribute of the function ends
the caller's graph. Where the function runs in compiled code, called from there, or by C++ (as hooks of
autograd are, or methods of a group), or by the garbage collector, what is noted with its code has the
compiler leave it alone, with all that it calls. Traced, such functions fail: methods of the core, which the
compiler does not know, are called without their object.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def compiler_is_loaded() -> bool:
    """Returns whether this process has imported the compiler."""
    return "torch._dynamo" in sys.modules


def leave_uncompiled(what: _T, *, callees: bool = True) -> _T:
    """Has the compiler run a function, or the methods of a class, as they are; returns what to use for it.

    As ``torch.compiler.disable``, which would import the compiler when a module is loaded, and puts a frame
    before each call. This costs nothing when a function is called. It needs names of torch that are not
    public; where torch lacks one, functions are wrapped.

    Args:
        what: a function, or a class; methods of its bases are not looked at.
        callees: whether that holds for all that it calls, too.
    """
    if isinstance(what, type):
        for name, member in list(vars(what).items()):
            for function in _functions_of(member):
                if not hasattr(function, "_torchdynamo_disable"):
                    left = leave_uncompiled(function, callees=callees)
                    if left is not function and member is function:
                        setattr(what, name, left)
        return what
    if not isinstance(what, FunctionType):
        return what
    what._torchdynamo_disable = True  # type: ignore[attr-defined]
    what._torchdynamo_disable_msg = "it communicates"  # type: ignore[attr-defined]
    mark = _marker(callees)
    if mark is None:
        return _disabled_when_loaded(what)  # type: ignore[return-value]
    wrapped: Any = what
    while wrapped is not None:
        # What decorates a function may be anybody's.
        if getattr(wrapped, "__globals__", {}).get("__name__", "").startswith("collectives"):
            for code in _codes_in(wrapped.__code__):
                mark(code)
        wrapped = getattr(wrapped, "__wrapped__", None)
    return what


def leave_names_uncompiled(namespace: dict[str, Any]) -> None:
    """Leaves the functions uncompiled that a module offers.

    Args:
        namespace: the module's ``globals()``.
    """
    for name, value in list(namespace.items()):
        if isinstance(value, FunctionType) and value.__module__.startswith("collectives."):
            namespace[name] = leave_uncompiled(value)


class Uncompiled:
    """Base of classes whose methods the compiler runs as they are, and those of our derived classes."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leaves the methods of a class uncompiled, but not those that a user adds."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("collectives."):
            leave_uncompiled(cls)


def _functions_of(member: object) -> Iterator[FunctionType]:
    """Yields the functions behind a member of a class."""
    if isinstance(member, property):
        candidates: tuple[object, ...] = (member.fget, member.fset, member.fdel)
    elif isinstance(member, functools.cached_property):
        candidates = (member.func,)
    else:
        candidates = (getattr(member, "__func__", member),)
    yield from (candidate for candidate in candidates if isinstance(candidate, FunctionType))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and those of the functions that are defined within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


@functools.cache
def _marker(callees: bool) -> Callable[[CodeType], object] | None:
    """Returns what has the compiler leave a code object, and its callees, alone; ``None`` without such."""
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError, TypeError):
        return None
    return lambda code: set_strategy(code, strategy)


def _disabled_when_loaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls another one, by ``torch.compiler.disable`` once the compiler is there."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if not compiler_is_loaded():
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call
