"""Training equals the naive solution bit for bit, whatever the options."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import pytest
import torch
from ddp_oracle import (
    Zoo,
    data,
    differences,
    in_place_from,
    naive_average,
    naive_broadcast,
    pair,
    same_averages,
    snapshot,
)
from harness import run_ranks
from on_ranks import on_ranks

from collectives.ddp import DistributedDataParallel
from collectives.ddp.hooks.default_hooks import allreduce_hook
from collectives.ddp.reducer import buckets

STEPS = 5

CHOICES = {
    "bucket_cap_mb": [None, 0, 0.0005],
    "find_unused_parameters": [False, True],
    "gradient_as_bucket_view": [False, True],
    "static_graph": [False, True],
    "batched_grad_copy": [False, True],
    "skip_all_reduce_unused_params": [False, True],
    "delayed": [False, True],
    "in_place_bytes": [1 << 18, 0, 60],
    "hook": [False, True],
    "set_to_none": [True, False],
    "micro_batches": [1, 3],
}


def combinations(count, seed):
    """Returns the two plainest combinations and some others."""
    every = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    return [every[0], every[1], *random.Random(seed).sample(every, count - 2)]


def train(group, wrap, micro_batches, set_to_none, skips):
    """Trains a model on data that differ by rank; returns its state after each step.

    ``wrap`` makes of a module one to call, a context for all micro-batches but the last, what ends a pass.
    """
    torch.manual_seed(group.rank())
    module = Zoo()
    model, no_sync, after_backward = wrap(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    states = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(micro_batches):
            x = Zoo.inputs(seed=100 * step + 10 * micro + group.rank())
            skip = skips and (step + group.rank()) % 3 != 0
            if micro < micro_batches - 1:
                with no_sync():
                    model(x, skip=skip)["out"].sum().backward()
            else:
                model(x, skip=skip)["out"].sum().backward()
        after_backward()
        optimizer.step()
        states.append(snapshot(module))
    return states


def train_naively(group, micro_batches, set_to_none, skips):
    synchronised = [True]

    def wrap(module):
        naive_broadcast(module.state_dict().values(), group)

        def model(*args, **kwargs):
            if synchronised[0]:
                naive_broadcast(module.buffers(), group)
            synchronised[0] = True
            return module(*args, **kwargs)

        @contextlib.contextmanager
        def no_sync():
            yield
            synchronised[0] = False

        return model, no_sync, lambda: naive_average(module.parameters(), group)

    return train(group, wrap, micro_batches, set_to_none, skips)


def train_with(group, micro_batches, set_to_none, skips, hook, delayed, in_place_bytes, **options):
    made = []
    buckets.IN_PLACE_BYTES = in_place_bytes

    def wrap(module):
        if delayed:
            names = ("scale", "phase", "wide.weight", "inner.bias")
            options["delay_all_reduce_named_params"] = [(n, module.get_parameter(n)) for n in names]
            options["param_to_hook_all_reduce"] = module.inner.weight
        model = DistributedDataParallel(module, process_group=group, **options)
        if hook:
            model.register_comm_hook(group, allreduce_hook)
        made.append(model)
        return model, model.no_sync, lambda: None

    states = train(group, wrap, micro_batches, set_to_none, skips)
    assert made[0].reducer.passes == STEPS
    return states


@in_place_from(buckets.IN_PLACE_BYTES)  # which combinations change
def compare(group, chosen, exact):
    """Returns what was not equal to the naive solution, for each combination."""
    references = {}
    wrong = []
    for combination in chosen:
        options = dict(combination)
        hook = options.pop("hook")
        kind = {name: options.pop(name) for name in ("micro_batches", "set_to_none")}
        unused = options["find_unused_parameters"] or options["skip_all_reduce_unused_params"]
        kind["skips"] = unused and not options["static_graph"]
        key = tuple(kind.values())
        if key not in references:
            references[key] = train_naively(group, **kind)
        states = train_with(group, hook=hook, **kind, **options)
        for step, (ours, theirs) in enumerate(zip(states, references[key], strict=True)):
            averages_early = options["delayed"] and kind["micro_batches"] > 1  # in each of them
            if averages_early or not exact:
                names = [
                    n for n in theirs if n not in ours or not torch.allclose(ours[n], theirs[n], 1e-3, 1e-4)
                ]
                names += sorted(ours.keys() - theirs.keys())
            else:
                names = differences(ours, theirs)
            if names:
                wrong.append((combination, step, names))
                break
    return wrong, {name: value for name, value in states[-1].items() if not name.startswith("norm.running")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_the_naive_solution_bit_for_bit(size) -> None:
    results = run_ranks(compare, size, combinations(24, size), True, backend="host")
    assert [wrong for wrong, _ in results] == [[]] * size
    assert all(differences(final, results[0][1]) == [] for _, final in results)


@pytest.mark.parametrize("other", ["gloo", "round_robin"])
@pytest.mark.full
def test_equals_the_naive_solution_on_other_backends(other) -> None:
    """Gloo sums in an order that depends on the size of the message, so it is equal to tolerance only."""
    results = run_ranks(compare, 3, combinations(8, 7), other != "gloo", backend=other)
    assert [wrong for wrong, _ in results] == [[]] * 3
    assert all(differences(final, results[0][1]) == [] for _, final in results)


@on_ranks(2)
def test_gradients_keep_the_strides_that_autograd_gives_them(group):
    module = Zoo()
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
    reference = copy.deepcopy(module)
    model(Zoo.inputs(group.rank()))["out"].sum().backward()
    reference(Zoo.inputs(group.rank()))["out"].sum().backward()
    strides = [[p.grad.stride() for p in m.parameters() if p.requires_grad] for m in (module, reference)]
    assert strides[0] == strides[1]
    assert [stride for stride in strides[0] if len(stride) == 4] == [(18, 1, 6, 2)]


@pytest.mark.parametrize("backend", ["host", "round_robin"])
@on_ranks(2, asked="backend")
def test_buckets_take_the_fast_path(group):
    """The group's all-reduce that checks its arguments in Python is out of reach of the second pass."""
    ours, naive = pair(group)
    ours(data(group.rank())).sum().backward()
    ours.zero_grad()
    output = ours(data(group.rank(), 1))  # agrees on the order of the gradients
    checked, group.allreduce = group.allreduce, None
    output.sum().backward()
    group.allreduce = checked
    naive(data(group.rank(), 1)).sum().backward()
    assert same_averages(ours, naive)
