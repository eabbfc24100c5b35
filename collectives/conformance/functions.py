"""Torch's functions on tensors of one data type, compared with the oracle.

What examines a function calls it with several counts, layouts and roots, and yields the differences that it
finds. All ranks call it with the same arguments. The collectives are examined by their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist

from collectives.conformance import oracle
from collectives.conformance.oracle import BYTES_ONLY, Placed, close, raw, reduced, same
from collectives.core.operations import ALL_TO_ALL_SINGLE, GATHER, OPERATIONS, Operand, Operation
from collectives.core.types import ReduceOp

_DENSE = ((0, "dense"), (1, "scalar"), (7, "dense"), (1009, "dense"), (100_003, "dense"))
_OFFSET = ((131, "offset"),)
_STRIDED = ((65, "strided"), (60, "transposed"), (1, "strided"))


@dataclass
class Trial:
    """What a function is tried with.

    Attributes:
        rank: this rank.
        size: number of ranks.
        dtype: data type of the tensors.
        op: the reduction, for functions that reduce.
        strided: whether tensors lie in memory with gaps or transposed.
        device: where the tensors are.
        case: the case that is under way, in words.
    """

    rank: int
    size: int
    dtype: torch.dtype
    op: ReduceOp
    strided: bool = False
    device: str = "cpu"
    case: str = ""

    def cases(self) -> Iterator[tuple[int, int, str, bool]]:
        """Yields turn, count, layout and whether the call is asynchronous."""
        dense = _DENSE if self.dtype in BYTES_ONLY else (*_DENSE, *_OFFSET)
        for turn, (count, layout) in enumerate(_STRIDED if self.strided else dense):
            asynchronous = turn % 2 == 0
            self.case = f"{count} elements, {layout}, {'async_op=True' if asynchronous else 'async_op=False'}"
            yield turn, count, layout, asynchronous

    def of(self, rank: int, count: int, salt: int = 0) -> torch.Tensor:
        """Returns what a rank gives, flat, on the CPU."""
        return oracle.values(self.dtype, rank, count, salt)

    def place(self, flat: torch.Tensor, layout: str = "dense") -> Placed:
        """Returns a tensor on the device with the values of a flat one."""
        return oracle.place(flat, layout).on(self.device)

    def blank(self, count: int, layout: str = "dense") -> Placed:
        """Returns an output with values that none must get."""
        return self.place(oracle.values(self.dtype, 77, count, salt=99), layout)

    @property
    def torch_op(self) -> torch_dist.ReduceOp:
        """The reduction as torch's."""
        if self.op.factor is not None:
            return torch._C._distributed_c10d._make_nccl_premul_sum(self.op.factor)
        op: torch_dist.ReduceOp = getattr(torch_dist.ReduceOp, self.op.name)
        return op

    @property
    def needs_batches(self) -> bool:
        """Whether messages that all ranks send before they receive may wait for each other, as NCCL's do."""
        assert torch_dist.group.WORLD is not None  # noqa: S101
        return torch_dist.group.WORLD._get_backend(torch.device(self.device)).supports_coalescing

    def differs(self, got: torch.Tensor, inputs: list[torch.Tensor]) -> str | None:
        """Compares with the reduction of the ranks' inputs; backends may round and order as they like.

        The mean of integers may also be that of a sum that wrapped, as NCCL's is.
        """
        difference = close(got, reduced(inputs, self.op), inputs, self.op)
        if difference is not None and self.op.name == "AVG" and self.dtype in oracle.INTS:
            return difference if same(got, oracle.wrapped_mean(inputs)) else None
        return difference


Differences = Iterator[str | None]
Examine = Callable[[Trial], Differences]


def _done(work: torch_dist.Work | None) -> None:
    if work is not None:
        work.wait()


_BY_RANK = {Operand.EACH, Operand.PARTS}


