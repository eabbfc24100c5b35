"""Torch's functions on tensors of one data type, compared with the oracle.

Each function of this module named as one of ``torch.distributed`` calls it with several counts, layouts and
roots, and yields the differences that it finds. All ranks call it with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from collectives.conformance import oracle
from collectives.conformance.oracle import BYTES_ONLY, Placed, close, reduced, same
from collectives.core.types import ReduceOp

__all__ = ["MOVING", "PLAIN", "REDUCING", "TAKING_LAYOUTS", "Call"]

_DENSE = ((0, "dense"), (1, "scalar"), (7, "dense"), (1009, "dense"), (100_003, "dense"))
_OFFSET = ((131, "offset"),)
_STRIDED = ((65, "strided"), (60, "transposed"), (1, "strided"))


@dataclass
class Call:
    """What a function is called with.

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


def _done(work: torch_dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _all_reduce(call: Call) -> Differences:
    for _, count, layout, asynchronous in call.cases():
        inputs = [call.of(rank, count) for rank in range(call.size)]
        mine = call.place(inputs[call.rank], layout)
        _done(torch_dist.all_reduce(mine.tensor, call.torch_op, async_op=asynchronous))
        yield call.differs(mine.tensor, inputs)
        yield _margin(mine)


def _reduce(call: Call) -> Differences:
    for turn, count, layout, asynchronous in call.cases():
        root = turn % call.size
        inputs = [call.of(rank, count) for rank in range(call.size)]
        mine = call.place(inputs[call.rank], layout)
        _done(torch_dist.reduce(mine.tensor, root, call.torch_op, async_op=asynchronous))
        if call.rank == root:  # torch leaves open what the others have then
            yield call.differs(mine.tensor, inputs)
        yield _margin(mine)


def _reduce_scatter(call: Call) -> Differences:
    for _, count, layout, asynchronous in call.cases():
        given = [call.place(call.of(call.rank, count, part), layout) for part in range(call.size)]
        output = call.blank(count, layout)
        tensors = [one.tensor for one in given]
        _done(torch_dist.reduce_scatter(output.tensor, tensors, call.torch_op, async_op=asynchronous))
        yield call.differs(output.tensor, [call.of(rank, count, call.rank) for rank in range(call.size)])
        yield _margin(output, *given)


def _reduce_scatter_tensor(call: Call) -> Differences:
    for _, count, _, asynchronous in call.cases():
        inputs = [call.of(rank, count * call.size) for rank in range(call.size)]
        output = call.blank(count)
        _done(
            torch_dist.reduce_scatter_tensor(
                output.tensor, call.place(inputs[call.rank]).tensor, call.torch_op, async_op=asynchronous
            )
        )
        part = slice(call.rank * count, (call.rank + 1) * count)
        yield call.differs(output.tensor, [each[part] for each in inputs])


def _broadcast(call: Call) -> Differences:
    for turn, count, layout, asynchronous in call.cases():
        root = turn % call.size
        mine = call.place(call.of(call.rank, count), layout)
        _done(torch_dist.broadcast(mine.tensor, root, async_op=asynchronous))
        yield same(mine.tensor, call.of(root, count))
        yield _margin(mine)


def _all_gather(call: Call) -> Differences:
    for _, count, layout, asynchronous in call.cases():
        outputs = [call.blank(count, layout) for _ in range(call.size)]
        mine = call.place(call.of(call.rank, count), layout)
        tensors = [output.tensor for output in outputs]
        _done(torch_dist.all_gather(tensors, mine.tensor, async_op=asynchronous))
        for rank, output in enumerate(outputs):
            yield same(output.tensor, call.of(rank, count))
        yield _margin(mine, *outputs)


def _all_gather_into_tensor(call: Call) -> Differences:
    for _, count, _, asynchronous in call.cases():
        output, mine = call.blank(count * call.size), call.place(call.of(call.rank, count)).tensor
        _done(torch_dist.all_gather_into_tensor(output.tensor, mine, async_op=asynchronous))
        yield from _parts(output.tensor, [call.of(rank, count) for rank in range(call.size)])


def _gather(call: Call) -> Differences:
    for turn, count, layout, asynchronous in call.cases():
        root = turn % call.size
        outputs = [call.blank(count, layout) for _ in range(call.size)] if call.rank == root else []
        mine = call.place(call.of(call.rank, count), layout)
        tensors = [output.tensor for output in outputs] or None
        _done(torch_dist.gather(mine.tensor, tensors, root, async_op=asynchronous))
        for rank, output in enumerate(outputs):
            yield same(output.tensor, call.of(rank, count))
        yield _margin(mine, *outputs)


def _scatter(call: Call) -> Differences:
    for turn, count, layout, asynchronous in call.cases():
        root = turn % call.size
        given = [call.place(call.of(root, count, rank), layout) for rank in range(call.size)]
        output = call.blank(count, layout)
        tensors = [one.tensor for one in given] if call.rank == root else None
        _done(torch_dist.scatter(output.tensor, tensors, root, async_op=asynchronous))
        yield same(output.tensor, call.of(root, count, call.rank))
        yield _margin(output, *given)


def _all_to_all(call: Call) -> Differences:
    for _, count, layout, asynchronous in call.cases():
        outputs = [call.blank(count, layout) for _ in range(call.size)]
        given = [call.place(call.of(call.rank, count, rank), layout) for rank in range(call.size)]
        _done(
            torch_dist.all_to_all(
                [output.tensor for output in outputs], [one.tensor for one in given], async_op=asynchronous
            )
        )
        for rank, output in enumerate(outputs):
            yield same(output.tensor, call.of(rank, count, call.rank))
        yield _margin(*outputs, *given)


def _all_to_all_single(call: Call) -> Differences:
    for turn, count, _, asynchronous in call.cases():
        uneven = turn % 2  # rank r sends r elements more to each rank
        counts = [count + uneven * rank for rank in range(call.size)]
        output = call.blank(sum(counts))
        mine = call.place(call.of(call.rank, counts[call.rank] * call.size)).tensor
        received = counts if uneven else None
        sent = [counts[call.rank]] * call.size if uneven else None
        _done(torch_dist.all_to_all_single(output.tensor, mine, received, sent, async_op=asynchronous))
        wanted = []
        for rank, each in enumerate(counts):
            theirs = call.of(rank, each * call.size)
            wanted.append(theirs[call.rank * each : (call.rank + 1) * each])
        yield from _parts(output.tensor, wanted)


def _send_recv(call: Call) -> Differences:
    return _messages(call, lambda turn: 0)  # noqa: ARG005


def _send_recv_tagged(call: Call) -> Differences:
    return _messages(call, lambda turn: turn + 1)


def _messages(call: Call, tag_of: Callable[[int], int]) -> Differences:
    following, previous = (call.rank + 1) % call.size, (call.rank - 1) % call.size
    receives_first = bool(call.rank % 2) and call.needs_batches
    for turn, count, layout, _ in call.cases():
        output = call.blank(count, layout)
        tag = tag_of(turn)
        if receives_first:
            torch_dist.recv(output.tensor, previous, tag=tag)
        outgoing = torch_dist.isend(call.place(call.of(call.rank, count), layout).tensor, following, tag=tag)
        if not receives_first:
            torch_dist.recv(output.tensor, previous, tag=tag)
        _done(outgoing)
        yield same(output.tensor, call.of(previous, count))
        yield _margin(output)


def _first_from_any_rank(call: Call) -> None:
    """Receives one message from any rank, or raises on all ranks: that it is refused, rank 0 alone sees."""
    store, key = torch_dist.distributed_c10d._get_default_store(), f"any rank/{call.dtype}/{call.strided}"
    if call.rank == 0:
        try:
            work = torch_dist.irecv(call.blank(1).tensor)
        except Exception as error:
            store.set(key, f"refused: {error}")
            raise
        store.set(key, "begun")
        _done(work)
        return
    said = bytes(store.get(key)).decode()
    if said != "begun":
        raise NotImplementedError(said)
    if call.rank == 1:
        torch_dist.send(call.place(call.of(1, 1)).tensor, 0)


def _recv_any_source(call: Call) -> Differences:
    _first_from_any_rank(call)
    for _, count, layout, _ in call.cases():
        if call.rank:
            torch_dist.send(call.place(call.of(call.rank, count), layout).tensor, 0)
        seen = set()
        for _ in range(call.size - 1 if call.rank == 0 else 0):
            output = call.blank(count, layout)
            source = torch_dist.recv(output.tensor)
            seen.add(source)
            yield same(output.tensor, call.of(source, count))
            yield _margin(output)
        if call.rank == 0 and seen != set(range(1, call.size)):
            yield f"messages were received from ranks {sorted(seen)}"
        torch_dist.barrier()  # else the next message of a rank could come before another's first


def _batch_isend_irecv(call: Call) -> Differences:
    following, previous = (call.rank + 1) % call.size, (call.rank - 1) % call.size
    for _, count, layout, _ in call.cases():
        output = call.blank(count, layout)
        mine = call.place(call.of(call.rank, count), layout)
        operations = [
            torch_dist.P2POp(torch_dist.isend, mine.tensor, following),
            torch_dist.P2POp(torch_dist.irecv, output.tensor, previous),
        ]
        for work in torch_dist.batch_isend_irecv(operations):
            work.wait()
        yield same(output.tensor, call.of(previous, count))
        yield _margin(output)


def _barrier(call: Call) -> Differences:  # noqa: ARG001
    torch_dist.barrier()
    _done(torch_dist.barrier(async_op=True))
    yield None


def _objects(call: Call) -> Differences:
    gathered: list[object] = [None] * call.size
    torch_dist.all_gather_object(gathered, {"rank": call.rank, "text": "x" * call.rank})
    if gathered != [{"rank": rank, "text": "x" * rank} for rank in range(call.size)]:
        yield f"all_gather_object gave {gathered}"
    shared = [("from", call.rank)]
    torch_dist.broadcast_object_list(shared, src=call.size - 1)
    if shared != [("from", call.size - 1)]:
        yield f"broadcast_object_list gave {shared}"


def _parts(got: torch.Tensor, wanted: list[torch.Tensor]) -> Differences:
    begin = 0
    for part in wanted:
        yield same(got[begin : begin + part.numel()], part)
        begin += part.numel()


def _margin(*placed: Placed) -> str | None:
    return (
        None if all(one.margin_is_whole() for one in placed) else "elements outside of a tensor were written"
    )


Examine = Callable[[Call], Differences]

REDUCING: dict[str, Examine] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
}
"""Functions that compute."""

MOVING: dict[str, Examine] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "batch_isend_irecv": _batch_isend_irecv,
    "broadcast": _broadcast,
    "gather": _gather,
    "isend, recv": _send_recv,
    "isend, recv, tagged": _send_recv_tagged,
    "recv from any rank": _recv_any_source,
    "scatter": _scatter,
}
"""Functions that hand data on as it is."""

TAKING_LAYOUTS = frozenset({*REDUCING, *MOVING}) - {
    "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor",
}  # fmt: skip
"""Functions that take tensors with gaps; torch asks for contiguous ones in the others."""

PLAIN: dict[str, Examine] = {"barrier": _barrier, "object collectives": _objects}
"""Functions without a tensor of the user's."""
