"""ZeroRedundancyOptimizer: trains as the wrapped optimizer does, bit for bit, with a part of its state."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from zero_training import batch, bits, equal_states, groups_of, net, same, train

from collectives.ddp import DistributedDataParallel, Join
from collectives.ddp.errors import ModelMismatchError
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step
from collectives.ddp.hooks.default_hooks import allreduce_hook
from collectives.ddp.optim import ZeroRedundancyOptimizer

OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
WAYS = [(False, False, False), (True, True, False), (False, True, True), (True, False, True)]
"""Bucket views, parameter groups, a scheduler."""

SIZES = pytest.mark.parametrize("world_size", [2, 3])


# ---- training ------------------------------------------------------------------------------------------


@SIZES
@on_ranks()
def test_training_equals_the_wrapped_optimizer_bit_for_bit(group):
    """Compares with the wrapped optimizer the parameters and the consolidated state."""
    for name, (kind, options) in OPTIMIZERS.items():
        for view, grouped, schedule in WAYS:
            models = [DistributedDataParallel(net(), process_group=group) for _ in range(2)]
            params = [groups_of(m.module) if grouped else list(m.parameters()) for m in models]
            plain = kind(params[0], **options)
            zero = ZeroRedundancyOptimizer(
                params[1], kind, process_group=group, parameters_as_bucket_view=view, **options
            )
            expected = train(models[0], plain, group, schedule=schedule)
            got = train(models[1], zero, group, schedule=schedule)
            zero.consolidate_state_dict(to=1)
            good = same(got, expected)
            if group.rank() == 1:
                good = good and equal_states(zero.state_dict(), plain.state_dict())
            assert good, (name, view, grouped, schedule)


@pytest.mark.parametrize("backend", ["gloo", "round_robin"])
@on_ranks(2, asked="backend")
def test_training_on_other_backends(group):
    models = [DistributedDataParallel(net(), process_group=group) for _ in range(2)]
    expected = train(models[0], torch.optim.Adam(models[0].parameters(), lr=0.01), group)
    zero = ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.Adam, group, lr=0.01)
    assert same(train(models[1], zero, group), expected)


def sizes(group):
    """Returns the bytes of optimizer state on this rank, of the whole, and of the largest parameter."""
    torch.manual_seed(0)
    widths = [7, 200, 3, 60, 60, 1, 90, 33, 150, 2, 12]
    params = [nn.Parameter(torch.randn(width, 5)) for width in widths]
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    zero = ZeroRedundancyOptimizer(
        [{"params": params[:5]}, {"params": params[5:]}], torch.optim.Adam, process_group=group
    )
    plain = torch.optim.Adam(params)
    zero.step()
    plain.step()

    def nbytes(state):
        return sum(v.nbytes for v in state.values() if v.dim())

    return (
        sum(map(nbytes, zero.optim.state.values())),
        sum(map(nbytes, plain.state.values())),
        max(map(nbytes, plain.state.values())),
    )


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_keeps_no_more_than_its_share_and_the_largest_parameter(world_size) -> None:
    results = run_ranks(sizes, world_size, backend="host")
    assert sum(mine for mine, _, _ in results) == results[0][1]
    for mine, whole, largest in results:
        assert 0 < mine <= whole / world_size + largest


def more_ranks_than_parameters(group):
    models = [DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group) for _ in range(2)]
    models[1].module.load_state_dict(models[0].module.state_dict())
    plain = torch.optim.Adam(models[0].parameters())
    zero = ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.Adam, group)
    losses = []
    for optimizer, model in zip([plain, zero], models, strict=True):

        def closure(optimizer=optimizer, model=model):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2) + group.rank()).sum()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(3)])
    return losses[0] == losses[1], torch.equal(bits(models[0]), bits(models[1])), len(zero.optim.state)


def test_closures_and_ranks_without_parameters() -> None:
    results = run_ranks(more_ranks_than_parameters, 3, backend="host")
    assert [(losses, equal) for losses, equal, _ in results] == [(True, True)] * 3
    assert sorted(kept for _, _, kept in results) == [0, 0, 1]


class ExtraArgument(torch.optim.SGD):
    """Takes one more argument of ``step``."""

    def step(self, closure=None, extra=None):
        super().step()
        extra.append(closure)


@on_ranks(1)
def test_what_cannot_be_called_goes_to_the_optimizer_as_in_torch(group):
    zero = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], ExtraArgument, group, lr=0.1)
    zero.step(0, extra=(seen := []))
    assert seen == [0]


@on_ranks(2)
def test_a_frozen_parameter_added_later_goes_where_there_is_least(group):
    sizes = [9, 7, 5, 3] * group.size()
    zero = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(n)) for n in sizes[:-1]], torch.optim.SGD, group)
    zero.add_param_group({"params": [nn.Parameter(torch.ones(sizes[-1]), requires_grad=False)]})
    assert sum(p.numel() for part in zero.optim.param_groups for p in part["params"]) == 24


# ---- checkpoints and changes ---------------------------------------------------------------------------


@on_ranks(3)
def test_checkpoints_go_on_as_if_nothing_had_happened(group):
    """Goes on from a checkpoint in another optimizer of both kinds as in the one that wrote it."""
    for kind, options in OPTIMIZERS.values():
        first = DistributedDataParallel(net(), process_group=group)
        zero = ZeroRedundancyOptimizer(groups_of(first.module), kind, group, **options)
        train(first, zero, group, steps=2)
        with pytest.raises(RuntimeError, match=f"consolidate_state_dict\\(to={group.rank()}\\)"):
            zero.state_dict()
        zero.consolidate_state_dict(to=0)
        if group.rank() == 1:
            with pytest.raises(RuntimeError, match="only its part"):
                zero.state_dict()
        held = [zero.state_dict() if group.rank() == 0 else None]
        state = share(held[0], group)
        before = copy.deepcopy(state)
        second, third = (
            DistributedDataParallel(copy.deepcopy(first.module), process_group=group) for _ in range(2)
        )
        reloaded = ZeroRedundancyOptimizer(groups_of(second.module), kind, group, True, lr=9.0)
        reloaded.load_state_dict(state)
        plain = kind(groups_of(third.module), **options)
        plain.load_state_dict(copy.deepcopy(state))
        paths = [
            train(model, optimizer, group, steps=3, first=2)
            for model, optimizer in ((first, zero), (second, reloaded), (third, plain))
        ]
        assert same(paths[0], paths[1])
        assert same(paths[0], paths[2])
        assert equal_states(state, before), "the state that was loaded has changed"
    with pytest.raises(ValueError, match="parameter group"):
        zero.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="rank 7"):
        zero.consolidate_state_dict(to=7)


def share(state, group):
    """Gives all ranks the state of rank 0, by way of a file's bytes."""
    import io

    from collectives import BroadcastOptions

    file = io.BytesIO()
    torch.save(state, file)
    content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    group.broadcast([length], BroadcastOptions(rootRank=0)).wait()
    content = content if group.rank() == 0 else torch.empty(int(length), dtype=torch.uint8)
    group.broadcast([content], BroadcastOptions(rootRank=0)).wait()
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)


