"""What ranks tell each other when they meet."""

from __future__ import annotations

from typing import Any

import torch
from harness import run_ranks

from collectives import ProcessGroup
from collectives.ddp.agreement import gather_records


def gathered(group: ProcessGroup) -> list[dict[str, Any]]:
    groups = [f"group {number}" for number in range(1000 * group.rank())]
    return gather_records(group, {"groups": groups, "iter": group.rank()}, torch.device("cpu"))


def test_records_may_be_of_any_length() -> None:
    for records in run_ranks(gathered, 3, backend="host"):
        assert [(len(record["groups"]), record["iter"]) for record in records] == [
            (0, 0),
            (1000, 1),
            (2000, 2),
        ]
