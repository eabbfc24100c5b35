"""No folder has more entries than a reader can take in at once, and packages say what is in them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sources import IMPORTED_FROM, ROOT, modules

MOST = 13
"""Entries of a folder: folders, and modules or pages; a C++ header and its source are one."""

SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".inl", ".md", ".sh", ".yaml"}
LEFT_OUT = {"__init__.py", "conftest.py", "__pycache__"}
TOP = ("collectives", "store", "backends", "ddp", "bench", "docs", "tests")

EXCEPTIONS = {
    "backends/native": (17, "the layers of the core, in the order that test_architecture.py states"),
    "backends/native/bindings": (15, "a file for each class that Python gets"),
    "backends/native/tests": (17, "a file for each layer under test"),
    "bench": (18, "a module is a program, named as `collectives bench NAME`"),
    "bench/acceptance": (14, "one command: its parts, and what ranks run for each section"),
    "collectives": (20, "four links, and modules that users import by these names"),
    "collectives/api": (17, "functions of torch.distributed by subject; they are looked for here only"),
    "collectives/core": (17, "the contract, whose modules backends import by subject"),
    "tests": (19, "the product's folders, and those of tests that cross them"),
    "tests/backends/nccl": (20, "one group over the double of NCCL, by subject"),
    "tests/bench": (18, "mirrors bench"),
    "tests/collectives/api": (14, "mirrors collectives/api"),
    "tests/collectives/torch_bridge": (15, "mirrors collectives/torch_bridge, and what torch itself asks"),
    "tests/conformance": (15, "twelve subjects, and the oracle that they ask"),
}
"""Folders that may have more: how many, and why."""


def has_sources(folder: Path) -> bool:
    return any(path.suffix in SUFFIXES for path in folder.rglob("*"))


def entries(folder: Path) -> set[str]:
    """Returns what a folder shows."""
    found = set()
    for path in folder.iterdir():
        if path.name in LEFT_OUT or path.name.startswith("."):
            continue
        if path.is_dir() and (path.is_symlink() or has_sources(path)):
            found.add(path.name + "/")
        elif path.suffix in SUFFIXES:
            found.add(path.stem if path.suffix in {".cpp", ".hpp", ".inl"} else path.name)
    return found


def folders() -> dict[str, int]:
    """Returns the number of entries of every folder, by path."""
    paths = [ROOT / top for top in TOP]
    paths += [path for top in paths for path in top.rglob("*") if path.is_dir()]
    found = {str(path.relative_to(ROOT)): len(entries(path)) for path in paths if not path.is_symlink()}
    return {name: count for name, count in found.items() if count}


def test_folders_have_few_entries() -> None:
    counts = folders()
    assert len(counts) > 60
    wrong = [
        f"{name}: {count} entries; make folders by subject"
        for name, count in sorted(counts.items())
        if count > EXCEPTIONS.get(name, (MOST, ""))[0]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_are_needed(name: str) -> None:
    assert folders().get(name, 0) > MOST, "this folder needs no exception"
    assert EXCEPTIONS[name][1], "a reason is missing"


def test_a_header_and_its_source_are_one_entry(tmp_path: Path) -> None:
    for name in ("a.cpp", "a.hpp", "b.py", "__init__.py", "data.json"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    assert entries(tmp_path) == {"a", "b.py", "package/"}


def test_packages_say_what_is_inside_and_what_is_not() -> None:
    wrong = []
    for name, path in modules().items():
        if path.name != "__init__.py" or name == "collectives_registration":  # which is an entry point
            continue
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        if "Not here" not in " ".join(text.split()) or len(text.splitlines()) > 6:
            wrong.append(name)
    assert not wrong, f"a headline, and three lines with what is inside and `Not here:` {', '.join(wrong)}"


def test_programs_that_tests_start_import_from_the_same_folders(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("pythonpath") == list(IMPORTED_FROM)
