"""The cost model: limits, order, hand-computed values, and parameters found again in synthetic times."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from machines import bytes_without_repeats, make_machines  # noqa: F401 - a fixture

from collectives import _native
from collectives.bench.cost_model import predictions
from collectives.bench.cost_model.algorithms import ALGORITHMS, ALL_REDUCES, host_algorithm, is_possible
from collectives.bench.cost_model.calibration import (
    MEMORY,
    NETWORK,
    Point,
    check_scatter,
    errors,
    fit,
    predicted_us,
    split,
)
from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.cost_model.predictions import PRICES, lower_bound_us, terms, time_us

ARRIVAL, LINES, COPIES, LATENCY, MESSAGES, LINK, SOCKETS = (
    PRICES[name][0] for name in ("arrivals", "lines", "copies", "latencies", "messages", "link", "sockets")
)
EASY = Parameters(
    cores=4,
    arrival_us=2.0,
    line_us=0.5,
    switch_us=7.0,
    flag_us=1.0,
    copy_us_per_byte=1e-4,
    reduce_us_per_byte=5e-5,
    crowding=0.5,
    latency_us=10.0,
    message_us=3.0,
    link_us_per_byte=1e-3,
    socket_us_per_byte=2e-4,
)
ONE = Scale(1, 4)
FIELDS = [*MEMORY, *NETWORK]
SCALES = [Scale(m, r) for m in (1, 2, 3, 5, 16, 100) for r in (1, 2, 3, 8)]
SIZES = [8, 4096, 1 << 20, 100 << 20]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_communicates_alone(name):
    assert terms(name, 1 << 20, Scale(1, 1), EASY) == {}
    assert lower_bound_us(1 << 20, Scale(1, 1), EASY) == 0


def test_ring_by_hand():
    # 2(n-1) steps, each a latency, two overheads, and s/n bytes over the link and twice through sockets; in
    # the first half each rank reads s/n bytes of its own and of the other's.
    s, n = 1_000_000, 5
    step = 10 + 2 * 3 + s / n * (1e-3 + 2 * 2e-4)
    wanted = 2 * (n - 1) * step + (n - 1) * 2 * s / n * 5e-5
    assert time_us("ring", s, Scale(n, 1), EASY) == pytest.approx(wanted)


def test_recursive_doubling_by_hand():
    # log2(8) steps of the whole.
    step = 10 + 2 * 3 + 4096 * (1e-3 + 2 * 2e-4) + 2 * 4096 * 5e-5
    assert time_us("recursive doubling", 4096, Scale(8, 1), EASY) == pytest.approx(3 * step)


def test_rabenseifner_by_hand():
    s, n = 1 << 20, 8
    sent = s * (n - 1) / n  # in each of the two halves, in three steps
    wanted = 2 * (3 * (10 + 2 * 3) + sent * (1e-3 + 2 * 2e-4)) + 2 * sent * 5e-5
    assert time_us("Rabenseifner", s, Scale(n, 1), EASY) == pytest.approx(wanted)


def test_tree_by_hand():
    step = 10 + 2 * 3 + 4096 * (1e-3 + 2 * 2e-4)
    assert time_us("tree", 4096, Scale(4, 1), EASY) == pytest.approx(4 * step + 2 * 2 * 4096 * 5e-5)


def test_one_shot_by_hand():
    # One machine: an arrival, three lines, a copy in, and four contributions read.
    assert time_us("one-shot", 1000, ONE, EASY) == pytest.approx(2 + 3 * 0.5 + 0.1 + 4 * 0.05)
    # Twice as many ranks as cores: a core does all that twice, at 1.5 times the cost of a byte, and switches.
    wanted = 2 + 7 + 2 * 7 * 0.5 + 2 * 1.5 * (0.1 + 8 * 0.05)
    assert time_us("one-shot", 1000, Scale(1, 8), EASY) == pytest.approx(wanted)


def test_arrival_of_machines_by_hand():
    # Leaders exchange frames, each with two others: a head, and what tells of two ranks. Two arrivals of the
    # local ranks around it.
    frame = 16 + 2 * 40
    parts = terms("barrier", 0, Scale(3, 2), EASY)
    assert parts == {
        ARRIVAL: pytest.approx(4),
        LINES: pytest.approx(5 * 0.5),
        LATENCY: pytest.approx(10),
        MESSAGES: pytest.approx(2 * 2 * 3),
        LINK: pytest.approx(2 * frame * 1e-3),
        SOCKETS: pytest.approx(2 * 2 * frame * 2e-4),
        COPIES: pytest.approx(3 * frame * 1e-4),
    }


def test_slices_of_two_by_hand():
    s = 4 << 20
    arrival = 2 + 0.5
    work = s * 1e-4 + s * 5e-5  # half of it in, half of it out; both contributions to half of it are read
    flags = 2 * 64 * 1.0  # filled and reduced, of chunks of 64 KiB
    assert time_us("sliced", s, Scale(1, 2), EASY) == pytest.approx(arrival + work + flags, rel=1e-9)


def test_long_messages_between_machines_reach_the_link():
    fast = replace(EASY, message_us=0, latency_us=0, copy_us_per_byte=1e-9, reduce_us_per_byte=1e-9,
                   flag_us=0, socket_us_per_byte=1e-9)  # fmt: skip
    for machines in (2, 3, 10):
        link = 2 * (machines - 1) / machines * (64 << 20) * fast.link_us_per_byte
        assert time_us("hierarchical", 64 << 20, Scale(machines, 2), fast) == pytest.approx(link, rel=1e-3)


def test_only_the_root_of_a_short_broadcast_sends_it():
    s, frame = 4096, 16 + 2 * 40
    parts = terms("broadcast", s, Scale(3, 2), EASY)
    assert parts[LINK] == pytest.approx(2 * (frame + s) * 1e-3)
    assert parts[SOCKETS] == pytest.approx(2 * (frame + s + frame) * 2e-4)
    # Of an all-gather every rank's part goes to both others.
    parts = terms("all_gather", 6 * s, Scale(3, 2), EASY)
    assert parts[LINK] == pytest.approx(2 * (frame + 2 * s) * 1e-3)


def test_arrival_of_many_machines_by_hand():
    # Beyond 32 machines leaders pass frames on: six rounds, in each of which one sends once and hears once.
    frame = 16 + 2 * 40
    parts = terms("barrier", 0, Scale(48, 2), EASY)
    assert parts[LATENCY] == pytest.approx(6 * 10)
    assert parts[MESSAGES] == pytest.approx(6 * 2 * 3)
    assert parts[LINK] == pytest.approx(47 * frame * 1e-3)
    assert parts[SOCKETS] == pytest.approx(2 * 47 * frame * 2e-4)
    assert parts[COPIES] == pytest.approx((1 + 3 * 47) * frame * 1e-4)
    # A root gives away what it stages once in every round.
    s = 4096
    parts = terms("broadcast", s, Scale(48, 2), EASY)
    assert parts[LINK] == pytest.approx((47 * frame + 6 * s) * 1e-3)


def test_bytes_of_long_messages_on_the_busiest_link():
    s = 24 << 20
    for machines in (2, 3, 6):
        arrival = terms("barrier", 0, Scale(machines, 1), EASY)[LINK]
        part = (machines - 1) / machines
        wanted = {"broadcast": s, "all_gather": s * part, "reduce_scatter": s * part, "all_to_all": s * part,
                  "hierarchical": 2 * s * part}  # fmt: skip
        for name, sent in wanted.items():
            link = terms(name, s, Scale(machines, 1), EASY)[LINK]
            assert link == pytest.approx(arrival + sent * 1e-3), (name, machines)


def test_more_machines_than_shares_load_those_that_have_one():
    # A chunk of 64 KiB has 256 shares of 256 bytes, so of 1025 machines 256 send results to all others.
    s, scale = 64 << 10, Scale(1025, 1)
    p = replace(EASY, message_us=0, latency_us=0, socket_us_per_byte=0, reduce_us_per_byte=0)
    arrival = terms("barrier", 0, scale, p)[LINK]
    link = terms("hierarchical", s, scale, p)[LINK]
    assert link - arrival == pytest.approx((255 * 256 + 1024 * 256) * 1e-3)


def test_burst_passes_a_link_at_once():
    shaped = replace(EASY, burst_bytes=100_000)
    for size in (8, 16 << 10, 64 << 20):
        free, limited = (terms("hierarchical", size, Scale(2, 1), p) for p in (EASY, shaped))
        saved = free[LINK] - limited.get(LINK, 0.0)
        assert saved == pytest.approx(min(free[LINK], 100_000 * 1e-3))
        assert {**free, LINK: 0.0} == {**limited, LINK: 0.0}


@pytest.mark.parametrize(
    ("scale", "staged", "in_parts"),
    [(Scale(2, 1), 32 << 10, 64 << 10), (Scale(4, 4), 32 << 10, 128 << 10), (Scale(8, 8), 8 << 10, 64 << 10),
     (Scale(32, 1), 16 << 10, 512 << 10), (Scale(100, 1), 4 << 10, 0), (Scale(2500, 4), 4 << 10, 0)],
)  # fmt: skip
def test_contributions_between_machines_travel_with_the_arrival_up_to(scale, staged, in_parts):
    assert host_algorithm("all_reduce", staged, scale) == "one-shot"
    beyond = "staged in parts" if in_parts else "hierarchical"
    assert host_algorithm("all_reduce", staged + 1, scale) == beyond
    assert host_algorithm("all_reduce", in_parts or staged, scale) in {"staged in parts", "one-shot"}
    assert host_algorithm("all_reduce", (in_parts or staged) + 1, scale) == "hierarchical"


def test_parts_by_hand():
    # Three machines of two ranks: frames of the arrival carry the machine's partial of the parts of two; then
    # a head and two results go to each other machine.
    s, part = 60_000, 10_000
    frame = 16 + 2 * 40 + 2 * part
    found = terms("staged in parts", s, Scale(3, 2), EASY)
    assert found[LATENCY] == pytest.approx(2 * 10)
    assert found[MESSAGES] == pytest.approx(2 * 2 * 2 * 3)
    assert found[LINK] == pytest.approx(2 * (frame + 16 + 2 * part) * 1e-3)
    assert found[SOCKETS] == pytest.approx(2 * found[LINK] * 0.2)
    # Of a reduce-scatter the arrival alone.
    assert terms("reduce_scatter", s, Scale(3, 2), EASY)[LINK] == pytest.approx(2 * frame * 1e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_more_work_takes_longer(name):
    for scale in SCALES:
        if not is_possible(name, scale):
            continue
        # Between many machines short contributions may take longer than long ones: they go to everybody.
        sizes = SIZES if scale.machines == 1 or name in ALL_REDUCES else SIZES[2:]
        times = [time_us(name, size, scale, EASY) for size in sizes]
        assert times == sorted(times)
        for size in (8, 1 << 20):
            now = time_us(name, size, scale, EASY)
            for field in FIELDS:
                slower = replace(EASY, **{field: 2 * getattr(EASY, field)})
                assert now <= time_us(name, size, scale, slower) * (1 + 1e-12)
                # Nothing can become slower by more than the one thing that did.
                assert time_us(name, size, scale, slower) <= 2 * now * (1 + 1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_more_machines_take_longer(name):
    for ranks in (1, 4):
        scales = [Scale(m, ranks) for m in (2, 4, 8, 16, 64, 256, 1024)]
        if is_possible(name, scales[0]):
            for size in (8, 100 << 20):
                times = [time_us(name, size, scale, EASY) for scale in scales]
                if name in {"all_gather", "all_to_all", "reduce_scatter"}:
                    continue  # a part is the smaller, the more ranks there are
                assert times == sorted(times), (ranks, size)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_nothing_is_faster_than_the_bound(name):
    for scale in SCALES:
        for size in SIZES:
            if is_possible(name, scale):
                bound = lower_bound_us(size, scale, EASY)
                assert 0 <= bound <= time_us(name, size, scale, EASY) * (1 + 1e-9), (scale, size)


def test_bound_by_hand():
    assert lower_bound_us(0, Scale(2, 1), EASY) == pytest.approx(10 + 2 * 3)
    # Nine machines: two steps with two others each cost less than four with one, or one with eight.
    assert lower_bound_us(0, Scale(9, 1), EASY) == pytest.approx(min(4 * 16, 2 * (10 + 12), 10 + 16 * 3))
    assert lower_bound_us(1 << 30, Scale(4, 1), EASY) == pytest.approx(1.5 * (1 << 30) * 1e-3)


def test_which_of_our_algorithms_is_taken():
    chosen = {
        (size, scale): host_algorithm("all_reduce", size, scale)
        for size in (8, 64 << 10, 256 << 10, 1 << 20)
        for scale in (Scale(1, 2), Scale(1, 4), Scale(4, 2))
    }
    assert [chosen[8, scale] for scale in (Scale(1, 2), Scale(1, 4), Scale(4, 2))] == ["one-shot"] * 3
    assert chosen[64 << 10, Scale(1, 4)] == "one-shot"
    assert chosen[256 << 10, Scale(1, 4)] == "sliced"
    assert chosen[64 << 10, Scale(1, 2)] == chosen[1 << 20, Scale(1, 2)] == "sliced"
    assert chosen[64 << 10, Scale(4, 2)] == "staged in parts"
    assert chosen[256 << 10, Scale(4, 2)] == chosen[1 << 20, Scale(4, 2)] == "hierarchical"
    assert host_algorithm("broadcast", 8, ONE) == "broadcast"


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 100])
def test_model_switches_algorithms_where_the_core_does(ranks):
    limits, scale = _native.complete_tuning({}, ranks), Scale(1, ranks)
    assert host_algorithm("all_reduce", limits["one_shot_bytes"], scale) == "one-shot"
    assert host_algorithm("all_reduce", limits["one_shot_bytes"] + 1, scale) != "one-shot"
    for name, per_byte in (("broadcast", 1), ("all_gather", ranks)):
        at_limit, beyond = (
            ALGORITHMS[name](size * per_byte, scale).serial
            for size in (limits["staged_bytes"], limits["staged_bytes"] + 1)
        )
        assert "flags" not in at_limit
        assert beyond["flags"] >= ranks - 1
    chunks = ALGORITHMS["all_gather"](ranks * 10 * limits["chunk_bytes"], scale).serial["flags"]
    assert chunks == 10 * (ranks - 1)


def call_often(group, name, size, calls):
    whole = torch.zeros(size // 4)
    part = whole[: whole.numel() // group.size()].clone()
    run = {
        "one-shot": lambda: group.allreduce([whole]),
        "staged in parts": lambda: group.allreduce([whole]),
        "hierarchical": lambda: group.allreduce([whole]),
        "broadcast": lambda: group.broadcast([whole], root=0),
        "all_gather": lambda: group.all_gather_single(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter_single(part, whole),
    }[name]
    for _ in range(calls):
        run().wait()


def test_machines_send_the_bytes_that_the_model_counts(make_machines):  # noqa: F811
    machines, long = make_machines(2), 3 << 20
    sizes = [(name, long) for name in ("hierarchical", "broadcast", "all_gather", "reduce_scatter")]
    sizes += [("one-shot", 30 << 10), ("staged in parts", 60 << 10), ("reduce_scatter", 60 << 10)]
    sizes += [("reduce_scatter", 30 << 10)]
    for (name, size), ranks in itertools.product(sizes, (1, 3)):
        where = {"isolated": True, "machines": (machines, [0] * ranks + [1] * ranks)}
        sent = []
        for calls in (1, 4) if size == long else (1, 100):
            before = bytes_without_repeats(machines, 0)
            run_ranks(call_often, 2 * ranks, name, size, calls, backend="host", **where)
            sent.append(bytes_without_repeats(machines, 0) - before)
        work = ALGORITHMS[name](size, Scale(2, ranks))
        counted = work.serial.get("link", 0) + work.pipelined.get("link", 0)
        more = 3 if size == long else 99
        with_headers = (sent[1] - sent[0]) / more
        assert counted == pytest.approx(with_headers, rel=0.15), (name, size, ranks)


def synthetic(parameters, noise=0.0):
    """Times as the model has them, some with noise."""
    rng = random.Random(7)
    return [
        Point(operation, size, scale, 0.0)
        for scale in (
            Scale(1, 2),
            Scale(1, 3),
            Scale(1, 4),
            Scale(1, 8),
            Scale(2, 1),
            Scale(2, 4),
            Scale(5, 2),
        )
        for operation in ("all_reduce", "broadcast", "barrier")
        for size in ((0,) if operation == "barrier" else [8 << shift for shift in range(0, 24, 2)])
    ], lambda point: predicted_us(point, parameters) * math.exp(noise * rng.gauss(0, 1))


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.25), (0.05, 0.3)])
def test_fit_finds_parameters_again(noise, tolerance):
    true = replace(
        Parameters(cores=2), arrival_us=2.5, switch_us=9.0, copy_us_per_byte=2e-4, reduce_us_per_byte=9e-5,
        latency_us=55.0, link_us_per_byte=2.4e-3,
    )  # fmt: skip
    points, measure = synthetic(true, noise)
    points = [replace(point, measured_us=measure(point)) for point in points]
    found = fit(points, Parameters(cores=2), [*MEMORY, *NETWORK])
    for name in ("arrival_us", "switch_us", "copy_us_per_byte", "reduce_us_per_byte", "latency_us",
                 "link_us_per_byte"):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=tolerance), name
    assert errors(points, found).median < 0.01 + noise


def test_outliers_and_scattering_points_decide_little():
    true = replace(Parameters(cores=2), arrival_us=2.5, copy_us_per_byte=2e-4)
    points, measure = synthetic(true)
    points = [replace(point, measured_us=measure(point)) for point in points]
    bad = [
        replace(
            point,
            measured_us=point.measured_us * (80 if i % 8 == 0 else 1),
            scatter=30 if i % 8 == 0 else 1.1,
        )
        for i, point in enumerate(points)
    ]
    found = fit(bad, Parameters(cores=2), [*MEMORY, *NETWORK])
    assert found.arrival_us == pytest.approx(2.5, rel=0.3)
    assert found.copy_us_per_byte == pytest.approx(2e-4, rel=0.3)
    assert errors(points, found).median < 0.1
    check_scatter(bad, "record")
    with pytest.raises(ValueError, match=r"record is too noisy .* 9 times as long .*--budget"):
        check_scatter([replace(point, scatter=9.0) for point in points], "record")


def test_namespaces_share_cores():
    apart = Point("barrier", 0, Scale(2, 2), 1.0)
    assert predicted_us(replace(apart, cores=2), EASY) == predicted_us(apart, replace(EASY, cores=2))
    assert predicted_us(replace(apart, cores=1), EASY) > predicted_us(apart, EASY)


def test_fit_leaves_what_is_not_asked_for():
    points, measure = synthetic(EASY)
    points = [replace(point, measured_us=measure(point)) for point in points]
    start = replace(Parameters(), cores=4)
    found = fit(points, start, ["copy_us_per_byte"])
    assert found == replace(start, copy_us_per_byte=found.copy_us_per_byte)
    with pytest.raises(ValueError, match="no measurement"):
        fit([], start, MEMORY)


def test_check_has_only_points_that_did_not_calibrate():
    points, _ = synthetic(EASY)
    one_machine = [point for point in points if point.scale.machines == 1]
    extra = [replace(point, operation="all_gather") for point in one_machine]
    used, kept = split([*one_machine, *extra])
    assert len(used) + len(kept) == len(one_machine) + len(extra)
    assert not set(used) & set(kept)
    assert {point.scale.ranks for point in used} == {2, 8}
    assert {point.scale.ranks for point in kept} == {2, 3, 4, 8}
    assert not [point for point in used if point.operation == "all_gather"]
    for ranks in (2, 8):
        sizes = {point.size_bytes for point in used if point.scale.ranks == ranks}
        between = {point.size_bytes for point in kept if point.operation == "all_reduce"} - sizes
        assert sizes
        assert between


def test_errors_are_relative_in_both_directions():
    points = [
        Point("barrier", 0, ONE, time_us("barrier", 0, ONE, EASY) * factor) for factor in (0.5, 1.0, 2.0)
    ]
    off = errors(points, EASY)
    assert (off.median, off.worst) == (pytest.approx(1.0), pytest.approx(1.0))
    assert errors([], EASY) is None


def test_scales_grow_to_the_limit():
    assert predictions.scales_up_to(10_000, 4)[-1] == Scale(2500, 4)
    assert [scale.machines for scale in predictions.scales_up_to(20, 2)] == [1, 2, 4, 8, 10]
    assert [scale.machines for scale in predictions.scales_up_to(16, 2)] == [1, 2, 4, 8]
    assert predictions.scales_up_to(3, 4) == [Scale(1, 4)]


def test_ends_of_scaling():
    scales = predictions.scales_up_to(4096, 1)
    end = predictions.scaling_end("one-shot", 8, scales, EASY)
    # A leader speaks with everybody: 6 us each, beside 10 us of latency. Beyond 32 machines it still
    # has a line of every rank to look at.
    first = time_us("one-shot", 8, Scale(2, 1), EASY)
    assert time_us("one-shot", 8, end.doubles, EASY) >= 2 * first
    assert time_us("one-shot", 8, Scale(end.doubles.machines // 2, 1), EASY) < 2 * first
    assert end.limit == LINES
    few = predictions.scaling_end("one-shot", 8, predictions.scales_up_to(32, 1), EASY)
    assert (few.doubles, few.limit) == (end.doubles, MESSAGES)
    assert end.inefficient is not None
    ring = predictions.scaling_end("ring", 8, scales, EASY)
    assert ring.limit == LATENCY
    long_ring = predictions.scaling_end("ring", 1 << 30, predictions.scales_up_to(16, 1), EASY)
    assert (long_ring.doubles, long_ring.inefficient, long_ring.limit) == (None, None, LINK)
    with pytest.raises(ValueError, match="does not exist"):
        predictions.scaling_end("sliced", 8, scales, EASY)


def test_best_is_the_fastest_that_exists():
    for scale in SCALES:
        if scale.ranks > 1:
            for size in SIZES:
                fastest = min(predictions.predictions(size, scale, EASY), key=lambda each: each.time_us)
                assert is_possible(fastest.algorithm, scale)
                assert fastest.time_us <= predictions.predict_host(size, scale, EASY).time_us


@pytest.mark.parametrize("machines", [0, -1])
def test_scales_without_ranks_are_refused(machines):
    with pytest.raises(ValueError, match="there must be"):
        Scale(machines, 2)