def _collective(operation: Operation, trial: Trial) -> Differences:
    """Examines the function of a collective by the collective's row."""
    function = getattr(torch_dist, operation.name)
    for turn, count, layout, asynchronous in trial.cases():
        root = turn % trial.size
        uneven = (
            turn % 2 if operation is ALL_TO_ALL_SINGLE else 0
        )  # rank r sends r elements more to each rank
        counts = [count + uneven * rank for rank in range(trial.size)]
        for_all = operation.input not in _BY_RANK
        shares = [trial.of(trial.rank, counts[trial.rank], to) for to in range(1 if for_all else trial.size)]
        received = [trial.of(rank, n, 0 if for_all else trial.rank) for rank, n in enumerate(counts)]
        given = _placed(trial, operation.output if operation.in_place else operation.input, shares, layout)
        outputs = given
        if not operation.in_place:
            numbers = counts if operation.output in _BY_RANK else [count]
            blank = [oracle.values(trial.dtype, 77, number, salt=99) for number in numbers]
            outputs = _placed(trial, operation.output, blank, layout)
        arguments = _arguments(operation, trial, outputs, given, root)
        if uneven:
            arguments += [counts, [counts[trial.rank]] * trial.size]
        _done(function(*arguments, async_op=asynchronous))
        if operation.writes != "root" or trial.rank == root:  # torch leaves open what the others have then
            yield from _compared(operation, trial, outputs, received, root)
        yield _margin(*outputs, *given)


def _placed(trial: Trial, kind: Operand, parts: Sequence[torch.Tensor], layout: str) -> list[Placed]:
    """Returns the tensors of an operand; one with parts is dense, as torch asks for it."""
    if kind is Operand.PARTS:
        return [trial.place(torch.cat([raw(part) for part in parts]).view(trial.dtype))]
    return [trial.place(part, layout) for part in parts]


def _arguments(
    operation: Operation, trial: Trial, outputs: Sequence[Placed], given: Sequence[Placed], root: int
) -> list[Any]:
    """Returns the arguments of torch's function; lists of rooted ones are given on the root alone."""
    arguments: list[Any] = []
    for kind, operand in ((operation.output, outputs), (operation.input, given)):
        if kind is Operand.EACH:
            absent = operation.rooted and trial.rank != root
            arguments.append(None if absent else [one.tensor for one in operand])
        elif kind is not Operand.NONE:
            arguments.append(operand[0].tensor)
    if operation is GATHER:
        arguments.reverse()
    return arguments + [root] * operation.rooted + [trial.torch_op] * operation.reduces


def _compared(
    operation: Operation, trial: Trial, outputs: Sequence[Placed], received: list[torch.Tensor], root: int
) -> Differences:
    """Compares what a collective has written with what the ranks gave this one."""
    if operation.reduces:
        yield trial.differs(outputs[0].tensor, received)
    elif operation.output is Operand.PARTS:
        begin = 0
        for part in received:
            yield same(outputs[0].tensor[begin : begin + part.numel()], part)
            begin += part.numel()
    elif operation.output is Operand.EACH:
        yield from (same(one.tensor, part) for one, part in zip(outputs, received, strict=True))
    else:
        yield same(outputs[0].tensor, received[root])


def _messages(trial: Trial, *, tagged: bool = False) -> Differences:
    following, previous = (trial.rank + 1) % trial.size, (trial.rank - 1) % trial.size
    receives_first = bool(trial.rank % 2) and trial.needs_batches
    for turn, count, layout, _ in trial.cases():
        output = trial.blank(count, layout)
        tag = turn + 1 if tagged else 0
        if receives_first:
            torch_dist.recv(output.tensor, previous, tag=tag)
        outgoing = torch_dist.isend(
            trial.place(trial.of(trial.rank, count), layout).tensor, following, tag=tag
        )
        if not receives_first:
            torch_dist.recv(output.tensor, previous, tag=tag)
        _done(outgoing)
        yield same(output.tensor, trial.of(previous, count))
        yield _margin(output)


