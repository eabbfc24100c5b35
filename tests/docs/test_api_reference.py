"""docs/api shows every public class and function of the packages that users import from."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

API = Path(__file__).resolve().parents[2] / "docs" / "api"
PACKAGES = [
    "collectives",
    "collectives.backends.gloo",
    "collectives.backends.host",
    "collectives.backends.mpi",
    "collectives.backends.nccl",
    "collectives.backends.round_robin",
    "collectives.ddp",
    "collectives.ddp.model_averaging",
    "collectives.ddp.optim",
    "collectives.dist2",
    "collectives.errors",
    "collectives.store",
    "collectives.torch_bridge",
]
CALLED_FOR_USERS = {"capabilities", "create", "decline", "option_names", "register", "unavailable"}
"""What the registry calls of a backend, and torch of the package."""


def shown() -> list[object]:
    """Returns what the directives of the pages name."""
    found: list[object] = []
    for page in API.glob("*.md"):
        for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)$", page.read_text("utf-8"), re.MULTILINE):
            if name.startswith("collectives.integrations."):
                continue  # needs its framework
            if kind == "module":
                module = importlib.import_module(name)
                found.extend(getattr(module, public) for public in module.__all__)
            else:
                module_name, _, public = name.rpartition(".")
                found.append(getattr(importlib.import_module(module_name), public))
    return found


@pytest.fixture(scope="module")
def reference() -> set[int]:
    return {id(value) for value in shown()}


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_shown(package: str, reference: set[int]) -> None:
    module = importlib.import_module(package)
    values = {
        name: getattr(module, name)
        for name in module.__all__
        if not name.startswith("_") and name not in CALLED_FOR_USERS
    }
    missing = [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in reference
    ]
    assert not missing, f"docs/api shows nothing of {', '.join(missing)} of {package}"
