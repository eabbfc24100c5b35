"""Hooks of torch's groups: around each operation, at its end, and where a group breaks.

torch keeps the hooks before and after operations, among them its flight recorder's, and calls them in the
kernels of its operators. So a group that has any issues its operations by these
(:mod:`collectives.torch_bridge.dispatch_modes`); others do not pay for them.

torch's C++ code takes Python's groups for such that cannot tell when operations end and when they break. So
the hooks for that are kept here, and the flight recorder's file is written here.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from collectives.core.operations import METHODS
from collectives.core.process_group import ProcessGroup
from collectives.dynamo import leave_uncompiled
from collectives.logs import Log
from collectives.torch_bridge import dispatch_modes
from collectives.torch_bridge.work import _Group

_c10d: Any = torch._C._distributed_c10d

AROUND_OPERATIONS = hasattr(_c10d.ProcessGroup, "register_pre_hook")
"""Whether torch has hooks before and after operations, as it does from 2.14 on."""

_RECORDER = "torch's flight recorder"


def recorder_wanted() -> bool:
    """Returns whether the environment asks for torch's flight recorder; groups ask when they are made.

    From 2.15 on, torch gives groups of other backends its recorder, and records unless told not to. Ours have
    a record of their own, and torch's costs more than a small operation.

    Raises:
        ValueError: what it asks for is no number.
    """
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ValueError(f"{name} must be a number of entries, but is {value!r}; unset it for none")
            return hasattr(_c10d, "_dump_fr_trace_file") and int(value) > 0
    return False


@dataclass(frozen=True)
class CompletedOperation:
    """What a hook at the end of operations is given; torch's ``WorkInfo`` cannot be made in Python.

    Attributes:
        op_type: the operation, an ``OpType`` of torch.
        seq: number of the operation in its group, from 1 on.
        time_started: when it was issued, by the monotonic clock.
        time_finished: when it was done.
        active_duration: the time between.
    """

    op_type: Any
    seq: int
    time_started: timedelta
    time_finished: timedelta
    active_duration: timedelta


_TYPES = {
    **{names[0]: names[-1] for names in METHODS},
    "recv_anysource": "recvanysource",
}
"""Names of operations among torch's ``OpType``, where they are not those of the methods."""