@pytest.mark.parametrize("view", [False, True])
@on_ranks(2)
def test_parameter_groups_are_added_and_parameters_frozen(group, view):
    """A layer is thawed and its parameters are added later, then another one is frozen."""
    models = [DistributedDataParallel(net(), process_group=group, find_unused_parameters=True) for _ in "ab"]
    optimizers = []
    for model, make in zip(
        models,
        [
            torch.optim.SGD,
            lambda params, **options: ZeroRedundancyOptimizer(
                params, torch.optim.SGD, group, view, **options
            ),
        ],
        strict=True,
    ):
        optimizers.append(make(model.module.wide.parameters(), lr=0.1, momentum=0.9))
    paths = []
    for model, optimizer in zip(models, optimizers, strict=True):
        path = train(model, optimizer, group, steps=2)
        optimizer.add_param_group({"params": list(model.module.last.parameters()), "lr": 0.01})
        path += train(model, optimizer, group, steps=2)
        optimizer.add_param_group({"params": [model.module.conv.weight], "momentum": 0.0})
        path += train(model, optimizer, group, steps=2)
        model.zero_grad()
        model.module.wide.bias.requires_grad_(False)
        model.module.wide.bias.grad = None
        path += train(model.module, optimizer, group, steps=0)
        optimizer.step()
        path.append(bits(model))
        paths.append(path)
    assert same(*paths)
    assert [g["lr"] for g in optimizers[1].param_groups] == [0.1, 0.01, 0.1]


