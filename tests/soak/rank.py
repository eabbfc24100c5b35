"""What a rank does in a round: its part of the program, the fault if it is the victim, and the judgement."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from census import census, growth, memory_mib, running
from conformance.random_programs import Drawn, Execution
from harness import current_store
from soak.rounds import Round

import collectives as dist
from collectives.store import PrefixStore, Store

PATIENT = timedelta(seconds=120)
"""Time limit of the groups, beyond what a round takes."""
LIMIT = timedelta(seconds=3)
"""Time limit that the victim lets pass."""
_IDLE_S = 10.0
"""After how long threads for futures end that are idle, if there are more than two."""
BOUND_S = 15.0
"""Seconds within which an error must be raised, from the call or the time limit on; for a loaded machine."""

_CLASSES: dict[str, type[dist.DistError]] = {
    "kill": dist.PeerLostError,
    "leave": dist.PeerLostError,
    "abort": dist.GroupAbortedError,
    "late": dist.CollectiveTimeoutError,
    "stop": dist.CollectiveTimeoutError,
}
"""The error that a fault causes."""


class RankOfRound(Execution):
    """Runs the whole program whatever happens: groups that the fault does not concern must go on as before.

    An error that is not what the fault must cause, or a call into a broken group that succeeds, raises
    :class:`AssertionError`.
    """

    def __init__(self, drawn: Round, rank: int, store: Store) -> None:
        super().__init__(drawn.program, rank, drawn.placement)
        self.groups[0].barrier().wait()  # else a fault may come while others still make their groups
        self.rank, self.store = rank, store
        self.fault, self.concerned = drawn.fault, drawn.concerned
        self.is_gloo = drawn.backend == "gloo"
        self.members = drawn.program.members[self.fault.group]
        self.broken: set[int] = set()
        self.on_broken: set[int] = set()  # steps that were issued on a group known to be broken
        self.errors: Counter[str] = Counter()
        self.operations = self.regrouped = 0
        self.timers: list[threading.Timer] = []
        if self.fault.kind == "pause" and rank == self.fault.victim:
            store.set("pid", str(os.getpid()))

    # ---- the program -------------------------------------------------------------------------------------

    def step(self, drawn: Drawn) -> None:
        if drawn.number == self.fault.step:
            getattr(self, f"_{self.fault.kind}")()
        if self.own_dice.random() < 0.1:
            time.sleep(self.own_dice.uniform(0, 0.005))
        super().step(drawn)

    def attempt(self, drawn: Drawn, waiting: bool, call: Callable[[], object]) -> bool:
        was_broken = drawn.group in self.broken
        if was_broken and not waiting:
            self.on_broken.add(drawn.number)
        if not self.judged(str(drawn), drawn.group, call):
            return False
        self.operations += not waiting
        done = waiting or not (drawn.asynchronous or drawn.name == "send")
        must_fail = drawn.number in self.on_broken and (drawn.count or not self.is_gloo)  # skips empty ones
        assert not (done and must_fail), f"{drawn}: done, but the group is broken"
        return True

    def run(self) -> None:
        super().run()
        for timer in self.timers:
            timer.join()
        if self.fault.kind == "kill" and self.rank == self.fault.victim:
            time.sleep(3600)
        for index in self.concerned:
            if self.rank in self.program.members[index]:
                group = self.groups[index]
                done = self.judged(f"the end, on group {index}", index, lambda: group.barrier().wait())  # noqa: B023
                assert not done, f"group {index} has not noticed {self.fault}"
        if not self.is_gloo and self.rank in self.members:
            self._regroup()

    def _regroup(self) -> None:
        """The members of the fault's group that live become its members anew, in an order that is drawn."""
        victim = self.fault.victim
        living = [rank for rank in self.members if rank != victim or self.fault.kind != "kill"]
        group = self.groups[self.fault.group]
        self.store.set(f"handle{self.rank}", dist.get_reconfigure_handle(group))
        group.set_timeout(PATIENT)
        if self.fault.kind == "die":
            self._lose_one_meanwhile(living)
            living.remove(victim)
        self._reconfigure("after the fault", living)
        total = torch.full((2000,), float(self.rank))
        group.allreduce([total]).wait()
        assert total.unique().tolist() == [sum(living)], f"{total.unique()} of the ranks {living}"
        group.barrier().wait()
        self.store.delete_key(f"handle{self.rank}")
        self.regrouped += 1

    def _lose_one_meanwhile(self, members: list[int]) -> None:
        """The victim is killed while the group takes the same members, or a little later."""
        group, victim = self.groups[self.fault.group], self.fault.victim
        if self.rank == victim:
            self._after_delay(os.kill, [os.getpid(), signal.SIGKILL])
        try:
            self._reconfigure("with the victim", members)
            while True:
                group.barrier().wait()
        except dist.DistError as error:
            place = self._order(members).index(victim)
            known = {place, -1} if place == 0 else {place}  # the first one's store goes with it
            text = f"{type(error).__name__} {error.details()}: {error}"
            assert self.rank != victim, f"the victim lives, and raises {text}"
            if error.rank not in known:
                raise AssertionError(f"rank {victim} of {members} died, but: {text}") from error
            self.errors[f"die: {type(error).__name__}"] += 1

    def _order(self, members: list[int]) -> list[int]:
        return random.Random(str(self.program.seed)).sample(members, len(members))

    def _reconfigure(self, name: str, members: list[int]) -> None:
        group, order = self.groups[self.fault.group], self._order(members)
        handles = [self.store.get(f"handle{rank}").decode() for rank in order]
        began = time.monotonic()
        group.reconfigure(name, handles)
        took = time.monotonic() - began
        assert took < BOUND_S, f"reconfiguring took {took:.1f} s"
        assert (group.rank(), group.size()) == (order.index(self.rank), len(order))

    # ---- errors ------------------------------------------------------------------------------------------

    def judged(self, what: str, index: int, call: Callable[[], object], limit: float = 0.0) -> bool:
        """Makes a call; returns whether it succeeded, and raises where its error is not that of the fault."""
        began = time.monotonic()
        try:
            call()
        except dist.DistError as error:
            took = time.monotonic() - began
            wrong = self._what_is_wrong(index, error)
            if took > BOUND_S + limit:
                wrong = f"it came after {took:.1f} s"
            if wrong:
                text = f"{what}: wrong error, {wrong}: {type(error).__name__} {error.details()}: {error}"
                raise AssertionError(text) from error
            self.broken.add(index)
            self.errors[f"{self.fault.kind}: {type(error).__name__}"] += 1
            return False
        return True

    def _what_is_wrong(self, index: int, error: dist.DistError) -> str:
        """Returns why an error is not that of the fault; nothing if it is."""
        if index not in self.concerned:
            return "the fault does not concern the group"
        kind, victim = self.fault.kind, self.program.members[index].index(self.fault.victim)
        if kind == "leave" and self.rank == self.fault.victim:
            return "" if isinstance(error, dist.GroupAbortedError) else "the group was shut down here"
        if error.rank != victim:
            return f"it should name rank {victim}"
        if isinstance(error, _CLASSES[kind]):
            first = error
        elif kind in {"late", "stop"} and isinstance(error, dist.GroupAbortedError):
            first = error.cause
        else:
            return f"it should be {_CLASSES[kind].__name__}"
        if kind in {"late", "stop"} and not (
            isinstance(first, dist.CollectiveTimeoutError)
            and first.rank == victim
            and victim in first.missing_ranks
        ):
            return f"rank {victim} should be missing in {first!r}"
        return ""

    # ---- faults ------------------------------------------------------------------------------------------

    def _after_delay(self, *what: Any) -> None:
        timer = threading.Timer(self.fault.delay, *what)
        timer.start()
        self.timers.append(timer)

    def _none(self) -> None:
        pass

    _die = _none  # which comes when the program is over

    def _pause(self) -> None:
        """The rank after the victim stops it, and lets it go on."""
        if self.rank != (self.fault.victim + 1) % len(self.program.members[0]):
            return
        victim = int(self.store.get("pid"))
        self.store.delete_key("pid")

        def pause() -> None:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(self.fault.length)
            os.kill(victim, signal.SIGCONT)

        self._after_delay(pause)

    def _kill(self) -> None:
        if self.rank == self.fault.victim:
            self._after_delay(os.kill, [os.getpid(), signal.SIGKILL])

    def _abort(self) -> None:
        if self.rank == self.fault.victim:
            self._after_delay(self.groups[self.fault.group].abort)

    def _leave(self) -> None:
        if self.rank == self.fault.victim:
            self.finish_all()
            self.groups[self.fault.group].shutdown()

    def _late(self) -> None:
        self._pass_the_limit(lambda: None)

    def _stop(self) -> None:
        self._pass_the_limit(lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def _pass_the_limit(self, stop: Callable[[], None]) -> None:
        """All but the victim pass the time limit of the group, of which nothing is under way before."""
        if self.rank not in self.members:
            return
        self.finish_all()
        group, victim = self.groups[self.fault.group], self.fault.victim
        group.barrier().wait()
        others = [rank for rank in self.members if rank != victim]
        if self.rank == victim:
            self.store.set("victim", str(os.getpid()))
            stop()
            self.store.wait([f"told{rank}" for rank in others], PATIENT)
            # May be done: between machines, what the others have sent may be here before that they gave up.
            self.judged("coming late", self.fault.group, lambda: group.allreduce([torch.ones(5)]).wait())
            return
        pid = int(self.store.get("victim"))
        group.set_timeout(LIMIT)
        options = dist.AllreduceOptions(asyncOp=self.own_dice.random() < 0.5)
        done = self.judged(
            f"the limit of group {self.fault.group}",
            self.fault.group,
            lambda: group.allreduce([torch.ones(5)], options).wait(),
            LIMIT.total_seconds(),
        )
        assert not done, "the operation was done without the victim"
        self.store.set(f"told{self.rank}", "")
        if self.rank == others[0]:
            self.store.wait([f"told{rank}" for rank in others], PATIENT)
            os.kill(pid, signal.SIGCONT)

    def _mismatch(self) -> None:
        if self.rank not in self.members:
            return
        group, own = self.groups[self.fault.group], torch.ones(4 + (self.rank == self.fault.victim))
        options = dist.AllreduceOptions(asyncOp=self.own_dice.random() < 0.5)
        try:
            group.allreduce([own], options).wait()
        except dist.CollectiveMismatchError:
            self.errors["mismatch: CollectiveMismatchError"] += 1
            assert own.unique().tolist() == [1], "something was written"
        else:
            raise AssertionError(f"a mismatch with rank {self.fault.victim} went unnoticed")


def play(rank: int, size: int, drawn: Round, plant: Callable[[], None] | None) -> dict[str, Any]:
    """Plays a rank in a round; returns what it counted, and complaints by their kind.

    Args:
        rank: the rank.
        size: number of ranks.
        drawn: the round.
        plant: called first, to spoil something that the round then finds.
    """
    if plant is not None:
        plant()
    store = current_store()
    _in_world(drawn, rank, PrefixStore("before", store), _start_what_stays)
    before = census()
    counted: dict[str, Any] = {}

    def run(own: Store) -> None:
        execution = RankOfRound(drawn, rank, own)
        execution.run()
        counted.update(
            operations=execution.operations,
            regrouped=execution.regrouped,
            errors=execution.errors,
            wrong=execution.report.failures,
        )

    _in_world(drawn, rank, PrefixStore("round", store), run)
    gc.collect()
    left = growth(before)
    if set(left) == {"threads"}:
        left = growth(before, _IDLE_S)
    counted.update(left=left, running=running() if "threads" in left else "")
    counted.update(pid=os.getpid(), memory_mib=memory_mib())
    return counted


def _start_what_stays(store: Store) -> None:
    """Starts the thread that completes the futures of this process, and whatever else is for good."""
    rank = dist.get_rank()
    for turn in range(dist.get_world_size()):  # in which one rank asks for the future before all have come
        if rank != turn:
            store.wait([f"turn{turn}"], PATIENT)
        work = dist.barrier(async_op=True)
        assert work is not None
        future = work.get_future()
        if rank == turn:
            store.set(f"turn{turn}", "")
        future.wait()
    dist.barrier()
    store.delete_key(f"turn{rank}")
    # The store keeps the connection of a thread that asks while another one waits.
    key = f"asked{dist.get_rank()}"
    waiting = threading.Thread(target=store.wait, args=([key], PATIENT))
    waiting.start()
    while waiting.is_alive():
        time.sleep(0.02)
        store.set(key, "")
    waiting.join()
    store.delete_key(key)


def _in_world(drawn: Round, rank: int, store: Store, run: Callable[[Store], None]) -> None:
    dist.init_process_group(drawn.backend, store=store, rank=rank, world_size=drawn.size, timeout=PATIENT)
    try:
        run(store)
    finally:
        dist.destroy_process_group()
