"""Dependencies point one way, in Python and in C++.

Words. An *area* is a part of the package that may use some others: ``store`` <- ``contracts`` <- ``users``
(the functions that users call), ``backends``, ``ddp`` and, on top, ``bench`` and ``conformance``. Names that
the package's root re-exports count as those of the module that defines them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sources import ROOT, modules

CONTRACTS = {
    "call_forms", "capabilities", "dtypes", "kinds", "membership", "monitored_barrier", "primitives",
    "process_group", "registry", "staging", "types", "uncompiled", "validation", "work",
}  # fmt: skip

MAY_USE = {
    "errors": set(),
    "forks": set(),
    "store": {"errors", "forks", "native", "store"},
    "contracts": {"errors", "forks", "native", "store", "contracts"},
    "users": {"errors", "forks", "native", "store", "contracts", "users"},
    "backends": {"errors", "forks", "native", "store", "contracts", "backends"},
    "ddp": {"errors", "contracts", "ddp"},
    "bench": {"errors", "native", "store", "contracts", "users", "backends", "ddp", "bench"},
    "conformance": {"errors", "contracts", "conformance"},
}

EXCEPTIONS = {
    ("collectives.ddp.default_group", "GroupMember"): "the group where the user names none",
    ("collectives.ddp.default_group", "new_subgroups"): "the subgroup where the user names none",
    ("collectives.ddp.default_group", "split_group"): "groups of neighbours, for hierarchical averaging",
}
"""Uses of single names beyond the rules, and why."""


MODULES = modules()


def area(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "users"
    if parts[1] in {"store", "backends", "ddp", "bench", "conformance"}:
        return parts[1]
    if parts[1] == "_native":
        return "native"
    if parts[1] in {"errors", "forks"}:
        return parts[1]
    return "contracts" if parts[1] in CONTRACTS else "users"


@dataclass(frozen=True)
class Import:
    """An import of a module, or of one name of it, somewhere in another module."""

    importer: str
    module: str
    name: str | None
    line: int
    at_top: bool

    def __str__(self) -> str:
        what = self.module if self.name is None else f"{self.module}.{self.name}"
        return f"{MODULES[self.importer].relative_to(ROOT)}:{self.line} ({area(self.importer)}) uses {what}"


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _walk(node: ast.AST, at_top: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields the nodes that are carried out, and whether that is when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child):
            continue
        inside = at_top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, inside
        yield from _walk(child, inside)


def imports_of(module: str) -> Iterator[Import]:
    tree = ast.parse(MODULES[module].read_text())
    for node, at_top in _walk(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, None, node.lineno, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                yield Import(module, node.module or "", alias.name, node.lineno, at_top)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "collectives"
        ):
            yield Import(module, "collectives", node.attr, node.lineno, at_top)


ALL_IMPORTS = [one for module in MODULES for one in imports_of(module)]
ROOT_NAMES = {
    one.name: one.module
    for one in ALL_IMPORTS
    if one.importer == "collectives" and one.module.startswith("collectives.")
}
"""The module that defines each name of the package's root."""


def target(one: Import) -> str | None:
    """Returns the module of the package that an import needs; ``None`` for another package."""
    if one.module != "collectives" and not one.module.startswith("collectives."):
        return None
    if one.name is not None:
        submodule = f"{one.module}.{one.name}"
        if submodule in MODULES or submodule == "collectives._native":
            return submodule
        if one.module == "collectives":
            return ROOT_NAMES.get(one.name, "collectives")
    return one.module


def test_the_rules_meet_the_code() -> None:
    assert len(MODULES) > 40
    assert {f"collectives.{name}" for name in CONTRACTS} <= set(MODULES)
    assert ROOT_NAMES["ProcessGroup"] == "collectives.process_group"
    assert {area(module) for module in MODULES} == set(MAY_USE)
    used = {(one.importer, one.name) for one in ALL_IMPORTS}
    assert set(EXCEPTIONS) <= used, "an exception that nobody needs"


