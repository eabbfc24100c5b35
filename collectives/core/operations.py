"""The collectives: one row for each, and the record of one call of it.

Everything that must know all collectives iterates over :data:`OPERATIONS`: checks of arguments, names for
profilers, comparisons of ranks, capabilities, torch's front end, conformance, benches and tests.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

import torch

from collectives._native import COLLECTIVES
from collectives.core.types import ReduceOp


class Operand(enum.Enum):
    """What a collective writes or reads on a rank."""

    NONE = "nothing"
    ONE = "one tensor"
    EACH = "a list of one tensor for each rank"
    PARTS = "one tensor with a part for each rank"
    SEVERAL = "a list of any tensors"


@dataclass(frozen=True, eq=False)
class Operation:
    """A collective.

    Attributes:
        name: of its user function, by which messages and capabilities call it.
        methods: names of the method of a group, as ``torch.distributed.ProcessGroup`` has had it; none where
            torch has no such collective.
        output: what it writes; what it reads as well where it has no input.
        input: what it only reads.
        reduces: whether it computes.
        rooted: whether one rank is special.
        writes: the ranks that it writes on: ``"all"``, the ``"root"``, or all ``"others"``.
        collective: name of the collective of the core that carries it out, and of its profiler events; its
            own name where empty.
        offered_as: the operation that must be offered for it; itself where empty.
        in_place: whether it reads what it writes.
        lists: whether an operand is a list of one tensor for each rank.
        opcode: number of the core's collective.
        handler: name of the method by which a backend carries it out, unless it takes all calls as one.
    """

    name: str
    methods: tuple[str, ...]
    output: Operand
    input: Operand = Operand.NONE
    reduces: bool = False
    rooted: bool = False
    writes: Literal["all", "root", "others"] = "all"
    collective: str = ""
    offered_as: str = ""
    in_place: bool = field(init=False)
    lists: bool = field(init=False)
    opcode: int = field(init=False)
    handler: str = field(init=False)

    def __post_init__(self) -> None:
        for name in ("collective", "offered_as"):
            object.__setattr__(self, name, getattr(self, name) or self.name)
        object.__setattr__(self, "in_place", self.input is Operand.NONE)
        object.__setattr__(self, "lists", Operand.EACH in {self.output, self.input})
        object.__setattr__(self, "opcode", COLLECTIVES[self.collective])
        object.__setattr__(self, "handler", f"_{self.name}")


_ONE, _EACH, _PARTS = Operand.ONE, Operand.EACH, Operand.PARTS

ALL_REDUCE = Operation("all_reduce", ("allreduce",), _ONE, reduces=True)
ALL_REDUCE_COALESCED = Operation(
    "all_reduce_coalesced",
    ("allreduce_coalesced",),
    Operand.SEVERAL,
    reduces=True,
    collective="all_reduce",
    offered_as="all_reduce",
)
ALL_REDUCE_INTO_TENSOR = Operation(
    "all_reduce_into_tensor", (), _ONE, _ONE, reduces=True, collective="all_reduce"
)
BROADCAST = Operation("broadcast", ("broadcast",), _ONE, rooted=True, writes="others")
REDUCE = Operation("reduce", ("reduce",), _ONE, reduces=True, rooted=True, writes="root")
ALL_GATHER = Operation("all_gather", ("allgather",), _EACH, _ONE)
ALL_GATHER_INTO_TENSOR = Operation(
    "all_gather_into_tensor", ("all_gather_single", "_allgather_base"), _PARTS, _ONE, collective="all_gather"
)
GATHER = Operation("gather", ("gather",), _EACH, _ONE, rooted=True, writes="root")
SCATTER = Operation("scatter", ("scatter",), _ONE, _EACH, rooted=True)
REDUCE_SCATTER = Operation("reduce_scatter", ("reduce_scatter",), _ONE, _EACH, reduces=True)
REDUCE_SCATTER_TENSOR = Operation(
    "reduce_scatter_tensor",
    ("reduce_scatter_single", "_reduce_scatter_base"),
    _ONE,
    _PARTS,
    reduces=True,
    collective="reduce_scatter",
)
ALL_TO_ALL = Operation("all_to_all", ("alltoall",), _EACH, _EACH)
ALL_TO_ALL_SINGLE = Operation(
    "all_to_all_single", ("all_to_all_single", "alltoall_base"), _PARTS, _PARTS, collective="all_to_all"
)
BARRIER = Operation("barrier", ("barrier",), Operand.NONE)

OPERATIONS = tuple(value for value in list(globals().values()) if isinstance(value, Operation))
"""All collectives."""


@dataclass(frozen=True)
class Coalesced:
    """Several collectives of one kind in one call of a group's method, which returns their one Work.

    Attributes:
        methods: names of the method, as ``torch.distributed.ProcessGroup`` has had it.
        base: the collective; what a group can do with it, it can do with several.
    """

    methods: tuple[str, ...]
    base: Operation


COALESCED = (
    Coalesced(("allgather_coalesced",), ALL_GATHER),
    Coalesced(("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), ALL_GATHER_INTO_TENSOR),
    Coalesced(("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), REDUCE_SCATTER_TENSOR),
)
"""The methods for several collectives; several all-reduces are one collective, with a row of its own."""

METHODS = (
    *(operation.methods for operation in OPERATIONS if operation.methods),
    *(several.methods for several in COALESCED),
)
"""The names of each method of a group that issues collectives, as torch has had them."""


@dataclass(slots=True)
class Call:
    """A collective that a rank issues, with arguments that were checked.

    Attributes:
        operation: the collective.
        outputs: the tensors that it writes, and reads where it is in place; none of a gather but on the root.
        inputs: the tensors that it only reads; none of a scatter but on the root.
        op: the reduction; the sum where it computes nothing.
        root: the root, counted within the group.
        timeout: time limit; ``None`` for the group's.
        async_op: whether the caller goes on before it is done; ``False`` lets a group use the caller's thread
            or stream. The Work is to be waited for all the same.
        output_splits: elements of each rank's part of an output that has parts; ``None`` for equal ones.
        input_splits: the same for the input.
        device: of a barrier: where streams are to wait for it; ``None`` for the current device.
    """

    operation: Operation
    outputs: Sequence[torch.Tensor] = ()
    inputs: Sequence[torch.Tensor] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    timeout: timedelta | None = None
    async_op: bool = True
    output_splits: Sequence[int] | None = None
    input_splits: Sequence[int] | None = None
    device: torch.device | int | None = None

    @property
    def output(self) -> torch.Tensor:
        """The first output."""
        return self.outputs[0]

    @property
    def input(self) -> torch.Tensor:
        """The first input."""
        return self.inputs[0]

    @property
    def tensor(self) -> torch.Tensor:
        """The operand that every rank has, of the size of one rank's share; of lists the first entry."""
        operation = self.operation
        return self.outputs[0] if operation.output is _ONE or operation.in_place else self.inputs[0]

    @property
    def shown(self) -> Sequence[torch.Tensor]:
        """The tensors by which messages and flight records describe it: those that tell each rank's size."""
        operation = self.operation
        if operation is GATHER or (operation.input is _EACH and not operation.rooted):
            return self.inputs
        return self.outputs

    @property
    def detail(self) -> str:
        """Reduction and root, for messages."""
        parts = [self.op.name] if self.operation.reduces else []
        return ", ".join([*parts, f"root {self.root}"] if self.operation.rooted else parts)

    def writes_on(self, rank: int) -> bool:
        """Returns whether it writes on a rank."""
        return self.operation.writes == "all" or (self.root == rank) == (self.operation.writes == "root")

    def as_(
        self,
        operation: Operation,
        outputs: Sequence[torch.Tensor] = (),
        inputs: Sequence[torch.Tensor] = (),
    ) -> Call:
        """Returns a call of another operation with the same reduction, root, time limit and manner."""
        return replace(
            self, operation=operation, outputs=outputs, inputs=inputs, output_splits=None, input_splits=None
        )
