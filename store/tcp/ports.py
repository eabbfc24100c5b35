"""The ports on which this process may listen where nobody names one."""

from __future__ import annotations

import os
import random
import re

__all__ = ["ANY_PORT", "PORT_RANGE_VARIABLE", "ports_to_try"]

PORT_RANGE_VARIABLE = "COLLECTIVES_PORT_RANGE"
ANY_PORT = 0
"""Lets the system choose."""


def ports_to_try() -> list[int]:
    """Returns ports to listen on, to be tried in this order.

    Without the variable that is :data:`ANY_PORT` alone; else all ports of the range, from one that differs
    from process to process, so that ranks that start together seldom want the same one.

    Raises:
        ValueError: the variable is no range of ports.
    """
    text = os.environ.get(PORT_RANGE_VARIABLE, "").strip()
    if not text:
        return [ANY_PORT]
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 0 < first <= last < 2**16:
        raise ValueError(
            f"{PORT_RANGE_VARIABLE}={text!r} is no range of ports; write the first and the last one, from 1 "
            "to 65535, as in 30000-30199"
        )
    ports = list(range(first, last + 1))
    start = random.randrange(len(ports))  # noqa: S311 - no secret
    return ports[start:] + ports[:start]
