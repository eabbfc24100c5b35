"""DistributedDataParallel over MPI, with every communication hook."""

from __future__ import annotations

import failing_hooks
import hook_zoo
import pytest
from mpi_team import Teams


@pytest.mark.full
def test_every_hook_trains_with_sparse_gradients_and_uneven_inputs(mpi: Teams) -> None:
    hook_zoo.check(mpi.run(hook_zoo.train_with_every_hook, 2, timeout=100))


@pytest.mark.full
@pytest.mark.parametrize("where", failing_hooks.WHERE)
def test_all_ranks_learn_which_hook_failed_and_train_on(mpi: Teams, where: str) -> None:
    """Hooks of each way over MPI: a collective, one that is waited for, messages, several collectives."""
    for name in ("plain", "blocking", "by messages", "low rank"):
        ranks = mpi.run(failing_hooks.failing, 3, name, where, "middle", True, timeout=100)
        failing_hooks.check(ranks, name)
