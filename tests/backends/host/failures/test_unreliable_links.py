"""Links between machines that are down for a while, lose packets, or carry them in one direction only."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time

import pytest
import torch
from harness import run_ranks
from machines import make_machines  # noqa: F401 - a fixture

import collectives as dist
from collectives.bench.core.namespaces import INTERFACE

pytestmark = pytest.mark.full

SYNCHRONOUS = dist.AllreduceOptions(asyncOp=False)


def on_link(program, *words):
    """Runs a program of iproute2 on this machine's link; returns what it prints."""
    return subprocess.run([program, *words], check=True, capture_output=True, text=True).stdout


def train(group, seconds):
    """All-reduces on and on, with right results; the last rank's word ends it."""
    rank, size = group.rank(), group.size()
    end, count = time.monotonic() + seconds, 0
    small, large = torch.empty(3), torch.empty(1 << 18)
    while True:
        for tensor in (small, large):
            tensor.fill_(rank + count)
            group.allreduce([tensor], SYNCHRONOUS if count % 2 else None).wait()
            assert (tensor == sum(range(size)) + size * count).all()
        count += 1
        goes_on = torch.tensor(float(time.monotonic() < end))
        group.broadcast([goes_on], size - 1).wait()
        if not goes_on:
            return count


def down_for_a_while(group, seconds):
    """The last rank takes its machine off the switch within a sequence of operations, and puts it back."""
    train(group, 0.3)
    if group.rank() == group.size() - 1:
        script = f"sleep 0.3; ip link set {INTERFACE} down; sleep {seconds}; ip link set {INTERFACE} up"
        with subprocess.Popen(["sh", "-c", script]) as switch:
            try:
                return train(group, seconds + 1.5)
            finally:
                assert switch.wait() == 0
    return train(group, 0)


def test_a_link_that_is_down_for_a_second_is_survived(make_machines):  # noqa: F811
    machines = make_machines(2)
    counts = run_ranks(
        down_for_a_while, 4, 1, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1])
    )
    assert len(set(counts)) == 1


def down_for_long(group, seconds):
    try:
        return down_for_a_while(group, seconds)
    except dist.PeerLostError as error:
        return str(error)


def test_a_link_that_is_down_for_five_seconds_is_survived_or_named_by_all(make_machines):  # noqa: F811
    machines = make_machines(2)
    told = run_ranks(down_for_long, 4, 5, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))
    if not all(isinstance(one, int) for one in told):
        for one in told:
            assert "cannot be reached any more" in one


def hears_but_is_not_heard(group):
    """What the last rank's machine sends is lost, what is sent to it arrives."""
    rank = group.rank()
    group.barrier().wait()
    if rank == group.size() - 1:
        on_link("tc", "qdisc", "add", "dev", INTERFACE, "root", "blackhole")
    with contextlib.suppress(dist.PeerLostError):  # what the others sent before may complete it
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()
    with pytest.raises(dist.PeerLostError, match=r"rank . on .* cannot be reached any more"):
        group.allreduce([torch.ones(1)], SYNCHRONOUS if rank % 2 else None).wait()


def is_not_heard_by_those_who_end(group, idle=0.0):
    """As above; what was sent before is acknowledged, so that the end of the others' connections arrives.

    Args:
        group: the group.
        idle: seconds for which those who are not heard begin no operation.
    """
    group.barrier().wait()
    here = group.rank() >= group.size() // 2
    if here:
        time.sleep(0.4)
        on_link("tc", "qdisc", "replace", "dev", INTERFACE, "root", "blackhole")
        time.sleep(idle)
    elif idle:
        time.sleep(0.5)  # so that they send a status next, which asks for no answer
    with contextlib.suppress(dist.PeerLostError):
        group.allreduce([torch.ones(1)]).wait()
    with pytest.raises(dist.PeerLostError, match=r"rank . on .* cannot be reached any more"):
        group.allreduce([torch.ones(1)]).wait()
    if not here:
        group.abort()


def is_not_heard_while_it_is_idle(group):
    """As above; it begins its operation when the others are about to end theirs."""
    is_not_heard_by_those_who_end(group, idle=2.0)


SCENES = [hears_but_is_not_heard, is_not_heard_by_those_who_end, is_not_heard_while_it_is_idle]


@pytest.mark.parametrize("scene", SCENES)
def test_a_machine_that_hears_but_is_not_heard_is_named_on_both_sides(make_machines, scene):  # noqa: F811
    machines = make_machines(2)
    run_ranks(scene, 4, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))


def losing(group):
    """A short queue in front of a slow link drops packets when it is full, as a switch does."""
    rank = group.rank()
    if rank % 2 == 0:
        shape = ["tbf", "rate", "200mbit", "burst", "3000b", "limit", "9000b"]
        on_link("tc", "qdisc", "add", "dev", INTERFACE, "root", *shape)
    group.barrier().wait()
    train(group, 2.0)
    parts = [torch.full((1 << 16,), 10.0 * rank + other) for other in range(group.size())]
    outputs = [torch.empty(1 << 16) for _ in parts]
    group.alltoall(outputs, parts).wait()
    assert [output[-1].item() for output in outputs] == [10.0 * other + rank for other in range(group.size())]
    group.barrier().wait()
    (statistics,) = json.loads(on_link("tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE, "root"))
    return statistics["drops"] / statistics["packets"]


def losing_at_random(group):
    """The kernel drops one packet of twenty, in both directions, with traffic and without."""
    if group.rank() % 2 == 0:
        # Classic BPF: a random number, and whether it is below a twentieth of all; TC_ACT_SHOT, or TC_ACT_OK.
        program = f"4,32 0 0 4294963256,53 1 0 {2**32 // 20},6 0 0 2,6 0 0 0"
        on_link("tc", "qdisc", "add", "dev", INTERFACE, "clsact")
        on_link(
            "tc", "filter", "add", "dev", INTERFACE, "egress", "bpf", "direct-action", "bytecode", program
        )
    group.barrier().wait()
    train(group, 1.0)
    time.sleep(5)  # longer than a machine may be silent
    train(group, 1.0)
    group.barrier().wait()
    queues = json.loads(on_link("tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE))
    return sum(queue["drops"] for queue in queues)


def test_a_link_that_loses_packets_at_random_is_not_taken_for_one_that_is_gone(make_machines):  # noqa: F811
    machines = make_machines(2)
    options = {"backend": "host", "isolated": True, "machines": (machines, [0, 0, 1, 1])}
    assert min(run_ranks(losing_at_random, 4, **options)) > 0


def test_a_link_that_loses_packets_changes_no_result(make_machines):  # noqa: F811
    machines = make_machines(2)
    lost = run_ranks(losing, 4, backend="host", isolated=True, machines=(machines, [0, 0, 1, 1]))
    assert min(lost) > 0.001
