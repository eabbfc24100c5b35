"""What a program puts in the place of gradients: it is averaged, whatever memory it lies in."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ddp_oracle import Layers, data, equal, grads, naive_average, pair, same_averages, same_pass, told
from harness import run_ranks
from on_ranks import on_ranks
from torch import nn

from collectives.ddp import GradientSyncError
from collectives.ddp.hooks.default_hooks import allreduce_hook

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copy", "view"])


def halve_data(parameter):
    parameter.grad.data = parameter.grad.data / 2


def nan_to_num(parameter):
    parameter.grad.data = torch.nan_to_num(parameter.grad.data)


def clone(parameter):
    parameter.grad = parameter.grad.clone()


def detach(parameter):
    parameter.grad = parameter.grad.detach()


def set_to_another(parameter):
    parameter.grad.set_(parameter.grad * 3)


def set_with_gaps(parameter):
    parameter.grad.data = torch.stack([parameter.grad, parameter.grad], dim=-1)[..., 0]


def take_away(parameter):
    parameter.grad = None


def put_another(parameter):
    parameter.grad = torch.full_like(parameter, 0.25)


def put_a_view(parameter):
    parameter.grad = torch.cat([torch.zeros(3), parameter.grad.flatten()])[3:].view(parameter.shape)


def data_of_double(parameter):
    parameter.grad.data = parameter.grad.data.double()


def clip_value(parameter):
    nn.utils.clip_grad_value_(parameter, 0.01)


def clip_norm(parameter):
    nn.utils.clip_grad_norm_(parameter, 0.05)


WAYS = [
    halve_data, nan_to_num, clone, detach, set_to_another, set_with_gaps, take_away, put_another, put_a_view,
    data_of_double, clip_value, clip_norm,
]  # fmt: skip


class Wide(nn.Module):
    """Gradients of a few bytes, and one that is copied, or reduced, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 300)
        self.large = nn.Linear(300, 300)
        self.last = nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.large(torch.tanh(self.first(x)))))


def close(ours, theirs):
    """Returns whether gradients are equal, but for what double precision adds to the average."""
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[n].double(), theirs[n].double()) for n in ours
    )


def replaced_between_passes(group, way, view, cap, hook):
    ours, naive = pair(group, Wide, gradient_as_bucket_view=view, bucket_cap_mb=cap)
    if hook:
        ours.register_comm_hook(group, allreduce_hook)
    for step in range(5):
        if step == 3:
            ours.zero_grad()
            naive.zero_grad()
        for model in (ours, naive):
            model(data(group.rank(), step)).square().sum().backward()
        naive_average(naive.parameters(), group)
        agree = close if way is data_of_double else equal
        assert agree(grads(ours.module), grads(naive))
        for model in (ours.module, naive):
            chosen = [model.first.weight, model.large.weight, model.last.bias]
            for parameter in chosen if step % 2 else model.parameters():
                with torch.no_grad():
                    way(parameter)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@VIEWS
def test_what_stands_in_for_a_gradient_is_averaged(way, view) -> None:
    run_ranks(replaced_between_passes, 2, way, view, None, False, backend="host")


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("cap", "hook"), [(0, False), (None, True), (0, True)], ids=str)
def test_what_stands_in_for_a_gradient_is_averaged_in_every_layout(way, cap, hook) -> None:
    run_ranks(replaced_between_passes, 2, way, True, cap, hook, backend="host")


