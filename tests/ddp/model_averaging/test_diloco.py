"""DiLoCo and Streaming DiLoCo: their steps against torch's optimizer, delays, checkpoints, and lost ranks."""

from __future__ import annotations

import copy
import os
import signal

import pytest
import torch
from harness import run_ranks, run_world
from on_ranks import on_ranks
from torch import nn

import collectives
from collectives.ddp.errors import ModelMismatchError
from collectives.ddp.model_averaging import DiLoCoAverager
from collectives.ddp.optim import PostLocalSGDOptimizer


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))


def train(module, optimizer, rank, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def made(group, module, **options):
    inner = torch.optim.AdamW(module.parameters(), lr=0.01)
    averager = DiLoCoAverager(module.parameters(), process_group=group, **options)
    return PostLocalSGDOptimizer(inner, averager)


def simulated(size, steps, period, delay=0, alpha=0.0, fragments=((0, 1, 2, 3, 4, 5),)):
    """Returns the parameters of all ranks, trained in one process; the outer optimizer is torch's."""
    ranks = [model() for _ in range(size)]
    inner = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in ranks]
    shared = [nn.Parameter(p.detach().clone()) for p in ranks[0].parameters()]
    outer = [
        torch.optim.SGD([shared[i] for i in fragment], lr=0.7, momentum=0.9, nesterov=True)
        for fragment in fragments
    ]
    pending = []

    def end(step):
        for entry in [entry for entry in pending if entry[0] == step]:
            pending.remove(entry)
            _, number, means = entry
            for i, mean in zip(fragments[number], means, strict=True):
                shared[i].grad = mean
            outer[number].step()
            for module in ranks:
                parameters = list(module.parameters())
                for i in fragments[number]:
                    parameters[i].data.lerp_(shared[i].detach(), 1 - alpha)

    for step in range(1, steps + 1):
        for rank, (module, optimizer) in enumerate(zip(ranks, inner, strict=True)):
            train(module, optimizer, rank, 1, first=step - 1)
        end(step)
        for number, fragment in enumerate(fragments):
            if (step - number * period // len(fragments)) % period == 0:
                means = [
                    torch.stack([shared[i].detach() - list(m.parameters())[i].detach() for m in ranks]).mean(
                        0
                    )
                    for i in fragment
                ]
                pending.append((step + delay, number, means))
        end(step)
    return [flat(module) for module in ranks]


def plain(group):
    module = model(seed=group.rank())  # rank 0's parameters are everybody's
    optimizer = made(group, module, period=3)
    train(module, optimizer, group.rank(), 7)
    return flat(module), group.stats()["all_reduce"]["count"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", ["host", "gloo", "round_robin"])
def test_outer_steps_are_those_of_nesterovs_momentum(backend) -> None:
    found = run_ranks(plain, 3, backend=backend)
    for (ours, count), expected in zip(found, simulated(3, 7, 3), strict=True):
        torch.testing.assert_close(ours, expected)
        assert count == 2


STREAMING = {"period": 4, "fragments": 3, "delay": 2, "alpha": 0.5}


def streaming(group, steps=11):
    module = model()
    optimizer = made(group, module, **STREAMING)
    train(module, optimizer, group.rank(), steps)
    trained = flat(module)
    optimizer.averager.finish()
    return trained, flat(module)


def test_fragments_are_exchanged_in_turn_beside_the_steps_of_the_ranks() -> None:
    fragments = ((0,), (1, 2), (3, 4, 5))
    expected = simulated(2, 11, period=4, delay=2, alpha=0.5, fragments=fragments)
    found = run_ranks(streaming, 2, backend="host")
    for (trained, _), one in zip(found, expected, strict=True):
        torch.testing.assert_close(trained, one)
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # bit by bit


def in_8_bits(group):
    module = model()
    optimizer = made(group, module, period=3, dtype=torch.int8)
    train(module, optimizer, group.rank(), 6)
    assert "all_reduce" not in group.stats()
    return flat(module)


def test_changes_travel_in_8_bits() -> None:
    """The bound is that of a quantized mean, a hundredth of the greatest change, through two outer steps."""
    first, second = run_ranks(in_8_bits, 2, backend="host")
    assert torch.equal(first, second)
    expected = simulated(2, 6, 3)[0]
    assert not torch.equal(first, expected)
    torch.testing.assert_close(first, expected, rtol=0, atol=0.01 * 0.06)


@on_ranks(2)
def test_training_goes_on_from_a_checkpoint_bit_by_bit(group):
    whole = model()
    train(whole, made(group, whole, **STREAMING), group.rank(), 11)

    module = model()
    optimizer = made(group, module, **STREAMING)
    train(module, optimizer, group.rank(), 6)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    assert saved[1]["under_way"], "the checkpoint is to be taken within an exchange"

    again = model(seed=5)
    optimizer = made(group, again, **STREAMING)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(again, optimizer, group.rank(), 5, first=6)
    assert torch.equal(flat(again), flat(whole))

    with pytest.raises(ValueError, match="has nothing of a DiLoCoAverager: shared, momentum"):
        optimizer.load_state_dict({**torch.optim.AdamW(again.parameters()).state_dict(), "step": 3})
    other = made(group, model(), period=4)
    with pytest.raises(ValueError, match=r"elements, but this averager's parameters"):
        other.load_state_dict(saved[1])


@on_ranks(2)
def test_parameters_of_several_kinds_in_memory_that_is_replaced(group):
    kinds = [torch.float32, torch.bfloat16, torch.complex64, torch.float64]
    parameters = [nn.Parameter(torch.full((3, 2), 1.0).to(kind)) for kind in kinds]
    averager = DiLoCoAverager(parameters, period=2, lr=1.0, momentum=0.0, process_group=group)
    for step in range(2):
        for parameter in parameters:
            parameter.data = parameter.data + 0.25 * (group.rank() + 1)  # memory of its own
        averager.average_parameters([{"params": parameters}])
        assert averager.step == step + 1
    assert [p.flatten()[0].item() for p in parameters] == [1.75, 1.75, 1.75, 1.75]
    assert [p.dtype for p in parameters] == kinds


@on_ranks(2)
def test_what_is_wrong_is_told_before_anything_is_exchanged(group):
    module = model()
    for options, words in [
        ({"period": 0}, "period must be 1 or more"),
        ({"period": 4, "fragments": 7}, "fragments must be 1 to 4"),
        ({"period": 40, "fragments": 7}, "fragments must be 1 to 6"),
        ({"period": 4, "delay": 4}, "delay must be 0 to 3"),
        ({"period": 4, "alpha": 1.0}, "alpha must be"),
        ({"period": 4, "lr": float("nan")}, "lr must be"),
        ({"period": 4, "momentum": -0.1}, "momentum must be"),
        ({"period": 4, "dtype": torch.uint8}, "dtype must be torch.int8 or"),
    ]:
        with pytest.raises(ValueError, match=words):
            DiLoCoAverager(module.parameters(), process_group=group, **options)
    with pytest.raises(TypeError, match="period must be an integer"):
        DiLoCoAverager(module.parameters(), 2.5, process_group=group)
    with pytest.raises(TypeError, match="int64"):
        DiLoCoAverager([torch.zeros(2, dtype=torch.int64)], 2, process_group=group)
    with pytest.raises(ModelMismatchError, match="option period: 4 on rank 0; 5 on rank 1"):
        DiLoCoAverager(module.parameters(), 4 + group.rank(), process_group=group)
    averager = DiLoCoAverager(module.parameters(), 4, process_group=group)
    with pytest.raises(ValueError, match="not those that this DiLoCoAverager was made for"):
        averager.average_parameters(list(module.parameters())[1:])


@on_ranks(3, world=True, isolated=True, lost=[2])
def test_a_checkpoint_is_loaded_though_an_exchange_has_failed(rank, size):
    """Rank 2 dies in an exchange; the others load what they saved before, though that will never end."""
    module = model()
    optimizer = made(None, module, period=3, delay=2)
    saved = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, rank, 2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    train(module, optimizer, rank, 1, first=2)  # begins an exchange
    with pytest.raises(collectives.DistError):
        optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.averager.step == 0
    assert torch.equal(optimizer.state_dict()["shared"][0], saved["shared"][0])


def death(rank, size):
    """Rank 2 dies between two outer steps; the others shrink the world and go on from what they have."""
    module = model()
    optimizer = made(None, module, period=3, delay=1)
    train(module, optimizer, rank, 5)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    shared = optimizer.state_dict()["shared"][0].clone()
    with pytest.raises(collectives.DistError):
        train(module, optimizer, rank, 4, first=5)
    averager = optimizer.averager
    assert torch.equal(averager.state_dict()["shared"][0], shared)
    own = flat(module)
    averager.process_group = collectives.shrink_group([2], shrink_flags=collectives.SHRINK_ABORT)
    averager.synchronize()
    assert torch.equal(flat(module), own)
    train(module, optimizer, rank, 6, first=averager.step)
    averager.finish()
    return averager.step, flat(module), shared


def test_the_others_go_on_after_a_death() -> None:
    first, second, _ = run_world(death, 3, backend="host", isolated=True, lost=[2])
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], first[2])


def newcomer(rank, size):
    """Ranks 0 and 1 train for a while before rank 2 comes."""
    pair = collectives.new_group([0, 1])
    module = model(seed=rank)
    optimizer = made(pair, module, period=3) if rank < 2 else None
    if optimizer is None:
        optimizer = made(None, module, period=3)
    else:
        train(module, optimizer, rank, 4)
        optimizer.averager.process_group = collectives.group.WORLD
        before = flat(module)
        optimizer.averager.synchronize()
        assert torch.equal(flat(module), before)
    state = optimizer.state_dict()
    assert state["step"] == 4
    assert (rank == 2) == torch.equal(flat(module), state["shared"][0])
    train(module, optimizer, rank, 2, first=4)
    return flat(module)


def test_a_rank_that_comes_later_begins_with_what_all_share() -> None:
    first, *others = run_world(newcomer, 3)
    assert all(torch.equal(first, other) for other in others)
