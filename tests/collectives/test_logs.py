"""Every log record of the package says which rank and which group it concerns."""

from __future__ import annotations

import ast
import logging
from typing import Any

import pytest
import torch
from harness import run_world
from sources import modules

import collectives as dist
from collectives.ddp import DistributedDataParallel
from collectives.logs import Log

LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


class TorchsGroup:
    group_name = "mesh"

    def rank(self) -> int:
        return 1


class Group:
    def rank(self) -> int:
        return 3

    def describe(self) -> str:
        return "host group '50 % of it' of 4"


def test_a_record_of_a_group_has_its_words_and_its_attributes(caplog: pytest.LogCaptureFixture) -> None:
    Log("collectives.part").of(Group()).warning("%d of %d", 1, 2)
    (record,) = caplog.records
    assert (record.name, record.rank, record.group) == ("collectives.part", 3, Group().describe())
    assert record.getMessage() == "[rank 3] host group '50 % of it' of 4: 1 of 2"
    assert record.funcName == "test_a_record_of_a_group_has_its_words_and_its_attributes"


def test_a_record_of_nobody_has_the_attributes_too(caplog: pytest.LogCaptureFixture) -> None:
    Log().warning("nobody's")
    Log(rank=2).warning("a rank's")
    Log().of(TorchsGroup()).warning("torch's")
    Log().of(object()).warning("no group's")
    nobody, ranks, torchs, other = caplog.records
    assert (torchs.rank, torchs.group) == (1, "group 'mesh'")
    assert (other.rank, other.getMessage()) == (-1, "no group's")
    assert (nobody.rank, nobody.group, nobody.getMessage()) == (-1, "", "nobody's")
    assert (ranks.rank, ranks.group, ranks.getMessage()) == (2, "", "[rank 2] a rank's")


def calls() -> list[tuple[str, ast.Call]]:
    """Returns the calls of the package that may log, by the place where they stand."""
    return [
        (f"{name}:{node.lineno}", node)
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]


def test_no_module_logs_beside_the_log() -> None:
    """Loggers are made in one place, and what goes round it has no attributes."""
    found = calls()
    beside = [
        place
        for place, call in found
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (
            (call.func.value.id == "logging" and call.func.attr in LEVELS | {"getLogger"})
            or (call.func.value.id == "logger" and call.func.attr in LEVELS)
        )
        and not place.startswith("collectives.logs:")
    ]
    assert not beside
    assert sum(place.startswith("collectives.store.tcp.client:") for place, _ in found) > 10


def records_of_a_life(rank: int, size: int) -> list[tuple[str, int, str, str]]:
    """Returns name, rank, group and text of what making groups and training logs."""
    found: list[Any] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("collectives")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        part = dist.new_group([1, 0], group_desc="both")
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=part)
        model(torch.ones(1, 2)).sum().backward()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return [(record.name, record.rank, record.group, record.getMessage()) for record in found]


def test_records_of_a_run() -> None:
    for rank, records in enumerate(run_world(records_of_a_life, 2)):
        assert {name for name, *_ in records} == {"collectives", "collectives.ddp.distributed"}
        for _, said_by, group, text in records:
            assert (said_by, group) == (rank, "host group '1' (both) of 2")
            assert text.startswith(f"[rank {rank}] host group '1' (both) of 2: ")
