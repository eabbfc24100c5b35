"""Accelerate's own distributed tests on ranks of :func:`collectives.testing.world`, which stay between them.

They are written for a launcher that starts ranks anew for each of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import collectives.testing

pytestmark = pytest.mark.full

ranks = collectives.testing.world(nproc=2, scope="module", environment={"ACCELERATE_USE_CPU": "true"})


def play(script: str) -> str:
    """Runs a script's main function in a world of ours; its state of the world before is forgotten."""
    import torch.distributed
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.distributed.init_process_group("collectives")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    backend = torch.distributed.get_backend()
    importlib.import_module(f"accelerate.test_utils.scripts.{script}").main()
    if torch.distributed.is_initialized():  # some scripts end it
        torch.distributed.destroy_process_group()
    return backend


@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", ["test_ops", "test_sync", "test_script"])
def test_accelerates_own_tests(ranks: Callable[..., Any], script: str) -> None:
    pytest.importorskip(
        "accelerate", reason="no accelerate here; the page of frameworks says how to install it"
    )
    assert ranks(play, script) == ["collectives"] * 2
