"""Turns on one rank, with functions that are no backend."""

from __future__ import annotations

import pytest
import torch

from collectives.bench import patterns
from collectives.bench.player import LIMIT, Player, Turn, Workload

COUNT = 1000
FINISHED_IN_TIME = range(1, 60_000_000_000)


class Recorder:
    """A peer of one rank: the result is the input. Keeps what it was called with, and spoils some results."""

    def __init__(self, spoil=()):
        self.places = []
        self.inputs = []
        self.spoil = set(spoil)

    def __call__(self, tensor):
        if len(self.places) in self.spoil:
            tensor[0] += 1
        self.places.append(tensor.data_ptr())
        self.inputs.append(tensor.clone())


def player(peer, *, in_place=True, max_bytes=4 * COUNT, name="peer", barrier=lambda: None):
    workload = Workload("float32", "sum", in_place, max_bytes, (name,))
    return Player(0, 1, workload, barrier, {name: peer})


def test_cold_calls_get_fresh_input_in_other_memory():
    peer = Recorder()
    result = player(peer).play(Turn("peer", COUNT, 7, 0))
    wanted = patterns.source("sum", torch.float32, COUNT, 0, 1)
    assert len(set(peer.places)) == 7
    assert all(torch.equal(given, wanted) for given in peer.inputs)
    assert len(result.cold_ns) == 7
    assert all(duration in FINISHED_IN_TIME for duration in result.cold_ns)
    assert (result.hot_ns, result.loop_ns, result.cold_wrong, result.hot_wrong) == ([], [], 0, 0)


def test_rotation_goes_on_from_turn_to_turn():
    peer = Recorder()
    one = player(peer)
    for _ in range(4):
        one.play(Turn("peer", COUNT, 3, 0))
    assert len(set(peer.places)) == 12


def test_input_is_fresh_after_the_rotation_has_come_round():
    peer = Recorder(spoil=range(100))
    big = 20 << 20  # three fit into the memory that buffers rotate through
    result = player(peer, max_bytes=big).play(Turn("peer", big // 4, 10, 0))
    assert len(set(peer.places)) < 10
    assert all(float(given[0]) == float(peer.inputs[0][0]) for given in peer.inputs)
    assert result.cold_wrong == 10


def test_hot_calls_and_the_loop_reuse_one_buffer():
    peer = Recorder()
    result = player(peer).play(Turn("peer", COUNT, 0, 5, 11))
    assert len(set(peer.places)) == 1
    assert len(peer.places) == 16
    assert (len(result.hot_ns), len(result.loop_ns)) == (5, 1)


@pytest.mark.parametrize("spoil", [(), (0,), (1, 3)])
def test_wrong_elements_of_cold_calls_are_counted(spoil):
    assert player(Recorder(spoil)).play(Turn("peer", COUNT, 5, 0)).cold_wrong == len(spoil)


def test_wrong_elements_of_hot_calls_are_counted():
    result = player(Recorder([2])).play(Turn("peer", COUNT, 0, 5))
    assert (result.cold_wrong, result.hot_wrong) == (0, 1)


def test_out_of_place_keeps_the_input_and_reduces_a_copy():
    peer = Recorder()
    result = player(peer, in_place=False).play(Turn("peer", COUNT, 4, 2))
    assert len(peer.places) == 6
    assert result.cold_wrong == 0
    assert len(set(peer.places[:4])) == 4

    spoiling = Recorder([1])
    assert player(spoiling, in_place=False).play(Turn("peer", COUNT, 4, 0)).cold_wrong == 1


def test_out_of_place_largest_size_fits():
    big = (64 << 20) + 4
    result = player(Recorder(), in_place=False, max_bytes=big).play(Turn("peer", big // 4, 2, 1))
    assert (len(result.cold_ns), result.cold_wrong) == (2, 0)


def test_the_limit_must_leave_the_input_as_it_is():
    assert player(lambda tensor: tensor.add_(0), name=LIMIT).play(Turn(LIMIT, COUNT, 3, 3)).cold_wrong == 0
    result = player(lambda tensor: tensor.add_(1), name=LIMIT).play(Turn(LIMIT, COUNT, 3, 3))
    assert (result.cold_wrong, result.hot_wrong) == (3 * COUNT, COUNT)


def test_ranks_meet_before_every_timed_call():
    met = []
    player(Recorder(), barrier=lambda: met.append(None)).play(Turn("peer", COUNT, 3, 2, 10))
    assert len(met) == 3 + 2 + 1
