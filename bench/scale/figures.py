"""The figures of a world, out of what its ranks tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from collectives.bench.core.records import Timing
from collectives.bench.core.sizes import format_bytes
from collectives.bench.scale.growth import World
from collectives.bench.scale.rank import Named, Step, victim_of

__all__ = ["Figure", "death_figures", "figures", "world_figures"]

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as the table shows it.

    Attributes:
        key: in the record.
        name: in words.
        unit: its unit.
        form: format of its values.
    """

    key: str
    name: str
    unit: str
    form: str


def figures(sizes: Sequence[int], groups: int) -> Iterator[Figure]:
    """Yields all figures, in the order of the table.

    Args:
        sizes: of all-reduces, in bytes.
        groups: how many are made.
    """
    yield Figure("form_s", "form the world", "s", ".2f")
    yield from _of_store("form")
    yield from _of_holdings("world")
    yield Figure("connections_used", "connections, most, all used", "", ".0f")
    yield Figure("group_s", "new_group", "s", ".3f")
    yield from _of_store("group")
    yield from _of_holdings("group")
    yield Figure("groups_s", f"make {groups} groups", "s", ".2f")
    yield Figure("destroy_s", f"destroy {groups} groups", "s", ".3f")
    yield Figure("barrier_us", "barrier", "us", ".0f")
    for size in sizes:
        yield Figure(f"all_reduce_{size}_us", f"all_reduce {format_bytes(size)}", "us", ".0f")
    yield Figure("message_us", "message to the next machine", "us", ".0f")
    yield Figure("death_s", "a leader's death named by all", "s", ".2f")


def _of_store(what: str) -> Iterator[Figure]:
    yield Figure(f"{what}_requests", "  requests to the store, mean", "", ".1f")
    yield Figure(f"{what}_requests_most", "  requests to the store, most", "", ".0f")
    yield Figure(f"{what}_keys", "  keys in them, mean", "", ".1f")


def _of_holdings(what: str) -> Iterator[Figure]:
    yield Figure(f"{what}_connections", "  connections, most", "", ".1f")
    yield Figure(f"{what}_descriptors", "  descriptors, most", "", ".1f")
    yield Figure(f"{what}_threads", "  threads, most", "", ".1f")
    yield Figure(f"{what}_own_mib", "  memory of its own, mean", "MiB", ".2f")
    yield Figure(f"{what}_segment_mib", "  shared memory, mean", "MiB", ".2f")


def world_figures(world: World, steps: Mapping[str, Sequence[Step]], groups: int) -> dict[str, float]:
    """Returns the figures of all steps but the last.

    Args:
        world: the world.
        steps: what each rank tells of each step, by the step's name: ``idle``, ``form``, ``groups`` and
            ``destroy``; all others are operations on the default group, between ``form`` and ``groups``.
        groups: how many groups were made.
    """
    operations = [name for name in steps if name not in {"idle", "form", "groups", "destroy"}]
    used = steps[operations[-1] if operations else "form"]
    found = {
        "form_s": _slowest_s(steps["form"]),
        **_store_figures("form", steps["form"], 1),
        **_holdings_figures("world", world, steps["idle"], steps["form"], 1),
        "connections_used": max(step.holdings.connections for step in used),
        "group_s": _median_us(steps["groups"]) / 1e6,
        **_store_figures("group", steps["groups"], groups),
        **_holdings_figures("group", world, used, steps["groups"], groups),
        "groups_s": _slowest_s(steps["groups"]),
        "destroy_s": _slowest_s(steps["destroy"]),
    }
    return found | {f"{name}_us": _median_us(steps[name]) for name in operations}


def death_figures(world: World, told: Sequence[object]) -> tuple[dict[str, float], int]:
    """Returns how long it took until all others had named the rank that died, and how many did.

    Args:
        world: the world.
        told: what each rank tells.
    """
    victim = victim_of(world)
    died = told[victim]
    if not isinstance(died, Named):
        return {}, 0
    named = [one.at_ns for one in told if isinstance(one, Named) and one.rank == victim]
    return {"death_s": (max(named, default=died.at_ns) - died.at_ns) / 1e9}, len(named)


def _store_figures(what: str, steps: Sequence[Step], times: int) -> dict[str, float]:
    return {
        f"{what}_requests": sum(step.requests for step in steps) / len(steps) / times,
        f"{what}_requests_most": max(step.requests for step in steps) / times,
        f"{what}_keys": sum(step.keys for step in steps) / len(steps) / times,
    }


def _holdings_figures(
    what: str, world: World, before: Sequence[Step], after: Sequence[Step], times: int
) -> dict[str, float]:
    """Returns how much more ranks hold than before, for each of so many groups."""
    pairs = [(one.holdings, two.holdings) for one, two in zip(before, after, strict=True)]

    def more(name: str) -> list[int]:
        return [getattr(after, name) - getattr(before, name) for before, after in pairs]

    def most(name: str) -> float:
        return max(more(name)) / times

    def mean_mib(name: str) -> float:
        return sum(more(name)) / len(pairs) / times / _MIB

    return {
        f"{what}_connections": most("connections"),
        f"{what}_descriptors": most("descriptors"),
        f"{what}_threads": most("threads"),
        f"{what}_own_mib": mean_mib("own_bytes"),
        f"{what}_segment_mib": mean_mib("segment_bytes") / world.local,
    }


def _slowest_s(steps: Sequence[Step]) -> float:
    return max(sum(step.calls_ns) for step in steps) / 1e9


def _median_us(steps: Sequence[Step]) -> float:
    return Timing.of([step.calls_ns for step in steps]).median_us
