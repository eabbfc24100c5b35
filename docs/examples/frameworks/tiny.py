"""What the examples share: arguments, a small network, its data, and the result to compare backends by."""

import argparse
import hashlib
import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="collectives", help="a name in torch.distributed")
    parser.add_argument("--ddp", choices=["torch", "collectives"], default="torch", help="whose wrapper")
    parser.add_argument("--result", type=Path, help="file for losses and a digest of the parameters")
    return parser


def arguments():
    return parser().parse_args()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))


def dataset():
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def report(given, losses, module):
    """Says what came out, on rank 0. The file is on the disk before the program ends, however it ends."""
    state = [tensor.detach().contiguous() for tensor in module.state_dict().values()]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in state)).hexdigest()
    keep(given, {"losses": [float(loss).hex() for loss in losses], "parameters": digest})
    assert losses[-1] < losses[0]
    print(f"worked: loss {losses[0]:.3f} to {losses[-1]:.3f}, parameters {digest[:8]}", flush=True)


def keep(given, result):
    """Writes the result to the file that is given, if one is."""
    if given.result is not None:
        with given.result.open("w", encoding="utf-8") as file:
            json.dump(result, file)
            file.flush()
            os.fsync(file.fileno())


def llama():
    """Returns a Llama of 60 MB with random weights in bfloat16, for the examples of inference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def inference_parser():
    inference = parser()
    inference.add_argument("--tokens", type=int, default=16, help="how many to generate")
    inference.add_argument("--repeats", type=int, default=1, help="how often; the median is the speed")
    return inference


def generate(given, function, first=True):
    """Generates tokens by ``function(prompt, count)``, and says how many a second, on the ``first`` rank."""
    prompt = list(range(1, 33))
    function(prompt, 2)
    seconds, found = [], []
    for _ in range(given.repeats):
        begin = time.perf_counter()
        found.append(function(prompt, given.tokens))
        seconds.append(time.perf_counter() - begin)
    assert [len(tokens) for tokens in found] == [given.tokens] * given.repeats
    assert all(tokens == found[0] for tokens in found)
    if first:
        keep(given, {"tokens": found[0]})
        speed = given.tokens / statistics.median(seconds)
        print(f"worked: {speed:.1f} tokens a second over {given.backend}", flush=True)


def generate_by_transformers(given, model):
    """Generates by the method of transformers' models, which all ranks call."""

    def tokens_after(prompt, count):
        inputs = torch.tensor([prompt])
        mask = torch.ones_like(inputs)
        whole = model.generate(
            inputs, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return whole[0, len(prompt) :].tolist()

    generate(given, tokens_after, torch.distributed.get_rank() == 0)
