"""Iterations that are predicted."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import pytest

from collectives.bench.cost_model.parameters import Parameters, Scale
from collectives.bench.paper.scaling import MOST_RANKS, predicted_s, predicted_scales, read_parameters

LOCAL = {"forward": [1_000_000] * 3, "backward": [2_000_000] * 3, "step": [500_000] * 3}
SIZES = [1000] * 100


def test_communication_that_backward_hides_costs_its_last_bucket_only():
    free = Parameters(1, *[1e-9] * (len(fields(Parameters)) - 1))
    seconds = predicted_s(LOCAL, SIZES, 25, Scale(8, 1), free, host=False)
    assert seconds == pytest.approx(0.0035, rel=1e-3)


def test_a_slow_link_is_what_an_iteration_takes():
    slow = Parameters(cores=1, link_us_per_byte=1.0)
    for host in (False, True):
        seconds = predicted_s(LOCAL, SIZES, 25, Scale(8, 1), slow, host=host)
        assert seconds > 1.5 * 400_000 * 1e-6


def test_more_small_buckets_cost_more():
    usual = Parameters(cores=1)
    one, many = (predicted_s(LOCAL, SIZES, size, Scale(64, 1), usual, host=False) for size in (25, 0))
    assert many > one


def test_scales_begin_beyond_what_was_measured():
    scales = predicted_scales(4, 2)
    assert [scale.ranks for scale in scales] == [8, 16, 32, 64, 128, 256]
    assert scales[-1].ranks == MOST_RANKS


def test_parameters_of_the_cost_models_program(tmp_path):
    file = tmp_path / "model.json"
    wanted = Parameters(cores=3, latency_us=7.0)
    file.write_text(json.dumps({"predicted_for": asdict(wanted)}))
    assert read_parameters(file) == wanted
    for other in ({}, [], {"predicted_for": {"speed": 1}}):
        file.write_text(json.dumps(other))
        with pytest.raises(ValueError, match="was not written by 'collectives bench model"):
            read_parameters(file)
