"""Options beyond the usual: skipped reductions, mixed precision, parameters that change."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from ddp_oracle import AVERAGE, Launches, Layers, follow, in_place_from, naive_average, same_gradients
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from collectives.ddp import DistributedDataParallel, GradientSyncError, MixedPrecision
from collectives.ddp.hooks.debugging_hooks import noop_hook
from collectives.ddp.hooks.default_hooks import allreduce_hook

data = Layers.inputs


# ---- skipped reductions ----------------------------------------------------------------------------------


def skipping(group, plan, options):
    ours = DistributedDataParallel(
        Layers(), process_group=group, skip_all_reduce_unused_params=True, **options
    )
    return follow(ours, Layers(), plan, Launches(group))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_buckets_that_all_ranks_drop_are_not_sent(options) -> None:
    """Section 6.2.2 of the paper. One message tells what the ranks can reach, eight are the gradients."""
    plan = [("0123", "0123"), ("03", "03"), ("01", "13"), ("-2", "-0"), ("0", "0"), ("0123", "123")]
    for wrong, sent in run_ranks(skipping, 2, plan, {**options, "bucket_cap_mb": 0}, backend="host"):
        assert not any(wrong)
        numbers = [sum(size > 1 for size in sizes) for sizes in sent]
        # the first pass is followed by an agreement on the order; a tail without gradients is a message, too
        assert numbers[0] == 9
        assert numbers[1] in (1 + 1 + 4, 1 + 1 + 4 + 1)
        assert numbers[2] in (1 + 6, 1 + 6 + 1)
        assert numbers[3] in (1 + 4, 1 + 4 + 1)
        assert numbers[4] == 9


@in_place_from(0)
def skipping_in_place(group, plan, options):
    return skipping(group, plan, options)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}], ids=str
)
def test_layers_that_all_ranks_drop_are_left_out_of_a_bucket(options) -> None:
    """The rest of the bucket is sent, and a layer that any rank uses, or used under no_sync, is in it."""
    everything = ("0123", "0123")
    plan = [everything, everything, everything, ("03", "03"), ("01", "13"), ("-2", "-0"), ("0", "0"),
            ("3", "3"), everything]  # fmt: skip
    for wrong, sent in run_ranks(skipping_in_place, 2, plan, options, backend="host"):
        assert not any(wrong)
        elements = list(map(sum, sent))
        whole = elements[2]
        assert [whole - number for number in elements[2:]] == [12 * n for n in (0, 2, 1, 2, 3, 0)]


@in_place_from(0)
def breaking(group, options):
    """Rank 1's backward breaks off in a pass that leaves layers out; the pass after it is whole."""
    ours = DistributedDataParallel(
        Layers(), process_group=group, skip_all_reduce_unused_params=True, **options
    )
    for step in range(2):
        ours(data(group.rank(), step), "03").sum().backward()
    out = ours(data(group.rank(), 2), "03")
    if group.rank() == 1:
        broken = out.grad_fn.register_prehook(fail)
    with pytest.raises(GradientSyncError if group.rank() == 0 else ZeroDivisionError) as caught:
        out.sum().backward()
    if group.rank() == 1:
        broken.remove()
    ours.zero_grad()
    wrong, _ = follow(ours, Layers(), [("03", "03")])
    assert wrong == [[]]
    assert list(getattr(caught.value, "reasons", {})) == ([] if group.rank() else [1])


def fail(_):
    raise ZeroDivisionError("broken off")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_pass_that_breaks_off_where_layers_are_left_out(options) -> None:
    run_ranks(breaking, 2, options, backend="host")


@on_ranks(2)
def test_a_hook_gets_whole_buckets(group):
    """What it averages is a flat tensor of the layout that it knows."""
    ours = DistributedDataParallel(Layers(), process_group=group, skip_all_reduce_unused_params=True)
    sizes = []

    def hook(state, bucket):
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    ours.register_comm_hook(None, hook)
    for step, layers in enumerate(("0123", "03", "03")):
        ours(data(group.rank(), step), layers).sum().backward()
    assert sizes == [48] * 3


