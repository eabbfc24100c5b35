"""Hooks that step an optimizer for each bucket, as those of torch do, beside steps after backward."""

from __future__ import annotations

import pytest
from harness import run_ranks
from optimizers_in_hooks import every_form


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["host", "gloo"])
def test_steps_in_hooks_equal_steps_after_backward(backend) -> None:
    assert run_ranks(every_form, 2, backend=backend) == [[]] * 2
