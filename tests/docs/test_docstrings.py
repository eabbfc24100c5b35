"""The API reference is complete: docstrings name every argument, what is returned, and what is raised.

Asked are public functions, constructors and methods of the packages and modules that users import from:

- ``Args:`` names every argument, of a constructor in the docstring of the class. A class may document a field
  instead, under ``Attributes:`` or by a string below it.
- What returns something has ``Returns:``, or a first line that begins with "Returns".
- What communicates, or takes the default group where none is named, has ``Raises:``, or is a method of a
  class that has it.

Nothing is asked of a method that overrides a documented one of ours, of an "Other name of :func:`...`" with
the same arguments, and of constructors of exceptions.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

MODULES = [
    "collectives",
    "collectives.backends.algorithms",
    "collectives.backends.gloo",
    "collectives.backends.host",
    "collectives.backends.mpi",
    "collectives.backends.nccl",
    "collectives.backends.round_robin",
    "collectives.bench.allreduce",
    "collectives.bench.core.records",
    "collectives.core.capabilities",
    "collectives.core.types",
    "collectives.ddp",
    "collectives.ddp.hooks",
    "collectives.ddp.model_averaging",
    "collectives.ddp.optim",
    "collectives.dist2",
    "collectives.errors",
    "collectives.ranks.launching",
    "collectives.registry.names",
    "collectives.store",
    "collectives.testing",
    "collectives.torch_bridge",
]
"""Modules in the ``__all__`` of one of these belong to it."""

ASKED_TOO = {"_coalescing_manager"}
"""Names with an underscore that users call, as torch named them."""


class Documented(NamedTuple):
    """A function and the docstring that users read about it."""

    name: str
    function: Callable[..., Any]
    text: str
    fields: frozenset[str] = frozenset()
    """Arguments of a constructor that the class documents as fields."""
    raises: bool = False
    """Whether the docstring of the class says what its methods raise."""


def is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in {
        "collectives",
        "collectives_registration",
    }


def section(text: str, title: str) -> str:
    """Returns what stands below a title in a docstring, without its indentation."""
    found = re.search(rf"^{title}:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    return textwrap.dedent(found.group(1)) if found else ""


def entries(text: str) -> set[str]:
    """Returns the names that a section explains."""
    heads = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:", text, re.MULTILINE)
    return {name.strip("*") for head in heads for name in head.split(", ")}


def fields_of(cls: type) -> frozenset[str]:
    """Returns the fields that a class and its bases document where they state them."""
    found = set()
    for base in filter(is_ours, cls.__mro__):
        found |= entries(section(inspect.getdoc(base) or "", "Attributes"))
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, below in itertools.pairwise(body):
            said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if said and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found.add(field.target.id)
    return frozenset(found)


def methods_of(cls: type) -> Iterator[Documented]:
    ours = [base for base in cls.__mro__ if is_ours(base)]
    raises = any(section(inspect.getdoc(base) or "", "Raises") for base in ours)
    for place, base in enumerate(ours):
        for member, value in vars(base).items():
            function = getattr(value, "__func__", value)
            if not inspect.isfunction(function) or not is_ours(function):
                continue
            name = f"{base.__module__}.{base.__qualname__}.{member}"
            if member == "__init__" and base is cls and not issubclass(cls, Exception):
                text = f"{inspect.getdoc(cls)}\n{function.__doc__ and inspect.getdoc(function)}"
                yield Documented(name, function, text, fields_of(cls), raises=True)
            elif not member.startswith("_") and not any(
                inspect.getdoc(vars(other)[member]) for other in ours[place + 1 :] if member in vars(other)
            ):
                yield Documented(name, function, inspect.getdoc(function) or "", raises=raises)


def public(module: ModuleType) -> Iterator[object]:
    """Yields the public values of a module and of those that it lists."""
    names = [name for name in module.__all__ if not name.startswith("_") or name in ASKED_TOO]
    for value in (getattr(module, name) for name in names):
        if inspect.ismodule(value):
            yield from public(value)
        else:
            yield value


def arguments_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in {"self", "cls"}]


def is_other_name(one: Documented, found: Iterable[Documented]) -> bool:
    """Returns whether a docstring sends to that of another function with the same arguments."""
    named = re.match(r"Other name of :(?:func|meth):`(\w+)`", one.text)
    return named is not None and any(
        other is not one
        and other.function.__name__ == named.group(1)
        and arguments_of(other.function) == arguments_of(one.function)
        for other in found
    )


@functools.cache
def documented() -> list[Documented]:
    found = {}
    for value in (value for name in MODULES for value in public(importlib.import_module(name))):
        if inspect.isclass(value) and is_ours(value):
            assert value.__doc__, f"{value} has no docstring"
            found.update({one.name: one for one in methods_of(value)})
        elif inspect.isfunction(value) and is_ours(value):
            name = f"{value.__module__}.{value.__qualname__}"
            found[name] = Documented(name, value, inspect.getdoc(value) or "")
    return [one for one in found.values() if not is_other_name(one, found.values())]


def returned(one: Documented) -> str:
    """Returns the annotation of what a function returns; empty for nothing."""
    stated = str(inspect.signature(one.function).return_annotation)
    nothing = stated in {"None", "NoReturn"} or stated.startswith(("Generator[None", "Iterator[None"))
    return "" if nothing else stated


def communicates(one: Documented) -> bool:
    """Returns whether a function communicates, or looks for the default group, which may not be there."""
    arguments = inspect.signature(one.function).parameters
    if {"async_op", "timeout"} & set(arguments) or "Work" in returned(one).split(" | "):
        return True
    groups = [arguments[name] for name in ("group", "process_group") if name in arguments]
    return bool(groups) and (not returned(one) or any(given.default is None for given in groups))


def faults(one: Documented) -> Iterator[str]:
    """Yields what is missing in a docstring, or too much."""
    taken = arguments_of(one.function)
    if not one.text:
        yield "no docstring"
    asked = {name for name in taken if not name.startswith("_")}
    explained = entries(section(one.text, "Args"))
    if missing := asked - explained - one.fields:
        yield f"Args: has not {', '.join(sorted(missing))}"
    if needless := explained - set(taken):
        yield f"Args: has {', '.join(sorted(needless))}, which it does not take"
    if returned(one) and not re.search(
        r"\A(Returns|Yields) |^(Returns|Yields):\n +\S", one.text, re.MULTILINE
    ):
        yield f"no Returns:, but it returns {returned(one)}"
    if communicates(one) and not one.raises and not section(one.text, "Raises"):
        yield "no Raises:, but it communicates or takes the default group"


def test_docstrings_are_complete() -> None:
    found = documented()
    assert len(found) > 250
    wrong = [f"{one.name}: {fault}" for one in found for fault in faults(one)]
    assert not wrong, "\n".join(wrong)