@on_ranks(2)
def test_a_forward_without_a_backward_pass_does_not_keep_buckets_from_being_skipped(group):
    """A forward on all layers that never gets its backward pass, before others on two of them."""
    ours = DistributedDataParallel(
        Layers(), process_group=group, bucket_cap_mb=0, skip_all_reduce_unused_params=True
    )
    naive = Layers()
    ours(data(group.rank()))
    sent = Launches(group)
    numbers, late = [], []
    for step in range(12):
        sent.sizes.clear()
        if step == 1:
            late.append(ours(data(group.rank(), 50), "012"))
        x = data(group.rank(), step)
        ours(x, "03").sum().backward()
        numbers.append(len([size for size in sent.sizes if size > 1]))
        naive(x, "03").sum().backward()
        naive_average(naive.parameters(), group)
        assert same_gradients(ours.module, naive) == []
    late[0].sum().backward()  # after so many others, but still right
    naive(data(group.rank(), 50), "012").sum().backward()
    naive_average(naive.parameters(), group)
    assert same_gradients(ours.module, naive) == []
    assert numbers[7] >= 9  # the others count for a while
    assert numbers[-1] in (1 + 4, 1 + 4 + 1)


def test_a_static_graph_skips_without_looking() -> None:
    plan = [("013", "03")] * 3
    options = {"static_graph": True, "bucket_cap_mb": 0}
    for wrong, sent in run_ranks(skipping, 2, plan, options, backend="host"):
        assert not any(wrong)
        numbers = [sum(size > 1 for size in sizes) for sizes in sent]
        assert numbers[0] == 8
        assert numbers[2] in (6, 7)


@on_ranks(2)
def test_nothing_is_searched_for_a_hook_that_does_not_communicate(group):
    """A hook that does not communicate leaves nothing to be sent."""
    ours = DistributedDataParallel(Layers(), process_group=group, skip_all_reduce_unused_params=True)
    ours.register_comm_hook(None, noop_hook)
    sent = Launches(group)
    for step in range(2):
        ours(data(group.rank(), step), "01").sum().backward()
    assert sent.sizes == []


def skipping_on_uneven_inputs(group):
    """Rank 0 has one input; what it reached with that does not count in the other rank's passes."""
    ours = DistributedDataParallel(
        Layers(), process_group=group, bucket_cap_mb=0, skip_all_reduce_unused_params=True
    )
    naive = Layers()
    plan = ["0123", "01", "3", "01"] if group.rank() else ["0123"]
    sent = Launches(group)
    wrong, numbers = [], []
    with ours.join():
        for step, run in enumerate(plan):
            sent.sizes.clear()
            ours.zero_grad()
            naive.zero_grad()
            x = data(group.rank(), step)
            ours(x, run).sum().backward()
            # gradients have 3 or 9 elements, and a tail in the last bucket; 8 is a number for each parameter
            numbers.append(len([size for size in sent.sizes if size in {3, 9} or size > 9]))
            naive(x, run).sum().backward()
            for parameter in naive.parameters() if step else ():
                if parameter.grad is not None:
                    parameter.grad /= 2
            wrong += same_gradients(ours.module, naive) if step else []
    return wrong, numbers


def test_ranks_without_inputs_skip_what_the_others_do() -> None:
    _, (wrong, numbers) = run_ranks(skipping_on_uneven_inputs, 2, backend="host")
    assert wrong == []
    for number, parameters in zip(numbers[1:], (4, 2, 4), strict=True):
        assert number in (parameters, parameters + 1)


@on_ranks(2)
def test_gradients_that_forward_does_not_lead_to_are_named(group):
    """A loss that uses a layer behind the back of what forward returns."""
    ours = DistributedDataParallel(
        Layers(), process_group=group, bucket_cap_mb=0, skip_all_reduce_unused_params=True
    )
    out = ours(data(group.rank()), "01")
    loss = out.sum() + ours.module.layers[2 + group.rank()].bias.sum()
    with pytest.raises(GradientSyncError) as caught:
        loss.backward()
    reasons = caught.value.reasons
    assert list(reasons) == [0, 1]
    assert "layers.2.bias got a gradient, but nothing that forward returned depends on it" in reasons[0]
    assert "layers.3.bias got" in reasons[1]


# ---- mixed precision -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A bit of all: tied weights, a recurrent layer, a buffer, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.rnn = nn.LSTM(4, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor, reentrant: bool | None = None) -> torch.Tensor:
        self.seen = {x.dtype, self.first.weight.dtype, self.rnn.weight_hh_l0.dtype}
        x = torch.tanh(self.first(x))
        block = lambda x: torch.tanh(self.last(self.tied(self.rnn(x)[0])))  # noqa: E731
        x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x * self.scale


def rows(rank, seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + rank))