def test_dependencies_point_one_way() -> None:
    wrong = []
    for one in ALL_IMPORTS:
        needed = target(one)
        if needed is None or (one.importer, one.name) in EXCEPTIONS:
            continue
        if one.name is None and one.module == "collectives":
            continue  # what is taken from it is looked at where it is used
        if area(needed) not in MAY_USE[area(one.importer)]:
            wrong.append(f"{one} of {area(needed)}")
    assert not wrong, "\n".join(wrong)


def test_what_the_root_needs_does_not_need_the_root() -> None:
    """Errors, stores, contracts and user functions import each other directly, so that no cycle arises."""
    wrong = [
        str(one)
        for one in ALL_IMPORTS
        if one.at_top
        and one.module == "collectives"
        and area(one.importer) in {"errors", "forks", "store", "contracts", "users"}
        and one.importer not in {"collectives", "collectives.__main__"}
        and target(one) != "collectives._native"
        and f"collectives.{one.name}" not in MODULES
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_at_import() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in ALL_IMPORTS:
        needed = target(one)
        if one.at_top and needed in MODULES and needed not in {one.importer, "collectives"}:
            graph[one.importer].add(needed)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail("cycle: " + " -> ".join([*path[path.index(module) :], module]))
        if module not in done:
            for needed in sorted(graph[module]):
                visit(needed, (*path, module))
            done.add(module)

    for module in sorted(set(graph) - {"collectives"}):
        visit(module, ())


def test_modules_import_no_optional_package() -> None:
    required = {"torch", "numpy", "collectives", "collectives_registration"}
    wrong = [
        str(one)
        for one in ALL_IMPORTS
        if one.at_top and one.module.split(".")[0] not in (sys.stdlib_module_names | required)
    ]
    assert not wrong, "\n".join(wrong)


NATIVE = ROOT / "backends" / "native"
_ORDER = ["common", "memory", "selection", "sockets", "state", "transport"]
_UP_TO = {layer: {*_ORDER[: _ORDER.index(layer) + 1]} for layer in _ORDER}
LAYERS = {
    "common": {"common"},
    "memory": {"common", "memory"},
    "selection": {"common", "selection"},
    "sockets": {"common", "memory", "sockets"},
    "state": _UP_TO["state"],
    "transport": _UP_TO["transport"],
    "kernels": {"common", "kernels"},
    "algorithms": _UP_TO["transport"] | {"kernels", "algorithms"},
    "collectives": _UP_TO["transport"] | {"kernels", "algorithms", "collectives"},
    "engine": _UP_TO["transport"] | {"kernels", "algorithms", "collectives", "engine"},
    "mpi": {"common", "kernels", "algorithms", "engine", "mpi"},
    "store": {"common", "store"},
    "bindings": _UP_TO["transport"]
    | {"kernels", "algorithms", "collectives", "engine", "mpi", "store", "bindings"},
    "tests": _UP_TO["transport"] | {"kernels", "algorithms", "collectives", "engine", "store", "tests"},
}
"""The layers of the core, and those that each may include."""


def includes() -> Iterator[tuple[Path, int, str, str]]:
    """Yields file, line, layer and what is included."""
    for path in sorted(NATIVE.rglob("*")):
        if path.suffix in {".hpp", ".cpp", ".inl"}:
            layer = path.relative_to(NATIVE).parts[0]
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = re.match(r'\s*#\s*include\s+([<"][^>"]+[>"])', line)
                if match:
                    yield path, number, layer, match.group(1)


def test_layers_of_the_core_include_only_those_before_them() -> None:
    wrong = []
    found = list(includes())
    assert len(found) > 50
    for path, number, layer, included in found:
        where = f"{path.relative_to(ROOT)}:{number} includes {included}"
        inner = included[1:-1]
        if included.startswith('"'):
            other = inner.split("/")[0] if "/" in inner else layer
            if other not in LAYERS.get(layer, set()):
                wrong.append(where)
        elif inner.split("/")[0] in {"torch", "ATen", "c10", "cuda"} or (
            layer != "bindings" and inner.split("/")[0] in {"nanobind", "Python.h", "pybind11"}
        ):
            wrong.append(where)
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_the_core_is_a_layer() -> None:
    assert {path.name for path in NATIVE.iterdir() if path.is_dir()} <= set(LAYERS)
