"""Modules, parameters and buffers replaced after wrapping: training goes on, or all ranks are told."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_oracle import data, grads, naive_average, pair, same_averages, same_pass, told
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel, GradientSyncError, MixedPrecision
from collectives.ddp.hooks.default_hooks import allreduce_hook

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


class Model(nn.Module):
    """A body, a head that does nothing yet, and room for more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Identity()
        self.out = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.adapters = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.body(x)) * self.frozen
        for adapter in self.adapters:
            x = x + adapter(x)
        return self.out(x)


def assign(module):
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def assign_one(module):
    module.out.load_state_dict(copy.deepcopy(module.out.state_dict()), assign=True)


def weight_norm(module):
    nn.utils.parametrizations.weight_norm(module.out)


def set_parameter(module):
    module.out.weight = nn.Parameter(module.out.weight.detach().clone())


def set_module(module):
    module.out = nn.Linear(3, 3)


def fill_identity(module):
    module.head = nn.Linear(3, 3)


def add_adapter(module):
    module.adapters.append(nn.Linear(3, 3))


def replace_frozen(module):
    module.frozen = nn.Parameter(torch.ones(3))


def write_table(module):
    module.out._parameters["bias"] = nn.Parameter(torch.zeros(3))


REPLACING = [
    (assign, "body.0.weight"),
    (assign_one, "out.weight"),
    (weight_norm, "out.parametrizations.weight.original0"),
    (set_parameter, "out.weight"),
    (set_module, "out.weight"),
    (fill_identity, "head.weight"),
    (add_adapter, "adapters.0.weight"),
    (replace_frozen, "frozen"),
    (write_table, "out.bias"),
]


def train_after(group, change, ranks, options, hook=False):
    """Trains, changes the module on some ranks, trains on; returns what each pass said."""
    torch.manual_seed(0)
    ours = DistributedDataParallel(Model(), process_group=group, **options)
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    said = []
    for step in range(4):
        if step == 1 and group.rank() in ranks:
            change(ours.module)
        ours.zero_grad()
        said.append(told(ours(data(group.rank(), step)).square().sum()))
    return said


OPTIONS = [
    {},
    {"find_unused_parameters": True},
    pytest.param({"static_graph": True}, marks=pytest.mark.full),
    pytest.param({"skip_all_reduce_unused_params": True}, marks=pytest.mark.full),
]


def check_refused(results, name, ranks):
    for said in results:
        assert said[0] == ""
        for message in said[1:]:
            assert f"rank {ranks[0]}: " in message
            assert name in message
            assert "wrap the module again" in message


@pytest.mark.parametrize(("change", "name"), REPLACING, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_parameters_that_came_later_are_refused(change, name, options) -> None:
    check_refused(run_ranks(train_after, 2, change, (0, 1), options, backend="host"), name, (0, 1))


@pytest.mark.parametrize(
    ("change", "name"), [REPLACING[0], REPLACING[6]], ids=lambda value: getattr(value, "__name__", None)
)
@pytest.mark.parametrize("hook", [False, True], ids=["", "hook"])
def test_all_ranks_are_told_of_parameters_that_came_later_on_one(change, name, hook) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0}
    check_refused(run_ranks(train_after, 2, change, (1,), options, hook, backend="host"), name, (1,))


@pytest.mark.parametrize("change", [assign, set_module, nn.Module.double], ids=lambda change: change.__name__)
@on_ranks(2)
def test_a_module_that_is_wrapped_again_is_averaged(group, change):
    torch.manual_seed(0)
    ours = DistributedDataParallel(Model(), process_group=group)
    ours(data(group.rank())).sum().backward()
    change(ours.module)
    ours = DistributedDataParallel(ours.module, process_group=group)
    naive = copy.deepcopy(ours.module)
    assert same_pass(ours, naive, data(group.rank(), 1).to(ours.module.out.weight.dtype))


@on_ranks(2)
def test_changes_that_lead_to_no_other_gradients_are_none_of_its_business(group):
    """Adds what gets no gradients, takes away what is not needed, and wraps a part once more."""
    torch.manual_seed(0)
    ours = DistributedDataParallel(Model(), process_group=group, find_unused_parameters=True)
    naive = copy.deepcopy(ours.module)

    def change(step, module):
        if step == 1:
            module.average = copy.deepcopy(module.body)  # an average of the weights, say
        elif step == 2:
            module.out, module.last = nn.Identity(), module.out
        elif step == 3:
            del module.last
        elif step == 4:
            module.out = nn.Sequential(module.head, nn.Flatten())

    for step in range(6):
        for model in (ours, naive):
            change(step, model.module if model is ours else model)
            model.zero_grad()
            model(data(group.rank(), step)).square().sum().backward()
        assert same_averages(ours, naive)