@pytest.mark.parametrize(
    ("config", "options", "reentrant"),
    [
        (_MixedPrecision(torch.bfloat16), {}, None),
        (
            MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
            {"gradient_as_bucket_view": True},
            False,
        ),
        (MixedPrecision(torch.float16, torch.bfloat16), {"gradient_as_bucket_view": True}, None),
        (MixedPrecision(reduce_dtype=torch.float16), {"bucket_cap_mb": 0, "batched_grad_copy": True}, None),
        (MixedPrecision(torch.bfloat16), {"static_graph": True}, True),
    ],
    ids=str,
)
@on_ranks(2)
def test_mixed_precision_equals_training_in_few_bits_naively(group, config, options, reentrant):
    module = Mixed()
    ours = DistributedDataParallel(module, process_group=group, mixed_precision=config, **options)
    naive = Mixed()
    param = config.param_dtype or torch.float32
    wire = config.reduce_dtype or param
    naive_low = copy.deepcopy(naive).to(param)
    naive_low.scale = naive_low.scale.to(config.buffer_dtype or torch.float32)
    dtypes = set()
    for step in range(3):
        ours.zero_grad()
        naive.zero_grad()
        for micro in range(2):
            x = rows(group.rank(), 10 * step + micro)
            if micro == 0:
                with ours.no_sync():
                    ours(x, reentrant).float().sum().backward()
            else:
                ours(x, reentrant).float().sum().backward()
            dtypes |= module.seen
            naive_low.zero_grad()
            naive_low(x.to(param), reentrant).float().sum().backward()
            for p, q in zip(naive.parameters(), naive_low.parameters(), strict=True):
                p.grad = q.grad.float() if p.grad is None else p.grad + q.grad.float()
        for p in naive.parameters():
            low = p.grad.to(wire)
            group.allreduce([low], AVERAGE).wait()
            p.grad = low.float()
        # A tied weight within a reentrant checkpoint comes twice, and is then added up in its own precision.
        close = functools.partial(torch.allclose, rtol=0.02, atol=0.02)
        assert same_gradients(ours.module, naive, close if reentrant else torch.equal) == []
        assert all(p.dtype is p.grad.dtype is torch.float32 for p in module.parameters())
    assert all(isinstance(p, nn.Parameter) for p in module._modules["rnn"]._flat_weights)
    state = {name: value.dtype for name, value in ours.state_dict().items()}
    assert dtypes == {config.param_dtype or torch.float32}
    assert state["module.scale"] == (config.buffer_dtype or torch.float32)
    assert (state["module.count"], state["module.first.weight"]) == (torch.int64, torch.float32)


@on_ranks(1)
def test_mixed_precision_and_exceptions(group):
    """Leaves parameters in their place when forward or backward raises."""
    ours = DistributedDataParallel(
        Layers(), process_group=group, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    with pytest.raises(ValueError, match="invalid literal"):
        ours(data(0), "x")
    assert all(isinstance(p, nn.Parameter) for p in ours.module.parameters())
    out = ours(data(0))
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert all(isinstance(layer.weight, nn.Parameter) for layer in ours.module.layers)
    with torch.no_grad():
        assert ours(data(0)).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="param_dtype must be a floating"):
        DistributedDataParallel(Layers(), process_group=group, mixed_precision=torch.float16)


# ---- parameters that change ------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [True, False])
@on_ranks(2)
def test_parameters_frozen_or_thawed_after_wrapping_are_named_on_all_ranks(group, freeze):
    module = Layers()
    module.layers[1].weight.requires_grad_(freeze)
    ours = DistributedDataParallel(module, process_group=group)
    if group.rank() == 1:
        module.layers[1].weight.requires_grad_(not freeze)
    with pytest.raises(GradientSyncError) as caught:
        ours(data(group.rank())).sum().backward()
    reasons = caught.value.reasons
    assert list(reasons) == [1]
    words = "needed a gradient when" if freeze else "needed no gradient when"
    assert f"layers.1.weight {words} the module was wrapped" in reasons[1]


# ---- meshes --------------------------------------------------------------------------------------------


@on_ranks(1, isolated=True)
def test_a_mesh_of_one_dimension_names_the_group(group):
    import torch.distributed as dist

    dist.init_process_group("collectives", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        ours = DistributedDataParallel(Layers(), device_mesh=mesh)
        ours(data(0)).sum().backward()
        square = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        with pytest.raises(ValueError, match="must have one dimension, but has 2"):
            DistributedDataParallel(Layers(), device_mesh=square)
        sliced = DistributedDataParallel(Layers(), device_mesh=square["b"])
        assert (ours.process_group.name(), ours.reducer.passes) == ("host", 1)
        assert sliced.process_group.size() == 1
    finally:
        dist.destroy_process_group()
