"""The tests of torch's suite that cannot pass, and why; one that passes all the same fails our own tests."""

from __future__ import annotations

import inspect

import torch.distributed as dist

_BY_NAME = (
    'torch.distributed.monitored_barrier raises ValueError for groups whose backend is not named "gloo"; '
    "the method monitored_barrier of the group itself works"
)
_UNEVEN = "Gloo's all-to-all of lists takes tensors of one size only"

_ASKS_FOR_THE_NAME = "Backend.GLOO" in inspect.getsource(dist.monitored_barrier)  # until torch 2.13

FAILURES: dict[str, dict[str, str]] = {
    "collectives": {
        "test_monitored_barrier_gloo": _BY_NAME,
        "test_monitored_barrier_gloo_subgroup": _BY_NAME,
        "test_monitored_barrier_failure_order": _BY_NAME,
        "test_monitored_barrier_wait_all_ranks": _BY_NAME,
    }
    if _ASKS_FOR_THE_NAME
    else {},
    "gloo": {
        "test_all_to_all": _UNEVEN,
        "test_all_to_all_complex": _UNEVEN,
        "test_all_to_all_full_group": _UNEVEN,
        "test_all_to_all_group": _UNEVEN,
    },
}
"""For each backend, the tests that fail and the cause."""
FAILURES["collectives_round_robin"] = FAILURES["collectives"]


def complaint(backend: str, name: str, status: str, text: str) -> str | None:
    """Returns what is unexpected of an outcome, ``None`` where it is as expected."""
    reason = FAILURES.get(backend, {}).get(name)
    if status == "failed" and reason is None:
        return f"{name} failed\n{text}"
    if status == "passed" and reason is not None:
        return f"{name} passed, but is listed as one that cannot: {reason}"
    return None
