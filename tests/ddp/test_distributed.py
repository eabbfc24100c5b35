"""The wrapper as a module: arguments, agreement of the ranks, buffers, checkpoints, containers."""

from __future__ import annotations

import copy
import inspect
import io
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from ddp_oracle import averages
from harness import run_ranks, run_world
from on_ranks import on_ranks
from torch import nn
from torch_world import run_torch

import collectives
from collectives.ddp import DistributedDataParallel, ModelMismatchError
from collectives.ddp.hooks.registration import BuiltinCommHookType
from collectives.ddp.module.trees import map_tensors, tensors_in
from collectives.errors import UnsupportedOperationError


def test_arguments_are_those_of_torch() -> None:
    """Names, order and defaults; torch releases other than 2.13 have fewer or more of them."""
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    shared = [name for name in theirs if name in ours]
    assert [name for name in ours if name in theirs] == shared
    if torch.__version__.startswith("2.13."):
        assert list(ours) == list(theirs)
        assert [ours[name].default for name in shared] == [theirs[name].default for name in shared]
    for method in ("forward", "no_sync", "register_comm_hook"):
        expected = inspect.signature(getattr(nn.parallel.DistributedDataParallel, method)).parameters
        assert list(inspect.signature(getattr(DistributedDataParallel, method)).parameters) == list(expected)


