"""Importing the package is light. That every public name exists and is documented: :mod:`test_docstrings`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

IMPORT = """
import json, sys
import torch, torch.distributed
before = set(sys.modules)
import collectives
added = sorted(set(sys.modules) - before)
dist = torch.distributed
registered = [dist.is_backend_available("collectives"), dist.Backend("Collectives"),
              dist.Backend.COLLECTIVES_ROUND_ROBIN, dist.Backend.backend_capability["collectives"]]
print(json.dumps([added, registered]))
"""


def test_import_is_light() -> None:
    """What ``import collectives`` adds to what torch has imported, and that torch knows its backends then."""
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, cwd="/")
    added, registered = json.loads(run.stdout)
    devices = ["cpu"] if torch.version.cuda is None else ["cpu", "cuda"]
    assert registered == [True, "collectives", "collectives_round_robin", devices]
    ours = {name for name in added if name.split(".")[0] == "collectives"}
    heavy = [
        name
        for name in ours
        if name.startswith(("collectives.backends", "collectives.ddp", "collectives.bench"))
        or name in {"collectives.torch_bridge.operators", "collectives.torch_bridge.group"}
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
