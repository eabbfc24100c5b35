"""Context parallelism of torch over our groups: attention over a sequence that the ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import _attention as attention
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch_world import run_torch


def attend(query, key, value, is_causal=False):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)


def attention_in_context(rank, size):
    """Each rank has a part of the sequence; keys and values go around, by both methods of torch.

    torch itself rings the attention kernels of accelerators only, and says so; the ring works on any.
    """
    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, 2, 16, 8, generator=generator) for _ in range(3))
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    for method in ("allgather", "alltoall"):
        attention.set_rotate_method(method)
        buffers = [query.clone(), key.clone(), value.clone()]
        kept, restored = buffers[0], buffers[1:]
        with (
            CommDebugMode() as mode,
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, no_restore_buffers={kept}),
        ):
            assert [one.shape[2] for one in buffers] == [4, 4, 4]
            found = attention._templated_ring_attention(
                mesh.get_group(), 2, attend, *buffers, is_causal=True
            )[0]
            (together,) = attention.context_parallel_unshard(mesh, [found], [2])
        torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
        assert [torch.equal(*pair) for pair in zip(restored, (key, value), strict=True)] == [True, True]
        assert kept.shape[2] == 4
        counts = {str(kind): count for kind, count in mode.get_comm_counts().items()}
        gathers = counts["c10d_functional.all_gather_into_tensor"]
        turns = counts.get("c10d_functional.all_to_all_single", 0)
        assert (gathers, turns) == ((2, 0) if method == "allgather" else (1, 3)), counts
    attention.set_rotate_method("allgather")
    buffers = [query.clone(), key.clone(), value.clone()]
    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3),
        pytest.raises(NotImplementedError, match="flash_attention_for_cpu"),
    ):
        nn.functional.scaled_dot_product_attention(*buffers, is_causal=True)


class Attention(nn.Module):
    """Attention of some queries to all keys, in plain operators."""

    def forward(self, query, key, value):
        return torch.softmax(query @ key.transpose(-2, -1), -1) @ value


def attention_to_all_keys(rank, size):
    """A plan that gathers keys and values before a module, and scatters their gradients after it."""
    mesh, mine = init_device_mesh("cpu", (4,)), slice(4 * rank, 4 * rank + 4)
    generator = torch.Generator().manual_seed(4)
    wholes = [torch.randn(1, 2, 16, 8, generator=generator).requires_grad_() for _ in range(3)]
    expected = Attention()(*wholes)
    expected.square().sum().backward()
    plan = attention._ContextParallel(2, attention._ContextParallel.AttentionType.FLEX)
    module = parallelize_module(Attention(), mesh, plan)
    parts = [one.detach()[:, :, mine].clone().requires_grad_() for one in wholes]
    found = module(*parts)
    torch.testing.assert_close(found, expected[:, :, mine])
    found.square().sum().backward()
    for part, one in zip(parts, wholes, strict=True):
        torch.testing.assert_close(part.grad, one.grad[:, :, mine], rtol=1e-4, atol=1e-5)


def test_attention_in_context():
    run_torch(attention_in_context, 4)


def test_attention_to_all_keys():
    run_torch(attention_to_all_keys, 4)
