"""Which law figures of worlds follow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from collectives.bench.scale.growth import World, growth_of

WORLDS = [World(m, r) for m, r in ((2, 2), (4, 2), (8, 2), (2, 8), (4, 4), (4, 8), (8, 8))]


@pytest.mark.parametrize(
    ("law", "formula", "of"),
    [
        ("constant", "7", lambda _: 7.0),
        ("constant", "0", lambda _: 0.0),
        ("log n", "1 + 2 log2 n", lambda w: 1 + 2 * math.log2(w.size)),
        ("machines", "-1 + 1 m", lambda w: w.machines - 1),
        ("ranks of a machine", "2 + 3 r", lambda w: 2 + 3 * w.local),
        ("machines + ranks of a machine", "5 + 2 m + 1 r", lambda w: 5 + 2 * w.machines + w.local),
        ("n", "10 + 2 n", lambda w: 10 + 2 * w.size),
        ("n log n", "2 n log2 n", lambda w: 2 * w.size * math.log2(w.size)),
        ("n^2", "3 n^2", lambda w: 3 * w.size**2),
    ],
)
def test_exact_values_have_their_law(law: str, formula: str, of: Callable[[World], float]) -> None:
    found = growth_of(WORLDS, [of(world) for world in WORLDS])
    assert found is not None
    assert (found.law, str(found)) == (law, formula)
    assert found.error < 1e-9


def test_a_little_noise_makes_no_other_law() -> None:
    values = [10 * world.size * (1 + 0.02 * (-1) ** i) for i, world in enumerate(WORLDS)]
    found = growth_of(WORLDS, values)
    assert found is not None
    assert found.law == "n"


def test_values_without_a_law_are_shown_with_their_distance() -> None:
    found = growth_of(WORLDS, [1, 50, 2, 60, 3, 70, 4])
    assert found is not None
    assert found.error > 0.1
    assert str(found).endswith(f"(+-{found.error:.0%})")


def test_what_shrinks_has_no_growing_law() -> None:
    found = growth_of(WORLDS, [70, 60, 50, 50, 50, 20, 10])
    assert found is not None
    assert found.law == "constant"


def test_two_worlds_tell_no_law() -> None:
    assert growth_of(WORLDS[:2], [1, 2]) is None
    assert growth_of([*WORLDS[:2], WORLDS[0]], [1, 2, 1]) is None


@pytest.mark.parametrize(("machines", "local"), [(1, 1), (0, 4), (4, 0), (-2, -2)])
def test_a_world_has_two_ranks(machines: int, local: int) -> None:
    with pytest.raises(ValueError, match=f"a world of {machines}x{local} has fewer than 2 ranks"):
        World(machines, local)
