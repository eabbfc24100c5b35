"""DeepSpeed's tensor parallel inference (AutoTP) on CPUs over this package, with a Llama of random weights.

Run with: torchrun --standalone --nproc-per-node 2 deepspeed_generate.py
"""

import deepspeed
import tiny
import torch
import torch.distributed as dist

parser = tiny.inference_parser()
parser.add_argument("--kernel", action="store_true", help="all-reduces by DeepSpeed's own kernel")
given = parser.parse_args()
if (
    not given.kernel
):  # before the world: DeepSpeed would compile its kernel, and use no backend for all-reduces
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend=given.backend)
assert dist.get_backend() == given.backend

engine = deepspeed.init_inference(
    tiny.llama(), dtype=torch.bfloat16, tensor_parallel={"tp_size": dist.get_world_size()}
)
tiny.generate_by_transformers(given, engine.module)
dist.destroy_process_group()
