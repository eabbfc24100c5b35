"""SyncBatchNorm equals BatchNorm over the concatenation of all ranks' batches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from harness import run_ranks, run_world
from on_ranks import on_ranks
from torch import nn

import collectives
from collectives.ddp import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)

C = 5
KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}

CASES = {
    "vectors": {"inner": (), "batches": (3, 4)},
    "images": {"inner": (3, 2), "batches": (2, 2)},
    "channels last": {"inner": (3, 2), "batches": (2, 3), "channels_last": True},
    "volumes": {"inner": (2, 1, 2), "batches": (1, 3)},
    "an empty batch": {"inner": (4,), "batches": (3, 0)},
    "one value here and one there": {"inner": (), "batches": (1, 1)},
    "off zero": {"inner": (8,), "batches": (4, 4), "shift": 1e5, "dtype": torch.float32, "tolerance": 2e-2},
    "float32": {"inner": (3, 2), "batches": (2, 5), "dtype": torch.float32, "tolerance": 2e-5},
    "bfloat16": {"inner": (3, 2), "batches": (2, 5), "dtype": torch.bfloat16, "tolerance": 3e-2},
    "plain average": {"inner": (), "batches": (3, 4), "options": {"momentum": None}},
    "no weights": {"inner": (), "batches": (3, 4), "options": {"affine": False}},
    "no bias": {"inner": (2,), "batches": (3, 4), "options": {"bias": False}},
    "no statistics": {"inner": (), "batches": (3, 4), "options": {"track_running_stats": False}},
    "fixed input": {"inner": (), "batches": (3, 4), "fixed": True},
}  # fmt: skip


def fill(layer, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def batch(rank, step, rows, inner, dtype, shift, channels_last):
    generator = torch.Generator().manual_seed(100 * step + rank)
    scale = torch.arange(1, C + 1).view(1, C, *[1] * len(inner))
    x = (torch.randn(rows, C, *inner, generator=generator, dtype=torch.float64) * scale + shift).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def near(ours, theirs, tolerance):
    if ours.shape != theirs.shape:
        return False
    size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * size)


def oracle_of(layer, kind, options):
    """Returns the same layer of torch in float64; without a bias, it has a zero."""
    oracle = kind(
        C, dtype=torch.float64, **{name: value for name, value in options.items() if name != "bias"}
    )
    fill(layer, 1)
    with torch.no_grad():
        for mine, theirs in ((layer.weight, oracle.weight), (layer.bias, oracle.bias)):
            if mine is not None:
                theirs.copy_(mine)
    return oracle


def compare(group, inner, batches, dtype=torch.float64, tolerance=1e-12, shift=0.0, channels_last=False,
            options=None, fixed=False):  # fmt: skip
    """Trains three steps and evaluates one, beside the oracle in float64; returns what is not near it."""
    options = dict(options or {})
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    layer = SyncBatchNorm(C, process_group=group, dtype=wide, **options)
    oracle = oracle_of(layer, KINDS[2 + len(inner)], options)
    rank = group.rank()
    begin = sum(batches[:rank])
    share = slice(begin, begin + batches[rank])
    wrong = []

    def check(what, ours, theirs):
        if not near(ours.detach().double(), theirs.detach(), tolerance):
            wrong.append((what, ours, theirs))

    for step in range(4):
        training = step < 3
        layer.train(training)
        oracle.train(training)
        parts = [batch(r, step, rows, inner, dtype, shift, channels_last) for r, rows in enumerate(batches)]
        x = parts[rank].requires_grad_(not fixed)
        joined = torch.cat([part.detach().double() for part in parts]).requires_grad_()
        if not training and not layer.track_running_stats:
            joined = (
                x.detach().double().requires_grad_()
            )  # evaluation without statistics is this rank's alone
            share = slice(0, batches[rank])
        y, expected = layer(x), oracle(joined)
        check(f"output {step}", y, expected[share])
        assert y.dtype == dtype
        if channels_last:
            assert y.is_contiguous(memory_format=torch.channels_last)
        slope = torch.cos(torch.arange(expected.numel()).double()).view(expected.shape)
        layer.zero_grad()
        oracle.zero_grad()
        if y.requires_grad:
            (y * slope[share].to(dtype)).sum().backward()
        (expected * slope).sum().backward()
        if not fixed:
            check(f"gradient {step}", x.grad, joined.grad[share])
        if not training:
            continue
        for name in ("weight", "bias"):
            mine, theirs = getattr(layer, name), getattr(oracle, name)
            if mine is not None:
                total = mine.grad.double().clone()
                group.allreduce([total]).wait()
                check(f"{name} {step}", total, theirs.grad)
        for name, value in layer.named_buffers():
            check(f"{name} {step}", value, dict(oracle.named_buffers())[name].double())
    assert (layer.bias is not None) == (options.get("bias", True) and layer.affine)
    return wrong


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_equals_batch_norm_over_the_joined_batch(group, case):
    assert compare(group, **CASES[case]) == []


@on_ranks(3)
def test_three_ranks_with_batches_of_three_sizes(group):
    assert compare(group, (2, 2), (1, 0, 4)) == []


@on_ranks(2)
def test_errors(group):
    layer = SyncBatchNorm(C, process_group=group)
    texts = []
    for shape in ((C,), (2, C + 1), (1 - group.rank(), C)):
        with pytest.raises(ValueError, match=r"[a-z]") as caught:
            layer(torch.ones(shape))
        texts.append(str(caught.value))
    before = layer.running_mean.clone()
    assert layer(torch.ones(0, C)).shape == (0, C)  # nobody has anything
    assert torch.equal(layer.running_mean, before)
    with pytest.raises(TypeError, match="cannot be pickled; save state_dict"):
        pickle.dumps(layer)
    assert copy.deepcopy(nn.ModuleList([layer]))[0].process_group is group
    rank = group.rank()
    assert "takes inputs of 2 dimensions or more, but got 1" in texts[0]
    assert "of 5 channels got an input of shape (2, 6), which has 6 in dimension 1" in texts[1]
    assert f"[rank {rank}] batch normalisation needs more than 1 value in each channel" in texts[2]


@on_ranks(4, world=True)
def test_a_group_of_some_ranks(rank, size):
    pairs = [collectives.new_group([0, 1]), collectives.new_group([2, 3])]
    mine = pairs[rank // 2]
    assert compare(mine, (3,), (2, 1)) == []


def default_group(rank, size):
    layer = SyncBatchNorm(2)
    x = torch.arange(4.0).view(2, 2) + 10 * rank
    everything = torch.cat([torch.arange(4.0).view(2, 2) + 10 * r for r in range(size)])
    near = torch.allclose(layer(x), nn.BatchNorm1d(2)(everything)[2 * rank : 2 * rank + 2], atol=1e-6)
    return near, pickle.loads(pickle.dumps(layer)).process_group is None


def test_the_default_group_and_none():
    assert run_world(default_group, 2, backend="host") == [(True, True)] * 2
    layer, plain = SyncBatchNorm(2), nn.BatchNorm1d(2)  # no group at all
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_var, plain.running_var)


class Own(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


class Inherited(nn.BatchNorm1d):
    pass


def model():
    shared = nn.BatchNorm2d(3)
    return nn.Sequential(
        nn.Conv2d(3, 3, 1), shared, nn.Sequential(nn.ReLU(), shared), nn.Identity(), nn.SyncBatchNorm(3)
    )


def test_conversion_keeps_everything_but_the_class_and_can_be_undone():
    module = model().eval()
    module[1].note = "kept"
    seen = []
    module[1].register_forward_hook(lambda *_: seen.append(1))
    module[3] = None
    module[1].weight.requires_grad_(False)
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    theirs = module[4].process_group = object()

    converted = convert_sync_batchnorm(module)
    assert converted is module
    assert type(module[1]) is SyncBatchNorm is type(module[4])
    assert module[1] is module[2][1]
    assert (module[1].note, module[1].training, module[1].process_group) == ("kept", False, None)
    assert module[3] is None
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    module[1](torch.ones(2, 3, 1, 1))
    assert seen == [1]
    again = SyncBatchNorm.convert_sync_batchnorm(module)
    assert again[1] is module[1]

    reverted = revert_sync_batchnorm(module)
    assert reverted is module
    assert type(module[1]) is nn.BatchNorm2d
    assert module[1] is module[2][1]
    assert not hasattr(module[1], "process_group")
    assert type(module[4]) is nn.SyncBatchNorm
    assert module[4].process_group is theirs
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(before[name] is after[name] for name in before)


def test_conversion_of_single_layers():
    assert type(convert_sync_batchnorm(nn.BatchNorm3d(2))) is SyncBatchNorm
    assert type(revert_sync_batchnorm(convert_sync_batchnorm(Inherited(2)))) is Inherited
    plain = revert_sync_batchnorm(SyncBatchNorm(2))
    x = torch.randn(3, 2, 2)
    assert torch.equal(plain(x), nn.BatchNorm1d(2)(x))
    with pytest.raises(ValueError, match="2 dimensions or more"):
        plain(torch.ones(2))
    own = Own(2)
    with pytest.warns(UserWarning, match="Own has a forward of its own"):
        assert convert_sync_batchnorm(own) is own
    with pytest.raises(ValueError, match="run forward once"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    lazy = nn.LazyBatchNorm1d()
    lazy(torch.ones(2, 2))
    assert isinstance(convert_sync_batchnorm(lazy), SyncBatchNorm)
    assert isinstance(convert_sync_batchnorm(nn.InstanceNorm1d(2)), nn.InstanceNorm1d)


def test_state_goes_both_ways():
    ours, theirs = SyncBatchNorm(2), nn.SyncBatchNorm(2)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    assert theirs.load_state_dict(ours.state_dict()).unexpected_keys == []


def train(group):
    """Trains over halves of a batch, and alone over all of it; returns the largest difference."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8)
    ).double()
    alone = copy.deepcopy(net)
    parallel = DistributedDataParallel(convert_sync_batchnorm(net, group), process_group=group)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (parallel, alone)]
    rows = slice(3 * group.rank(), 3 * group.rank() + 3)
    for step in range(4):
        x = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(step)).double()
        for net_, part, optimizer in zip((parallel, alone), (x[rows], x), optimizers, strict=True):
            optimizer.zero_grad()
            net_(part).square().mul(torch.arange(8)).mean().backward()
            optimizer.step()
    pairs = zip(net.state_dict().values(), alone.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def test_training_in_parallel_equals_training_on_all_data():
    assert max(run_ranks(train, 2, backend="host")) < 1e-9
