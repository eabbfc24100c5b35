"""The paper's table 1, training systems by scheme, with later ones; every statement with its source."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from collectives.bench.core.records import Column, Table

__all__ = ["SCHEMES", "SYSTEMS", "System", "systems_json", "systems_table"]

SCHEMES = {
    "S": "synchronous update",
    "A": "asynchronous update",
    "C": "cross-iteration",
    "I": "intra-iteration",
    "D": "data parallel",
    "M": "model parallel",
}
"""The schemes by letter, as section 7 of the paper explains them."""

_PAPER = "Li et al., VLDB 2020, table 1"


@dataclass(frozen=True, slots=True)
class System:
    """A system.

    Attributes:
        name: its name.
        schemes: letters of :data:`SCHEMES`.
        source: where that stands.
        year: of that source.
    """

    name: str
    schemes: str
    source: str
    year: int = 2020


_OF_PAPER = {
    "PyTorch DDP": "SID",
    "PyTorch RPC": "ACIDM",
    "TensorFlow MultiWorkerMirrored": "SID",
    "TensorFlow ParameterServer": "AIDM",
    "Mesh TensorFlow": "SIDM",
    "GPipe": "SCM",
    "Horovod": "SID",
    "GradientFlow": "SID",
    "SlowMo": "AID",
    "PipeDream": "SCIDM",
    "ZeRO": "SIDM",
    "Parallax": "SAIDM",
    "ByteScheduler": "SCID",
    "TicTac": "AIDM",
    "PACE": "SID",
}

SYSTEMS = (
    *(System(name, schemes, _PAPER) for name, schemes in _OF_PAPER.items()),
    System("BytePS", "SAID", "Jiang et al., OSDI 2020: synchronous and asynchronous data parallel training"),
    System("GSPMD", "SIDM", "Xu et al., arXiv 2105.04663: sharding of one step over devices", 2021),
    System(
        "ZeRO-Infinity",
        "SIDM",
        "Rajbhandari et al., SC 2021: partitioned states",
        2021,
    ),
    System(
        "Megatron-LM",
        "SIDM",
        "Narayanan et al., SC 2021: tensor, pipeline and data parallelism, with flushes",
        2021,
    ),
    System("Alpa", "SIDM", "Zheng et al., OSDI 2022: intra- and inter-operator parallelism", 2022),
    System("PyTorch FSDP", "SIDM", "Zhao et al., VLDB 2023: parameters sharded, gathered by layer", 2023),
    System("DiLoCo", "AID", "Douillard et al., arXiv 2311.08105: local steps, as the paper has SlowMo", 2023),
    System("TorchTitan", "SIDM", "Liang et al., arXiv 2410.06511: FSDP, tensor and pipeline", 2024),
    System(
        "collectives",
        "SID",
        "its ddp: gradients averaged within the backward pass; PostLocalSGDOptimizer averages parameters",
        2026,
    ),
)
"""Those of the paper in its order, then later ones."""


def systems_table() -> Table:
    """Returns the table, with what its letters mean."""
    letters = "; ".join(f"{letter}: {words}" for letter, words in SCHEMES.items())
    columns = [
        Column("system", "", -32),
        Column("year", "", 5),
        *(Column(f"  {letter}", "", 4) for letter in SCHEMES),
        Column("   source", "", -10),
    ]
    rows = [
        [
            system.name,
            str(system.year),
            *("x" if letter in system.schemes else "" for letter in SCHEMES),
            f"   {system.source}",
        ]
        for system in SYSTEMS
    ]
    return Table(f"table1: {letters}", columns, rows)


def systems_json() -> list[dict[str, Any]]:
    """Returns the table as plain values."""
    return [asdict(system) for system in SYSTEMS]
