"""What the groups of a round-robin composition are made of, from options or from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from collectives.core.arguments.option_records import BackendOptions
from collectives.registry.backends import backend_spec, refuse_unknown_options

__all__ = ["RoundRobinOptions", "lanes_of", "option_names", "options_of"]

_LANES = "COLLECTIVES_ROUND_ROBIN_LANES"
_BACKEND = "COLLECTIVES_ROUND_ROBIN_BACKEND"


@dataclass(frozen=True, slots=True)
class RoundRobinOptions(BackendOptions):
    """Options of the round_robin backend, given as ``pg_options``; the same on every rank.

    Attributes:
        lanes: number of groups, at least 1.
        backend: backend of every one; any but ``"round_robin"``. Several names go to the lanes in turn; their
            groups must take the same device types.
        lane_options: its own options; with several names a dict from the names to those of each.
    """

    lanes: int = 3
    backend: str | tuple[str, ...] = "host"  # type: ignore[assignment]
    lane_options: Any = None

    _backend: ClassVar[str] = "round_robin"


def option_names() -> tuple[str, ...]:
    """Returns the names of the options."""
    return tuple(field.name for field in fields(RoundRobinOptions))


def options_of(given: object, where: str) -> RoundRobinOptions:
    """Returns what the user gave as options.

    Args:
        given: the options, or some of their fields as a dict; the others, and all for ``None``, are those of
            the environment.
        where: what stands in front of a message.

    Raises:
        TypeError: they are something else.
        ValueError: a variable of the environment is out of its range.
    """
    if given is None:
        return _from_environment(where)
    if isinstance(given, Mapping):
        refuse_unknown_options(given, option_names(), where)
        return replace(_from_environment(where), **given)
    if not isinstance(given, RoundRobinOptions):
        raise TypeError(f"{where} they must be RoundRobinOptions, but are of type {type(given).__name__}")
    return given


def _from_environment(where: str) -> RoundRobinOptions:
    default = RoundRobinOptions()
    lanes = os.environ.get(_LANES, str(default.lanes))
    if not lanes.isdecimal() or int(lanes) < 1:
        raise ValueError(f"{where} {_LANES} must be a number of at least 1, but is {lanes!r}")
    names = [name.strip() for name in os.environ.get(_BACKEND, "").split(",") if name.strip()]
    return RoundRobinOptions(int(lanes), tuple(names) if len(names) > 1 else (*names, default.backend)[0])


def lanes_of(options: RoundRobinOptions, where: str) -> list[tuple[str, Any]]:
    """Returns backend and options of each lane.

    Raises:
        TypeError: a field is of another type.
        ValueError: a field is out of its range, or a backend is not known.
    """
    count, given = options.lanes, options.lane_options
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{where} lanes must be an int of at least 1, but is {count!r}")
    single = isinstance(options.backend, str)
    named = [options.backend] if isinstance(options.backend, str) else list(options.backend)
    if not named:
        raise ValueError(f"{where} backend names no backend")
    names = [backend_spec(name).name for name in named]
    if "round_robin" in names:
        raise ValueError(f"{where} lanes of a round-robin group cannot be round-robin groups themselves")
    if not single and given is not None:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{where} lane_options for several backends must be a dict from their names to the options "
                f"of each, but are of type {type(given).__name__}"
            )
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"{where} lane_options are for {unknown}, but the backends are {names}")
    chosen = [names[lane % len(names)] for lane in range(count)]
    return [(name, given if single or given is None else given.get(name)) for name in chosen]
