"""The stub of the core, which says more than the compiled module knows: the same names and arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nanobind.stubgen import StubGen
from sources import ROOT

from collectives import _native


def signatures(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the names in a stub, each with its arguments."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name, args=arguments):
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                yield prefix + name, tuple(one.arg for one in named if one.arg != "self")
            case ast.ClassDef(name=name, body=inner):
                yield prefix + name, ()
                yield from signatures(inner, f"{prefix}{name}.")
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, ()


def test_the_stub_has_the_names_and_arguments_of_the_module() -> None:
    generator = StubGen(_native)
    generator.put(_native)
    compiled = dict(signatures(ast.parse(generator.get()).body))
    written = dict(signatures(ast.parse(Path(ROOT / "collectives/_native.pyi").read_text()).body))
    assert len(compiled) > 100
    assert sorted(compiled) == sorted(written)
    for name, arguments in compiled.items():
        if any(re.fullmatch(r"arg\d*", one) for one in arguments):  # the binding does not name them
            assert len(arguments) == len(written[name]), name
        else:
            assert arguments == written[name], name