# ---- uneven inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 2])
@on_ranks(3)
def test_ranks_without_inputs_update_their_part(group, micro):
    """Trains as the wrapped optimizer would in a loop where ranks without inputs give zeros."""
    counts = [2 * micro, 5 * micro, 3 * micro]
    ddp = DistributedDataParallel(net(), process_group=group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, group, lr=0.01)
    plain_ddp = DistributedDataParallel(net(), process_group=group)
    plain = torch.optim.Adam(plain_ddp.parameters(), lr=0.01)
    for _epoch in range(2):
        with Join([ddp, zero]):
            for step in range(counts[group.rank()]):
                last = step % micro == micro - 1
                loss(ddp, batch(group.rank(), step), last, 1).backward()
                if last:
                    zero.step()
                    zero.zero_grad()
        for step in range(max(counts)):
            last = step % micro == micro - 1
            weight = float(step < counts[group.rank()])
            loss(plain_ddp, batch(group.rank(), step), last, weight).backward()
            if last:
                plain.step()
                plain.zero_grad()
    assert torch.equal(bits(ddp), bits(plain_ddp))


def loss(ddp, x, sync, weight):
    before, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, sync
    value = ddp(x).square().mean() * weight
    ddp.require_backward_grad_sync = before
    return value


# ---- errors --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_use_is_refused_and_leaves_the_optimizer_usable(group):
    sgd = torch.optim.SGD
    weight = nn.Parameter(torch.ones(2))
    ddp = DistributedDataParallel(net(), process_group=group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), sgd, group, lr=0.1)

    def make(params, kind=sgd, **options):
        return lambda: ZeroRedundancyOptimizer(params, kind, group, lr=0.1, **options)

    overlapping = make([weight], overlap_with_ddp=True)()
    cases = [
        (TypeError, "iterable", make(weight)),
        (ValueError, "empty parameter list", make([])),
        (ValueError, "one data type", make([weight, nn.Parameter(torch.ones(2).double())])),
        (ValueError, "must be dense", make([nn.Parameter(torch.ones(2).to_sparse())])),
        (ValueError, "evaluates the model as often", make([weight], torch.optim.LBFGS)),
        (ValueError, "not both", make([weight], overlap_with_ddp=True, parameters_as_bucket_view=True)),
        (ModelMismatchError, "rank 1", make([nn.Parameter(torch.ones(2 + group.rank()))])),
        (RuntimeError, "hook_with_zero_step", overlapping.step),
        (ValueError, "overlap_with_ddp=True", lambda: hook_with_zero_step(allreduce_hook, ddp, zero)),
        (ValueError, r"\[0\]", lambda: hook_with_zero_step(allreduce_hook, ddp, overlapping)),
        (
            ValueError,
            "one data type",
            lambda: zero.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]}),
        ),
        (TypeError, "state_dict", lambda: copy.deepcopy(zero)),
    ]
    for kind, match, call in cases:
        with pytest.raises(kind, match=match):
            call()
    train(ddp, zero, group, steps=1)
    assert len(zero.param_groups) == 1


@on_ranks(1)
def test_groups_without_parameters_are_refused(group):
    with pytest.raises(ValueError, match="no parameter in any group"):
        ZeroRedundancyOptimizer([{"params": []}], torch.optim.SGD, group, lr=0.1)
