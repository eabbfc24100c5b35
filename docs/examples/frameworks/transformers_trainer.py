"""transformers' Trainer over this package, with a small GPT-2 of random weights.

Run with: torchrun --standalone --nproc-per-node 2 transformers_trainer.py
"""

import tempfile

import tiny
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import collectives.integrations.accelerate

given = tiny.arguments()
collectives.integrations.accelerate.register()  # the Trainer stands on Accelerate
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1))

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend=given.backend,
            per_device_train_batch_size=4,
            max_steps=12,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    assert dist.get_backend() == given.backend
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    tiny.report(given, losses, model)
dist.destroy_process_group()
