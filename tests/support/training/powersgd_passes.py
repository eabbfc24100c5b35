"""Models that PowerSGD averages the gradients of, for its tests."""

from __future__ import annotations

import torch
from given_gradients import Given

from collectives.ddp import DistributedDataParallel
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

SHAPES = {"a": (12, 20), "bias": (12,), "b": (16, 3, 3, 3), "c": (12, 20), "scale": ()}
MATRICES = ("a", "b", "c")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def state_of(group, **changes):
    return PowerSGDState(group, **{"start_powerSGD_iter": 2, "min_compression_rate": 0.5, **changes})


def wrapped(group, state, hook=powerSGD_hook, shapes=SHAPES, dtype=torch.float32, **options):
    parallel = DistributedDataParallel(Given(shapes, dtype), process_group=group, **options)
    parallel.register_comm_hook(state, hook)
    return parallel


def errors_of(state):
    return {key: error.clone() for key, error in state.error_dict.items()}
