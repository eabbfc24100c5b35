"""Every listed name exists and is documented, and importing the package is light."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
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


def test_listed_names_exist(module: ModuleType) -> None:
    assert inspect.getdoc(module), "the module has no docstring"
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    missing = [name for name in listed if not hasattr(module, name)]
    assert not missing, f"__all__ lists what does not exist: {missing}"


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
    for name in getattr(module, "__all__", []):
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
