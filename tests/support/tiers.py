"""The two tiers of the tests: a quick one, which is the default, and ``--full``, which is everything.

``--rest SEED`` runs what the quick tier that this seed draws leaves out: both together are everything.

The quick tier leaves out

- the folders of :data:`FULL_FOLDERS` and what has the mark ``full``: they take long for what is tested
  elsewhere too;
- of a test function with several parameters, most of their product: it keeps a sample that has each value of
  each parameter at least once, and those of :data:`SHARED` parameters in turn. A seed draws the sample; the
  header of the run shows it, and ``--seed`` repeats it;
- of a test function with the mark ``sampled(n)``, all cases but ``n``, drawn in the same way.

A test that is named by its node id (``file.py::test``) runs with all its cases in either tier.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

FULL_FOLDERS = {
    "packaging": "builds wheels and virtual environments",
    "torch_suite": "torch's own tests",
    "torch_systems/systems": "torch's systems on our groups",
}
"""Folders of the full tier, and why they are."""

_FULL = {str(TESTS / folder) for folder in FULL_FOLDERS}
_WITHIN = tuple(f"{folder}/" for folder in _FULL)
"""What paths of files in them begin with."""

SHARED = ("world_size", "mpi")
"""Parameters of many functions: all functions of a module together have each of their values."""

_Value = tuple[str, str]
"""Name and value of a parameter."""

_left = pytest.StashKey[int]()


def add_options(parser: pytest.Parser) -> None:
    """Adds ``--full``, ``--rest`` and ``--seed``."""
    parser.addoption("--full", action="store_true", help="run all tests, not only the quick tier")
    parser.addoption(
        "--rest",
        type=int,
        metavar="SEED",
        help="run what the quick tier whose header shows this seed left out",
    )
    parser.addoption("--seed", type=int, help="draw the sample of the run whose header shows this seed")


def configure(config: pytest.Config) -> None:
    """Draws the seed where none is given; a process that shares the tests has that of the first."""
    config.stash[_left] = 0
    if hasattr(config, "workerinput"):
        config.option.seed = config.workerinput["seed"]
    elif is_rest(config):
        if config.getoption("full") or config.getoption("seed") is not None:
            raise pytest.UsageError("--rest SEED goes with neither --full nor --seed")
        config.option.seed = config.getoption("rest")
    elif config.getoption("seed") is None:
        config.option.seed = random.SystemRandom().randrange(1_000_000)


def is_rest(config: pytest.Config) -> bool:
    """Returns whether the run is of what a quick tier left out."""
    return config.getoption("rest") is not None


def header(config: pytest.Config) -> str:
    """Returns the line of the run's header that says how to repeat it."""
    if config.getoption("full"):
        return "tier: full"
    if is_rest(config):
        return f"tier: what the quick tier drawn by --seed {config.getoption('seed')} leaves out"
    return f"tier: quick, drawn by --seed {config.getoption('seed')} (all tests: --full)"


def left_out(config: pytest.Config) -> int:
    """Returns how many tests were left to the full tier."""
    return config.stash[_left]


def set_left_out(config: pytest.Config, count: int) -> None:
    """Sets how many tests were left to the full tier, where another process has selected."""
    config.stash[_left] = count


def summary(config: pytest.Config) -> str:
    """Returns the line of the run's summary that says what was left out, if anything."""
    left = 0 if is_rest(config) else left_out(config)
    return f"{left} tests were left to the full tier (--full), which has folders of its own" if left else ""


def is_ignored(path: Path, config: pytest.Config) -> bool:
    """Returns whether a folder is one of the full tier that the run neither names nor has a name in.

    Its modules are not even imported, which takes seconds in each process that shares the tests.
    """
    if config.getoption("full") or is_rest(config) or str(path) not in _FULL:
        return False
    named = [config.invocation_params.dir / str(word).partition("::")[0] for word in config.args]
    return not any(one == path or path in one.parents for one in named)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes what the tier leaves out of ``items``."""
    if config.getoption("full"):
        return
    rest = is_rest(config)
    named = () if rest else tuple(str(word).partition("[")[0] for word in config.args if "::" in str(word))
    kept: set[pytest.Item] = set()
    functions = defaultdict(list)
    for item in items:
        function = item.nodeid.partition("[")[0]
        if named and function.endswith(named):
            kept.add(item)
        elif not is_full(item):
            functions[function].append(item)
    used: dict[str, Counter[_Value]] = defaultdict(Counter)
    for function, cases in functions.items():
        dice = random.Random(f"{config.getoption('seed')} {function}")
        kept.update(sample(cases, dice, used[function.partition("::")[0]]))
    left = [item for item in items if (item in kept) is rest]
    config.stash[_left] = len(left)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if (item in kept) is not rest]


def is_full(item: pytest.Item) -> bool:
    """Returns whether a test belongs to the full tier alone."""
    if item.get_closest_marker("full") is not None:
        return True
    return str(item.path).startswith(_WITHIN)


def sample(cases: Sequence[pytest.Item], dice: random.Random, used: Counter[_Value]) -> list[pytest.Item]:
    """Draws the cases of one test function that the quick tier runs.

    Args:
        cases: all cases.
        dice: decides among cases that are as good.
        used: how often the module's functions have each value of a shared parameter; updated.

    Returns:
        Cases that have each value of each parameter, or as many of the values as ``sampled`` allows.
    """
    mark = cases[0].get_closest_marker("sampled")
    limit = len(cases) if mark is None else mark.args[0]
    values = {case: _values(case, shared=False) for case in cases}
    shared = {case: _values(case, shared=True) for case in cases}
    missing = set().union(*values.values())
    waiting = dice.sample(cases, len(cases))
    drawn = []
    while len(drawn) < limit and waiting and (missing or not drawn):
        best = max(
            waiting,
            key=lambda case: (len(values[case] & missing), -sum(used[value] for value in shared[case])),
        )
        waiting.remove(best)
        drawn.append(best)
        missing -= values[best]
        used.update(shared[best])
    return drawn


def _values(case: pytest.Item, *, shared: bool) -> set[_Value]:
    """Returns a case's parameters, the values in words, because not all of them can be hashed."""
    if not hasattr(case, "callspec"):
        return set()
    return {(name, repr(value)) for name, value in case.callspec.params.items() if (name in SHARED) is shared}
