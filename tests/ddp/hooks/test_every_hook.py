"""Every hook with sparse gradients, on uneven inputs, over every backend that needs no launcher."""

from __future__ import annotations

import hook_zoo
import pytest
from harness import run_ranks


@pytest.mark.full
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("backend", "ranks"), [("host", 3), ("gloo", 2), ("round_robin", 3)])
def test_every_hook_trains_with_sparse_gradients_and_uneven_inputs(backend, ranks) -> None:
    hook_zoo.check(run_ranks(hook_zoo.train_with_every_hook, ranks, backend=backend, timeout=100))
