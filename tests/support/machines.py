"""Fixtures of tests that run ranks on several machines; the machines are network namespaces.

::

    def test_it(make_machines):
        machines = make_machines(2, "1gbit")
        run_ranks(check, 4, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))

A test whose machines the kernel does not allow is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from collectives.bench.core.namespaces import Machines, NamespacesUnavailableError

__all__ = ["make_machines"]


@pytest.fixture
def make_machines() -> Iterator[Callable[..., Machines]]:
    """Gives a function with the arguments of :class:`collectives.bench.core.namespaces.Machines`."""
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Machines:
            try:
                return stack.enter_context(Machines(*args, **options))
            except NamespacesUnavailableError as error:
                pytest.skip(f"no machines out of network namespaces here: {error}")

        yield make