def _first_from_any_rank(trial: Trial) -> None:
    """Receives one message from any rank, or raises on all ranks: that it is refused, rank 0 alone sees."""
    store, key = torch_dist.distributed_c10d._get_default_store(), f"any rank/{trial.dtype}/{trial.strided}"
    if trial.rank == 0:
        try:
            work = torch_dist.irecv(trial.blank(1).tensor)
        except Exception as error:
            store.set(key, f"refused: {error}")
            raise
        store.set(key, "begun")
        _done(work)
        return
    said = bytes(store.get(key)).decode()
    if said != "begun":
        raise NotImplementedError(said)
    if trial.rank == 1:
        torch_dist.send(trial.place(trial.of(1, 1)).tensor, 0)


def _recv_any_source(trial: Trial) -> Differences:
    _first_from_any_rank(trial)
    for _, count, layout, _ in trial.cases():
        if trial.rank:
            torch_dist.send(trial.place(trial.of(trial.rank, count), layout).tensor, 0)
        seen = set()
        for _ in range(trial.size - 1 if trial.rank == 0 else 0):
            output = trial.blank(count, layout)
            source = torch_dist.recv(output.tensor)
            seen.add(source)
            yield same(output.tensor, trial.of(source, count))
            yield _margin(output)
        if trial.rank == 0 and seen != set(range(1, trial.size)):
            yield f"messages were received from ranks {sorted(seen)}"
        torch_dist.barrier()  # else the next message of a rank could come before another's first


def _batch_isend_irecv(trial: Trial) -> Differences:
    following, previous = (trial.rank + 1) % trial.size, (trial.rank - 1) % trial.size
    for _, count, layout, _ in trial.cases():
        output = trial.blank(count, layout)
        mine = trial.place(trial.of(trial.rank, count), layout)
        operations = [
            torch_dist.P2POp(torch_dist.isend, mine.tensor, following),
            torch_dist.P2POp(torch_dist.irecv, output.tensor, previous),
        ]
        for work in torch_dist.batch_isend_irecv(operations):
            work.wait()
        yield same(output.tensor, trial.of(previous, count))
        yield _margin(output)


def _barrier(trial: Trial) -> Differences:  # noqa: ARG001
    torch_dist.barrier()
    _done(torch_dist.barrier(async_op=True))
    yield None


def _objects(trial: Trial) -> Differences:
    gathered: list[object] = [None] * trial.size
    torch_dist.all_gather_object(gathered, {"rank": trial.rank, "text": "x" * trial.rank})
    if gathered != [{"rank": rank, "text": "x" * rank} for rank in range(trial.size)]:
        yield f"all_gather_object gave {gathered}"
    shared = [("from", trial.rank)]
    torch_dist.broadcast_object_list(shared, src=trial.size - 1)
    if shared != [("from", trial.size - 1)]:
        yield f"broadcast_object_list gave {shared}"


def _margin(*placed: Placed) -> str | None:
    return (
        None if all(one.margin_is_whole() for one in placed) else "elements outside of a tensor were written"
    )


_COLLECTIVES = sorted(
    (one for one in OPERATIONS if one.methods and one.output not in {Operand.NONE, Operand.SEVERAL}),
    key=lambda one: one.name,
)

REDUCING: dict[str, Examine] = {one.name: partial(_collective, one) for one in _COLLECTIVES if one.reduces}
"""Functions that compute."""

MOVING: dict[str, Examine] = {
    one.name: partial(_collective, one) for one in _COLLECTIVES if not one.reduces
} | {
    "batch_isend_irecv": _batch_isend_irecv,
    "isend, recv": _messages,
    "isend, recv, tagged": partial(_messages, tagged=True),
    "recv from any rank": _recv_any_source,
}
"""Functions that hand data on as it is."""

TAKING_LAYOUTS = frozenset({*REDUCING, *MOVING}) - {
    one.name for one in _COLLECTIVES if Operand.PARTS in {one.output, one.input}
}
"""Functions that take tensors with gaps; torch asks for contiguous ones in the others."""

PLAIN: dict[str, Examine] = {"barrier": _barrier, "object collectives": _objects}
"""Functions without a tensor of the user's."""
