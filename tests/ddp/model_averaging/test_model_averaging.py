"""Model averagers and PostLocalSGDOptimizer."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections import OrderedDict

import pytest
import torch
from harness import run_ranks, run_world
from on_ranks import on_ranks
from torch import nn
from zero_training import batch, bits, net, train

import collectives as dist
from collectives.ddp import DistributedDataParallel, model_averaging
from collectives.ddp.errors import ModelMismatchError
from collectives.ddp.model_averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from collectives.ddp.optim import PostLocalSGDOptimizer


@pytest.mark.parametrize("module", ["averagers", "utils"])
def test_the_modules_of_torch_are_there(module) -> None:
    """Programs that were written for torch import from them."""
    ours = importlib.import_module(f"collectives.ddp.model_averaging.{module}")
    torchs = importlib.import_module(f"torch.distributed.algorithms.model_averaging.{module}")
    for name in set(model_averaging.__all__) & set(vars(torchs)):
        assert getattr(ours, name) is getattr(model_averaging, name)


def parameters(rank):
    """Parameters whose values are the rank, of several kinds; the last one has no gradient."""
    made = [
        nn.Parameter(torch.full((3, 2), float(rank))),
        nn.Parameter(torch.full((2, 3, 2, 2), float(rank)).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.full((5,), float(rank), dtype=torch.bfloat16)),
        nn.Parameter(torch.full((2,), complex(rank, 1))),
        nn.Parameter(torch.full((2,), float(rank))),
    ]
    for parameter in made[:-1]:
        parameter.grad = torch.zeros_like(parameter)
    return made


@pytest.mark.parametrize("backend", ["host", "gloo", "round_robin"])
@on_ranks(3, asked="backend")
def test_means_of_parameters(group):
    rank, mean = group.rank(), (group.size() - 1) / 2
    made = parameters(rank)
    before = [(p.data_ptr(), p.stride(), p.dtype) for p in made]
    average_parameters_or_parameter_groups(
        [{"params": made[:2], "lr": 1.0}, {"params": iter(made[2:])}], group
    )
    assert before == [(p.data_ptr(), p.stride(), p.dtype) for p in made]
    assert [p.flatten()[0].item() for p in made] == [mean, mean, mean, complex(mean, 1), rank]
    assert all((p == p.flatten()[0]).all() for p in made)
    again = parameters(rank)
    average_parameters(iter(again), group)
    assert again[-1].tolist() == [mean] * 2
    assert len(get_params_to_average(again)) == 4
    average_parameters([], group)
    outside = parameters(rank)
    average_parameters(outside, dist.GroupMember.NON_GROUP_MEMBER)
    assert outside[0][0, 0].item() == rank
    with pytest.raises(TypeError, match="int"):
        get_params_to_average([3])


@on_ranks(2)
def test_ranks_that_would_average_different_parameters_are_told(group):
    """Ranks have gradients of different parameters, of one size."""
    made = [nn.Parameter(torch.full((2,), float(group.rank()))) for _ in range(2)]
    made[group.rank()].grad = torch.zeros(2)
    with pytest.raises(ModelMismatchError) as caught:
        PeriodicModelAverager(2, process_group=group).average_parameters(made)
    assert all((p == group.rank()).all() for p in made)
    average_parameters(made, group)
    assert "0: float32[2] on rank 0; absent on rank 1" in str(caught.value)
    assert "give those that are not used on all ranks one of zeros" in str(caught.value)
    assert [p.tolist() for p in made] == [[0.5] * 2] * 2


def steps_with(averager, rank, steps):
    """Returns the values of a parameter that grows by its rank in each step, and is averaged now and then."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    values = []
    for _ in range(steps):
        with torch.no_grad():
            parameter += rank
        averager.average_parameters([parameter])
        values.append(parameter.item())
    return values


def periodic(group):
    averager = PeriodicModelAverager(period=3, warmup_steps=2, process_group=group)
    values = steps_with(averager, group.rank(), 9)
    with pytest.warns(UserWarning, match="every step"):
        PeriodicModelAverager(1, process_group=group)
    for wrong in ({"period": 0}, {"period": -1}, {"period": 2, "warmup_steps": -1}):
        with pytest.raises(ValueError, match="must be"):
            PeriodicModelAverager(process_group=group, **wrong)
    assert averager.step == 9
    return values


def test_periodic_averages_begin_after_the_warm_up() -> None:
    """Averages at steps 2, 5 and 8 of ranks 0 and 1: each goes on from the mean of both."""
    zero, one = run_ranks(periodic, 2, backend="host")
    assert zero == [0, 0, 1.5, 1.5, 1.5, 3.0, 3.0, 3.0, 4.5]
    assert one == [1, 2, 1.5, 2.5, 3.5, 3.0, 4.0, 5.0, 4.5]


