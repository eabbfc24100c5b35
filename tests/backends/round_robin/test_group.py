"""The composition of several groups."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from harness import current_store, run_ranks, run_world
from recorder import Recorder, lanes

import collectives as dist
from collectives import CollectiveTimeoutError, GroupAbortedError, ProcessGroup
from collectives.backends.round_robin import (
    ProcessGroupRoundRobin,
    RoundRobinOptions,
    round_robin_process_groups,
)
from collectives.core.types import AllreduceOptions
from collectives.ddp import DistributedDataParallel
from collectives.registry.backends import GroupOptions, create_group


def test_collectives_take_turns_messages_stay_and_barriers_cover_all() -> None:
    a, b, c = recorders = lanes()
    group = ProcessGroupRoundRobin(recorders)
    x = torch.zeros(2)
    for _ in range(4):
        group.allreduce(x)
    group.broadcast(x)
    group.send(x, 1)
    group.recv(x, 1)
    group.barrier().wait()
    group.shutdown()
    assert a.calls == ["all_reduce", "all_reduce", "send", "recv", "barrier", "shutdown"]
    assert b.calls == ["all_reduce", "broadcast", "barrier", "shutdown"]
    assert c.calls == ["all_reduce", "barrier", "shutdown"]


def test_wrong_arguments_take_no_turn() -> None:
    a, b, _ = recorders = lanes()
    group = ProcessGroupRoundRobin(recorders)
    with pytest.raises(NotImplementedError):
        group.allreduce(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="root is 2"):
        group.broadcast(torch.zeros(2), root=2)
    group.allreduce(torch.zeros(2))
    assert a.calls == ["all_reduce"]
    assert b.calls == []


def test_coalesced_operations_spread_over_the_lanes() -> None:
    recorders = lanes()
    ProcessGroupRoundRobin(recorders).allreduce_coalesced([torch.zeros(1)] * 3).wait()
    assert [lane.calls for lane in recorders] == [["all_reduce"]] * 3


def test_capabilities_are_those_that_all_lanes_have() -> None:
    f32, i32 = torch.float32, torch.int32
    first = Recorder("a", reductions={f32: frozenset({"SUM", "MAX"}), i32: frozenset({"SUM"})}, tags=False)
    second = Recorder(
        "b",
        reductions={f32: frozenset({"SUM"})},
        operations=frozenset({"all_reduce", "barrier"}),
        moves=frozenset({f32}),
        uneven=False,
    )
    can = ProcessGroupRoundRobin([first, second]).capabilities
    assert can.reductions == {f32: frozenset({"SUM"})}
    assert can.moves == {f32}
    assert not can.uneven
    assert not can.tags
    assert can.operations == {"all_reduce", "barrier", "send", "recv", "recv_anysource"}


def test_devices_are_those_in_common() -> None:
    both = Recorder("x", devices=frozenset({"cpu", "cuda"}))
    assert round_robin_process_groups([lanes()[0], both]).capabilities.devices == {"cpu"}
    assert round_robin_process_groups([both, Recorder("y", devices=both.capabilities.devices)]).supports(
        "all_reduce", device="cuda"
    )


def test_wrong_groups_are_refused() -> None:
    a, b, c = lanes()
    with pytest.raises(ValueError, match="empty"):
        round_robin_process_groups([])
    with pytest.raises(ValueError, match="groups 0 and 2 are the same group 'a'"):
        round_robin_process_groups([a, b, a])
    with pytest.raises(ValueError, match=r"size is 2 in group 0 \('a'\) and 3 in group 1 \('x'\)"):
        round_robin_process_groups([a, Recorder("x", size=3)])
    with pytest.raises(ValueError, match=r"rank is 0 in group 0 .* and 1 in group 1"):
        round_robin_process_groups([a, Recorder("x", rank=1)])
    with pytest.raises(ValueError, match=r"in common, but take \{'a': \['cpu'\], 'x': \['cuda'\]\}"):
        round_robin_process_groups([a, Recorder("x", devices=frozenset({"cuda"}))])
    with pytest.raises(TypeError, match=r"entry 1 .* HashStore"):
        round_robin_process_groups([c, dist.HashStore()])


def test_names_and_limits() -> None:
    group = round_robin_process_groups(lanes())
    assert group.group_name == "a+b+c"
    assert group.describe() == "round_robin group 'a+b+c' of 2 over 3 recorder lanes"
    group.set_timeout(timedelta(seconds=7))
    assert [lane.timeout for lane in group.lanes] == [timedelta(seconds=7)] * 3
    assert group.timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (3, TypeError, "must be RoundRobinOptions, but are of type int"),
        ({"lane": 3}, TypeError, "unknown are lane; known are lanes, backend, lane_options"),
        ({"lanes": 0}, ValueError, "lanes must be an int of at least 1, but is 0"),
        (RoundRobinOptions(backend=()), ValueError, "names no backend"),
        (RoundRobinOptions(backend=("host", "round_robin")), ValueError, "cannot be round-robin groups"),
        (RoundRobinOptions(2, ("host", "gloo"), 3), TypeError, "must be a dict .* are of type int"),
        (
            RoundRobinOptions(2, ("host", "gloo"), {"mpi": 3}),
            ValueError,
            r"for \['mpi'\], but .*\['host', 'gloo'\]",
        ),
        (RoundRobinOptions(lanes=0), ValueError, "lanes must be an int of at least 1, but is 0"),
        (RoundRobinOptions(lanes=True), ValueError, "but is True"),
        (RoundRobinOptions(backend="round_robin"), ValueError, "cannot be round-robin groups"),
        (RoundRobinOptions(backend="nothing"), ValueError, "unknown backend 'nothing'; known are"),
    ],
)
def test_wrong_options_are_refused(given: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_group("round_robin", GroupOptions(None, 0, 1, pg_options=given))


def bits_on_lanes(group: ProcessGroup, count: int) -> list[bytes]:
    torch.manual_seed(group.rank())
    values = [torch.randn(count) for _ in range(4)]
    works = [group.allreduce(value) for value in values]
    for work in reversed(works):
        work.wait()
    return [value.numpy().tobytes() for value in values]


@pytest.mark.parametrize("lane", ["host", "gloo"])
@pytest.mark.parametrize("count", [1, 1009, 50_000])
def test_bits_are_those_of_one_lane(lane: str, count: int) -> None:
    one = run_ranks(bits_on_lanes, 3, count, backend=lane)
    three = run_ranks(bits_on_lanes, 3, count, backend="round_robin", pg_options=RoundRobinOptions(3, lane))
    assert one == three
    assert one[0] == one[1] == one[2]


KINDS = ("host", "gloo")


def several_kinds(group: ProcessGroup, kinds: list[str]) -> list[float]:
    assert [lane.name() for lane in group.lanes] == kinds
    results = []
    for value in range(5):
        x = torch.tensor([float(value)])
        group.allreduce(x).wait()
        results.append(x.item())
    group.barrier().wait()
    return results


@pytest.mark.parametrize(
    "options",
    [
        {"pg_options": RoundRobinOptions(3, KINDS)},
        {"pg_options": RoundRobinOptions(3, KINDS, {"gloo": None})},
        {"pg_options": {"lanes": 3, "backend": KINDS}},
        {"env": {"COLLECTIVES_ROUND_ROBIN_LANES": "3", "COLLECTIVES_ROUND_ROBIN_BACKEND": "host, gloo"}},
    ],
    ids=["options", "options of one kind", "fields", "environment"],
)
def test_lanes_of_several_kinds_take_turns(options: dict[str, object]) -> None:
    kinds = ["host", "gloo", "host"]
    assert (
        run_ranks(several_kinds, 2, kinds, backend="round_robin", **options)
        == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2
    )


def short_and_long_ways(rank: int, size: int) -> None:
    """Each rank goes another way to each collective; all take the same turns."""
    group = dist.group.WORLD
    for turn in range(24):
        x = torch.full((6,), float(rank + turn))
        way = (turn + rank) % 4
        if way == 0:
            dist.all_reduce(x)
        elif way == 1:
            dist.all_reduce(x, async_op=True).wait()
        elif way == 2:
            group.allreduce([x], AllreduceOptions(timeout=timedelta(seconds=9))).wait()
        else:
            strided = torch.stack([x, x], dim=1)[:, 0]
            dist.all_reduce(strided)
            x = strided
        assert x.tolist() == [2.0 * turn + 1] * 6
        if turn % 5 == 0:
            dist.barrier()
        if turn % 7 == rank:
            with pytest.raises(dist.UnsupportedOperationError):
                dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        got = torch.empty(1)
        if rank == turn % 2:
            dist.send(torch.ones(1) * turn, 1 - rank)
        else:
            dist.recv(got, 1 - rank)
            assert got.item() == turn
    assert group._turn == 24 + 5  # barriers take turns, too


def test_all_ways_to_a_collective_take_one_turn() -> None:
    run_world(short_and_long_ways, 2, backend="round_robin")


def sub_groups(rank: int, size: int) -> None:
    pairs = [dist.new_group([0, 1], backend="round_robin", pg_options={"lanes": 2}), dist.new_group([1, 2])]
    for pair, members in zip(pairs, ([0, 1], [1, 2]), strict=True):
        if rank not in members:
            continue
        works = []
        for turn in range(5):
            x = torch.tensor([rank + turn])
            works.append((x, dist.all_reduce(x, group=pair, async_op=True)))
        for turn, (x, work) in enumerate(works):
            work.wait()
            assert x.item() == sum(members) + 2 * turn
        dist.barrier(pair)
        dist.destroy_process_group(pair)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size


def test_sub_groups() -> None:
    run_world(sub_groups, 3, backend="round_robin")


def errors_of_lanes(group: ProcessGroup) -> None:
    group.allreduce(torch.ones(1)).wait()
    if group.rank() == 1:
        current_store().wait(["seen"])
        return
    with pytest.raises(CollectiveTimeoutError, match=r"^\[rank 0\] lane 1 of round_robin group") as info:
        group.allreduce(torch.ones(3), AllreduceOptions(timeout=timedelta(milliseconds=200))).wait()
    assert info.value.lane == 1
    assert str(info.value).count("lane 1 of") == 1
    # The turn is another lane's, but the group is broken as a whole.
    for refused in (group.barrier, lambda: group.allreduce(torch.ones(3))):
        with pytest.raises(
            GroupAbortedError, match=r"\[rank 0\] round_robin group .* is broken; first cause.*lane 1 of"
        ):
            refused()
    current_store().set("seen", "x")


@pytest.mark.parametrize("lane", ["host", "gloo"])
def test_errors_name_lane_and_rank(lane: str) -> None:
    run_ranks(errors_of_lanes, 2, backend="round_robin", pg_options=RoundRobinOptions(3, lane), isolated=True)


def absent_lane(rank: int, size: int) -> str:
    with pytest.raises(CollectiveTimeoutError, match="lane 0 of round_robin group 'alone', which") as info:
        create_group(
            "round_robin",
            GroupOptions(current_store(), 0, 2, timedelta(seconds=0.3), group_name="alone"),
        )
    assert info.value.lane == 0
    return str(info.value)


def test_a_lane_that_cannot_be_made_is_named() -> None:
    (text,) = run_ranks(absent_lane, 1)
    assert "[rank 0]" in text


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(23, 23) for _ in range(6)), torch.nn.BatchNorm1d(23)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def trained(group: ProcessGroup) -> list[bytes]:
    """Returns the bits of a model after some steps, with more buckets than lanes."""
    torch.manual_seed(7 + group.rank())
    model = Model()
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(8, 23)).square().mean().backward()
        optimizer.step()
    return [value.numpy().tobytes() for value in model.state_dict().values()]


def test_training_over_lanes_gives_the_bits_of_one_group() -> None:
    one = run_ranks(trained, 3, backend="host")
    assert one[0][:-3] == one[1][:-3] == one[2][:-3]
    for count in (1, 3, 5):
        assert run_ranks(trained, 3, backend="round_robin", pg_options=RoundRobinOptions(count)) == one, count


def compose(rank: int, size: int) -> list[float]:
    store = current_store()
    groups = []
    for name in ("host", "gloo"):
        prefix = torch.distributed.PrefixStore(name, store)
        groups.append(create_group(name, GroupOptions(prefix, rank, size, group_name=name)))
    group = round_robin_process_groups(groups)
    results = []
    for value in range(4):
        x = torch.tensor([float(value)])
        group.allreduce(x).wait()
        results.append(x.item())
    group.monitored_barrier(timedelta(seconds=10))
    group.shutdown()
    return results


def test_groups_of_different_kinds_compose() -> None:
    assert run_ranks(compose, 2) == [[0.0, 2.0, 4.0, 6.0]] * 2


def ends_within_a_barrier(group: ProcessGroup) -> None:
    """A barrier that has begun on one lane reaches the others before they are shut down."""
    store = current_store()
    group.allreduce(torch.ones(1)).wait()  # the barrier begins on the second lane
    if group.rank():
        store.wait(["begun"])
    work = group.barrier()
    if group.rank() == 0:
        store.set("begun", "")
    group.shutdown()
    assert work.wait()
    assert work.is_success()


def test_shutdown_finishes_a_barrier() -> None:
    run_ranks(ends_within_a_barrier, 2, backend="round_robin")


def meets_a_thread_that_breaks_lanes(group):
    """One that hangs keeps who reconfigures the group waiting for the time limit only."""
    lane, begun, ends = group.lanes[0], threading.Event(), threading.Event()
    break_for = lane._break_for

    def hangs(cause):
        if threading.current_thread() is thread:
            begun.set()
            ends.wait()
        break_for(cause)

    lane._break_for = hangs
    error = dist.PeerLostError("for this test", 0)
    thread = threading.Thread(target=lambda: group._failed(0, group._epoch, error))
    thread.start()
    begun.wait()
    handles = [group.reconfigure_handle()]
    try:
        with pytest.raises(CollectiveTimeoutError, match=r"another thread .* was not done within"):
            group.reconfigure("too early", handles, timedelta(seconds=0.5))
    finally:
        ends.set()
        thread.join()
    group.reconfigure("in time", handles)
    group.barrier().wait()


def test_a_thread_that_hangs_holds_a_reconfiguration_up_for_its_limit() -> None:
    run_ranks(meets_a_thread_that_breaks_lanes, 1, backend="round_robin", isolated=True)
