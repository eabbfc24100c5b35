"""Dependencies point one way, in Python and in C++.

Every module and package directly below ``collectives`` is a *floor*; ``MAY_USE`` says on which it stands.
Names that the package's root re-exports count as those of the module that defines them.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sources import IMPORTED_FROM, ROOT, modules

_BASE = {"dynamo", "errors", "forks", "logs", "secret", "threads", "time_limits", "_native"}
_CONTRACTS = _BASE | {"store", "core", "registry"}

MAY_USE = {
    "dynamo": set(),
    "errors": set(),
    "forks": set(),
    "logs": set(),
    "secret": set(),
    "threads": {"errors"},
    "time_limits": set(),
    "store": _BASE | {"store"},
    "core": _BASE | {"store", "core"},
    "registry": _CONTRACTS,
    "api": _CONTRACTS | {"api"},
    "dist2": _CONTRACTS | {"api"},
    "torch_bridge": _CONTRACTS | {"api", "torch_bridge"},
    "collectives": _CONTRACTS | {"api", "torch_bridge", "dist2", "ranks"},
    "backends": _CONTRACTS | {"backends"},
    "ddp": {"dynamo", "errors", "logs", "threads", "core", "ddp"},
    "ranks": {"secret", "threads", "ranks"},
    "testing": {"ranks"},
    "conformance": {"errors", "core", "registry", "ranks", "cli", "conformance"},
    "integrations": {"core", "api", "torch_bridge", "ddp"},
    "bench": _CONTRACTS | {"api", "collectives", "cli", "backends", "ddp", "ranks", "conformance", "bench"},
    "cli": {"errors", "secret", "_native", "registry", "core", "cli"},
    "__main__": {"cli"},
    "collectives_registration": {"torch_bridge"},
}

EXCEPTIONS = {
    ("collectives.ddp.default_group", "GroupMember"): "the group where the user names none",
    ("collectives.ddp.default_group", "group_beside_torch"): "groups of the ranks of torch's own",
    ("collectives.ddp.default_group", "new_subgroups"): "the subgroup where the user names none",
    ("collectives.ddp.default_group", "split_group"): "groups of neighbours, for hierarchical averaging",
}
"""Uses of single names beyond the rules, and why."""

LOADS = {
    ("cli", "bench"): "the programs of `collectives bench`, of which one is loaded at a time",
    ("collectives_registration", "backends"): "mpi:// of torch's rendezvous",
    ("bench", "_native"): "doctor tells why the core cannot be loaded",
}
"""What a floor loads by a name in a string, beyond the rules or not, and why."""


MODULES = modules()


def floor(module: str) -> str:
    """Returns the floor of a module: the part of its name below ``collectives``."""
    return module.removeprefix("collectives.").split(".")[0]


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
        return f"{MODULES[self.importer].relative_to(ROOT)}:{self.line} ({floor(self.importer)}) uses {what}"


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _walk(node: ast.AST, at_top: bool, types: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yields the nodes that are carried out, and whether that is when the module is imported.

    Args:
        node: the node whose children to begin with.
        at_top: whether the node is carried out when the module is imported.
        types: whether nodes for type checkers alone count, too.
    """
    for child in ast.iter_child_nodes(node):
        if _is_type_checking(child) and not types:
            continue
        inside = at_top and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, inside
        yield from _walk(child, inside, types)


def imports_of(module: str, types: bool = False) -> Iterator[Import]:
    for node, at_top in _walk(tree_of(module), True, types):
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


def loads_of(module: str) -> Iterator[str]:
    """Yields the modules of the package that a module names in a call of ``import_module``."""
    for node in ast.walk(tree_of(module)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
            and str(node.args[0].value).startswith("collectives")
        ):
            yield str(node.args[0].value)


@functools.cache
def all_imports() -> tuple[Import, ...]:
    return tuple(one for module in MODULES for one in imports_of(module))


@functools.cache
def names_of_the_root() -> dict[str, str]:
    """Returns the module that defines each name of the package's root."""
    found = {}
    for one in all_imports():
        if one.importer == "collectives" and one.module.startswith("collectives."):
            names = listed_in(one.module) if one.name == "*" else [str(one.name)]
            found |= dict.fromkeys(names, one.module)
    return found