def hierarchical(rank, size):
    averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=1)
    sizes = [group.size() for group in averager.period_process_group_dict.values()]
    pair = averager.period_process_group_dict[2]
    given = HierarchicalModelAverager({2: pair, 4: dist.GroupMember.WORLD}, warmup_steps=1)
    wrong = [
        (None, "empty"),
        ({}, "empty"),
        ({2: 2, 4: 2}, "last size must be 4"),
        ({2: 3, 4: 4}, "divide"),
        ({0: 2, 4: 4}, "ascending"),
        ({4: 2, 2: 4}, "ascending"),
    ]
    for groups, match in wrong:
        with pytest.raises(ValueError, match=match):
            HierarchicalModelAverager(groups)
    with pytest.raises(ValueError, match="warmup_steps"):
        HierarchicalModelAverager({2: 4}, warmup_steps=-1)
    with pytest.warns(UserWarning, match="every step"):
        HierarchicalModelAverager({1: 4})
    return steps_with(averager, rank, 5), steps_with(given, rank, 5), sizes


def test_hierarchical_averages_are_those_of_the_largest_period() -> None:
    """Ranks 0 to 3 grow by their rank; pairs average at step 2, all at step 4; step 0 is warm-up."""
    results = run_world(hierarchical, 4)
    for rank, (values, given, sizes) in enumerate(results):
        first = rank // 2 * 2
        at_two = (2 * first + 1) / 2 * 3
        assert sizes == [2, 4]
        assert values == given
        assert values[:4] == [rank, 2 * rank, at_two, at_two + rank]
        assert values[4] == 7.5


# ---- PostLocalSGDOptimizer -----------------------------------------------------------------------------


def make(group, warmup=2):
    module = net()
    inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return module, PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, warmup, group))


def local_sgd(group):
    """Equals steps on each rank by itself with a mean at steps 2, 4, 6; goes on so from a checkpoint."""
    module, optimizer = make(group)
    got = train(module, optimizer, group, 7)
    naive = net()
    inner = torch.optim.SGD(naive.parameters(), lr=0.05, momentum=0.9)
    expected = []
    for step in range(7):
        train(naive, inner, group, 1, step)
        if step >= 2 and step % 2 == 0:
            average_parameters(naive.parameters(), group)
        expected.append(bits(naive))
    assert all(map(torch.equal, got, expected))

    module, optimizer = make(group)
    train(module, optimizer, group, 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert state["step"] == 3
    _, other = make(group, warmup=2)
    copied = copy.deepcopy(module)
    inner = torch.optim.SGD(copied.parameters(), lr=9.0, momentum=0.9)
    other = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, 2, group))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(state)
    assert other.averager.step == 3
    assert torch.equal(train(copied, other, group, 4, 3)[-1], got[-1])
    del state["step"]
    with pytest.warns(UserWarning, match="begins at step 0"):
        other.load_state_dict(state)
    assert other.averager.step == 0
    assert other.param_groups is inner.param_groups
    assert other.state is inner.state
    assert repr(other) == repr(inner)
    return got


def options(group):
    """Closures, schedulers and parameter groups are those of the wrapped optimizer."""
    module, optimizer = make(group, warmup=100)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = module(batch(group.rank(), 0)).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.025
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optim.param_groups) == 2
    with pytest.raises(TypeError, match="Optimizer"):
        PostLocalSGDOptimizer(module, optimizer.averager)
    with pytest.raises(TypeError, match="ModelAverager"):
        PostLocalSGDOptimizer(optimizer.optim, None)
    assert losses[1] < losses[0]


def hooks_of_steps_and_states(group):
    module, optimizer = make(group)
    module(batch(group.rank(), 0)).square().mean().backward()
    moments = [
        f"{what}_{when}" for what in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
    ]
    seen = []
    for name in moments:
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: seen.append(name))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == moments


def with_ddp(group):
    """Within DistributedDataParallel over half of the ranks, averages over all."""
    module = net()
    ddp = DistributedDataParallel(module, process_group=group)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.05)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, 0, group))
    return train(ddp, optimizer, group, 4)[-1]


def all_of_it(group):
    hooks_of_steps_and_states(group)
    options(group)
    return local_sgd(group), with_ddp(group)


def test_post_local_sgd() -> None:
    (one, ddp_one), (two, ddp_two) = run_ranks(all_of_it, 2, backend="host")
    same = [torch.equal(a, b) for a, b in zip(one, two, strict=True)]
    assert same == [False, False, True, False, True, False, True]
    assert torch.equal(ddp_one, ddp_two)
