"""Has the ranks find torch's systems loaded."""

import harness

harness.preload(
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