@on_ranks(1)
def test_bad_arguments_are_named(group):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    meta = nn.Linear(2, 2, device="meta")
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("same", torch.ones(1).expand(3))
    DistributedDataParallel(expanded, process_group=group, broadcast_buffers=False)  # is not written to
    with torch.inference_mode():
        inferring = nn.Linear(2, 2)
        with pytest.raises(RuntimeError, match=r"Linear is wrapped within torch.inference_mode\(\)"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    stepped = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch itself imports there
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, stepped.parameters(), {"lr": 0.1})
    fine, theirs = nn.Linear(2, 2), torch.distributed.ProcessGroup(0, 1)
    for module, arguments, kind, words in (
        (frozen, {}, RuntimeError, "no parameter of Linear needs a gradient"),
        (nn.LazyLinear(2), {}, RuntimeError, "weight of LazyLinear is not initialised"),
        (meta, {}, RuntimeError, "weight of Linear is on the meta device"),
        (inferring, {}, RuntimeError, "weight of Linear was made within torch.inference_mode()"),
        (
            expanded,
            {},
            ValueError,
            "same of DistributedDataParallel(Linear) has the shape [3] and",
        ),
        (expanded, {"init_sync": False}, ValueError, "elements share their memory"),
        (stepped, {}, UnsupportedOperationError, "weight of Linear has an optimizer that steps"),
        (fine, {"process_group": theirs}, TypeError, "must be a collectives.ProcessGroup"),
        (fine, {"process_group": None}, ValueError, "init_process_group"),
        (fine, {"device_ids": [0]}, ValueError, "are for modules on one device that is not the CPU"),
        (fine, {"device_ids": [0, 1]}, ValueError, "[0, 1]"),
        (fine, {"output_device": 0}, ValueError, "the parameters are on cpu"),
        (fine, {"bucket_cap_mb": -3}, ValueError, "must be zero or positive and finite, but is -3"),
        (fine, {"process_group": None, "device_mesh": object()}, TypeError, "but is of type object"),
        (fine, {"device_mesh": object()}, ValueError, "give process_group or device_mesh, not both"),
        (fine, {"broadcast_buffers": True, "forward_sync_buffers": False}, ValueError, "got True and False"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            DistributedDataParallel(module, **{"process_group": group, **arguments})
    with pytest.warns(FutureWarning, match="check_reduction"):
        DistributedDataParallel(nn.Linear(2, 2), process_group=group, check_reduction=True)


class Variant(nn.Module):
    """A model that a rank may have in another variant."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5 if kind == "shape" else 4)
        if kind == "order":
            self.third = nn.Linear(2, 2)
            self.second = nn.Linear(4, 2)
        else:
            self.second = nn.Linear(4, 2)
            self.third = nn.Linear(2, 2)
        if kind == "dtype":
            self.second.double()
        if kind == "frozen":
            self.second.bias.requires_grad_(False)
        if kind == "more":
            self.extra = nn.Linear(1, 1)
        if kind == "strides":
            self.second.weight = nn.Parameter(self.second.weight.detach().t().contiguous().t())
        self.register_buffer("count", torch.zeros(2 if kind == "buffer" else 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", "parameter first.weight: float32[4, 3] on ranks 0, 2; float32[5, 3] on rank 1"),
        ("dtype", "parameter second.bias: float32[2] on ranks 0, 2; float64[2] on rank 1"),
        ("frozen", "parameter second.bias: float32[2] on ranks 0, 2; float32[2] frozen on rank 1"),
        ("more", "parameter extra.weight: absent on ranks 0, 2; float32[1, 1] on rank 1"),
        (
            "order",
            "order of registration: parameter second.weight on ranks 0, 2; parameter third.weight on rank 1",
        ),
        ("strides", "float32[2, 4] on ranks 0, 2; float32[2, 4] strides [1, 2] on rank 1"),
        ("buffer", "buffer count: int64[1] on ranks 0, 2; int64[2] on rank 1"),
        ("option", "option find_unused_parameters: False on ranks 0, 2; True on rank 1"),
    ],
)
@on_ranks(3)
def test_ranks_that_disagree_on_the_model_all_say_where(group, kind, words):
    options = {"find_unused_parameters": True} if kind == "option" and group.rank() == 1 else {}
    module = Variant(kind if group.rank() == 1 else "")
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(ModelMismatchError) as caught:
        DistributedDataParallel(module, process_group=group, **options)
    assert all(map(torch.equal, before, module.parameters()))
    group.barrier().wait()
    message = str(caught.value)
    assert message.startswith(f"[rank {group.rank()}] DistributedDataParallel(Variant) over host group")
    assert words in message


def start_values(group, options):
    torch.manual_seed(group.rank())
    module = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(2, 2).half(), nn.Linear(3, 3))
    module[0].weight.data = module[0].weight.data.t()
    module[3].requires_grad_(False)
    module[1].running_mean.fill_(group.rank())
    module[1].num_batches_tracked.fill_(group.rank() + 7)
    mine = {name: value.clone() for name, value in module.state_dict().items()}
    DistributedDataParallel(module, process_group=group, **options)
    return mine, module.state_dict()


def test_rank_0_gives_all_ranks_their_start_values() -> None:
    results = run_ranks(start_values, 2, {}, backend="host")
    for _, now in results:
        assert all(torch.equal(value, results[0][0][name]) for name, value in now.items())
    for options in ({"broadcast_buffers": False}, {"init_sync": False}, {"forward_sync_buffers": False}):
        (first, _), (before, now) = run_ranks(start_values, 2, options, backend="host")
        kept = {
            name
            for name in now
            if torch.equal(now[name], before[name]) and not torch.equal(now[name], first[name])
        }
        buffers = {"1.running_mean", "1.num_batches_tracked"}
        if options == {"broadcast_buffers": False}:
            assert kept == buffers
        elif options == {"init_sync": False}:
            assert kept >= buffers | {"0.weight", "3.bias"}
        else:
            assert kept == set()


class Counter(nn.Module):
    """Buffers that every forward changes, one of them replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("hidden", torch.zeros(2, 2, dtype=torch.bool), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before = (self.seen.clone(), self.mean.clone(), self.hidden.clone())
        self.seen += 1 + int(x[0, 0])
        self.mean = self.mean + x.mean().double()
        self.hidden[0, int(x[0, 0])] = True
        return self.layer(x)


def buffer_history(group, options):
    ours = DistributedDataParallel(Counter(), process_group=group, **options)
    x = torch.full((1, 2), float(group.rank()))
    history = []
    for kind in ("sync", "no_sync", "no_sync", "sync", "eval", "eval", "sync"):
        predicted = ours.will_sync_module_buffers()
        if kind == "no_sync":
            with ours.no_sync():
                ours(x).sum().backward()
        elif kind == "eval":
            with torch.no_grad():
                ours(x)
        else:
            ours(x).sum().backward()
        history.append((predicted, [b.tolist() for b in ours.module.before]))
    return history


def test_buffers_are_those_of_rank_0_before_each_forward_after_a_synchronised_one() -> None:
    """Section 4.1 of the paper, "Model Buffers"."""
    first, second = run_ranks(buffer_history, 2, {}, backend="host")
    sent = [predicted for predicted, _ in second]
    assert sent == [predicted for predicted, _ in first] == [True, True, False, False, True, False, False]
    equal = [a == b for (_, a), (_, b) in zip(first, second, strict=True)]
    assert equal == [True, True, False, False, True, False, False]
    for options in ({"broadcast_buffers": False}, {"forward_sync_buffers": False}):
        first, second = run_ranks(buffer_history, 2, options, backend="host")
        assert [predicted for predicted, _ in second] == [False] * 7
        assert [a == b for (_, a), (_, b) in zip(first, second, strict=True)] == [True] + [False] * 6


def ignored(group):
    torch.manual_seed(group.rank())
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].running_mean.fill_(group.rank())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.bias", "1.running_mean"])
    ours = DistributedDataParallel(module, process_group=group)
    start = [module[0].bias.clone(), module[1].running_mean.clone(), module[0].weight.clone()]
    ours(torch.randn(4, 2)).square().sum().backward()
    return [*start, module[0].bias.grad.clone(), module[0].weight.grad.clone()]


def test_ignored_parameters_and_buffers_are_left_alone() -> None:
    first, second = run_ranks(ignored, 2, backend="host")
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [
        False,
        False,
        True,
        False,
        True,
    ]


@on_ranks(1)
def test_checkpoints_go_both_ways_between_ours_and_torch(group):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        theirs = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        ours = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), process_group=group)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert next(iter(ours.state_dict())) == "module.0.weight"
        saved = io.BytesIO()
        torch.save(theirs.state_dict(), saved)
        saved.seek(0)
        ours.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
        assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
        with torch.no_grad():
            ours.module[0].weight.add_(1)
        theirs.load_state_dict(ours.state_dict())
        assert torch.equal(theirs.module[0].weight, ours.module[0].weight)
        plain = ours.state_dict()
        nn.modules.utils.consume_prefix_in_state_dict_if_present(plain, "module.")
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(plain)
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_gradients_are_views_of_the_buckets_and_survive_zero_grad(group):
    ours = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), process_group=group, gradient_as_bucket_view=True
    )
    plain = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    x = torch.full((1, 2), float(group.rank() + 1))
    buffers = set()
    for step in range(4):
        ours.zero_grad(set_to_none=step % 2 == 0)
        ours(x).sum().backward()
        buffers |= {p.grad.untyped_storage().data_ptr() for p in ours.parameters()}
    assert len(buffers) == 1
    with pytest.raises(RuntimeError, match=r"gradient_as_bucket_view[\s\S]*zero_grad"):
        ours.module[0].weight.grad.detach_()
    plain(x).sum().backward()
    plain.module.weight.grad.detach_()


