"""ZeroRedundancyOptimizer: trains as the wrapped optimizer does, bit for bit, with a part of its state."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run_ranks, run_world
from torch import nn

from collectives.ddp import DistributedDataParallel, GradientSyncError, Join
from collectives.ddp.errors import ModelMismatchError
from collectives.ddp.hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from collectives.ddp.hooks.default_hooks import allreduce_hook, bf16_compress_wrapper
from collectives.ddp.hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from collectives.ddp.optim import ZeroRedundancyOptimizer

OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}
WAYS = [(False, False, False), (True, True, False), (False, True, True), (True, False, True)]
"""Bucket views, parameter groups, a scheduler."""

SIZES = pytest.mark.parametrize("world_size", [2, 3])


class Net(nn.Module):
    """Parameters of very different sizes, one laid out in another order, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(12, 40)
        self.frozen = nn.Linear(40, 8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.frozen(torch.tanh(self.wide(self.conv(x).flatten(1)))))


def net(seed=3):
    torch.manual_seed(seed)
    return Net()


def batch(rank, step):
    return torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def groups_of(module):
    """Two parameter groups with different options; the second one has the frozen parameters, too."""
    return [
        {"params": [*module.conv.parameters(), *module.wide.parameters()]},
        {"params": [*module.frozen.parameters(), *module.last.parameters()], "lr": 0.02},
    ]


