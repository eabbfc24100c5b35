"""Turns on one rank, with functions that are no backend."""

from __future__ import annotations

import pytest
import torch

from collectives.bench import allreduce, operations
from collectives.bench.allreduce import Batch, Options, Ready, Worker, run_worker
from collectives.bench.core.devices import DEVICES, Device
from collectives.bench.core.ranks import Placement, barrier_memory
from collectives.bench.operations import OPERATIONS, input_values, wanted_values

COUNT = 1000
FINISHED_IN_TIME = range(1, 60_000_000_000)


class Recorder:
    """A peer of one rank: the result is the input. Keeps what it was called with, and spoils some results."""

    def __init__(self, spoil=(), spoil_input=False):
        self.places = []
        self.inputs = []
        self.spoil = set(spoil)
        self.spoil_input = spoil_input

    def __call__(self, operation, given, result):
        return lambda: self.move(given, result)

    def move(self, given, result):
        self.inputs.append(given.clone())
        if given is not result:
            result.copy_(given[: result.numel()])
        if len(self.places) in self.spoil:
            (given if self.spoil_input else result)[0] += 1
        self.places.append(result.data_ptr())


def player(
    peer, *, in_place=True, max_bytes=4 * COUNT, name="peer", barrier=lambda: None, operation="all_reduce"
):
    options = Options((), (1,), (max_bytes,), (operation,), in_place=in_place)
    return Worker(0, 1, options, barrier, {name: peer})


def turn(cold, hot, loop=0, *, count=COUNT, name="peer", operation="all_reduce"):
    return Batch(name, operation, count, cold, hot, loop)


def test_cold_calls_get_fresh_input_in_other_memory():
    peer = Recorder()
    result = player(peer).run(turn(7, 0))
    wanted = operations.source("sum", torch.float32, COUNT, 0, 1)
    assert len(set(peer.places)) == 7
    assert all(torch.equal(given, wanted) for given in peer.inputs)
    assert len(result["cold"]) == 7
    assert all(duration in FINISHED_IN_TIME for duration in result["cold"])
    assert (result["hot"], result["loop"], sum(result["cold_wrong"]), sum(result["hot_wrong"])) == (
        [],
        [],
        0,
        0,
    )


class Behind(Device):
    """A device that is done with a call when it is asked to complete it."""

    runs_behind = True

    def __init__(self, clock):
        self.clock = clock

    def finish(self):
        self.clock[0] += 9000


def test_of_a_device_that_runs_behind_the_host_has_a_time_of_its_own(monkeypatch):
    clock = [0]
    monkeypatch.setitem(DEVICES, "cpu", Behind(clock))
    monkeypatch.setattr(allreduce.time, "perf_counter_ns", lambda: clock[0])

    def issue(*_):
        def call():
            clock[0] += 50

        return call

    result = player(issue).run(turn(1, 3))
    assert (result["cold"], result["host"], result["hot"]) == ([9050], [50] * 3, [9050] * 3)


def test_on_the_cpu_the_host_has_no_time_of_its_own():
    assert player(Recorder()).run(turn(1, 3))["host"] == []


def test_a_rank_is_ready_when_its_tensors_are_there(monkeypatch):
    events = []

    class Line:
        def send(self, message):
            events.append(message)

        def recv(self):
            raise EOFError

    def make(*arguments):
        made = Worker(*arguments)
        events.append("tensors")
        return made

    monkeypatch.setattr(allreduce, "Worker", make)
    monkeypatch.setattr(allreduce, "_peers", lambda options: ({"peer": Recorder()}, Ready({}, {})))
    with barrier_memory(1) as memory:
        run_worker(0, Line(), Placement(1, 0, memory, "cpu"), Options((), (1,), (4 * COUNT,)))
    assert events == ["tensors", Ready({}, {})]


def test_rotation_goes_on_from_turn_to_turn():
    peer = Recorder()
    one = player(peer)
    for _ in range(4):
        one.run(turn(3, 0))
    assert len(set(peer.places)) == 12


