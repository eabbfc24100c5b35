"""Ranks as processes that examine one function and data type after the other, and what became of each.

A question is a function and a data type. Ranks that hang or die, or that no longer agree, are replaced by new
ones before the next question.
"""

from __future__ import annotations

import enum
import importlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as c10d

from collectives.conformance.functions import MOVING, PLAIN, REDUCING, TAKING_LAYOUTS, Trial
from collectives.conformance.oracle import BYTES_ONLY, DTYPES, OPS
from collectives.core.capabilities import Capabilities
from collectives.core.types import ReduceOp
from collectives.ranks.cuda_devices import take_cuda_device
from collectives.ranks.processes import SpawnedRanks, Unanswered, commands
from collectives.registry.backends import capabilities_of


class Status(str, enum.Enum):
    """What became of a question."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    WRONG = "wrong"
    HANG = "hang"


@dataclass(frozen=True)
class Question:
    """A function and a data type.

    Attributes:
        function: name of the function.
        dtype: the data type; ``None`` where the user gives no tensor.
        strided: whether tensors lie in memory with gaps or transposed.
    """

    function: str
    dtype: torch.dtype | None
    strided: bool = False

    @property
    def title(self) -> str:
        """The function, and how its tensors lie."""
        return f"{self.function}, strided" if self.strided else self.function

    @property
    def ops(self) -> tuple[ReduceOp, ...]:
        """The reductions that are defined for the data type; one of no meaning for other functions."""
        if self.function not in REDUCING or self.dtype is None:
            return (ReduceOp.SUM,)
        stated = capabilities_of("host")
        names = stated.reductions.get(self.dtype, frozenset()) if stated is not None else frozenset()
        return tuple(op for op in OPS if op.name in names)


@dataclass(frozen=True)
class Answer:
    """What became of a question.

    Attributes:
        status: the status; ``OK`` where at least one reduction is offered, and all that are give the right
            values.
        details: for each reduction that is not ``OK``, or for the function, why.
        offered: number of reductions that are offered; 1 for a function that does not reduce.
        asked: number of reductions that were tried.
    """

    status: Status
    details: dict[str, str]
    offered: int
    asked: int


def questions(
    dtypes: Sequence[torch.dtype] | None = None, functions: Sequence[str] | None = None
) -> list[Question]:
    """Returns the questions.

    Args:
        dtypes: data types; ``None`` for all that the oracle knows.
        functions: names of functions; ``None`` for all.
    """
    wanted = [
        *(Question(name, None) for name in PLAIN),
        *(Question(name, dtype) for name in REDUCING for dtype in DTYPES),
        *(Question(name, dtype) for name in MOVING for dtype in (*DTYPES, *BYTES_ONLY)),
        *(
            Question(name, dtype, strided=True)
            for name in (*REDUCING, *MOVING)
            if name in TAKING_LAYOUTS
            for dtype in DTYPES
        ),
    ]
    return [
        one
        for one in wanted
        if (functions is None or one.function in functions)
        and (dtypes is None or one.dtype is None or one.dtype in dtypes)
    ]


def examine(
    backend: str,
    ranks: int,
    asked: Sequence[Question],
    timeout_s: float = 20.0,
    imports: Sequence[str] = (),
    progress: Callable[[Question, Answer], object] = lambda *_: None,
    device: str = "cpu",
    prepare: Callable[[int, int], object] | None = None,
    verify: Callable[[], object] | None = None,
) -> dict[Question, Answer]:
    """Asks all questions; returns the answers.

    Args:
        backend: name in ``torch.distributed``.
        ranks: number of ranks.
        asked: the questions.
        timeout_s: seconds that a question may take; afterwards it hangs.
        imports: modules that register backends; imported by every rank.
        progress: called with every answer.
        device: type of the device that the tensors are on.
        prepare: called by every rank with its number and the number of ranks, before all else; a function at
            the top level of a module. ``None`` gives the ranks the machine's CUDA devices where tensors are
            on those; ranks share them where there are fewer.
        verify: called by every rank after each question, likewise; what it raises makes the answer wrong.

    Raises:
        RuntimeError: the ranks cannot make a group of the backend.
    """
    setup = _Setup(backend, ranks, timeout_s, tuple(imports), device, prepare, verify)
    answers = {}
    examinees: _Examinees | None = None
    try:
        for question in asked:
            if examinees is None:
                examinees = _Examinees(setup)
            answer, usable = examinees.ask(question)
            answers[question] = answer
            progress(question, answer)
            if not usable:
                examinees.close(at_once=True)
                examinees = None
    finally:
        if examinees is not None:
            examinees.close()
    return answers


_READY = "ready"
_START_S = 60.0
_GRACE_S = 2.0
"""How much longer than the ranks themselves the parent waits."""
_AT_ONCE_S = 1.0
"""An error that comes later than this has waited for other ranks."""


@dataclass(frozen=True)
class _Setup:
    """What ranks are told, as :func:`examine` takes it."""

    backend: str
    ranks: int
    timeout_s: float
    imports: tuple[str, ...]
    device: str
    prepare: Callable[[int, int], object] | None
    verify: Callable[[], object] | None


class _Examinees:
    """The ranks of one group."""

    def __init__(self, setup: _Setup) -> None:
        self._timeout_s = setup.timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="collectives-conformance-")
        self._ranks = SpawnedRanks(setup.ranks, _serve, (setup, f"{self._folder.name}/store"))
        try:
            first = self._ranks.collect(_START_S + setup.timeout_s)
            if first != [_READY] * setup.ranks:
                why = next(_failures(first))
                raise RuntimeError(f"no group of backend {setup.backend!r} could be made: {why}")
        except BaseException:
            self.close(at_once=True)
            raise

    def ask(self, question: Question) -> tuple[Answer, bool]:
        """Returns the answer, and whether the ranks can answer more."""
        details: dict[str, str] = {}
        statuses = []
        usable = True
        ops = question.ops
        for op in ops:
            name = op.name if question.function in REDUCING else question.function
            self._ranks.send((question, ops.index(op)))
            status, text, usable = _judge(self._ranks.collect(self._timeout_s + _GRACE_S))
            statuses.append(status)
            if text:
                details[name] = text
            if not usable:
                break
        offered = statuses.count(Status.OK)
        bad = next((v for v in (Status.HANG, Status.WRONG) if v in statuses), None)
        whole = bad or (Status.OK if offered else Status.UNSUPPORTED)
        return Answer(whole, details, offered, len(ops)), usable

    def close(self, *, at_once: bool = False) -> None:
        """Ends the ranks; they have a moment to leave by themselves unless it is to happen at once."""
        self._ranks.close(at_once=at_once)
        self._folder.cleanup()


def _failures(replies: Sequence[Any]) -> Iterator[str]:
    for rank, reply in enumerate(replies):
        if isinstance(reply, Unanswered):
            yield f"rank {rank} {'died' if reply.ended else 'did not answer in time'}"
        elif isinstance(reply, tuple):
            yield f"rank {rank}: {reply[1]}"


def _judge(replies: Sequence[Any]) -> tuple[Status, str, bool]:
    """Returns the status on what all ranks replied, why, and whether the group can be used further."""
    for ended, status in ((False, Status.HANG), (True, Status.WRONG)):
        if Unanswered(ended) in replies:
            missing = [reply if reply == Unanswered(ended) else "" for reply in replies]
            return status, next(_failures(missing)), False
    kinds = {kind for kind, _, _ in replies}
    text = next((text for kind, text, _ in replies if kind is not Status.OK), "")
    usable = all(usable for _, _, usable in replies)
    if len(kinds) == 1:
        return kinds.pop(), text, usable
    if Status.UNSUPPORTED in kinds:  # the others may have communicated
        return Status.WRONG, f"not all ranks raised: {text}", False
    return Status.WRONG, text, usable


def _serve(rank: int, connection: Connection, setup: _Setup, path: str) -> None:
    """Body of a rank: answers until the connection closes."""
    ranks, device, verify = setup.ranks, setup.device, setup.verify
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of functions that torch renames, and the like; errors are reported
    try:
        if setup.prepare is not None:
            setup.prepare(rank, ranks)
        elif device == "cuda":
            take_cuda_device(rank, ranks)
        for module in setup.imports:
            importlib.import_module(module)
        store = c10d.FileStore(path, ranks)
        # the limit of the group is for its operations, not for how long the slowest rank takes to get here
        store.set(f"imported/{rank}", "")
        store.wait([f"imported/{r}" for r in range(ranks)], timedelta(seconds=_START_S))
        limit = timedelta(seconds=setup.timeout_s)
        torch_dist.init_process_group(setup.backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        torch_dist.barrier()
    except Exception as error:  # noqa: BLE001 - reported
        connection.send((Status.WRONG, _in_words(error), False))
        return
    connection.send(_READY)
    for question, which in commands(connection):
        reply = _reply(question, which, rank, ranks, device)
        if verify is not None:
            try:
                verify()
            except Exception as error:  # noqa: BLE001 - judged
                reply = Status.WRONG, f"rank {rank}: {_in_words(error)}", reply[2]
        connection.send(reply)


def _reply(question: Question, which: int, rank: int, ranks: int, device: str) -> tuple[Status, str, bool]:
    """Returns the status of this rank, why, and whether the group can be used further."""
    functions = {**PLAIN, **REDUCING, **MOVING}
    dtype = question.dtype or torch.float32
    trial = Trial(rank, ranks, dtype, question.ops[which], question.strided, device)
    cases = functions[question.function](trial)
    begun, started = False, time.monotonic()
    try:
        for difference in cases:
            begun = True
            if difference is not None:
                case = trial.case
                for _ in cases:  # the other ranks go on
                    pass
                return Status.WRONG, f"rank {rank}, {case}: {difference}", True
    except Exception as error:  # noqa: BLE001 - judged
        late = time.monotonic() - started > _AT_ONCE_S
        if begun or late or not _is_refusal(error):
            return Status.WRONG, f"rank {rank}, {trial.case}: {_in_words(error)}", False
        return Status.UNSUPPORTED, _in_words(error), True
    return Status.OK, "", True


def _is_refusal(error: Exception) -> bool:
    """Returns whether an error may say that something is not offered.

    Torch's backends do so with a plain RuntimeError. Its subclasses are failures: of a group, of a device.
    """
    return isinstance(error, (NotImplementedError, TypeError, ValueError)) or type(error) is RuntimeError


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


_OPERATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_isend_irecv": ("send", "recv"),
    "isend, recv": ("send", "recv"),
    "isend, recv, tagged": ("send", "recv"),
    "object collectives": ("all_gather", "broadcast"),
    "recv from any rank": ("send", "recv_anysource"),
}
"""The operations behind functions, where their names differ."""


def is_stated(question: Question, op: ReduceOp, stated: Capabilities, device: str) -> bool:
    """Returns whether capabilities offer what a question is about.

    Args:
        question: a function and a data type.
        op: the reduction, for functions that reduce.
        stated: the capabilities.
        device: type of the device that the tensors are on.
    """
    if question.function == "isend, recv, tagged" and not stated.tags:
        return False
    if question.function == "all_to_all_single" and not stated.uneven:
        return False
    if question.function == "barrier":
        return stated.why_not("barrier") is None
    dtype = question.dtype or torch.uint8  # of objects
    return all(
        stated.why_not(name, device=device, dtype=dtype, op=op) is None
        for name in _OPERATIONS.get(question.function, (question.function,))
    )


def unkept(question: Question, answer: Answer, stated: Capabilities, device: str) -> dict[str, str]:
    """Returns what is stated and was refused, with the reason that was given.

    Args:
        question: what the ranks were asked.
        answer: what became of it.
        stated: the capabilities of their backend.
        device: type of the device that the tensors were on.

    Returns:
        By the name of the reduction, or of the function where it does not reduce.
    """
    if answer.status not in {Status.OK, Status.UNSUPPORTED}:
        return {}  # which is said of it, and the others were not asked
    found = {}
    for op in question.ops:
        name = op.name if question.function in REDUCING else question.function
        if name in answer.details and is_stated(question, op, stated, device):
            found[name] = answer.details[name]
    return found
