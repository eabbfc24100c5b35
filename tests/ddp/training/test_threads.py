"""Several models on one rank: in one backward pass, and trained by several threads at the same time."""

from __future__ import annotations

import threading

import pytest
from ddp_oracle import Chain, data, equal, grads, naive_average, pair, same_pass
from on_ranks import on_ranks

import collectives
from collectives.ddp import GradientSyncError

STEPS = 20


@on_ranks(2, world=True)
def test_threads_train_models_over_groups_of_their_own(rank, size):
    """Trains two models over two groups, each by a thread of its own."""
    groups = [collectives.new_group(list(range(size))) for _ in range(2)]
    pairs = [
        pair(groups[0], Chain, bucket_cap_mb=0),
        pair(groups[1], Chain, gradient_as_bucket_view=True, find_unused_parameters=True),
    ]
    found = [[], []]

    def train(number):
        ours, naive = pairs[number]
        found[number] = [same_pass(ours, naive, data(rank, step + number)) for step in range(STEPS)]

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * STEPS] * 2


@on_ranks(2, world=True)
def test_two_models_in_one_pass_and_an_error_of_one_of_them(rank, size):
    """Two models in one backward pass; then all ranks leave two layers of the second one out, once."""
    group = collectives.group.WORLD
    first, naive_first = pair(group, Chain, bucket_cap_mb=0)
    second, naive_second = pair(group, Chain)

    def both(step):
        for one, two in ((first, second), (naive_first, naive_second)):
            one.zero_grad()
            two.zero_grad()
            (two(one(data(rank, step))) * one(data(rank, step + 1))).sum().backward()
        for naive in (naive_first, naive_second):
            naive_average(naive.parameters(), group)
        assert equal(grads(first.module), grads(naive_first))
        assert equal(grads(second.module), grads(naive_second))

    both(0)
    both(1)
    x = data(rank)
    loss = first(x).sum() + second.module.b(second(x).detach()).sum()
    with pytest.raises(GradientSyncError) as caught:
        loss.backward()
    both(2)
    for other in range(size):
        words = f"rank {other}: 4 of 6 parameters got no gradient: a.weight, a.bias, c.weight"
        assert words in str(caught.value)