def listed_in(module: str) -> list[str]:
    """Returns the names in the ``__all__`` of a module."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def target(one: Import) -> str | None:
    """Returns the module of the package that an import needs; ``None`` for another package."""
    if one.module != "collectives" and not one.module.startswith("collectives."):
        return None
    if one.name is not None:
        submodule = f"{one.module}.{one.name}"
        if submodule in MODULES or submodule == "collectives._native":
            return submodule
        if one.module == "collectives":
            return names_of_the_root().get(one.name, "collectives")
    return one.module


def test_every_module_has_a_floor() -> None:
    assert len(MODULES) > 40
    assert names_of_the_root()["ProcessGroup"] == "collectives.core.process_group"
    assert {floor(module) for module in MODULES} == set(MAY_USE)
    used = {(one.importer, one.name) for one in all_imports()}
    assert set(EXCEPTIONS) <= used, "an exception that nobody needs"


def test_dependencies_point_one_way() -> None:
    wrong = []
    for one in all_imports():
        needed = target(one)
        if needed is None or (one.importer, one.name) in EXCEPTIONS:
            continue
        if one.name is None and one.module == "collectives":
            continue  # what is taken from it is looked at where it is used
        if floor(needed) not in MAY_USE[floor(one.importer)]:
            wrong.append(f"{one} of {floor(needed)}")
    assert not wrong, "\n".join(wrong)


def test_what_is_loaded_by_name() -> None:
    found = {(floor(module), floor(loaded)) for module in MODULES for loaded in loads_of(module)}
    assert found == set(LOADS)


def test_what_the_root_imports_does_not_import_the_root() -> None:
    """Only what stands on the contract as other packages do may import names from the root."""
    wrong = [
        str(one)
        for one in all_imports()
        if one.module == "collectives"
        and floor(one.importer) not in {"backends", "bench", "collectives", "ddp"}
        and f"collectives.{one.name}" not in {*MODULES, "collectives._native"}
        and (one.importer, one.name) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    """No module needs itself, neither at import, nor later in a function, nor for its types."""
    graph: dict[str, set[str]] = {
        module: {
            needed
            for one in imports_of(module, types=True)
            if (needed := target(one)) in MODULES and needed not in {module, "collectives"}
        }
        for module in MODULES
    }
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
    assert done >= set(MODULES) - {"collectives"}


def test_modules_import_no_optional_package() -> None:
    required = {"torch", "numpy", "cloudpickle", "collectives", "collectives_registration"}
    wrong = [
        str(one)
        for one in all_imports()
        if one.at_top
        and one.module.split(".")[0] not in (sys.stdlib_module_names | required)
        and floor(one.importer) != "integrations"  # which nothing else may import, as MAY_USE has it
    ]
    assert not wrong, "\n".join(wrong)


NATIVE = ROOT / "backends" / "native"
_ORDER = ["common", "security", "memory", "selection", "sockets", "state", "transport"]
_UP_TO = {layer: {*_ORDER[: _ORDER.index(layer) + 1]} for layer in _ORDER}
LAYERS = {
    "common": {"common"},
    "security": {"common", "security"},
    "memory": {"common", "memory"},
    "selection": {"common", "selection"},
    "sockets": {"common", "security", "memory", "sockets"},
    "state": _UP_TO["state"],
    "transport": _UP_TO["transport"],
    "kernels": {"common", "kernels"},
    "algorithms": _UP_TO["transport"] | {"kernels", "algorithms"},
    "collectives": _UP_TO["transport"] | {"kernels", "algorithms", "collectives"},
    "engine": _UP_TO["transport"] | {"kernels", "algorithms", "collectives", "engine"},
    "mpi": {"common", "kernels", "algorithms", "engine", "mpi"},
    "nccl": {"nccl"},
    "store": {"common", "security", "store"},
    "store_client": _UP_TO["state"] | {"store", "store_client"},
    "bindings": _UP_TO["transport"]
    | {"kernels", "algorithms", "collectives", "engine", "mpi", "nccl", "store", "store_client", "bindings"},
    "tests": _UP_TO["transport"]
    | {"kernels", "algorithms", "collectives", "engine", "nccl", "store", "store_client", "tests"},
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


def test_programs_that_tests_start_import_from_the_same_folders(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("pythonpath") == list(IMPORTED_FROM)
