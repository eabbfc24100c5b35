"""Every public name is listed, sorted and documented, and importing the package is light."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import warnings
from types import ModuleType

import pytest
from sources import modules

SKIPPED = {"collectives.__main__", "collectives._native"}
"""Modules without an interface: they run something, or are private."""


MODULES = modules()
NAMES = sorted(set(MODULES) - SKIPPED)
SOURCES = {name: MODULES[name].read_text() for name in NAMES}


def kind_and_name(name: str) -> tuple[int, list[object]]:
    """Orders constants, then classes, then the rest, and numbers by value."""
    bare = name.lstrip("_")
    kind = 0 if bare.isupper() and len(bare) > 1 else 1 if bare[:1].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@pytest.fixture(params=NAMES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param.startswith("collectives.integrations."):
        framework = request.param.rpartition(".")[2]
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"no {framework} here: pip install 'torch-collectives[frameworks]'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the framework's own
            return importlib.import_module(request.param)
    return importlib.import_module(request.param)


def test_all_parts_are_looked_at() -> None:
    for part in ("store.tcp.store", "backends.host", "ddp.reducer.reducer", "api.collectives", "core.work"):
        assert f"collectives.{part}" in NAMES


def test_all_is_sorted_and_complete(module: ModuleType) -> None:
    assert inspect.getdoc(module), "the module has no docstring"
    listed = module.__all__
    assert len(set(listed)) == len(listed)
    for name in listed:
        assert hasattr(module, name), f"__all__ lists {name}, which does not exist"
    assert sorted(listed, key=kind_and_name) == listed or sorted(listed) == listed
    own = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }
    # What only other modules of the package use may be left out.
    unlisted = [name for name in sorted(own - set(listed)) if not used_elsewhere(module.__name__, name)]
    assert not unlisted, f"neither in __all__ nor used by another module, so private or forgotten: {unlisted}"


def used_elsewhere(module: str, name: str) -> bool:
    word = re.compile(rf"\b{name}\b")
    return any(other != module and module in text and word.search(text) for other, text in SOURCES.items())


def members_of(cls: type) -> list[tuple[str, object]]:
    """Returns the public methods and properties that a class defines itself."""
    found = []
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            found.append((name, function))
    return found


def documented(value: object) -> bool:
    text = inspect.getdoc(value)
    return bool(text) and text != inspect.getdoc(object)


def test_public_objects_have_docstrings(module: ModuleType) -> None:
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            if not value.__doc__:
                missing.append(name)
            for member, function in members_of(value):
                # A method that only carries out the contract of a base class has the docstring of that.
                if not documented(getattr(value, member, function)) and not documented(function):
                    missing.append(f"{name}.{member}")
        elif inspect.isfunction(value) and not documented(value):
            missing.append(name)
    assert not missing, f"without a docstring: {missing}"


IMPORT = """
import json, sys
import torch, torch.distributed
before = set(sys.modules)
import collectives
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_is_light() -> None:
    """What ``import collectives`` adds to what torch has imported."""
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, cwd="/")
    added = json.loads(run.stdout)
    ours = {name for name in added if name.split(".")[0] == "collectives"}
    heavy = [
        name
        for name in ours
        if name.startswith(("collectives.backends", "collectives.ddp", "collectives.bench"))
    ]
    assert not heavy, f"loaded without being asked for: {heavy}"
    others = set(added) - ours - {"torch.distributed._dist2"}  # which learns the names of our backends
    assert others <= set(sys.stdlib_module_names), f"packages beyond torch's: {sorted(others)}"
    assert len(others) <= 10, f"more of the standard library than a start needs: {sorted(others)}"
    assert run.stderr == ""


def test_classes_of_backends_are_loaded_when_asked_for() -> None:
    import collectives

    for backend in ("gloo", "mpi", "nccl"):
        name = f"ProcessGroup{backend.capitalize() if backend == 'gloo' else backend.upper()}"
        theirs = importlib.import_module(f"collectives.backends.{backend}")
        assert getattr(collectives, name) is getattr(theirs, name)
    with pytest.raises(AttributeError, match="module 'collectives' has no attribute 'ProcessGroupUCC'"):
        _ = collectives.ProcessGroupUCC