@leave_uncompiled
class HookedGroup(_Group):
    """A group of torch's with its hooks.

    Attributes:
        hooked: whether hooks are to see the operations.
        shows_factors: whether operators show reductions that have a factor.
        inner: the group of ours that carries them out.
    """

    hooked = False
    shows_factors = False
    supports_abort_hooks = True

    inner: ProcessGroup
    _hooks: set[tuple[str, int]]
    _abort_hooks: dict[Any, Callable[[], None]]
    _sequence: int
    _completion_hook: Callable[[Any], None] | None = None

    def _begin_without_hooks(self) -> None:
        """Called once, when the group is made."""
        self._hooks, self._abort_hooks = set(), {}
        self._listens = self._broken = False
        self._breaking = threading.Lock()
        self._pending, self._ends = 0, threading.Condition()

    def _show_to(self, hook: tuple[str, int], wanted: bool) -> None:
        (self._hooks.add if wanted else self._hooks.discard)(hook)
        dispatch_modes.show_to_hooks(self, bool(self._hooks))

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Has a hook called before each operation, on the thread that issues it.

        Args:
            hook_id: any number; takes the place of the hook before operations that has it.
            hook: is given torch's ``PreHookArgs``; what it raises, the operation raises, and is not issued.
        """
        _torchs("register_pre_hook")(self, hook_id, hook)
        self._show_to(("pre", hook_id), True)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Removes a hook before operations, if there is one of this number."""
        _torchs("unregister_pre_hook")(self, hook_id)
        self._show_to(("pre", hook_id), False)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Has a hook called after each operation is issued, on the thread that does.

        Args:
            hook_id: any number; takes the place of the hook after operations that has it.
            hook: is given torch's ``PostHookArgs``, whose ``work`` may be waited for; torch gives it no
                ``is_completed()`` that tells.
        """
        _torchs("register_post_hook")(self, hook_id, hook)
        self._show_to(("post", hook_id), True)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Removes a hook after operations, if there is one of this number."""
        _torchs("unregister_post_hook")(self, hook_id)
        self._show_to(("post", hook_id), False)

    def _register_on_completion_hook(self, hook: Callable[[Any], None]) -> None:
        """Has a hook called for each operation, issued from now on, that ends without an error.

        Args:
            hook: is given a :class:`CompletedOperation`, on the thread that ends the operation, which may be
                the one that issues it; must not wait for operations. What it raises is logged.

        Raises:
            RuntimeError: there is one.
        """
        if self._completion_hook is not None:
            raise RuntimeError(f"[rank {self.rank()}] {self!r} has a completion hook already")
        self._completion_hook = hook
        self._show_to(("completion", 0), True)

    def _has_hooks(self) -> bool:
        return self._completion_hook is not None

    def _wait_for_pending_works(self) -> None:
        """Blocks until the completion hook has been called for all operations that have ended or will."""
        with self._ends:
            self._ends.wait_for(lambda: not self._pending)

    def _note_issued(self, name: str, began: int, work: Any) -> None:
        """Called after an operation of a group that has hooks was issued.

        Args:
            name: name of its method.
            began: when its issue began, in nanoseconds of the monotonic clock.
            work: its Work.
        """
        hook = self._completion_hook
        if hook is None:
            return
        number, types = self._sequence, _c10d.OpType
        kind = getattr(types, _TYPES.get(name, name).upper(), types.UNKNOWN)
        finished = work.get_future()  # before it counts: shutdown() waits for what does
        with self._ends:
            self._pending += 1

        def ended(future: Any) -> None:
            start, now = (timedelta(microseconds=at / 1000) for at in (began, time.monotonic_ns()))
            done = CompletedOperation(kind, number, start, now, now - start)
            try:
                if _succeeds(future.value):
                    self._call("completion", lambda: hook(done))
            finally:
                with self._ends:
                    self._pending -= 1
                    self._ends.notify_all()

        finished.add_done_callback(ended)

    def register_abort_hook(self, hook_id: Any, hook: Callable[[], None]) -> None:
        """Has a hook called once, where an operation of the group first fails, or where this rank aborts it.

        Args:
            hook_id: any number; takes the place of the hook that has it.
            hook: is called on the thread that finds the failure; what it raises is logged.
        """
        if not self._listens:
            self._listens, itself = True, weakref.ref(self)
            self.inner._at_first_error(lambda _: _break(itself()))
        self._abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: Any) -> None:
        """Removes a hook for the group's end, if there is one of this number."""
        self._abort_hooks.pop(hook_id, None)

    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook

    def record_for_torch(self) -> None:
        """Lets torch's flight recorder see the operations, and writes its file where the group breaks.

        torch gives its recorder to each group that it makes; without this nothing reaches it.
        """
        self._show_to((_RECORDER, 0), True)
        itself = weakref.ref(self)
        self.register_abort_hook(_RECORDER, lambda: _write_record(itself()))

    def _tell_of_break(self) -> None:
        with self._breaking:
            first, self._broken = not self._broken, True
        for hook in list(self._abort_hooks.values()) if first else ():
            self._call("abort", hook)

    def _call(self, kind: str, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception:  # noqa: BLE001 - the user's
            Log().of(self).exception("the %s hook raised", kind)


def _succeeds(value: Callable[[], Any]) -> bool:
    try:
        value()
    except Exception:  # noqa: BLE001 - of the operation
        return False
    return True


def _torchs(name: str) -> Any:
    return getattr(_c10d.ProcessGroup, name)


def _break(group: HookedGroup | None) -> None:
    if group is not None:
        group._tell_of_break()


def _write_record(group: Any) -> None:
    """Writes the file of torch's flight recorder, as its own hook does where a group of C++ breaks."""
    wanted = os.environ.get("TORCH_FR_DUMP_ON_TIMEOUT", os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"))
    if wanted.lower() not in {"0", "n", "no", "f", "false"}:
        _c10d._dump_fr_trace_file(group.inner.global_ranks[group.rank()], backend=group.name())
