"""Runs torch's suite with several numbers of ranks and prints a table.

::

    python -P tests/torch_suite/run.py --ranks 2,3,4,8 --backend collectives,gloo [--only all_to_all]
    python -P tests/torch_suite/run.py --files pytorch/test/distributed [--pattern 'test_c10d_*.py']

The second plays files of PyTorch's repository, and shows what passes on the backends side by side; a backend
with ``+dropin`` plays our classes in the place of torch's, too. Ends with status 1 where an outcome is not as
expected, or differs between backends.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from sources import IMPORTED_FROM

sys.path.extend(map(str, IMPORTED_FROM))

from torch_suite.expected import FAILURES, complaint
from torch_suite.player import Outcome, Player


def play(player: Player, backend: str, ranks: int, only: str) -> tuple[Counter[str], list[str], float]:
    """Returns how many tests passed and so on, the names of those that failed, and the seconds."""
    counts: Counter[str] = Counter()
    failed, seconds = [], 0.0
    player.take(backend, ranks)
    for name in player.names:
        if only not in name:
            continue
        outcome = player.play(name)
        counts[outcome.status] += 1
        seconds += outcome.seconds
        if outcome.status == "failed":
            failed.append(name)
        unexpected = complaint(backend, name, outcome.status, outcome.text)
        if unexpected:
            counts["unexpected"] += 1
            print(f"{backend}, {ranks} ranks: {unexpected}", file=sys.stderr)
    return counts, failed, seconds


def play_files(player: Player, files: Sequence[Path], backends: Sequence[str], only: str) -> int:
    """Prints a row for each file, and the tests whose outcome differs; returns their number."""
    width = max(len(file.name) for file in files) + 2
    print(f"{'':{width}}" + "".join(f"{backend:>28}" for backend in backends))
    print(f"{'file':{width}}" + f"{'passed  failed  skipped':>28}" * len(backends))
    differing = 0
    for file in files:
        outcomes: dict[str, dict[str, Outcome]] = {}
        for backend in backends:
            player.take(backend, 0, str(file.resolve()))
            outcomes[backend] = {name: player.play(name) for name in player.names if only in name}
        row = f"{file.name:{width}}"
        for found in outcomes.values():
            counts = Counter(outcome.status for outcome in found.values())
            row += f"{counts['passed']:11}{counts['failed']:8}{counts['skipped']:9}"
        print(row, flush=True)
        for name in outcomes[backends[0]]:
            here = {backend: found[name] for backend, found in outcomes.items() if name in found}
            differs = len({outcome.status for outcome in here.values()}) > 1
            differing += differs
            for backend, outcome in here.items():
                if outcome.status != "passed" and (differs or name == "import"):
                    print(f"    {name} {outcome.status} on {backend}: {_reason(outcome.text)}", flush=True)
    return differing


def _reason(text: str) -> str:
    """Returns the line of a failure that names the error: the last but for hints that torch prints."""
    lines = text.strip().splitlines() or [""]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines)[-1]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4,8", help="numbers of ranks, by commas")
    parser.add_argument("--backend", default="collectives,gloo", help="names in torch.distributed, by commas")
    parser.add_argument("--only", default="", help="plays only tests with this in their names")
    parser.add_argument("--files", type=Path, help="folder with files of PyTorch's test/distributed")
    parser.add_argument("--pattern", default="test_*.py", help="which files of that folder")
    arguments = parser.parse_args()
    if arguments.files is not None:
        files = sorted(arguments.files.glob(arguments.pattern))
        if not files:
            parser.error(f"no file {arguments.pattern} in {arguments.files}")
        player = Player()
        try:
            return 1 if play_files(player, files, arguments.backend.split(","), arguments.only) else 0
        finally:
            player.close()
    print(f"{'backend':24}{'ranks':>6}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}  failed")
    unexpected = 0
    player = Player()
    try:
        for ranks in map(int, arguments.ranks.split(",")):
            for backend in arguments.backend.split(","):
                counts, failed, seconds = play(player, backend, ranks, arguments.only)
                numbers = f"{counts['passed']:8}{counts['failed']:8}{counts['skipped']:9}{seconds:9.0f}"
                print(f"{backend:24}{ranks:6}{numbers}  {' '.join(failed)}", flush=True)
                unexpected += counts["unexpected"]
    finally:
        player.close()
    for backend in arguments.backend.split(","):
        for name, reason in FAILURES.get(backend, {}).items():
            print(f"# {backend} {name}: {reason}")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
