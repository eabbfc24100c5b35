"""What the quick tier draws of a test function's cases."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import tiers


class Case(SimpleNamespace):
    """Stands in for one case of a test function."""

    __hash__ = object.__hash__


def drawn(
    seed: int,
    mark: pytest.Mark | None = None,
    used: Counter[tuple[str, str]] | None = None,
    **values: list[object],
) -> list[dict[str, object]]:
    """Returns the parameters of the cases that are drawn of the product of all values."""
    cases = [
        Case(
            get_closest_marker={"sampled": mark}.get,
            callspec=SimpleNamespace(params=dict(zip(values, chosen, strict=True))),
        )
        for chosen in itertools.product(*values.values())
    ]
    return [
        case.callspec.params
        for case in tiers.sample(cases, random.Random(seed), Counter() if used is None else used)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_each_value_is_drawn(seed):
    values = {
        "backend": ["host", "gloo"],
        "ranks": [1, 2, 3, 4],
        "dtype": list("abcdef"),
        "options": [{}, {1: 2}],
    }
    got = drawn(seed, **values)
    for name, wanted in values.items():
        assert all(value in [case[name] for case in got] for value in wanted), name
    assert len(got) < 10  # of 96


def test_a_seed_draws_the_same_again_and_another_one_does_not():
    values = {"backend": ["host", "gloo", "mpi"], "ranks": [1, 2, 3, 4]}
    assert drawn(1, **values) == drawn(1, **values)
    assert len({str(drawn(seed, **values)) for seed in range(10)}) > 1


def test_functions_share_the_values_of_shared_parameters():
    used = Counter()
    for seed in range(4):
        got = drawn(seed, used=used, backend=["host", "gloo", "mpi"], world_size=[1, 2, 3, 4])
        assert [case["backend"] for case in got].count("mpi") == len(got) / 3 == 1
    assert list(used.values()) == [3, 3, 3, 3]


def test_a_mark_says_how_many():
    assert len(drawn(1, pytest.mark.sampled(2).mark, word=["a", "b", "c"])) == 2
    assert len(drawn(1, pytest.mark.sampled(5).mark, word=["a", "b", "c"])) == 3
