"""transformers' tensor parallel generation over this package, with a Llama of random weights.

Run with: torchrun --standalone --nproc-per-node 2 transformers_generate.py
"""

import tempfile

import tiny
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

given = tiny.inference_parser().parse_args()
dist.init_process_group(given.backend)  # before the model, for which transformers would take Gloo

with tempfile.TemporaryDirectory() as own:
    folder = [own]
    if dist.get_rank() == 0:
        tiny.llama().save_pretrained(own)
    dist.broadcast_object_list(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_plan="auto")
    )
    dist.barrier()

tiny.generate_by_transformers(given, model)
dist.destroy_process_group()
