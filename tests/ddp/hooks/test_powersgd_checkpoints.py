"""PowerSGD's state in checkpoints: what is saved, what goes on as before, and what is refused."""

from __future__ import annotations

import io
import logging
import pickle

import pytest
import torch
from given_gradients import averaged, random_gradients
from harness import run_ranks, run_world
from powersgd_passes import CLOSE, MATRICES, SHAPES, errors_of, state_of, wrapped
from torch import nn

import collectives as dist
from collectives.ddp import DistributedDataParallel, GradientSyncError
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def moved(group):
    """New buckets come between two steps; errors go with their parameters."""
    state = state_of(group, use_error_feedback=True)
    first = wrapped(group, state)
    for step in range(4):
        averaged(first, random_gradients(SHAPES, group.rank(), step))
    state = pickle.loads(pickle.dumps(state))
    state.process_group = group
    second = wrapped(group, state, bucket_cap_mb=0.0005)
    layouts = []
    for step in range(4, 8):
        before = errors_of(state)
        assert set(before) == set(SHAPES)
        given = random_gradients(SHAPES, group.rank(), step)
        given = dict(sorted(given.items(), key=lambda entry: entry[0], reverse=True))
        result = averaged(second, given)
        layouts.append([bucket.indices for bucket in second.reducer.gradients.buckets])
        for name in MATRICES:
            left = (given[name] - result[name]).flatten() + before[name]
            torch.testing.assert_close(left, state.error_dict[name], **CLOSE)
    return layouts


def test_errors_survive_new_buckets_and_a_checkpoint() -> None:
    for layouts in run_ranks(moved, 2, backend="host"):
        assert layouts[0] != layouts[-1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x):
        return self.fc2(self.relu(self.fc1(x)))


def train(model, steps, rank, seed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(10 * seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 24, generator=generator)).square().sum().backward()
        optimizer.step()


def demo(rank, size, path):
    """The example of the documentation, then both models go on alike where rank 0's memory is theirs."""
    model = DistributedDataParallel(Model())
    state, hook = PowerSGDState(process_group=None, start_powerSGD_iter=2), powerSGD_hook
    model.register_comm_hook(state, hook)
    train(model, 4, rank, 0)
    checkpoint = {"state_dict": model.state_dict(), "comm_hook": hook, "comm_hook_state": state}
    if rank == 0:
        torch.save(checkpoint, path)
    own = io.BytesIO()
    torch.save(checkpoint, own)
    own.seek(0)
    dist.barrier()
    found = []
    for source in (path, own):
        loaded = torch.load(source, weights_only=False)
        again = DistributedDataParallel(Model())
        again.load_state_dict(loaded["state_dict"])
        again.register_comm_hook(loaded["comm_hook_state"], loaded["comm_hook"])
        assert loaded["comm_hook_state"].iter == 4
        assert loaded["comm_hook"] is powerSGD_hook
        train(again, 3, rank, 1)
        found.append([parameter.detach().clone() for parameter in again.parameters()])
    train(model, 3, rank, 1)
    found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


def test_the_documented_checkpoint(tmp_path) -> None:
    ranks = run_world(demo, 2, str(tmp_path / "checkpoint.pt"))
    for ours, other in zip(*ranks, strict=True):
        assert all(map(torch.equal, ours, other))
    of_rank_0, own, straight_on = ranks[0]
    for restored, never_saved in zip(own, straight_on, strict=True):
        torch.testing.assert_close(restored, never_saved, **CLOSE)
    assert not all(map(torch.equal, of_rank_0, own))  # the other rank's errors are not in rank 0's file


def saved_by(group):
    state = state_of(group)
    parallel = wrapped(group, state)
    for step in range(3):
        averaged(parallel, random_gradients(SHAPES, group.rank(), step))
    return pickle.dumps(state)


def restored(group, saved, differ):
    """Returns the errors of a pass with a bad state, and of the next one with a mended state."""
    state = pickle.loads(saved)
    state.process_group = group
    if differ:
        state.iter += group.rank()
    parallel = wrapped(group, state)
    parallel.module.a.grad = torch.full((12, 20), 7.0)
    seen = []
    for _ in range(2):
        try:
            parallel(random_gradients(SHAPES, group.rank(), 0)).backward()
        except GradientSyncError as error:
            seen.append(str(error))
            # What was accumulated is there, and the mean is not.
            mine = random_gradients(SHAPES, group.rank(), 0)["a"]
            torch.testing.assert_close(parallel.module.a.grad, mine + 7)
        state.iter = 3
        state.reset_memory()
        parallel.zero_grad()
    return seen


def test_a_state_of_another_world_is_refused_on_all_ranks(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        (saved, _) = run_ranks(saved_by, 2, backend="host")
    for seen in run_ranks(restored, 3, saved, False, backend="host"):
        assert len(seen) == 1
        assert "the state was saved by 2 ranks, but there are 3; call reset_memory()" in seen[0]
        assert "because of ranks 0, 1, 2" in seen[0]
    for seen in run_ranks(restored, 2, saved, True, backend="host"):
        assert len(seen) == 1
        assert "the ranks' states differ" in seen[0]
        assert "iter: 3 on rank 0; 4 on rank 1" in seen[0]


def test_the_process_group_is_not_saved(caplog) -> None:
    state = PowerSGDState(object(), matrix_approximation_rank=3)
    state.rng.randint(5)
    with caplog.at_level(logging.WARNING):
        loaded = pickle.loads(pickle.dumps(state))
    assert "the process group of PowerSGDState cannot be saved" in caplog.text
    assert loaded.process_group is None
    assert loaded.matrix_approximation_rank == 3
    assert loaded.rng.randint(2**31) == state.rng.randint(2**31)


def another_model(group, cap):
    state = state_of(group)
    first = wrapped(group, state)
    for step in range(3):
        averaged(first, random_gradients(SHAPES, group.rank(), step))
    shapes = {**SHAPES, "a": (13, 20)}
    state = pickle.loads(pickle.dumps(state))
    state.process_group = group
    second = wrapped(group, state, shapes=shapes, bucket_cap_mb=cap)
    with pytest.raises(GradientSyncError) as caught:
        averaged(second, random_gradients(shapes, group.rank(), 0))
    return str(caught.value)


@pytest.mark.parametrize("cap", [25, 0])
def test_a_state_of_another_model_is_refused(cap) -> None:
    """Also where it fits all buckets but the last, whose failure must not leave the others waiting."""
    for message in run_ranks(another_model, 2, cap, backend="host", timeout=20):
        assert "an error of 240 elements for a, whose gradient has 260" in message
