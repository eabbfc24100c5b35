"""For tests that run ranks on several machines; the machines are network namespaces.

::

    def test_it(make_machines):
        machines = make_machines(2, "1gbit")
        run_ranks(check, 4, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))

A test whose machines the kernel does not allow is skipped with the reason.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError

_SEGMENT = 1448
"""Bytes of data in a segment of TCP on these links."""


def bytes_without_repeats(machines: Machines, machine: int) -> int:
    """Returns how many bytes a machine has sent, without what TCP sent again.

    TCP does that where a process gets no core for a while and its acknowledgements come late.
    """
    command = machines.command(machine, ["cat", "/proc/net/snmp"])
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, values = (line.split() for line in table.splitlines() if line.startswith("Tcp:"))
    return machines.sent_bytes(machine) - _SEGMENT * int(values[names.index("RetransSegs")])


def machines_or_skip(*args: Any, **options: Any) -> Machines:
    """Returns machines, which the caller ends; skips the test where there can be none."""
    try:
        return Machines(*args, **options)
    except NamespacesUnavailableError as error:
        pytest.skip(f"no machines out of network namespaces here: {error}")


@pytest.fixture
def make_machines() -> Iterator[Callable[..., Machines]]:
    """Gives a function with the arguments of :class:`collectives.bench.core.namespaces.Machines`."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(machines_or_skip(*args, **options))
