"""All ways to keep ranks equal average the same gradients."""

from __future__ import annotations

import torch
from harness import run_world

import collectives
from collectives.bench.paper.cells import build_classifier, random_loss, wrap


def train(rank, size):
    """Returns, by wrapper and bucket size, the parameters after two steps."""
    group = collectives.new_group()
    found = {}
    for name, bucket_mb in (
        ("ours", None), ("after backward", None), ("after backward", 0.0), ("after backward", 1.0),
        ("per parameter", None), ("averaging", None), ("local", None),
    ):  # fmt: skip
        torch.manual_seed(rank)
        model = build_classifier("small")
        model.body.body[1:].requires_grad_(False)  # little to compute
        loss_of = random_loss("small", 2, 16, rank, "cpu")
        wrapper = wrap(name, model, group, bucket_mb)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(wrapper.module).backward()
            wrapper.after_backward()
            optimizer.step()
            wrapper.after_step()
        found[name, bucket_mb] = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return found


def test_all_average_the_same_gradients():
    ranks = run_world(train, 2)
    for key, wanted in ranks[0].items():
        if key[0] == "local":
            assert not torch.allclose(wanted, ranks[1][key])
        else:
            assert torch.equal(wanted, ranks[1][key]), key
            torch.testing.assert_close(wanted, ranks[0]["ours", None], msg=str(key))
