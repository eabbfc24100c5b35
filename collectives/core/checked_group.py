"""A group around a group that compares every collective over all ranks before it runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

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
    GroupAbortedError,
    PeerLostError,
    ranks_in_words,
)
from collectives.logs import Log
from collectives.store.joining.agreement import exchange
from collectives.store.records import demand, fetch, fields, publish
from collectives.threads import start_thread

log = Log()

_MOMENT_S = 0.5
"""How long an abort waits for the store, which takes far less where it is well."""
_LIBRARIES = frozenset({"collectives", "torch"})


class CheckedGroup(ForwardingGroup):
    """Runs the operations of another group, and raises where ranks call different collectives.

    Before each collective, every rank leaves a fingerprint of it (function, shapes, data type, reduction,
    root, sequence number) in the group's store, where the last one compares them, which takes several round
    trips to the store; so it is for debugging. Sends and receives run unchecked.

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
        super().__init__([inner], store)
        self.inner = inner
        vars(self)["backend_type"] = inner.backend_type
        self._turns = itertools.count()
        self._stopped: tuple[Any, str] = None, ""

    def __getattr__(self, name: str) -> Any:
        """Gives what only the backend's own class has."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def _unchecked(self) -> ProcessGroup:
        return self.inner

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

    def _kind(self) -> str:
        return f"{self.inner._kind()}, with calls compared"

    def _become_new(self, store: Any) -> None:
        super()._become_new(store)
        self._turns = itertools.count()

    def _stop_comparing(self) -> None:
        """Tells ranks that wait to compare, once; waits for a moment only, as the store's server may hang."""
        store, key = self._store, self._key("aborted")
        if self._stopped == (store, key):
            return
        self._stopped = store, key

        def tell() -> None:
            with contextlib.suppress(Exception):
                store.set(key, "")

        try:
            start_thread(tell, "abort").join(_MOMENT_S)
        except DistBackendError:  # as where the interpreter ends
            tell()

    def _key(self, name: str) -> str:
        """Returns a key of the time since the ranks were connected last."""
        return f"check/{self._renewals}/{name}"

    def issue(self, call: Call) -> Work:
        """Compares the call with those of the other ranks, then issues it on the inner group."""
        if call.operation is operations.ALL_REDUCE_COALESCED:
            for tensor in call.outputs:
                self._compare(call.as_(operations.ALL_REDUCE, [tensor]))
        elif call.operation is operations.ALL_REDUCE_INTO_TENSOR:  # other ranks may call all_reduce
            self._compare(call.as_(operations.ALL_REDUCE, call.inputs))
        else:
            self._compare(call)
        return self.inner.issue(call)

    # ---- the comparison ------------------------------------------------------------------------------------

    def _compare(self, call: Call) -> None:
        """Waits for all ranks at this place of the order, and raises where one calls something else.

        Returns where a rank has died or aborted: the operation itself raises what it knows of that.
        """
        if self._size == 1:
            return
        turn, mine = next(self._turns), _arguments(call)
        limit = self._timeout if call.timeout is None else call.timeout
        record = [mine, _call_site()]
        try:
            publish(self._store, self._key(f"last/{self._rank}"), record)
            exchange(
                self._store,
                self._key(str(turn)),
                self._rank,
                range(self._size),
                limit,
                f"[rank {self._rank}] collective #{turn} on {self.describe()}:",
                record=record,
                check=self._checked,
                combine=partial(_check_alike, turn),
                late=CollectiveTimeoutError,
                lost_ranks=self.inner.lost_ranks,
                look=self._look_for_abort,
            )
        except (PeerLostError, GroupAbortedError):
            return
        except CollectiveMismatchError as error:
            error.operation = mine["function"]
            if os.environ.get("TORCH_SHOW_CPP_STACKTRACES") == "1":
                stack = "".join(traceback.format_stack())
                log.of(self).error("collective #%d was called from:\n%s", turn, stack)
            raise
        except CollectiveTimeoutError as error:
            raise self._missing(turn, mine, limit, error.missing_ranks) from None

    def _look_for_abort(self) -> DistError | None:
        return GroupAbortedError("a rank aborted it") if self._store.check([self._key("aborted")]) else None

    def _missing(
        self, turn: int, mine: dict[str, Any], limit: timedelta, missing: Sequence[int]
    ) -> CollectiveTimeoutError:
        """Returns the error for ranks that did not come to this place of the order, with their last calls."""
        lines = []
        others = [r for r in missing if r != self._rank]
        for r in others:
            key, does = self._key(f"last/{r}"), "called nothing yet"
            if self._store.check([key]):
                call, site = fetch(self._store, key, self._checked)
                does = f"last called {_in_words(call)} at {site}"
            lines.append(f"  rank {r}: {does}")
        if self._rank in missing:
            why = "but the others had given up before it came"
            why += f", as {ranks_in_words(others)} had called nothing either" if others else ""
        else:
            why = f"but {ranks_in_words(others)} called nothing within {limit.total_seconds():g} s"
        text = (
            f"[rank {self._rank}] collective #{turn} on {self.describe()}: this rank calls {_in_words(mine)}"
        )
        return CollectiveTimeoutError(
            "\n".join([f"{text}, {why}", *lines]),
            missing[0] if missing else -1,
            missing_ranks=missing,
            operation=mine["function"],
            sequence=turn,
        )

    def _checked(self, record: Any) -> tuple[dict[str, Any], str]:
        """Checks what a rank calls, and where."""
        demand(isinstance(record, list) and [type(part) for part in record] == [dict, str], f"{record!r}")
        call, site = record
        fields(call, function=str)
        for name in filter(call.__contains__, _APART):
            is_whole = isinstance(call[name], list) and len(call[name]) == self._size
            demand(is_whole, f"{name} = {call[name]!r} instead of {self._size} numbers of elements")
        return call, site