@VIEWS
@pytest.mark.parametrize(
    ("way", "late"),
    [
        (halve_data, False), (clone, False), (set_to_another, False),
        (halve_data, True), (clone, True), (take_away, True),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
@on_ranks(2)
def test_what_hooks_put_in_the_place_of_a_gradient_is_averaged(group, way, late, view):
    """Replaces gradients as they come; late, after the reducer has seen them, while they are reduced."""
    ours, naive = pair(group, Wide, gradient_as_bucket_view=view, bucket_cap_mb=0 if late else None)

    def hook(*models):
        return [p.register_post_accumulate_grad_hook(way) for m in models for p in m.parameters()]

    if not late:
        hook(ours.module, naive)
    for step in range(3):
        ours.zero_grad()
        naive.zero_grad()
        loss = ours(data(group.rank(), step)).square().sum()
        handles = hook(ours.module) if late else []
        loss.backward()
        for handle in handles:
            handle.remove()
        naive(data(group.rank(), step)).square().sum().backward()
        assert same_averages(ours, naive)


class Optional(nn.Module):
    """Two layers, of which a call leaves out one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.used(x)
        return self.left_out(x) if both else x


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on no rank", "on another rank"])
@pytest.mark.parametrize("way", [halve_data, clone, take_away], ids=lambda way: way.__name__)
@on_ranks(2)
def test_gradients_of_unused_parameters_may_be_replaced(group, way, elsewhere):
    """Leaves a layer out in every second pass, on all ranks or on rank 0, after its gradient was replaced."""
    ours, naive = pair(group, Optional, gradient_as_bucket_view=True, find_unused_parameters=True)
    for step in range(6):
        both = step % 2 == 0 or (elsewhere and group.rank() == 1)
        for model in (ours, naive):
            model(data(group.rank(), step), both).square().sum().backward()
        for parameter in naive.parameters() if step % 2 == 0 or elsewhere else naive.used.parameters():
            naive_average([parameter], group)
        assert equal(grads(ours.module), grads(naive))
        for model in (ours.module, naive):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    with torch.no_grad():
                        way(parameter)


@pytest.mark.parametrize("way", [halve_data, nan_to_num, set_to_another], ids=lambda way: way.__name__)
@on_ranks(2)
def test_gradients_may_be_replaced_between_passes_that_do_not_average(group, way):
    ours, naive = pair(group, gradient_as_bucket_view=True)
    for step in range(6):
        with ours.no_sync() if step % 3 != 2 else contextlib.nullcontext():
            ours(data(group.rank(), step)).square().sum().backward()
        naive(data(group.rank(), step)).square().sum().backward()
        if step % 3 == 2:
            naive_average(naive.parameters(), group)
        assert equal(grads(ours.module), grads(naive))
        for model in (ours.module, naive):
            for parameter in model.parameters():
                with torch.no_grad():
                    way(parameter)


@on_ranks(2)
def test_a_pass_that_broke_off_leaves_the_next_one_whole(group):
    """Breaks a pass off after gradients were replaced; the gradients of that rank stay its own."""
    ours, naive = pair(group, gradient_as_bucket_view=True)
    told = []

    def replace_and_break_off(grad):
        halve_data(ours.module[2].weight)
        raise KeyError("in a hook")

    for step in range(3):
        ours.zero_grad()
        naive.zero_grad()
        if step == 1 and group.rank() == 0:
            handle = ours.module[0].weight.register_hook(replace_and_break_off)
        try:
            ours(data(group.rank(), step)).square().sum().backward()
        except (GradientSyncError, KeyError) as error:
            told.append((step, type(error).__name__))
            if group.rank() == 0:
                handle.remove()
    naive(data(group.rank(), 2)).square().sum().backward()
    assert same_averages(ours, naive)
    assert told == [(1, "GradientSyncError" if group.rank() else "KeyError")]


@pytest.mark.parametrize("exchanged", [True, False], ids=["exchanged", "transposed"])
@on_ranks(2)
def test_a_gradient_in_the_place_of_another_one_is_refused_by_name(group, exchanged):
    ours, _ = pair(
        group, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), gradient_as_bucket_view=True
    )
    first, second = ours.module[0].weight, ours.module[1].weight
    ours(data(group.rank())).square().sum().backward()
    if group.rank() == 1:
        if exchanged:
            first.grad, second.grad = second.grad, first.grad
        else:
            first.grad = first.grad.t()
    refused = told(ours(data(group.rank())).square().sum())
    assert "rank 1" in refused
    assert "0.weight" in refused
    ours.zero_grad()
    assert told(ours(data(group.rank(), 1)).square().sum()) == ""


def move_buffer(group, bucket):
    buffer = bucket.buffer()
    buffer.data = buffer.data.clone()
    return allreduce_hook(group, bucket)


def move_gradients(group, bucket):
    for gradient in bucket.gradients():
        gradient.data = gradient.data.clone()
    return allreduce_hook(group, bucket)


@VIEWS
@pytest.mark.parametrize("hook", [move_buffer, move_gradients], ids=lambda hook: hook.__name__)
@on_ranks(2)
def test_a_communication_hook_may_give_its_tensors_other_memory(group, hook, view):
    ours, naive = pair(group, gradient_as_bucket_view=view)
    ours.register_comm_hook(group, hook)
    assert all(same_pass(ours, naive, data(group.rank(), step)) for step in range(3))


def reshape_parameters(group, bucket):
    for parameter in bucket.parameters():
        parameter.grad = None
        parameter.data = parameter.data.view(3, -1, 1)
    return allreduce_hook(group, bucket)


@pytest.mark.parametrize("run", ["0123", "0"])
@on_ranks(2)
def test_torchs_words_on_a_gradient_that_fits_no_more_are_the_cause(group, run):
    """One rank uses all layers, and the other one those that it is told."""
    ours, _ = pair(group, Layers, gradient_as_bucket_view=True, find_unused_parameters=True)
    ours.register_comm_hook(group, reshape_parameters)
    with pytest.raises(RuntimeError, match="could not be put into its bucket") as caught:
        ours(Layers.inputs(group.rank()), run if group.rank() else "0123").sum().backward()
    cause = str(caught.value.__cause__)
    assert "assign a gradient of size" in cause
    assert cause in str(caught.value)


def repeat_one(group, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:1].expand(bucket.buffer().shape))
    return future


@on_ranks(2)
def test_a_communication_hook_may_return_a_view_of_its_buffer_in_other_strides(group):
    ours, _ = pair(group)
    ours.register_comm_hook(group, repeat_one)
    message = told(ours(data(group.rank())).square().sum())
    values = {grad for gradient in grads(ours.module).values() for grad in gradient.flatten().tolist()}
    assert "refers to a single memory location" in message or (message == "" and len(values) == 1)
