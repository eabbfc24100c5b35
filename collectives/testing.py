"""A pytest fixture that runs functions of tests on several ranks of this machine.

Not here: the ranks of scripts and notebooks (:func:`collectives.launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from collectives.ranks.launching import Ranks

__all__ = ["world"]


def world(
    nproc: int = 2, *, scope: str = "session", environment: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Returns a pytest fixture whose ranks live as long as its scope, so that tests need not start them.

    The fixture is a function ``run(function, *args)`` as :meth:`collectives.ranks.launching.Ranks.run`. A
    test that fails on a rank ends the ranks; the next test gets new ones.

    Args:
        nproc: number of ranks.
        scope: how long the ranks stay, as of ``pytest.fixture``.
        environment: further environment variables of the ranks.

    Returns:
        The fixture, to be bound to a name in a test's module or in ``conftest.py``. ``run`` returns what the
        function returned, by rank, and raises
        :class:`~collectives.ranks.processes.RankFailedError` where a rank failed.

    Raises:
        ValueError: ``nproc`` is less than 1.
        ImportError: there is no pytest.

    Example:
        In ``conftest.py``, and in a test::

            import collectives.testing

            ranks = collectives.testing.world(nproc=2)

            def test_sum(ranks):
                assert ranks(total, 10) == [21, 21]
    """
    import pytest

    ranks = Ranks(nproc, environment=environment)

    def run() -> Iterator[Callable[..., list[Any]]]:
        with ranks:
            yield ranks.run

    return pytest.fixture(run, scope=scope)  # type: ignore[call-overload, no-any-return]