@VIEWS
@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
@on_ranks(2)
def test_parameters_whose_contents_are_swapped_are_averaged(group, view, unused):
    """Exchanges the contents of parameters for others, which leaves the objects the module's."""
    ours, naive = pair(group, gradient_as_bucket_view=view, find_unused_parameters=unused)
    for step in range(5):
        for model in (ours.module, naive):
            if step in (1, 3):
                for parameter in model.parameters() if step == 1 else model[0].parameters():
                    parameter.grad = None
                    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() / 2))
            model.zero_grad()
        ours(data(group.rank(), step)).square().sum().backward()
        naive(data(group.rank(), step)).square().sum().backward()
        assert same_averages(ours, naive)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 300, 3), nn.Conv2d(300, 40, 3), nn.Flatten())


def images(rank, step):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@VIEWS
@on_ranks(2)
def test_parameters_may_get_other_memory(group, view):
    """Gives parameters other memory by ``.data``, as WGAN clips them, and other strides."""
    ours, naive = pair(group, convolutions, gradient_as_bucket_view=view)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9) for model in (ours, naive)]
    for step in range(4):
        for model, optimizer in zip((ours, naive), optimizers, strict=True):
            if step == 2:
                model.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            model(images(group.rank(), step)).square().mean().backward()
        assert same_averages(ours, naive)
        for model, optimizer in zip((ours, naive), optimizers, strict=True):
            optimizer.step()
            for parameter in model.parameters():
                parameter.data = parameter.data.clamp(-0.01, 0.01)


@on_ranks(2)
def test_gradients_in_other_strides_on_one_rank_are_averaged(group):
    """Has one rank alone lay its parameters out in channels_last, whose gradients so are, too."""
    ours, naive = pair(group, convolutions)
    for step in range(3):
        if step == 1 and group.rank() == 1:
            ours.to(memory_format=torch.channels_last)
        for model in (ours, naive):
            model.zero_grad()
            model(images(group.rank(), step)).square().mean().backward()
        naive_average(naive.parameters(), group)
        pairs = zip(grads(ours.module).values(), grads(naive).values(), strict=True)
        assert all(torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in pairs)


def converted(group, change, when, view, ranks, backend_options):
    torch.manual_seed(0)
    ours = DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 300), nn.Linear(300, 300)),
        process_group=group, gradient_as_bucket_view=view, **backend_options,
    )  # fmt: skip
    said = []
    for step in range(3):
        if step == when and group.rank() in ranks:
            change(ours)
        ours.zero_grad(set_to_none=step != 2)
        x = data(group.rank(), step).to(ours.module[0].weight.dtype)
        said.append(told(ours(x).float().square().sum()))
    return said


def to_double(model):
    model.double()


def to_half_within(model):
    model.module.to(torch.bfloat16)


def by_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


@VIEWS
@pytest.mark.parametrize("when", [0, 1], ids=["before the first pass", "after it"])
@pytest.mark.parametrize("change", [to_double, to_half_within, by_data], ids=lambda change: change.__name__)
def test_another_data_type_after_wrapping_is_refused_by_name(change, when, view) -> None:
    after = "bfloat16" if change is to_half_within else "float64"
    for ranks in ((0, 1), (1,)):
        for said in run_ranks(converted, 2, change, when, view, ranks, {}, backend="host"):
            assert said[:when] == [""] * when
            for message in said[when:]:
                assert f"rank {ranks[0]}: 6 of 6 parameters have another data type" in message
                assert f"0.weight ({after}[3, 3] instead of float32[3, 3])" in message
                assert "wrap it again" in message
                assert "could not be put" not in message


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0},
        {"batched_grad_copy": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["host", "gloo", "round_robin"])
def test_another_data_type_is_refused_with_every_option(options, backend) -> None:
    for said in run_ranks(converted, 2, to_double, 1, True, (1,), options, backend=backend):
        assert said[0] == ""
        for message in said[1:]:
            assert "rank 1: 6 of 6 parameters have another data type" in message
            assert "0.weight (float64[3, 3] instead of float32[3, 3])" in message


@VIEWS
@on_ranks(2)
def test_another_data_type_between_forward_and_backward_is_refused_by_name(group, view):
    ours = DistributedDataParallel(nn.Linear(3, 3), process_group=group, gradient_as_bucket_view=view)
    for step in range(2):
        loss = ours(data(group.rank(), step)).sum()
        if step == 1 and group.rank() == 1:
            ours.double()
        message = told(loss)
    assert "weight (float64[3, 3] instead of float32[3, 3])" in message