@dataclass
class Answer:
    main: torch.Tensor
    rest: dict


class Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.me = self


class Pair(NamedTuple):
    left: object
    right: object


def test_tensors_are_found_in_any_container() -> None:
    t = [torch.full((), float(i)) for i in range(8)]
    nested = Answer(
        t[0], OrderedDict(a=[t[1], (t[2], {"b": t[3]})], c=Pair(t[4], 5), d=Plain(t[5]), e={t[6]}, f="x")
    )
    assert [int(x) for x in tensors_in(nested)] == [0, 1, 2, 3, 4, 5, 6]
    assert list(tensors_in((nn.Linear(1, 1), None, torch.float32, print))) == []
    doubled = map_tensors(
        lambda x: x * 2, Answer(t[1], {"a": [t[2], Pair(t[3], "x")], "b": OrderedDict(c=(t[4],))})
    )
    assert isinstance(doubled, Answer)
    assert doubled.rest["a"][1] == Pair(t[6], "x")
    assert isinstance(doubled.rest["b"], OrderedDict)
    assert [int(x) for x in tensors_in(doubled)] == [2, 4, 6, 8]


def subgroup(rank, size):
    pair = collectives.new_group([1, 2])
    if rank not in (1, 2):
        return None
    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.fill_(rank)
    ours = DistributedDataParallel(module, process_group=pair)
    return module.weight[0, 0].item(), averages(ours, pair)