_APART = ("sent", "received")
"""Arguments that differ between ranks: rank i sends j what j expects from i, in elements."""


def _arguments(call: Call) -> dict[str, Any]:
    """Returns what the ranks compare of a call."""
    operation = call.operation
    about: dict[str, Any] = {"function": operation.name}
    if operation.reduces:
        about["op"] = repr(call.op)
    if operation.rooted:
        about["root"] = call.root
    if operation is operations.BARRIER:
        return about
    dtype = {"dtype": str(call.tensor.dtype)}
    if operation is operations.ALL_TO_ALL_SINGLE:
        return about | dtype | {"sent": call.input_splits, "received": call.output_splits}
    if operation is operations.ALL_TO_ALL:
        sent, received = ([tensor.numel() for tensor in list_] for list_ in (call.inputs, call.outputs))
        return about | dtype | {"sent": sent, "received": received}
    if operation.lists and not operation.rooted:
        each = call.outputs if operation.output is Operand.EACH else call.inputs
        return about | dtype | {"shapes": [list(tensor.shape) for tensor in each]}
    return about | {"shape": list(call.tensor.shape), **dtype, "device": call.tensor.device.type}


def _check_alike(turn: int, table: Sequence[tuple[dict[str, Any], str]]) -> None:
    """Raises where ranks call different collectives, or do not send each other what they expect."""
    calls = [call for call, _ in table]
    about: dict[str, Any] = {"operation": calls[0]["function"], "sequence": turn}
    different = _aspects(calls)
    if different:
        lines = [f"  rank {r}: {_in_words(call)}, called at {site}" for r, (call, site) in enumerate(table)]
        raise CollectiveMismatchError(
            f"the ranks differ in {', '.join(different)}; nothing was sent\n" + "\n".join(lines), **about
        )
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls if "sent" in sender else ()):
            out, expected = sender["sent"][j], receiver["received"][i]
            if out != expected:
                raise CollectiveMismatchError(
                    f"rank {i} sends {out} elements to rank {j}, which expects {expected}; nothing was sent",
                    **about,
                )


def _aspects(calls: list[dict[str, Any]]) -> list[str]:
    """Returns the names of the entries in which the calls differ."""
    first = calls[0]
    if any(call["function"] != first["function"] for call in calls):
        return ["function"]
    return [
        key
        for key, value in first.items()
        if key not in _APART and any(call.get(key) != value for call in calls)
    ]


def _in_words(call: dict[str, Any]) -> str:
    details = ", ".join(f"{key} {value}" for key, value in call.items() if key != "function")
    return f"{call['function']}({details})"


def _call_site() -> str:
    """Returns the place in the source that called into this package, or into torch, which called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