@VIEWS
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@on_ranks(2)
def test_gradients_of_another_data_type_are_averaged_in_theirs(group, view):
    """Gives parameters of 16 bits gradients of 32, as torch allows for since 2.10."""
    torch.manual_seed(0)
    module = nn.Linear(3, 3, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    naive = copy.deepcopy(module)
    for parameter in naive.parameters():
        parameter.grad_dtype = torch.float32
    ours = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=view)
    for step in range(3):
        for model in (ours, naive):
            model(data(group.rank(), step).bfloat16()).float().square().sum().backward()
        assert same_averages(ours, naive)
    assert [parameter.grad.dtype for parameter in module.parameters()] == [torch.float32] * 2


class Buffered(nn.Module):
    """A layer with buffers that the ranks change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale.to(x.dtype).mean())


def buffers_replaced(group):
    """Gives buffers other values, data types and shapes on each rank; returns what the ranks then have."""
    ours = DistributedDataParallel(Buffered(), process_group=group)
    module, rank, found = ours.module, group.rank(), []

    def step():
        ours(data(rank)).sum().backward()
        found.append({name: buffer.clone() for name, buffer in module.named_buffers()})

    step()
    module.scale = torch.full((3,), rank + 2.0)
    step()
    module.scale = torch.full((3,), 1 / 3 + rank, dtype=torch.float64)
    step()
    module.scale = torch.full((2, 2), 1 / 3 + rank, dtype=torch.float64)
    step()
    module.late = torch.full((5,), rank + 1.0)
    step()
    module.register_buffer("later", torch.full((1,), rank + 1.0))
    step()
    del module.late
    step()
    module.layer = nn.Sequential(module.layer, nn.BatchNorm1d(3, affine=False))
    module.layer[1].running_mean += rank
    ours(data(rank)).sum().backward()
    ours.require_forward_param_sync = True
    with torch.no_grad():
        ours.eval()(data(rank))
    found.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return found


def test_buffers_may_be_replaced_on_all_ranks_alike() -> None:
    first, second = run_ranks(buffers_replaced, 2, backend="host")
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(
            torch.equal(ours[name], theirs[name]) and ours[name].dtype is theirs[name].dtype for name in ours
        )
    assert [found["scale"].flatten()[0].item() for found in first[:4]] == [1, 2, 1 / 3, 1 / 3]
    assert "late" in first[4]
    assert "later" in first[5]
    assert "late" not in first[6]
    assert "layer.1.running_mean" in first[7]


@on_ranks(2)
def test_mixed_precision_keeps_parameters_that_came_later(group):
    """Loads other parameters into a model in mixed precision; they are not lost."""
    torch.manual_seed(0)
    ours = DistributedDataParallel(
        nn.Sequential(nn.Linear(3, 3)), process_group=group, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    ours(data(group.rank())).sum().backward()
    ours.module.load_state_dict(
        {name: torch.full_like(p, 5.0) for name, p in ours.module.state_dict().items()}, assign=True
    )
    with pytest.raises(GradientSyncError, match=r"0\.weight, 0\.bias|0\.bias, 0\.weight"):
        ours(data(group.rank())).sum().backward()
    assert [p.detach().unique().tolist() for p in ours.module.parameters()] == [[5.0], [5.0]]


@on_ranks(2)
def test_scripted_modules_are_averaged(group):
    """Trains a module whose tables are no dicts."""
    ours, naive = pair(group, lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3)))
    assert all(same_pass(ours, naive, data(group.rank(), step)) for step in range(3))
    ours.module.append(nn.Linear(3, 3))
    with pytest.raises(GradientSyncError, match=r"2\.weight|2\.bias"):
        ours(data(group.rank())).sum().backward()


class Cast(nn.Linear):
    """A layer that takes inputs of any data type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize(
    ("change", "words"),
    [(assign, "1.weight"), (nn.Module.double, "1.weight (float64[3, 3] instead of float32[3, 3])")],
    ids=["assign", "double"],
)
@on_ranks(2)
def test_delayed_parameters_that_are_changed_are_refused(group, change, words):
    """Changes what is averaged apart from the buckets, on one rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), Cast(3, 3))
    ours = DistributedDataParallel(
        module,
        process_group=group,
        delay_all_reduce_named_params=[("1.weight", module[1].weight), ("1.bias", module[1].bias)],
        param_to_hook_all_reduce=module[0].weight,
    )
    for step in range(3):
        if step == 1 and group.rank() == 1:
            change(module[1])
        ours.zero_grad()
        said = told(ours(data(group.rank(), step)).square().sum())
        assert ("rank 1: " in said and words in said) if step else said == ""