def test_a_group_of_some_ranks() -> None:
    assert run_world(subgroup, 3) == [None, (1.0, True), (1.0, True)]


def other_groups(rank: int, size: int, torch_world: bool, options: dict[str, Any]) -> None:
    """The ranks get fewer, and more again; a hook, views and the sample rate stay."""
    layer: Any = torch.distributed if torch_world else collectives
    some = layer.new_group([0, 2])
    world = layer.group.WORLD
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    ddp = DistributedDataParallel(module, **options)
    ddp._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    ddp._set_ddp_runtime_logging_sample_rate(7)

    def gradients(model: nn.Module) -> list[float]:
        model.zero_grad()
        model(torch.full((2, 3), rank + 1.0)).sum().backward()
        return [p.grad.sum().item() for p in model.parameters()]

    def step() -> list[float]:
        return gradients(ddp)

    def together(ranks: list[int]) -> list[float]:
        """Returns the average of what those ranks compute by themselves."""
        everyone: list[Any] = [None] * size
        layer.all_gather_object(everyone, gradients(copy.deepcopy(ddp.module)))
        return [sum(values) / len(ranks) for values in zip(*(everyone[r] for r in ranks), strict=True)]

    if not torch_world:
        step()  # so that buckets are laid out anew
    expected = together([0, 1, 2])
    assert step() == pytest.approx(expected, rel=1e-5)
    ddp._update_process_group(some)
    expected = together([0, 2])
    if rank != 1:
        assert ddp.process_group.size() == 2
        for _ in range(3):
            assert step() == pytest.approx(expected, rel=1e-5)
        assert ddp._get_ddp_logging_data()["world_size"] == 2
    ddp._update_process_group(world)
    expected = together([0, 1, 2])
    assert step() == pytest.approx(expected, rel=1e-5)
    assert ddp._comm_hooks[0][1] is ddp.process_group
    assert ddp.reducer.clock.sample_rate == 7
    with pytest.raises(TypeError, match=r"must be a collectives\.ProcessGroup"):
        ddp._update_process_group("world")
    assert step() == pytest.approx(expected, rel=1e-5)
    ddp.module[0].weight.register_hook(lambda grad: ddp._update_process_group(world))
    with pytest.raises(RuntimeError, match="within a backward pass"):
        step()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "views"])
@pytest.mark.parametrize("backend", ["collectives", "gloo", "ours"])
def test_the_group_can_be_changed(backend: str, plain: bool) -> None:
    options = {} if plain else {"gradient_as_bucket_view": True, "find_unused_parameters": True}
    if backend == "ours":
        run_world(other_groups, 3, False, options)
    else:
        run_torch(other_groups, 3, True, options, backend=backend)


def keeps_an_output(rank: int, size: int) -> None:
    alone = collectives.new_group([0])
    model = DistributedDataParallel(nn.Linear(2, 2))
    kept = model(torch.ones(1, 2))
    model._update_process_group(alone)
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
        kept.sum().backward()
    collectives.barrier()  # which an all-reduce of the former group would meet


def test_an_output_that_lives_averages_nothing_over_the_former_group() -> None:
    run_world(keeps_an_output, 2)


def validates_on_some(rank: int, size: int) -> None:
    alone, world = collectives.new_group([0]), collectives.group.WORLD
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model(torch.randn(4, 2)).sum().backward()
    model._update_process_group(alone)
    if rank == 0:
        with torch.no_grad():
            model(torch.randn(4, 2))
    model._update_process_group(world)
    model.zero_grad()
    model(torch.randn(4, 2)).sum().backward()


def test_ranks_agree_on_buffers_after_some_have_validated_in_another_group() -> None:
    run_world(validates_on_some, 2)
