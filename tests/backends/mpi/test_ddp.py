"""DistributedDataParallel over MPI, with every communication hook."""

from __future__ import annotations

import hook_zoo
import pytest
from mpi_team import Teams


@pytest.mark.full
def test_every_hook_trains_with_sparse_gradients_and_uneven_inputs(mpi: Teams) -> None:
    hook_zoo.check(mpi.run(hook_zoo.train_with_every_hook, 2, timeout=100))
