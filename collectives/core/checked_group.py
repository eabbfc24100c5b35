"""A group around a group that compares every collective over all ranks before it runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch

from collectives.core import operations
from collectives.core.capabilities import Capabilities
from collectives.core.forwarding import ForwardingGroup
from collectives.core.operations import Call, Operand
from collectives.core.process_group import ProcessGroup
from collectives.core.work import Work
from collectives.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    ranks_in_words,
)
from collectives.logs import Log
from collectives.store.records import demand, fetch, fetch_all, fields, publish
from collectives.store.waiting import wait_for_keys

__all__ = ["CheckedGroup"]

log = Log()

_LOOK_AGAIN = timedelta(seconds=1)
"""How long ranks wait for each other before they look for deaths and aborts."""

_LIBRARIES = frozenset({"collectives", "torch"})


class CheckedGroup(ForwardingGroup):
    """Runs the operations of another group, and raises where ranks call different collectives.

    Before each collective, every rank leaves a fingerprint of it (function, shapes, data type, reduction,
    root, sequence number) in the group's store and compares those of all ranks; one round trip to the store
    for each rank, so for debugging. Sends and receives run unchecked.

    Args:
        inner: the group; must have a store.

    Raises:
        DistBackendError: the group has no store.
    """

    def __init__(self, inner: ProcessGroup) -> None:
        store = inner.get_group_store()
        if store is None:
            raise DistBackendError(
                f"{inner.describe()} cannot be checked, because it was made without a store"
            )
        super().__init__(
            inner.rank(),
            inner.size(),
            timeout=inner.timeout,
            store=store,
            group_name=inner.group_name,
            group_desc=inner.group_desc,
        )
        self.inner = inner
        vars(self)["backend_type"] = inner.backend_type
        self._turns = itertools.count()

    def __getattr__(self, name: str) -> Any:
        """Gives what only the backend's own class has."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def capabilities(self) -> Capabilities:
        """What the inner group can do."""
        return self.inner.capabilities

    @property
    def detects_mismatch(self) -> bool:
        """``True``."""
        return True

    def name(self) -> str:
        """Returns the inner group's backend."""
        return self.inner.name()

    @property
    def inner_groups(self) -> Sequence[ProcessGroup]:
        """The inner group."""
        return [self.inner]

    def _forward(self, tensor: torch.Tensor, issue: Callable[[ProcessGroup], Work]) -> Work:  # noqa: ARG002
        return issue(self.inner)

    def abort(self) -> None:
        """Breaks the inner group; ranks that wait to compare stop waiting."""
        self._stop_comparing()
        super().abort()

    def _break_for(self, cause: DistError) -> None:
        self._stop_comparing()
        super()._break_for(cause)

    def _renew(self, others_are_late: Callable[[], object] = lambda: None) -> None:
        super()._renew(others_are_late)
        self._renewals += 1
        self._turns = itertools.count()

    def _stop_comparing(self) -> None:
        with contextlib.suppress(Exception):
            self._store.set(self._key("aborted"), "")

    def _key(self, name: str) -> str:
        """Returns a key of the time since the ranks were connected last."""
        return f"check/{self._renewals}/{name}"

    # ---- the comparison ------------------------------------------------------------------------------------

    def _compare(
        self, operation: str, timeout: timedelta | None, *, apart: Collection[str] = (), **about: Any
    ) -> list[dict[str, Any]]:
        """Waits for all ranks at this place of the order; returns what each of them calls, by rank.

        Returns nothing where a rank has died or aborted: the operation itself raises what it knows of that.

        Args:
            operation: name of the function.
            timeout: time limit; ``None`` for that of the group.
            apart: names of arguments that the caller compares; the others must be equal.
            about: the arguments.
        """
        turn = next(self._turns)
        keys = [self._key(f"{turn}/{r}") for r in range(self._size)]
        mine = {"function": operation, **about}
        publish(self._store, keys[self._rank], [mine, _call_site()])
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        left = limit
        while not wait_for_keys(self._store, keys, min(_LOOK_AGAIN, left)):
            if self.inner.lost_ranks() or self._store.check([self._key("aborted")]):
                return []
            left = timedelta(seconds=deadline - time.monotonic())
            if left <= timedelta():
                self._report_missing(turn, keys, mine, limit)
        table = fetch_all(self._store, keys, _call)
        if turn:
            # All ranks have come to this turn, so none reads the turn before. Not all stores delete.
            with contextlib.suppress(DistStoreError, RuntimeError):
                self._store.delete_key(self._key(f"{turn - 1}/{self._rank}"))
        different = _aspects([entry[0] for entry in table], apart)
        if different:
            self._report(turn, table, f"the ranks differ in {', '.join(different)}")
        return [entry[0] for entry in table]

    def _report(self, turn: int, table: list[Any], reason: str) -> None:
        if os.environ.get("TORCH_SHOW_CPP_STACKTRACES") == "1":
            stack = "".join(traceback.format_stack())
            log.of(self).error("collective #%d was called from:\n%s", turn, stack)
        lines = [f"  rank {r}: {_in_words(entry[0])}, called at {entry[1]}" for r, entry in enumerate(table)]
        raise CollectiveMismatchError(
            f"[rank {self._rank}] collective #{turn} on {self.describe()}: {reason}; nothing was sent\n"
            + "\n".join(lines),
            operation=table[self._rank][0]["function"],
            sequence=turn,
        )

    def _report_missing(self, turn: int, keys: list[str], mine: dict[str, Any], limit: timedelta) -> None:
        missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
        lines = []
        for r in missing:
            before = self._key(f"{turn - 1}/{r}")
            last = fetch(self._store, before, _call) if turn and self._store.check([before]) else None
            lines.append(
                f"  rank {r}: "
                + (f"last called {_in_words(last[0])} at {last[1]}" if last else "called nothing yet")
            )
        raise CollectiveTimeoutError(
            f"[rank {self._rank}] collective #{turn} on {self.describe()}: this rank calls "
            f"{_in_words(mine)}, but {ranks_in_words(missing)} called nothing within "
            f"{limit.total_seconds():g} s\n" + "\n".join(lines),
            missing[0] if missing else -1,
            missing_ranks=missing,
            operation=mine["function"],
            sequence=turn,
        )

    def _compare_exchange(self, call: Call, sent: Sequence[int], received: Sequence[int]) -> None:
        """Compares an all-to-all: rank i sends j what j expects from i; counts in elements."""
        operation = call.operation.name
        apart = {"sent": list(sent), "received": list(received)}
        calls = self._compare(operation, call.timeout, apart=apart, dtype=str(call.input.dtype), **apart)
        for r, other in enumerate(calls):
            for name in apart:
                if not isinstance(counts := other.get(name), list) or len(counts) != self._size:
                    raise DistStoreError(
                        f"[rank {self._rank}] {operation} on {self.describe()}: rank {r} left {name} = "
                        f"{counts!r} in the store instead of {self._size} numbers of elements; no other "
                        "program may use the same store and prefix, and all ranks must run the same version"
                    )
        for i, sender in enumerate(calls):
            for j, receiver in enumerate(calls):
                out, expected = sender["sent"][j], receiver["received"][i]
                if out != expected:
                    raise CollectiveMismatchError(
                        f"[rank {self._rank}] {operation} on {self.describe()}: rank {i} sends {out} "
                        f"elements to rank {j}, which "
                        f"expects {expected}; nothing was sent",
                        operation=operation,
                    )

    def issue(self, call: Call) -> Work:
        """Compares the call with those of the other ranks, then issues it on the inner group."""
        operation = call.operation
        if operation is operations.ALL_REDUCE_COALESCED:
            for tensor in call.outputs:
                self._compare_call(call.as_(operations.ALL_REDUCE, [tensor]))
        elif operation is operations.ALL_REDUCE_INTO_TENSOR:  # other ranks may call all_reduce
            self._compare_call(call.as_(operations.ALL_REDUCE, call.inputs))
        elif operation is operations.ALL_TO_ALL:
            sent, received = ([tensor.numel() for tensor in list_] for list_ in (call.inputs, call.outputs))
            self._compare_exchange(call, sent, received)
        elif operation is operations.ALL_TO_ALL_SINGLE:
            self._compare_exchange(call, call.input_splits or (), call.output_splits or ())
        else:
            self._compare_call(call)
        return self.inner.issue(call)

    def _compare_call(self, call: Call) -> None:
        """Compares what all ranks must give alike."""
        operation = call.operation
        about: dict[str, Any] = {}
        if operation.reduces:
            about["op"] = repr(call.op)
        if operation.rooted:
            about["root"] = call.root
        each = call.outputs if operation.output is Operand.EACH else call.inputs
        if Operand.EACH in {operation.output, operation.input} and not operation.rooted:
            about |= {"dtype": str(call.tensor.dtype), "shapes": [list(tensor.shape) for tensor in each]}
        elif operation is not operations.BARRIER:
            about |= _tensor(call.tensor)
        self._compare(operation.name, call.timeout, **about)


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": tensor.device.type}


def _aspects(calls: list[dict[str, Any]], apart: Collection[str]) -> list[str]:
    """Returns the names of the entries in which the calls differ, but for those that are compared apart."""
    first = calls[0]
    if any(call["function"] != first["function"] for call in calls):
        return ["function"]
    return [
        key
        for key, value in first.items()
        if key not in apart and any(call.get(key) != value for call in calls)
    ]


def _in_words(call: dict[str, Any]) -> str:
    details = ", ".join(f"{key} {value}" for key, value in call.items() if key != "function")
    return f"{call['function']}({details})"


def _call(record: Any) -> tuple[dict[str, Any], str]:
    """Checks what a rank calls, and where."""
    demand(isinstance(record, list) and [type(part) for part in record] == [dict, str], f"{record!r}")
    fields(record[0], function=str)
    return record[0], record[1]


def _call_site() -> str:
    """Returns the place in the source that called into this package, or into torch, which called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
