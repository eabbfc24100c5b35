"""The MPI installations that the tests of the mpi backend run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi_team import VARIABLE, Teams, find_installations

USUAL = ("openmpi", "mpich")
FURTHER = tuple(one.name for one in find_installations() if one.name not in USUAL)
"""Those that are asked for by name, as Intel's."""


@pytest.fixture(params=[*USUAL, *FURTHER], scope="session")
def mpi(request: pytest.FixtureRequest) -> Iterator[Teams]:
    """Jobs of one MPI."""
    pytest.importorskip("mpi4py", reason="needs mpi4py: python -m pip install 'torch-collectives[mpi]'")
    found = {installation.name: installation for installation in find_installations()}
    if request.param not in found:
        pytest.skip(
            f"there is no {request.param} here: python -m pip install {request.param} (beside another MPI: "
            f"--prefix FOLDER, named in {VARIABLE})"
        )
    teams = Teams(found[request.param])
    yield teams
    teams.close()
