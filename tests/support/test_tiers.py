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


def test_one_parameter_is_no_product():
    assert len(drawn(1, word=["a", "b", "c"])) == 3
    assert len(drawn(1)) == 1


def test_functions_share_the_values_of_shared_parameters():
    used = Counter()
    for seed in range(4):
        got = drawn(seed, used=used, backend=["host", "gloo", "mpi"], world_size=[1, 2, 3, 4])
        assert [case["backend"] for case in got].count("mpi") == len(got) / 3 == 1
    assert list(used.values()) == [3, 3, 3, 3]


def test_a_mark_says_how_many():
    assert len(drawn(1, pytest.mark.sampled(2).mark, word=["a", "b", "c"])) == 2
    assert len(drawn(1, pytest.mark.sampled(5).mark, word=["a", "b", "c"])) == 3


def test_folders_of_the_full_tier_are_there():
    assert all((tiers.TESTS / folder).is_dir() for folder in tiers.FULL_FOLDERS)


@pytest.mark.parametrize(
    ("args", "full", "ignored"),
    [
        ([], False, True),
        (["tests"], False, True),
        (["tests/store", "tests/torch_systems"], False, True),
        (["tests/torch_systems/systems"], False, False),
        (["tests/torch_systems/systems/test_systems.py::test_system[dtensors]"], False, False),
        ([], True, False),
    ],
)
def test_folders_of_the_full_tier_are_not_imported(args, full, ignored):
    config = SimpleNamespace(
        args=args,
        getoption={"full": full}.get,
        invocation_params=SimpleNamespace(dir=tiers.TESTS.parent),
    )
    assert tiers.is_ignored(tiers.TESTS / "torch_systems" / "systems", config) is ignored
    assert not tiers.is_ignored(tiers.TESTS / "store", config)
    assert not tiers.is_ignored(tiers.TESTS / "torch_systems", config)
