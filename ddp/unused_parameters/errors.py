"""The words of the errors about parameters whose gradients came too rarely or too often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "CHANGED",
    "CONVERTED",
    "MISSING",
    "REPEATED",
    "ParameterFault",
    "frozen",
    "in_words",
    "replaced",
    "skipped",
    "unfrozen",
]


_WRAP_AGAIN = "wrap the module again after such a change"


class ParameterFault(NamedTuple):
    """Something that can be wrong with several parameters of one backward pass.

    Attributes:
        what: what happened to the parameters.
        advice: the way out.
    """

    what: str
    advice: str


MISSING = ParameterFault(
    "got no gradient",
    "Make every parameter take part in the loss on every rank, or pass find_unused_parameters=True; where "
    "one is never trained, freeze it before wrapping.",
)

REPEATED = ParameterFault(
    "got a gradient more than once",
    "A backward pass within the backward pass, as of activation checkpointing with use_reentrant=True, "
    "reached these parameters more than once: pass use_reentrant=False there, or static_graph=True here.",
)

CHANGED = ParameterFault(
    "got gradients not as often as in the first pass",
    "static_graph=True promises that all passes use the parameters alike; leave it out.",
)


CONVERTED = ParameterFault(
    "have another data type or size than when the module was wrapped",
    "Convert a module before wrapping it, or wrap it again afterwards.",
)


def in_words(fault: ParameterFault, names: Sequence[str], total: int, limit: int) -> str:
    """Returns the fault with the names of its parameters.

    Args:
        fault: the fault.
        names: names of the parameters that have it.
        total: number of parameters of the model.
        limit: number of bytes that the names may take; the others are counted.
    """
    shown: list[str] = []
    for name in names:
        limit -= len(name.encode()) + 2
        if limit < 0:
            shown.append(f"and {len(names) - len(shown)} more")
            break
        shown.append(name)
    return f"{len(names)} of {total} parameters {fault.what}: {', '.join(shown)}"


def skipped(name: str) -> str:
    """Returns the error about a gradient that came although its bucket was skipped."""
    return (
        f"{name} got a gradient, but nothing that forward returned depends on it, so that it was skipped; "
        "leave out skip_all_reduce_unused_params"
    )


def frozen(names: Sequence[str]) -> str:
    """Returns the error about parameters that were frozen after wrapping."""
    return f"{', '.join(names)} needed a gradient when the module was wrapped, but need none now"


def unfrozen(names: Sequence[str]) -> str:
    """Returns the error about parameters that were frozen when the module was wrapped, but are no more."""
    return (
        f"{', '.join(names)} needed no gradient when the module was wrapped, but need one now; {_WRAP_AGAIN}"
    )


def replaced(names: Sequence[str]) -> str:
    """Returns the error about parameters that came into the module after wrapping, and got gradients."""
    return (
        f"{', '.join(names)} got a gradient, but came into the module after it was wrapped, as by setattr, "
        f"load_state_dict(assign=True) or weight_norm, so that nobody averages it; {_WRAP_AGAIN}"
    )
