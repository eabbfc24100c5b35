"""Whether what a group states about itself is true: a yes works with the right value, a no raises at once.

:func:`check_statements` runs on every rank of any group, on tensors of any device type, so that the tests of
each backend can call it.
"""

from __future__ import annotations

import warnings

import torch
from conformance import table
from conformance.oracle import OPS, Report, raw, values

from collectives import ProcessGroup, ReduceOp, UnsupportedOperationError
from collectives.cli.backends import data_types
from collectives.core.capabilities import OPERATIONS, REDUCING, Capabilities
from collectives.core.operations import Operand, Operation

QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
COUNT = 8
"""Elements of a part: whole bytes of the data types that pack several into one."""

Got = list[tuple[torch.Tensor, list[torch.Tensor]]]
"""The outputs that a rank got, each with the bytes of the tensors that it is made of, in rank order."""


def tensor(dtype: torch.dtype, device: str, rank: int, count: int = COUNT, salt: int = 0) -> torch.Tensor:
    """Returns a new dense tensor of any data type with the values of a rank."""
    if dtype not in QUANTIZED:
        return values(dtype, rank, count, salt).to(device)
    steps = (torch.arange(count) + rank + salt) % 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is to drop them; as long as it has them, they are moved
        return torch.quantize_per_tensor(steps.float(), 1.0, 0, dtype).to(device)


def in_bytes(given: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor."""
    if not given.is_quantized:
        return raw(given.cpu())
    return torch.empty(0, dtype=torch.uint8).set_(given.cpu().untyped_storage()).clone()


class Operations:
    """Every operation of a group by its name, on tensors of one data type; each needs all ranks."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype, device: str, op: ReduceOp) -> None:
        self.group, self.dtype, self.device, self.op = group, dtype, device, op
        self.me, self.size = group.rank(), group.size()

    def of(self, rank: int, count: int = COUNT, salt: int = 0) -> torch.Tensor:
        return tensor(self.dtype, self.device, rank, count, salt)

    def blank(self, count: int = COUNT) -> torch.Tensor:
        """Returns an output, with values that none must get."""
        return self.of(self.size + 3, count, salt=99)

    def run(self, name: str) -> Got:
        if name in {"send", "recv"}:
            return self._pass_on(sends_first=name == "send")
        return self._recv_anysource() if name == "recv_anysource" else self._collective(table.BY_NAME[name])

    def _collective(self, operation: Operation) -> Got:
        root, wide = self.size - 1, COUNT * self.size
        wanted = table.taken(operation, self.me, self.size, root)

        def lay(kind: Operand, pieces: list[torch.Tensor], whole: torch.Tensor) -> list[torch.Tensor]:
            return [whole] if kind is Operand.PARTS else pieces

        def piece(rank: int, part: int) -> torch.Tensor:
            if operation.input is Operand.PARTS:
                return in_bytes(self.of(rank, wide)).chunk(self.size)[part]
            return in_bytes(self.of(rank, salt=part))

        mine = [self.of(rank, salt=part) for rank, part in table.given(operation, self.me, self.size, root)]
        outputs, inputs = mine, []
        if not operation.in_place:
            outputs = lay(operation.output, [self.blank() for _ in wanted], self.blank(wide))
            inputs = lay(operation.input, mine, self.of(self.me, wide))
        issue = table.by_group(self.group)
        issue(operation, outputs, inputs, op=self.op, root=root, async_op=True, splits=None).wait()
        made = [[piece(*one) for one in pieces] for pieces in wanted]
        if operation.output is Operand.PARTS:
            made = [[part for parts in made for part in parts]]
        every = zip(outputs, made, strict=True)
        return [one for one in every if not operation.reduces or len(one[1]) == self.size]

    def _pass_on(self, sends_first: bool) -> Got:
        output, right, left = self.blank(), (self.me + 1) % self.size, (self.me - 1) % self.size
        if self.group.needs_batches:  # where messages of both directions wait for each other
            sends_first = self.me % 2 == 0
        calls = [lambda: self.group.send(self.of(self.me), right), lambda: self.group.recv(output, left)]
        first, second = calls if sends_first else calls[::-1]
        work = first()
        second().wait()
        work.wait()
        return [(output, [in_bytes(self.of(left))])]

    def _recv_anysource(self) -> Got:
        output, left = self.blank(), (self.me - 1) % self.size
        work = self.group.recv_anysource(output)
        self.group.send(self.of(self.me), (self.me + 1) % self.size).wait()
        work.wait()
        assert work.source_rank() == left
        return [(output, [in_bytes(self.of(left))])]


class Statements:
    """Goes through the statements of a group, and counts those that were a yes and a no."""

    def __init__(self, group: ProcessGroup, report: Report) -> None:
        self.group = group
        self.report = report
        self.offered = self.refused = 0

    def check(self, operation: str, dtype: torch.dtype, device: str, op: ReduceOp = ReduceOp.SUM) -> None:
        """Holds the group to one statement."""
        case = f"{operation} {dtype} on {device}" + (f" {op.name}" if operation in REDUCING else "")
        about = {} if operation == "barrier" else {"device": device, "dtype": dtype}
        if operation in REDUCING:
            about["op"] = op
        operations = Operations(self.group, dtype, device, op)
        if self.group.supports(operation, **about):
            self.offered += 1
            reduction = op if operation in REDUCING else None
            self.report.run(case, lambda: self._is_right(case, operations.run(operation), reduction))
            return
        self.refused += 1
        self.report.cases += 1
        try:
            operations.run(operation)
        except (UnsupportedOperationError, TypeError):
            pass
        except Exception as error:  # noqa: BLE001 - reported with the others
            self.report.failures.append(f"{case}: refused by {type(error).__name__}: {error}")
        else:
            self.report.failures.append(f"{case}: not offered by its statement, but nothing was raised")

    def in_step(self, case: str, device: str) -> None:
        """Fails where a rank sent something that was to be refused."""
        one = torch.ones(1, device=device)
        self.group.allreduce(one).wait()
        self.report.expect(case, None if one.item() == self.group.size() else f"then got {one.item()}")

    def _is_right(self, case: str, got: Got, op: ReduceOp | None) -> None:
        for place, (output, inputs) in enumerate(got):
            if op is None:
                self.report.same(f"{case}, output {place}", in_bytes(output), torch.cat(inputs))
                continue
            self.report.reduced(case, output.cpu(), [given.view(output.dtype) for given in inputs], op)


def check_statements(
    group: ProcessGroup, device: str, stated: Capabilities | None, report: type[Report] = Report
) -> tuple[int, int]:
    """Holds a group to its statements; called by all ranks.

    Args:
        group: a group of at least two ranks.
        device: device type of the tensors.
        stated: what its backend states without a group, which must be the same; ``None`` for nothing.
        report: says what the right values are.

    Returns:
        How many statements were a yes, and how many a no.
    """
    can, checked = group.capabilities, Statements(group, report(group))
    assert device in can.devices
    if stated is not None:
        assert stated.on(device) == can.on(device)
    checked.check("barrier", torch.float32, device)
    for dtype in data_types():
        for operation in OPERATIONS:
            for op in OPS if operation in REDUCING else OPS[:1]:
                if operation != "barrier":
                    checked.check(operation, dtype, device, op)
        checked.in_step(f"after {dtype}", device)
    for operation in OPERATIONS if "meta" not in can.devices else ():
        if operation != "barrier":
            checked.check(operation, torch.float32, "meta")
    checked.in_step("after tensors on meta", device)
    checked.report.finish(len(data_types()) * len(OPERATIONS))
    return checked.offered, checked.refused