def bits(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def train(model, optimizer, group, steps=4, first=0, schedule=False):
    """Returns the parameters after each step."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if schedule else None
    states = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(group.rank(), step)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        states.append(bits(model))
    return states


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# ---- training ------------------------------------------------------------------------------------------


def compare(group):
    """Returns what differs from the wrapped optimizer, of parameters and of the consolidated state."""
    wrong = []
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
            if not good:
                wrong.append((name, view, grouped, schedule))
    return wrong


def equal_states(ours, theirs):
    return ours["param_groups"] == theirs["param_groups"] and equal_values(ours["state"], theirs["state"])


def equal_values(ours, theirs):
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal_values(ours[key], theirs[key]) for key in theirs)
    return torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@SIZES
def test_training_equals_the_wrapped_optimizer_bit_for_bit(world_size) -> None:
    assert run_ranks(compare, world_size, backend="host") == [[]] * world_size


@pytest.mark.parametrize("backend", ["gloo", "round_robin"])
def test_training_on_other_backends(backend) -> None:
    assert run_ranks(once, 2, backend=backend) == [True] * 2


def once(group):
    models = [DistributedDataParallel(net(), process_group=group) for _ in range(2)]
    expected = train(models[0], torch.optim.Adam(models[0].parameters(), lr=0.01), group)
    zero = ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.Adam, group, lr=0.01)
    return same(train(models[1], zero, group), expected)


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


# ---- checkpoints and changes ---------------------------------------------------------------------------


def checkpoint(group):
    """Goes on from a checkpoint in another optimizer of both kinds as in the one that wrote it."""
    wrong = []
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
        if not same(paths[0], paths[1]) or not same(paths[0], paths[2]):
            wrong.append(kind.__name__)
        if not equal_states(state, before):
            wrong.append(f"{kind.__name__} changed the state that it loaded")
    with pytest.raises(ValueError, match="parameter group"):
        zero.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="rank 7"):
        zero.consolidate_state_dict(to=7)
    return wrong


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


def test_checkpoints_go_on_as_if_nothing_had_happened() -> None:
    assert run_ranks(checkpoint, 3, backend="host") == [[]] * 3


def thawing(group, view):
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
    return same(*paths), [g["lr"] for g in optimizers[1].param_groups]


def test_parameter_groups_are_added_and_parameters_frozen() -> None:
    for view in (False, True):
        assert run_ranks(thawing, 2, view, backend="host") == [(True, [0.1, 0.01, 0.1])] * 2


# ---- during the backward pass --------------------------------------------------------------------------


def overlapped(group):
    wrong = []
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for shard in (False, True):
            for options in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
                models = [
                    DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.001, **options)
                    for _ in range(2)
                ]
                plain = torch.optim.Adam(groups_of(models[0].module), lr=0.01)
                zero = ZeroRedundancyOptimizer(
                    groups_of(models[1].module), torch.optim.Adam, group, overlap_with_ddp=True, lr=0.01
                )
                hook = make(allreduce_hook, models[1], zero, shard)
                models[1].register_comm_hook(group, hook)
                expected = train(models[0], plain, group, schedule=True)
                got = train(models[1], zero, group, schedule=True)
                grads = [[p.grad for p in m.module.last.parameters()] for m in models]
                zero.consolidate_state_dict()
                good = same(got, expected) and same(*grads)
                if group.rank() == 0:
                    good = good and equal_states(zero.state_dict(), plain.state_dict())
                if not good:
                    wrong.append((make.__name__, shard, options))
    return wrong, overlapped_and_uneven(group)


def overlapped_and_uneven(group):
    """The hook of a rank without inputs updates its part of the parameters as well."""
    ddp = DistributedDataParallel(net(), process_group=group)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.01, momentum=0.9
    )
    ddp.register_comm_hook(group, hook_with_zero_step(allreduce_hook, ddp, zero))
    with pytest.raises(ValueError, match="divide_by_initial_world_size"):
        ddp.join(divide_by_initial_world_size=False).__enter__()
    with Join([ddp, zero]):
        train(ddp, zero, group, steps=2 + group.rank())
    return bits(ddp)


@SIZES
def test_updates_during_the_backward_pass_equal_those_after_it(world_size) -> None:
    results = run_ranks(overlapped, world_size, backend="host")
    assert [wrong for wrong, _ in results] == [[]] * world_size
    assert all(torch.equal(uneven, results[0][1]) for _, uneven in results)


def low_rank(group):
    """Returns for which hooks around PowerSGD, whose futures wait for the next bucket, training differs."""
    wrong = []
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for hook in (powerSGD_hook, bf16_compress_wrapper(powerSGD_hook)):
            models = [
                DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001) for _ in range(2)
            ]
            plain = torch.optim.Adam(models[0].parameters(), lr=0.01)
            zero = ZeroRedundancyOptimizer(
                models[1].parameters(), torch.optim.Adam, group, overlap_with_ddp=True, lr=0.01
            )
            for model, its in zip(models, (hook, make(hook, models[1], zero)), strict=True):
                state = PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5)
                model.register_comm_hook(state, its)
            got = train(models[1], zero, group)
            if not same(got, train(models[0], plain, group)) or not state.total_numel_after_compression:
                wrong.append((make.__name__, hook.__name__))
    return wrong


def test_updates_during_the_backward_pass_beside_low_rank_gradients() -> None:
    assert run_ranks(low_rank, 2, backend="host", timeout=30) == [[]] * 2


class Breaking(torch.optim.SGD):
    """Fails when it is told to."""

    broken = False

    def step(self, closure=None):
        if Breaking.broken:
            raise ArithmeticError("in the optimizer")
        return super().step(closure)


def failing_updates(group, where):
    """Returns, for both hooks, the error of the second pass and whether the ranks stay equal."""
    found = []
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001)
        zero = ZeroRedundancyOptimizer(ddp.parameters(), Breaking, group, overlap_with_ddp=True, lr=0.1)
        fails = []

        def hook(state, bucket, fails=fails):
            future = allreduce_hook(state, bucket)
            if fails and bucket.index() == 1:
                future.wait()
                if where == "hook":
                    raise OSError("in the hook")
                if where == "future":
                    future = torch.futures.Future()
                    future.set_exception(OSError("in the future"))
            return future

        ddp.register_comm_hook(group, make(hook, ddp, zero))
        before = train(ddp, zero, group, steps=2)[-1]
        if where == "optimizer of one rank":
            Breaking.broken = group.rank() == 1
        else:
            fails.append(True)
        with pytest.raises(GradientSyncError) as caught:
            train(ddp, zero, group, steps=1, first=2)
        Breaking.broken = False
        fails.clear()
        after = bits(ddp)
        everyone = torch.stack([after] * group.size())
        group.all_gather_single(everyone.view(-1), after).wait()
        last = train(ddp, zero, group, steps=1, first=3)[-1]
        found.append(
            (
                str(caught.value),
                bool((everyone == after).all()),
                not torch.equal(before, after),
                last,
            )
        )
    return found


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hook", "OSError: in the hook"),
        ("future", "OSError: in the future"),
        ("optimizer of one rank", "ArithmeticError: in the optimizer"),
    ],
)
def test_parameters_stay_equal_where_an_update_fails(where, words) -> None:
    ranks = run_ranks(failing_updates, 2, where, backend="host", timeout=30)
    for one, other in zip(*ranks, strict=True):
        for message, equal, changed, _ in (one, other):
            assert words in message
            assert equal
            assert changed  # the buckets that did not fail
        assert torch.equal(one[3], other[3])


def failing_step(group):
    """The optimizer of one rank fails in a step; the others do not wait, and training goes on."""
    ddp = DistributedDataParallel(net(), process_group=group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), Breaking, group, lr=0.1)
    first = train(ddp, zero, group, steps=1)[-1]
    Breaking.broken = group.rank() == 1
    raised = None
    try:
        train(ddp, zero, group, steps=1, first=1)
    except ArithmeticError as error:
        raised = str(error)
    Breaking.broken = False
    second = bits(ddp)
    return raised, [first, second, train(ddp, zero, group, steps=1, first=2)[-1]]


def test_no_rank_waits_for_one_whose_step_failed() -> None:
    ranks = run_ranks(failing_step, 3, backend="host", timeout=30)
    assert [raised for raised, _ in ranks] == [None, "in the optimizer", None]
    for _, states in ranks:
        assert all(map(torch.equal, states, ranks[0][1]))
    first, second, third = ranks[0][1]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def dealt_out_anew(group):
    """Optimizer state must not move; the rank that owns nothing raises with the others."""
    found = []
    for stepped in (True, False):
        weight = nn.Parameter(torch.ones(2))
        zero = ZeroRedundancyOptimizer([weight], torch.optim.Adam, group)
        if stepped:
            weight.grad = torch.ones(2)
            zero.step()
        else:
            plain = torch.optim.Adam([weight])
            zero.load_state_dict(plain.state_dict())
        with pytest.raises(RuntimeError, match="before the first step"):
            zero.assign_together([[weight]])
        found.append(len(zero.state))
    return found


def test_state_is_not_dealt_out_anew_on_any_rank() -> None:
    assert sorted(run_ranks(dealt_out_anew, 2, backend="host")) == [[0, 0], [1, 0]]


# ---- uneven inputs -------------------------------------------------------------------------------------


def uneven(group, micro):
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
    return torch.equal(bits(ddp), bits(plain_ddp))


def loss(ddp, x, sync, weight):
    before, ddp.require_backward_grad_sync = ddp.require_backward_grad_sync, sync
    value = ddp(x).square().mean() * weight
    ddp.require_backward_grad_sync = before
    return value


@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_without_inputs_update_their_part(micro) -> None:
    assert run_ranks(uneven, 3, micro, backend="host") == [True] * 3


# ---- errors --------------------------------------------------------------------------------------------


def refused(group):
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
    return len(zero.param_groups)


def test_wrong_use_is_refused_and_leaves_the_optimizer_usable() -> None:
    assert run_ranks(refused, 2, backend="host") == [1, 1]


def in_world(rank, size):
    """The example of the documentation, over the default group."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)]))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    inputs = [torch.full((1, 20), float(rank)) for _ in range(3 + rank)]
    with Join([model, optimizer]):
        for x in inputs:
            model(x).sum().backward()
            optimizer.step()
    return bits(model)


def test_the_documented_example() -> None:
    first, second = run_world(in_world, 2)
    assert torch.equal(first, second)
