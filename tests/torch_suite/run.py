"""Runs torch's suite with several numbers of ranks and prints a table.

::

    python -P tests/torch_suite/run.py --ranks 2,3,4,8 --backend collectives,gloo [--only all_to_all]

Ends with status 1 where an outcome is not as expected.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "support"))

from torch_suite.expected import FAILURES, complaint
from torch_suite.player import Player


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


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4,8", help="numbers of ranks, by commas")
    parser.add_argument("--backend", default="collectives,gloo", help="names in torch.distributed, by commas")
    parser.add_argument("--only", default="", help="plays only tests with this in their names")
    arguments = parser.parse_args()
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
