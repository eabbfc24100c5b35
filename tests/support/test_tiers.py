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


@pytest.mark.parametrize("seed", range(3))
def test_the_quick_tier_and_its_rest_are_all_tests_once(seed):
    everything = [
        *items("tests/a.py::test_x", 12),
        *items("tests/a.py::test_y", 5),
        *items("tests/b.py::test_z", 1),
    ]
    full = items("tests/b.py::test_full", 2, full=pytest.mark.full.mark)
    quick, rest = (selected([*everything, *full], **{tier: seed}) for tier in ("seed", "rest"))
    assert quick
    assert {item.nodeid for item in full} < set(rest)
    assert sorted([*quick, *rest]) == sorted(item.nodeid for item in [*everything, *full])


def items(function: str, count: int, **marks: pytest.Mark) -> list[Case]:
    """Returns stand-ins for the cases of a test function, by two parameters."""
    return [
        Case(
            nodeid=f"{function}[{number}]",
            path=function.partition("::")[0],
            get_closest_marker={"sampled": None, **marks}.get,
            callspec=SimpleNamespace(params={"one": number % 3, "other": number // 3}),
        )
        for number in range(count)
    ]


def selected(cases: list[Case], **options: object) -> list[str]:
    """Returns the names of what a run with these options keeps."""
    chosen = {"full": False, "rest": None, "seed": options.get("rest"), **options}
    config = SimpleNamespace(
        getoption=chosen.get,
        args=[],
        stash=pytest.Stash(),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    kept = list(cases)
    tiers.select(config, kept)
    return [case.nodeid for case in kept]


def test_functions_share_the_values_of_shared_parameters():
    used = Counter()
    for seed in range(4):
        got = drawn(seed, used=used, backend=["host", "gloo", "mpi"], world_size=[1, 2, 3, 4])
        assert [case["backend"] for case in got].count("mpi") == len(got) / 3 == 1
    assert list(used.values()) == [3, 3, 3, 3]


def test_a_mark_says_how_many():
    assert len(drawn(1, pytest.mark.sampled(2).mark, word=["a", "b", "c"])) == 2
    assert len(drawn(1, pytest.mark.sampled(5).mark, word=["a", "b", "c"])) == 3