def test_input_is_fresh_after_the_rotation_has_come_round():
    peer = Recorder(spoil=range(100))
    big = 20 << 20  # three fit into the memory that buffers rotate through
    result = player(peer, max_bytes=big).run(turn(10, 0, count=big // 4))
    assert len(set(peer.places)) < 10
    assert all(float(given[0]) == float(peer.inputs[0][0]) for given in peer.inputs)
    assert sum(result["cold_wrong"]) == 10


def test_hot_calls_and_the_loop_reuse_one_buffer():
    peer = Recorder()
    result = player(peer).run(turn(0, 5, 11))
    assert len(set(peer.places)) == 1
    assert len(peer.places) == 16
    assert (len(result["hot"]), len(result["loop"])) == (5, 1)


@pytest.mark.parametrize("spoil", [(), (0,), (1, 3)])
def test_wrong_elements_of_cold_calls_are_counted(spoil):
    assert sum(player(Recorder(spoil)).run(turn(5, 0))["cold_wrong"]) == len(spoil)


def test_wrong_elements_of_hot_calls_are_counted():
    result = player(Recorder([2])).run(turn(0, 5))
    assert (sum(result["cold_wrong"]), sum(result["hot_wrong"])) == (0, 1)


def test_out_of_place_keeps_the_input_and_reduces_a_copy():
    peer = Recorder()
    result = player(peer, in_place=False).run(turn(4, 2))
    assert len(peer.places) == 6
    assert sum(result["cold_wrong"]) == 0
    assert len(set(peer.places[:4])) == 4

    spoiling = Recorder([1])
    assert sum(player(spoiling, in_place=False).run(turn(4, 0))["cold_wrong"]) == 1


def test_out_of_place_largest_size_fits():
    big = (64 << 20) + 4
    result = player(Recorder(), in_place=False, max_bytes=big).run(turn(2, 1, count=big // 4))
    assert (len(result["cold"]), sum(result["cold_wrong"])) == (2, 0)


def test_ranks_meet_before_every_timed_call():
    met = []
    player(Recorder(), barrier=lambda: met.append(None)).run(turn(3, 2, 10))
    assert len(met) == 3 + 2 + 1


MOVING = [name for name, operation in OPERATIONS.items() if not operation.in_place and name != "barrier"]


@pytest.mark.parametrize("operation", MOVING)
def test_operations_with_an_input_and_an_output(operation):
    peer = Recorder()
    if operation == "sendrecv":  # a single rank has no partner
        assert sum(player(peer, operation=operation).run(turn(2, 2, operation=operation))["cold_wrong"]) == 0
        return
    result = player(peer, operation=operation).run(turn(3, 2, 5, operation=operation))
    assert (len(result["cold"]), len(result["hot"]), len(result["loop"])) == (3, 2, 1)
    assert (sum(result["cold_wrong"]), sum(result["hot_wrong"])) == (0, 0)
    assert len(set(peer.places)) == 4
    for spoils_input in (False, True):
        spoiling = Recorder([1], spoils_input)
        assert (
            sum(player(spoiling, operation=operation).run(turn(3, 0, operation=operation))["cold_wrong"]) == 1
        )


def test_output_is_wiped_before_every_cold_call():
    result = player(lambda *_: lambda: None, operation="all_gather").run(turn(3, 0, operation="all_gather"))
    zeros = int((operations.source("max", torch.float32, COUNT, 0, 1) == 0).sum())
    assert sum(result["cold_wrong"]) == 3 * (COUNT - zeros)


def test_half_of_a_ping_pong_counts(monkeypatch):
    ticks = iter(range(0, 10**6, 500))
    monkeypatch.setattr("collectives.bench.allreduce.time.perf_counter_ns", lambda: next(ticks))
    result = player(Recorder(), operation="sendrecv").run(turn(1, 1, 2, operation="sendrecv"))
    assert (result["cold"], result["hot"], result["loop"]) == ([250], [250], [125])


def run_by_formula(operation, inputs, ranks):
    """The naive operation on all ranks' inputs, as lists."""
    name, part = operation.name, max(len(given) for given in inputs) // ranks
    total = [sum(values) for values in zip(*inputs, strict=False)]
    joined = [value for given in inputs for value in given]
    return {
        "all_reduce": lambda r: total,
        "reduce": lambda r: total if r == 0 else None,
        "broadcast": lambda r: inputs[0],
        "all_gather": lambda r: joined,
        "reduce_scatter": lambda r: total[r * part : (r + 1) * part],
        "all_to_all": lambda r: [value for given in inputs for value in given[r * part : (r + 1) * part]],
        "gather": lambda r: joined if r == 0 else [],
        "scatter": lambda r: inputs[0][r * part : (r + 1) * part],
        "sendrecv": lambda r: inputs[r ^ 1] if r ^ 1 < ranks else [],
        "barrier": lambda r: [],
    }[name]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_wanted_values_are_those_of_the_naive_operation(operation, ranks):
    count = 0 if operation.name == "barrier" else 60 * ranks
    what = [(operation, "sum", torch.float64, count, rank, ranks) for rank in range(ranks)]
    inputs = [input_values(*each) for each in what]
    for rank, given in enumerate(inputs):
        assert given.numel() == operation.input_count(count, rank, ranks)
    naive = run_by_formula(operation, [given.tolist() for given in inputs], ranks)
    for rank, each in enumerate(what):
        wanted = wanted_values(*each)
        assert (None if wanted is None else wanted.tolist()) == naive(rank)
        if wanted is not None:
            assert wanted.numel() == operation.output_count(count, rank, ranks)
