"""Options of the host backend's own, of which there are none: environment and thresholds say the rest."""

from __future__ import annotations

from collectives.registry.backends import GroupOptions

__all__ = ["option_names", "refuse_options"]


def option_names() -> tuple[str, ...]:
    """Returns the names of the options: none."""
    return ()


def refuse_options(options: GroupOptions) -> None:
    """Checks that the user gave none.

    Raises:
        TypeError: there are some.
    """
    if options.pg_options is not None:
        raise TypeError(
            f"[rank {options.rank}] the host backend has no pg_options, but they are of type "
            f"{type(options.pg_options).__name__}"
        )
