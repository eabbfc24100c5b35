"""Random programs against the oracle; a failure names the seed, which ``--seed`` repeats."""

from __future__ import annotations

import pytest
from conformance.random_programs import Execution, Program
from harness import run_world

STEPS = 400


def random_program(rank: int, size: int, seed: int, placement: str) -> None:
    try:
        execution = Execution(Program(seed, size, STEPS), rank, placement)
        execution.run()
        execution.report.finish(STEPS // 4)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("backend", ["host", "round_robin", "gloo"])
def test_random_programs(backend: str, size: int, request: pytest.FixtureRequest) -> None:
    run_world(random_program, size, request.config.getoption("seed"), "", backend=backend, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("placement", ["abc", "aab", "abba"])
def test_random_programs_between_machines(placement: str, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("seed")
    run_world(random_program, len(placement), seed, placement, placement=placement, timeout=120)
