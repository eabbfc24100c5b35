"""Models of transformers train by two forwards before one backward pass as with torch's DDP, bit for bit.

Contrastive and preference losses (SimCSE, CLIP, DPO) train so. Most of these models have buffers that the
graph saves, and that every forward sends.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import current_store, run_ranks
from torch import nn

from collectives.ddp import DistributedDataParallel

transformers = pytest.importorskip("transformers")

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SHORT = {"vocab_size": 40, "max_position_embeddings": 16}

MODELS = {
    "Albert": {**TINY, **SHORT, "embedding_size": 8},
    "Bert": {**TINY, **SHORT},
    "CLIPText": {**TINY, **SHORT},
    "DistilBert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, **SHORT},
    "Electra": {**TINY, **SHORT, "embedding_size": 8},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 40},
    "GPTNeo": {
        "hidden_size": 16, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
        **SHORT,
    },
    "Llama": {**TINY, **SHORT, "num_key_value_heads": 1},
    "Roberta": {**TINY, **SHORT, "pad_token_id": 1},
    "XLMRoberta": {**TINY, **SHORT, "pad_token_id": 1},
}  # fmt: skip


class Pooled(nn.Module):
    """The mean of a model's last hidden states."""

    def __init__(self, kind):
        super().__init__()
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
        self.body = getattr(transformers, f"{kind}Model")(config)

    def forward(self, ids):
        return self.body(input_ids=ids).last_hidden_state.mean(1)


def batch(rank, number):
    return torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(100 * rank + number))


def train(wrap, kind, rank):
    torch.manual_seed(rank)
    module = Pooled(kind)
    torch.manual_seed(10 + rank)  # of dropout, which makes the two views
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        first, second = model(batch(rank, step)), model(batch(rank, step))
        scores = nn.functional.cosine_similarity(first[:, None], second[None], dim=-1) / 0.05
        nn.functional.cross_entropy(scores, torch.arange(2)).backward()
        optimizer.step()
    return model.module.state_dict()


def compare(group, kind):
    options = {"find_unused_parameters": True}  # poolers are not used
    store = dist.PrefixStore("torch", current_store())
    dist.init_process_group(
        "gloo", store=store, rank=group.rank(), world_size=group.size(), timeout=timedelta(seconds=60)
    )
    try:
        theirs = train(lambda m: nn.parallel.DistributedDataParallel(m, **options), kind, group.rank())
    finally:
        dist.destroy_process_group()
    ours = train(lambda m: DistributedDataParallel(m, process_group=group, **options), kind, group.rank())
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
def test_two_forwards_train_as_with_torch(kind) -> None:
    assert run_ranks(compare, 2, kind, backend="host", timeout=240) == [[], []]
