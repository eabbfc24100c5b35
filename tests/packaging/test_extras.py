"""Extras that are installed together fit together."""

from __future__ import annotations

import re

import pytest
from sources import ROOT

tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]


def packages(extras: list[str]) -> set[str]:
    """Returns the names of all packages of some extras, and of those that they name."""
    found: set[str] = set()
    for extra in extras:
        for requirement in EXTRAS[extra]:
            name, more = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
            found |= packages(more.split(",")) if more else {name}
    return found


@pytest.mark.parametrize(
    ("extras", "cupy"),
    [
        (["dev"], "cupy-cuda13x"),
        (["dev", "bench"], "cupy-cuda13x"),
        (["dev", "cuda13"], "cupy-cuda13x"),
        (["dev-cuda12"], "cupy-cuda12x"),
        (["dev-cuda12", "bench"], "cupy-cuda12x"),
    ],
)
def test_development_has_one_cupy_and_both_ways_to_nccl(extras: list[str], cupy: str) -> None:
    found = packages(extras)
    assert {name for name in found if name.startswith("cupy")} == {cupy}
    assert {"pynccl", "pytest", "ruff"} <= found


def test_development_is_the_same_for_every_cuda() -> None:
    differ = packages(["dev"]) ^ packages(["dev-cuda12"])
    assert differ == {"cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12"}
