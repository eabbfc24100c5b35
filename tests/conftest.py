"""Parameters that all tests share, the tiers, and the proof that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import folders
import harness
import preloaded_python as interpreters
import pytest
import tiers
from census import shared_memory, unused
from preloaded_python import fresh_python, preloaded_python  # noqa: F401 - fixtures

BACKENDS = ("host", "gloo", "round_robin")
WORLD_SIZES = (1, 2, 3, 4)
FEW_SIZES = {"gloo": (2, 3), "round_robin": (1, 4)}
"""World sizes of backends whose work does not depend on the number of ranks, as that of host's core does."""
PROCESSES = 4

_left: list[str] = []
_segments_before: set[str] = set()
_within_another_session = False
_sockets_before: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends", default=",".join(BACKENDS), help="backends that the shared tests run on, by commas"
    )
    tiers.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Has four processes share the tests where the user names none, because many tests only wait."""
    if hasattr(config, "workerinput") or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    if not config.option.usepdb and config.getoption("numprocesses", 0) is None:
        config.option.numprocesses = PROCESSES
        config.option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    tiers.configure(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a process that shares the tests the seed of the sample."""
    node.workerinput["seed"] = node.config.getoption("seed")


def pytest_report_header(config: pytest.Config) -> str:
    return tiers.header(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return tiers.is_ignored(collection_path, config) or None


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.select(config, items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spares the collections of garbage to come what stays until the end: thousands of tests, and torch."""
    gc.collect()
    gc.freeze()


def _named_by_itself(metafunc: pytest.Metafunc) -> set[str]:
    """Returns the arguments that a test gives values to."""
    found: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        found.update(names.replace(",", " ").split() if isinstance(names, str) else names)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests with an argument ``backend`` on all, with ``world_size`` for all, unless they name some.

    A test with both has all sizes on host, and few on the others.
    """
    from collectives.registry.backends import why_unavailable

    asked = {"backend", "world_size"} & set(metafunc.fixturenames) - _named_by_itself(metafunc)
    if asked == {"world_size"}:
        metafunc.parametrize("world_size", WORLD_SIZES, ids="{}ranks".format, scope="module")
    if "backend" not in asked:
        return
    both, values = "world_size" in asked, []
    for backend in metafunc.config.getoption("--backends").split(","):
        reason = why_unavailable(backend)
        marks = [] if reason is None else [pytest.mark.skip(reason=f"{backend}: {reason}")]
        if both:
            sizes = FEW_SIZES.get(backend, WORLD_SIZES)
            values += [
                pytest.param(backend, size, id=f"{backend}-{size}ranks", marks=marks) for size in sizes
            ]
        else:
            values.append(pytest.param(backend, id=backend, marks=marks))
    metafunc.parametrize("backend, world_size" if both else "backend", values, scope="module")


@pytest.hookimpl(tryfirst=True)  # before the processes that share the tests start
def pytest_sessionstart(session: pytest.Session) -> None:
    global _within_another_session
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs so, and all below them inherit it: Python there installs no handler.
        # What is handled here is back to its default in the programs that tests start.
        signal.signal(signal.SIGINT, lambda number, frame: None)
    folders.sweep()
    _within_another_session = harness.SESSION_VARIABLE in os.environ
    os.environ[harness.SESSION_VARIABLE] = f"{os.getpid()}-{time.monotonic_ns()}"
    interpreters.environment()  # as it is now
    if session.config.getoption("numprocesses", None) and not session.config.option.collectonly:
        interpreters.start(*interpreters.OF_PROGRAMS)  # one for all processes that share the tests
    _segments_before.update(shared_memory())
    _sockets_before.update(_own_sockets())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Ends what the harness started, then looks for what the tests left: that fails the session."""
    harness.close()
    interpreters.stop()
    gc.collect()
    for pid, command in _strays():
        _left.append(f"process {pid}: {command}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _left.extend(f"socket of the pytest process: {name}" for name in sorted(_own_sockets() - _sockets_before))
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output.update(left_behind=_left, left_out=tiers.left_out(session.config))
        return  # the process that started this one reports, and tells whose files are left
    if not _within_another_session:  # that one looks at its end; now its other tests may be at work there
        _left.extend(f"/dev/shm/{name}" for name in sorted(unused(shared_memory() - _segments_before)))
    if _left and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Takes over what a worker of pytest-xdist found at its end."""
    found = getattr(node, "workeroutput", {})
    _left.extend(found.get("left_behind", ()))
    tiers.set_left_out(node.config, found.get("left_out", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := tiers.summary(config):
        terminalreporter.write_line(left_out)
    if _left:
        terminalreporter.section("left behind by the tests", red=True)
        for line in _left:
            terminalreporter.write_line(line)


def _strays() -> list[tuple[int, str]]:
    """Returns the processes that descend from this one and still run, whoever their parent is now."""
    marker = f"{harness.SESSION_VARIABLE}={os.environ[harness.SESSION_VARIABLE]}".encode()
    deadline = time.monotonic() + 2.0  # those that are just ending may do so
    while True:
        found, starting = [], False
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environ, command = ((folder / name).read_bytes() for name in ("environ", "cmdline"))
                if not environ and not command:  # what Popen() has just started has neither for a moment
                    starting |= bool((folder / "exe").readlink().name)  # fails for zombies and the kernel's
                elif marker in environ.split(b"\0") and b"multiprocessing.resource_tracker" not in command:
                    # that one ends with the pytest process
                    found.append((int(folder.name), command.replace(b"\0", b" ").decode(errors="replace")))
        if not (found or starting) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _own_sockets() -> set[str]:
    sockets = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:"):
                sockets.add(target)
    return sockets
