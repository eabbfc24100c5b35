"""Tests that are the function which runs on every rank."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from harness import run_ranks


def on_ranks(
    size: int = 0, backend: str | None = "host", *, asked: str = "", world: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that asserts on ranks; pytest gives it further arguments.

    ::

        @pytest.mark.parametrize("value", [1, 2])
        @on_ranks(2)
        def test_sum(group, value): ...

    Args:
        size: number of ranks; 0 where a parameter ``world_size`` of the test says it.
        backend: of the group that the function gets; ``None`` for none, where it gets rank and size.
        asked: name of an option, such as ``backend``, that is a parameter of the test.
        world: whether the group is the default one, and the function gets rank and size.
        **options: as of :func:`harness.run_ranks`.
    """
    given = 2 if world or backend is None else 1

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(**arguments: Any) -> None:
            ranks = size or arguments.pop("world_size")
            chosen = {"backend": backend, "world": world, **options}
            chosen |= {asked: arguments.pop(asked)} if asked else {}
            run_ranks(_body, ranks, function.__module__, function.__name__, arguments, **chosen)

        test.body = function  # type: ignore[attr-defined]
        test.__name__, test.__qualname__ = function.__name__, function.__qualname__
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        names = [*inspect.signature(function).parameters][given:] + [asked] * bool(asked)
        names += ["world_size"] * (not size)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        return test

    return decorate


def _body(*given: Any) -> None:
    """Runs the function on a rank, where the name stands for the test."""
    *first, module, name, arguments = given
    getattr(importlib.import_module(module), name).body(*first, **arguments)
