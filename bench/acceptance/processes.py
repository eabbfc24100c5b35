"""Ranks as programs of their own, of which the end counts: exit status, output, how long it took.

Each is an interpreter that runs one body, answers into a file, and exits as a user's program does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.bench.core.groups import parent_store

__all__ = ["Answer", "RankEnd", "run_ranks", "write_answer"]

_POLL_S = 0.02
_TAIL = 2000
"""Characters of the output that are kept."""


@dataclass(frozen=True)
class Answer:
    """What a rank found.

    Attributes:
        values: plain values.
        at: when it answered, on the machine's monotonic clock.
    """

    values: Mapping[str, Any]
    at: float


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        status: its exit status, negative for a signal; ``None`` where it did not end by itself.
        answer: its answer; ``None`` where it gave none.
        exit_seconds: from its answer to its end.
        output: the end of what it printed.
    """

    status: int | None
    answer: Answer | None
    exit_seconds: float
    output: str


def write_answer(folder: str, rank: int, values: Mapping[str, Any]) -> None:
    """Leaves a rank's answer for the parent; the last one counts."""
    new = Path(folder, f"{rank}.new")
    new.write_text(json.dumps({"values": values, "at": time.monotonic()}), encoding="utf-8")
    new.replace(Path(folder, f"{rank}.json"))


def run_ranks(
    platform: str,
    body: str,
    size: int,
    limit_s: float,
    *,
    environment: Mapping[str, str],
    without: Collection[int] = (),
) -> list[RankEnd]:
    """Runs a body on every rank; blocks until they have ended, and leaves no process.

    Args:
        platform: name of the platform's module.
        body: name of one of the cases.
        size: number of ranks.
        limit_s: seconds after which those that still run are killed.
        environment: what to add to theirs.
        without: ranks that are not waited for.
    """
    store = parent_store()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-accept-"))
        command = [sys.executable, "-m", "collectives.bench.acceptance.rank", platform, body]
        processes, outputs = [], []
        for rank in range(size):
            outputs.append(stack.enter_context(Path(folder, f"{rank}.output").open("w+b")))
            process = subprocess.Popen(
                [*command, str(rank), str(size), str(store.port), folder],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            processes.append(process)
        ended = _wait([one for rank, one in enumerate(processes) if rank not in without], limit_s)
        statuses = [process.poll() for process in processes]
        for process in processes:
            _end(process)
        ends = []
        for rank, process in enumerate(processes):
            answer = None
            with suppress(FileNotFoundError):
                answer = Answer(**json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")))
            seconds = 0.0 if answer is None else ended.get(process.pid, time.monotonic()) - answer.at
            outputs[rank].seek(0)
            text = outputs[rank].read().decode(errors="replace")[-_TAIL:]
            ends.append(RankEnd(statuses[rank], answer, seconds, text))
        return ends


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], limit_s: float) -> dict[int, float]:
    """Waits for processes; returns when each ended, by its number."""
    deadline = time.monotonic() + limit_s
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() < deadline:
        for process in processes:
            if process.pid not in ended and process.poll() is not None:
                ended[process.pid] = time.monotonic()
        time.sleep(_POLL_S)
    return ended
